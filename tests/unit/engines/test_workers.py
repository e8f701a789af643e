"""Workers that fail or are killed are replaced, and no process remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure, Update
from fedhen.data.dataset import Data
from fedhen.engines.parallel import ParallelDevices
from fedhen.engines.worker_pool import WorkerPool, make_shared_vector
from fedhen.experiment.experiment import Experiment
from support.families import TwoExits, texts, two_exits, words
from support.parallel_runs import NUMBERS, both, everything, experiment, vectors

pytestmark = pytest.mark.process


def test_a_device_that_raises_fails_alone() -> None:
    """Device 5 has a word that the model does not know: its error is the one that torch raises in one process."""
    runs = [experiment(number, words(), texts([5]), devices={"active": 8}) for number in NUMBERS]
    with pytest.warns(UserWarning, match="device 5, round 1: IndexError: index out of range in self"):
        records, *others = ([step.record for step in run.play()] for run in runs)
    assert [record["failed"] for record in records] == [[5]] * 3
    assert others == [records, records]


class Fatal(TwoExits):
    """Kills the worker that trains it on inputs above 100, as often as its file has lines left."""

    left: Path
    parent = os.getpid()

    def forward(self, x: Tensor) -> list[Tensor]:
        here = self.training and x.max() > 100 and os.getpid() != self.parent
        if here and (lines := self.left.read_text().splitlines()):
            self.left.write_text("\n".join(lines[1:]))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x.clamp(max=5))


def fatal(tmp_path: Path, times: int) -> tuple[Experiment, Path]:
    left = tmp_path / "left"
    left.write_text("\n".join(["kill"] * times))

    class Here(Fatal):
        pass

    Here.left = left
    data = vectors()
    x = data.x.clone()
    x[:12] = 1000
    shards = tuple(np.arange(12 * k, 12 * k + 12) for k in range(8))
    data = Data(x, data.y, data.x_test, data.y_test, 3, shards=shards)
    return experiment(2, both(lambda deep: Here(6, 3, deep)), data, devices={"active": 8}, rounds=2), left


def test_a_killed_worker_is_replaced_and_its_device_trained_again_to_the_same_bytes(tmp_path: Path) -> None:
    quiet, left = fatal(tmp_path, times=0)
    expected = everything(quiet)
    killed, left = fatal(tmp_path, times=1)
    assert everything(killed) == expected and not left.read_text()


def test_a_device_on_which_two_workers_die_has_failed(tmp_path: Path) -> None:
    run, left = fatal(tmp_path, times=2)
    with pytest.warns(UserWarning, match="device 0, round 1: its worker process died 2 times, by SIGKILL"):
        records = [step.record for step in run.play()]
    assert [record.get("failed", []) for record in records] == [[0], []] and not left.read_text()
    assert all(np.isfinite(record["loss"]) for record in records)


def test_a_worker_that_dies_between_rounds_is_replaced() -> None:
    run, expected = experiment(2, two_exits(), vectors()), everything(experiment(1, two_exits(), vectors()))
    assert isinstance(run.engine.devices, ParallelDevices)
    records, workers, killed = [], run.engine.devices.workers, set()
    for step in run.play():
        records.append(json.dumps(step.record))
        for worker in workers.alive.values():
            os.kill(worker.pid, signal.SIGKILL)
            killed.add(worker.pid)
    assert records == expected[0] and len(killed) == 2 * 3


def test_a_scoring_worker_that_is_killed_is_replaced_and_a_failing_one_raises_here(tmp_path: Path) -> None:
    class Scored(TwoExits):
        """Dies on the first pass of the test set in a worker."""

        def forward(self, x: Tensor) -> list[Tensor]:
            if not self.training and len(x) == 7 and os.getpid() != parent and (marker := tmp_path / "once").exists():
                marker.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            if not self.training and len(x) == 7 and (tmp_path / "raise").exists():
                raise ZeroDivisionError("while scoring")
            return super().forward(x)

    parent, settings = os.getpid(), {"rounds": 1, "evaluation": {"batch_size": 7}}
    family = both(lambda deep: Scored(6, 3, deep))
    expected = everything(experiment(1, family, vectors(), **settings))
    (tmp_path / "once").touch()
    assert everything(experiment(2, family, vectors(), **settings)) == expected and not (tmp_path / "once").exists()
    (tmp_path / "raise").touch()
    with pytest.raises(ZeroDivisionError, match="while scoring"):
        everything(experiment(2, family, vectors(), **settings))


def test_only_as_many_workers_as_there_is_work_and_none_after_the_rounds() -> None:
    run = experiment(5, two_exits(), vectors(), devices={"active": 2}, evaluation={"every": 3})
    assert isinstance(run.engine.devices, ParallelDevices)
    workers, steps = run.engine.devices.workers, run.play()
    next(steps)
    pids = [worker.pid for worker in workers.alive.values()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    steps.close()  # type: ignore[attr-defined]
    assert not workers.alive and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_worker_has_shared_memory_and_no_file_of_its_parent(tmp_path: Path) -> None:
    """A lock or a connection of the parent must end with the parent."""
    vector = make_shared_vector(torch.zeros(3, dtype=torch.float64))
    with (tmp_path / "open").open("w") as file, WorkerPool(2, work) as workers:

        def own(worker: int, job: dict[str, Any]) -> dict[str, Any]:
            vector[job["place"]] = job["place"] + 1
            names = {path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()}
            return {"sees": tmp_path / "open" in names, "pid": os.getpid()}

        workers.work = own
        answers = [answer for _, _, answer in workers.run([{"place": k} for k in range(3)])]
        assert file.fileno() > 2
    assert vector.tolist() == [1, 2, 3] and not any(answer["sees"] for answer in answers)
    assert len({answer["pid"] for answer in answers} - {os.getpid()}) <= 2


def work(worker: int, job: dict[str, Any]) -> dict[str, Any]:
    return job


def test_replies_of_an_abandoned_round_are_not_taken_for_the_next() -> None:
    def slow(worker: int, job: dict[str, Any]) -> dict[str, Any]:
        time.sleep(job["seconds"])
        return job

    with WorkerPool(2, slow) as workers:
        jobs = [{"seconds": 0.0}, {"seconds": 60.0}]
        answers = workers.run(jobs)
        assert next(answers)[1] == jobs[0]
        answers.close()  # type: ignore[attr-defined]
        assert [job for _, job, _ in workers.run([{"seconds": 0.0, "new": k} for k in range(4)])] != []


SCRIPT = """
import os, sys, time
import fedhen, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, deep):
        super().__init__()
        self.body, self.exit = nn.Linear(20, 32), nn.Linear(32, 4)
        self.top = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)) if deep else None

    def forward(self, x):
        if HOLD and os.getpid() != HERE:
            os.write(1, b"training %d\\n" % os.getpid())
            time.sleep(600)
        h = self.body(x).relu()
        return [self.exit(h)] if self.top is None else [self.exit(h), self.top(h)]

HOLD, HERE = False, os.getpid()
y = torch.randint(0, 4, (1000,))
x = torch.randn(1000, 20) + 3 * nn.functional.one_hot(y, 20)
data = fedhen.arrays(x[:800], y[:800], x[800:], y[800:])
family = fedhen.Family({"simple": lambda: Net(deep=False), "complex": lambda: Net(deep=True)})
settings = dict(accelerator="cpu", rounds=20, devices={"number": 20, "active": 5}, runtime={"workers": 2})
"""


def started(code: str, **more: Any) -> subprocess.Popen[str]:
    """A script on standard input, without a `__main__` that could be imported."""
    process = subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )
    assert process.stdin is not None
    # What starts the tests may ignore Ctrl-C, and children inherit that.
    process.stdin.write("import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + SCRIPT + code)
    process.stdin.close()
    return process


def test_lambdas_on_standard_input_are_trained_in_parallel() -> None:
    code = "run = fedhen.train(family, data, 'fedhen', **settings)\n"
    code += "print(run.accuracy['server']['complex'], type(run.experiment.engine.devices).__name__)\n"
    process = started(code)
    assert process.stdout is not None
    out = process.stdout.read().split()
    assert process.wait() == 0 and float(out[0]) > 0.8 and out[1] == "ParallelDevices"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_parent_ends_no_process_and_no_shared_memory_is_left(how: signal.Signals) -> None:
    """Its two workers wait in the first round, after each has reported its pid; then only the parent gets a signal."""
    process = started("HOLD = True\nfedhen.train(family, data, 'fedhen', **settings)\n", start_new_session=True)
    assert process.stdout is not None and process.stderr is not None
    workers = list[int]()
    try:
        for _ in range(2):
            said = process.stdout.readline().split()
            assert said[:1] == ["training"], f"{said}: {process.stderr.read()}"
            workers.append(int(said[1]))
        assert len({*workers, process.pid}) == 3
        # Shared memory without a name: there is nothing that could be left.
        assert [shared_files(pid) for pid in (*workers, process.pid)] == [{"/dev/zero"}] * 3
        process.send_signal(how)
        process.wait(timeout=240)
        assert process.returncode == (1 if how == signal.SIGINT else -how) or process.returncode == -signal.SIGINT
        # The system kills them at once; how soon they are gone is its affair.
        end = time.monotonic() + 240
        while any(Path(f"/proc/{pid}/exe").exists() and alive(pid) for pid in workers):
            assert time.monotonic() < end, "a worker has outlived its parent"
            time.sleep(0.01)
    finally:
        for pid in (*workers, process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def shared_files(pid: int) -> set[str]:
    """The files behind the memory that a process may share and write; anonymous memory is Linux's /dev/zero."""
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line[5] for line in maps if line[1].startswith("rw") and line[1].endswith("s")}


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_failures_and_updates_are_those_of_the_device_that_was_asked() -> None:
    run = experiment(2, words(), texts([2]))
    replies = list(run.engine.devices.train(1, Sent(run.server, {}), [7, 2, 0]))
    assert sorted((reply.device, type(reply)) for reply in replies) == [(0, Update), (2, Failure), (7, Update)]
    assert all(reply.samples == 10 for reply in replies if isinstance(reply, Update))

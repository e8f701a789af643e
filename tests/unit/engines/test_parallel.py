"""Workers give the bytes of one process, whichever of them train, fail or are killed, and no process remains."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhen import Family
from fedhen.algorithm.methods import load_method
from fedhen.algorithm.rounds import Sent
from fedhen.algorithm.updates import Failure, Update
from fedhen.config import toml, validation
from fedhen.data.dataset import Data
from fedhen.engines.parallel import ParallelDevices
from fedhen.engines.sequential import SequentialDevices
from fedhen.engines.worker_pool import WorkerPool, make_shared_vector
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from fedhen.hardware import threads
from fedhen.models.preact_resnet import Shape, preact_resnet
from support.families import TwoExits, texts, two_exits, words

pytestmark = pytest.mark.process

METHODS = ["fedhen", "noside", "decouple", "side-apart", "fedavg"]
LOCALS = ["plain", "fedprox", "scaffold", "feddyn"]
NUMBERS = [1, 2, 5]
BASE: dict[str, Any] = {
    "rounds": 3,
    "devices": {"number": 8, "active": 5},
    "model": {"family": "python"},
    "training": {"epochs": 2, "batch_size": 5},
    "local": {"name": "plain", "mu": 0.5, "alpha": 0.2},
    "evaluation": {"every": 1},
}


def vectors() -> Data:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(120, 6))), torch.from_numpy(rng.integers(0, 3, 120))
    return Data(x[:96], y[:96], x[96:], y[96:], 3)


def images() -> Data:
    rng = np.random.default_rng(1)
    x, y = torch.from_numpy(rng.normal(size=(120, 1, 8, 8))).float(), torch.from_numpy(rng.integers(0, 3, 120))
    return Data(x[:96], y[:96], x[96:], y[96:], 3)


def resnet(**more: Any) -> Family:
    shape: dict[str, Any] = {"widths": (4, 6, 8, 8), "blocks": (1, 1, 1, 1), "strides": (1, 2, 2, 1), "exit_pool": 1}
    return preact_resnet(Shape(channels=1, size=8, classes=3, exits={"simple": 2, "complex": 4}, **{**shape, **more}))


def both(build: Callable[[bool], nn.Module], **more: Any) -> Family:
    return Family({"simple": lambda: build(False), "complex": lambda: build(True)}, **more)


def experiment(workers: int, family: Family, data: Data, /, **settings: Any) -> Experiment:
    merged = {k: {**BASE.get(k, {}), **v} if isinstance(v, dict) and k != "tiers" else v for k, v in settings.items()}
    merged["runtime"] = {**merged.get("runtime", {}), "workers": workers}
    config = validation.from_mapping({**BASE, **merged})
    chosen = load_method(config.method)
    config = chosen.keep_tiers(config)
    return build_experiment(config, data=data, family=family, method=chosen, accelerator="cpu")


def everything(run: Experiment) -> tuple[list[str], dict[str, bytes]]:
    """What a run leaves behind: its records as text, and its models and memories as bytes."""
    records = [json.dumps(step.record) for step in run.play()]
    found = {
        f"{kind} {tier} {name}": tensor.contiguous().numpy().tobytes()
        for kind, models in {**run.models(), "mean": run.memories.mean, "moments": run.moments}.items()
        for tier, weights in models.items()
        for name, tensor in weights.items()
    }
    found |= {f"memory {device}": run.memory.vector(device).numpy().tobytes() for device in run.memory}
    return records, found


def same_bytes(family: Family, data: Data, /, **settings: Any) -> None:
    """Play with 1, 2 and 5 workers: one is this process, several are others, and nothing shows which."""
    runs = [experiment(number, family, data, **settings) for number in NUMBERS]
    assert [type(run.engine.devices) for run in runs] == [SequentialDevices, ParallelDevices, ParallelDevices]
    (records, found), *others = (everything(run) for run in runs)
    assert found and len(records) == runs[0].config.rounds and "accuracy" in records[-1]
    for other in others:
        assert other == (records, found)


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_local_variant(method: str, local: str) -> None:
    same_bytes(two_exits(), vectors(), method=method, local={"name": local})


@pytest.mark.parametrize("local", ["plain", "feddyn"])
@pytest.mark.parametrize("training", [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adamw"}], ids=str)
def test_optimisers_whose_state_stays_on_the_device(training: dict[str, Any], local: str) -> None:
    """A device's state travels to the worker that trains it and back; the server's optimiser has a state too."""
    kept = {"lr": 0.01, "optimizer_state": "device", **training}
    server = {"optimizer": "yogi", "lr": 0.1}
    same_bytes(two_exits(), vectors(), training=kept, local={"name": local}, server=server, rounds=4)


@pytest.mark.parametrize("method", ["fedhen", "heterofl"])
@pytest.mark.parametrize("nesting", ["depth", "width"])
def test_networks_of_images_nested_by_depth_and_by_width(method: str, nesting: str) -> None:
    family = resnet(nesting=nesting, rates={"simple": 0.5, "complex": 1.0})
    same_bytes(family, images(), method=method, data={"augmentation": "crop-flip"}, local={"name": "scaffold"})


@pytest.mark.parametrize(
    "training",
    [
        {"last_batch": "drop"},
        {"momentum": 0.9},
        {"masked_loss": True},
        {"clip": 0.05},
        {"weight_decay": 0.5},
        {"lr_decay": 0.5, "lr": 0.3},
    ],
    ids=lambda t: next(iter(t)),
)
def test_every_setting_on_devices_of_unequal_size(training: dict[str, Any]) -> None:
    """By class the devices have from 2 to 30 images."""
    split = {"kind": "dirichlet-by-class", "alpha": 0.4, "minimum": 2}
    same_bytes(
        two_exits(), vectors(), split=split, training={"batch_size": 4, **training}, server={"weighting": "samples"}
    )


def test_precision_exits_ensemble_and_label_rows() -> None:
    more = {"objective": {"exit_weights": {"simple": 0.3}, "distillation": 0.5, "temperature": 2.0}}
    same_bytes(two_exits(), vectors(), **more, evaluation={"ensemble": True, "batch_size": 7})
    same_bytes(resnet(), images(), server={"rows_by_class": True}, split={"kind": "dirichlet", "alpha": 0.3})
    same_bytes(resnet(), images(), rounds=2, runtime={"precision": "bf16"})
    same_bytes(resnet(), images(), rounds=2, runtime={"threads": 2})


class Dropping(TwoExits):
    """Dropout, noise from numpy and from Python, a separate generator, and a counter that changes its output."""

    def __init__(self, deep: bool) -> None:
        super().__init__(6, 3, deep)
        self.own, self.calls = torch.Generator().manual_seed(7), 0

    def forward(self, x: Tensor) -> list[Tensor]:
        if self.training:
            self.calls += 1
            x = F.dropout(x, 0.3) + 0.1 * torch.randn(x.shape, generator=self.own).double()
            x = x * (1 + 0.1 * random.random()) + torch.from_numpy(np.random.normal(size=x.shape)) / self.calls
        return super().forward(x)


class Normed(TwoExits):
    def __init__(self, deep: bool) -> None:
        super().__init__(6, 3, deep)
        self.norm = nn.BatchNorm1d(6).double()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(6).double(), persistent=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        self.seen = self.seen + x.mean(0)
        return super().forward(self.norm(x) + 0.01 * self.seen)


class NotCopied(TwoExits):
    """Cannot be copied: a weight is computed from others when it is built."""

    def __init__(self, deep: bool) -> None:
        super().__init__(6, 3, deep)
        torch.nn.utils.weight_norm(self.body)


@pytest.mark.parametrize(
    ("build", "more"),
    [(Dropping, {}), (Normed, {"average_buffers": True}), (NotCopied, {})],
    ids=["randomness and state", "batch norm and a buffer", "weight_norm"],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_modules_with_randomness_counters_and_stored_state(
    build: Callable[[bool], nn.Module], more: dict[str, Any]
) -> None:
    same_bytes(both(build, **more), vectors(), method="noside", local={"name": "feddyn"})


def test_dropout_is_drawn_anew_for_every_device_and_round() -> None:
    """The same examples on every device: without separate random numbers all would end with the same weights."""
    data = vectors()
    data = Data(data.x, data.y, data.x_test, data.y_test, 3, shards=tuple(np.arange(96) for _ in range(8)))
    family = both(lambda deep: Dropping(deep))
    run = experiment(2, family, data, training={"batch_size": 96, "epochs": 1})
    sent = Sent(run.server, {})
    found = [
        update.weights["body.weight"].numpy().tobytes()
        for number in (1, 2)
        for update in run.engine.devices.train(number, sent, range(4))
        if isinstance(update, Update)
    ]
    assert len(found) == 8 == len(set(found))


def test_the_global_randomness_of_a_program_is_left_alone() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1).item(), np.random.random(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    list(experiment(1, both(Dropping), vectors()).play())
    assert (torch.rand(1).item(), np.random.random(), random.random()) == expected


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


def test_the_threads_of_the_program_are_its_own() -> None:
    """Inside a round torch has the configured threads; the caller that gets a step has its own number again."""
    seen = []

    class Seeing(TwoExits):
        def forward(self, x: Tensor) -> list[Tensor]:
            seen.append(torch.get_num_threads())
            return super().forward(x)

    family, before = both(lambda deep: Seeing(6, 3, deep)), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run = experiment(1, family, vectors(), runtime={"threads": 2})
        seen.clear()
        for _ in run.play():
            assert torch.get_num_threads() == 3
        assert set(seen) == {2}
    finally:
        torch.set_num_threads(before)


def test_cores_are_those_of_affinity_and_quota(tmp_path: Path) -> None:
    """By the files that Linux has for control groups of version 2, of version 1, and of none."""
    assert 1 <= threads.usable_cores() <= len(os.sched_getaffinity(0))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert threads._quota("0::/a/b\n", tmp_path) == 1.5
    assert threads._quota("0::/elsewhere\n", tmp_path) == float("inf")
    (tmp_path / "cpu,cpuacct" / "c").mkdir(parents=True)
    (tmp_path / "cpu,cpuacct" / "c" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu,cpuacct" / "c" / "cpu.cfs_period_us").write_text("100000\n")
    assert threads._quota("4:cpu,cpuacct:/c\n3:memory:/c\n", tmp_path) == 3
    (tmp_path / "cpu,cpuacct" / "c" / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads._quota("4:cpu,cpuacct:/c\n", tmp_path) == float("inf")


def test_ranks_on_one_machine_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = validation.from_mapping({}).runtime
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert (threads.worker_count(runtime), threads.threads_per_worker(runtime)) == (8, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert threads.worker_count(runtime) == 2
    for settings, expected in (({"threads": 2}, (1, 2)), ({"threads": 0}, (1, 2)), ({"workers": 5}, (5, 1))):
        runtime = validation.from_mapping({"runtime": settings}).runtime
        assert (threads.worker_count(runtime), threads.threads_per_worker(runtime)) == expected


def test_the_affinity_of_a_process_is_seen() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from fedhen.hardware import threads; "
    code += "print(threads.usable_cores())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "1\n"


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
            time.sleep(60)
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
    process.stdin.write(SCRIPT + code)
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
        process.wait(timeout=60)
        assert process.returncode == (1 if how == signal.SIGINT else -how) or process.returncode == -signal.SIGINT
        # The system kills them at once; how soon they are gone is its affair.
        end = time.monotonic() + 60
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


def test_the_old_settings_of_a_run_are_still_read(tmp_path: Path) -> None:
    """Before there were workers, `threads = 0` meant as many as torch takes, and was the default."""
    old = "[runtime]\nengine = 'fast'\nprecision = 'auto'\nrows = 'auto'\nrows_dir = ''\nthreads = 0\n"
    (tmp_path / "old.toml").write_text(old)
    runtime = toml.read_toml(tmp_path / "old.toml").runtime
    assert (runtime.engine, runtime.threads, runtime.workers) == ("fast", 0, 0)

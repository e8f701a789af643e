"""Runs as processes that are killed at chosen moments, and the comparison of their results after they are resumed.

`python kills.py` imports fedhen once and forks a process for each command on its standard input, which saves 3 s of
imports a command.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
Moment = Callable[[Path, random.Random], bool]
"""Returns whether it is time to kill the process that writes this folder."""


class Forks:
    """Starts commands, one at a time. A command that a failed test left running is killed before the next one."""

    def __init__(self) -> None:
        self.last: Started | None = None

    def __enter__(self) -> Forks:
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.server.stdin is not None
        self.clear()
        self.server.stdin.close()
        self.server.wait()

    def start(self, arguments: Sequence[str], log: Path) -> Started:
        assert self.server.stdin is not None
        self.clear()
        self.server.stdin.write(json.dumps([list(arguments), str(log)]) + "\n")
        self.server.stdin.flush()
        self.last = Started(self, self.read_number(), log)
        return self.last

    def clear(self) -> None:
        if self.last is not None:
            self.last.kill()
            self.last.wait()

    def read_number(self) -> int:
        assert self.server.stdout is not None
        return int(self.server.stdout.readline())

    def run(self, arguments: Sequence[str], log: Path) -> tuple[int, str]:
        """Returns the exit code and everything that the command printed."""
        return self.start(arguments, log).wait(), log.read_text()


@dataclass
class Started:
    """A command that was started."""

    forks: Forks
    pid: int
    log: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def ended(self) -> bool:
        """Returns whether the process is a zombie: it is reaped only in `wait`, so that its id is not reused."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def wait(self) -> int:
        """Returns the exit code, which is negative after a signal."""
        assert self.forks.server.stdin is not None
        self.forks.last = None
        self.forks.server.stdin.write("\n")
        self.forks.server.stdin.flush()
        return self.forks.read_number()


WARM = ("fedhen.experiment.build", "fedhen.experiment.runner", "torch._dynamo", "torch.fx", "torch.utils.flop_counter")
"""Modules that a run imports and that take seconds."""


HOLD = ".hold"
"""Suffix of a file next to a run folder. It holds how many steps to let pass, and whether to stop after them."""


def hold_while_saving() -> None:
    """Stops this process before it opens or renames a checkpoint file if a `HOLD` file says so."""
    passed = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal passed
        if event not in ("open", "os.rename") or not str(arguments[0]).endswith(".part"):
            return
        place = Path(str(arguments[0])).parent
        hold = place.parent.with_suffix(HOLD)
        if place.name == "checkpoints" and hold.exists():
            most, stops = json.loads(hold.read_text())
            passed += 1
            if passed > most:
                hold.unlink()
                if stops:
                    os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(hook)


def serve() -> None:
    from fedhen.cli import main

    for name in WARM:
        importlib.import_module(name)

    for line in sys.stdin:
        arguments, log = json.loads(line)
        child = os.fork()
        if not child:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            hold_while_saving()
            code = 1
            try:
                code = main(arguments)
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def wait_for(happened: Callable[[], T], seconds: float = 240.0) -> T:
    """Calls `happened` until it returns something true, and returns that."""
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process started, directly or indirectly."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in parents.get(parent, [])]
        found += new
    return found


def kill_tree(pid: int) -> None:
    """Kills a process and its descendants. All are stopped first, so that none can start another one meanwhile."""
    stopped: set[int] = set()
    while new := {pid, *descendants(pid)} - stopped:
        send(new, signal.SIGSTOP)
        stopped |= new
    send(stopped, signal.SIGKILL)


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def count_rounds(folder: Path) -> int:
    path = folder / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def after_some_rounds(least: int, most: int) -> Callable[[Path, random.Random], Moment]:
    """A moment shortly after `least` to `most` further rounds are recorded, with a checkpoint to resume from."""

    def begin(folder: Path, rng: random.Random) -> Moment:
        # The run resumes at a checkpoint: the lines after it are removed and written again.
        goal, last = rng.randint(least, most), [count_rounds(folder), 0]

        def reached(folder: Path, rng: random.Random) -> bool:
            now = count_rounds(folder)
            last[1] += max(0, now - last[0])
            last[0] = now
            if last[1] < goal or not any(folder.glob("checkpoints/round-*.json")):
                return False
            time.sleep(rng.uniform(0, 0.04))
            return True

        return reached

    return begin


def while_saving(folder: Path, rng: random.Random) -> Moment:
    """A moment while a checkpoint is written, or shortly after; see `hold_while_saving`."""
    hold = folder.with_suffix(HOLD)
    hold.write_text(json.dumps([rng.randint(0, 7), rng.random() < 0.5]))
    return lambda folder, rng: not hold.exists()


def after_some_time(folder: Path, rng: random.Random) -> Moment:
    """A moment while the process starts."""
    until = time.monotonic() + rng.uniform(0, 0.6)
    return lambda folder, rng: time.monotonic() >= until


MOMENTS = (after_some_rounds(1, 6), while_saving, after_some_rounds(1, 6), after_some_time)


def play_with_kills(
    forks: Forks, command: Sequence[str], folder: Path, kills: int, rng: random.Random
) -> dict[str, int]:
    """Plays a run with `kills` kills, then to its end. Returns the number of kills at each moment."""
    done: dict[str, int] = {}
    log = folder.with_suffix(".log")
    number = rng.randrange(len(MOMENTS))
    while sum(done.values()) < kills:
        begin = MOMENTS[number % len(MOMENTS)]
        number += 1
        # Both ways to resume; only `run --resume` can also begin.
        resume = (folder / "config.toml").is_file() and rng.random() < 0.5
        arguments = ["resume", str(folder)] if resume else [*command, "--out", str(folder), "--resume"]
        reached, has_saved = begin(folder, rng), any(folder.glob("checkpoints/round-*.json"))
        run = forks.start([*arguments, "--quiet"], log)
        while not run.ended() and not reached(folder, rng):
            time.sleep(0.001)
        if run.ended():
            assert run.wait() == 0, log.read_text()
            raise AssertionError("the run ended before all kills: give it more rounds")
        run.kill()
        assert run.wait() == -signal.SIGKILL
        assert not has_saved or "starts again at round 1" not in log.read_text()
        name = begin.__qualname__.split(".")[0]
        done[name] = done.get(name, 0) + 1
    has_saved = any(folder.glob("checkpoints/round-*.json"))
    code, said = forks.run(["resume", str(folder), "--quiet"], log)
    assert not has_saved or "starts again at round 1" not in said
    if code == 2 and "is not a run folder" in said:
        code, said = forks.run([*command, "--out", str(folder), "--resume", "--quiet"], log)
    assert code == 0, said
    return done


def lasting_files(folder: Path) -> dict[str, bytes]:
    """Returns the files that no interruption may change: records, models and the state of the checkpoints."""
    written = ("models/*", "checkpoints/*.safetensors", "private/rounds.jsonl")
    files = [folder / "rounds.jsonl", *(path for pattern in written for path in folder.glob(pattern))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def same_run(one: Path, other: Path) -> bool:
    """Returns whether two finished runs have the same bytes, and the other left no temporary file behind."""
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (one, other))
    left = list(other.rglob("*.part"))
    timed = [json.loads(line)["round"] for line in (other / "timing.jsonl").read_text().splitlines()]
    return (
        lasting_files(one) == lasting_files(other)
        and len(lasting_files(one)) >= 4
        and {**a, "seconds": 0} == {**b, "seconds": 0}
        and not left
        and timed == list(range(1, len(timed) + 1)) == list(range(1, a["rounds"] + 1))
    )


if __name__ == "__main__":
    serve()

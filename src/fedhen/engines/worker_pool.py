"""Worker processes, forked from this one: they share its data, models and functions without a copy.

Threads would share torch's random numbers and the interpreter's lock; new processes would have to import torch and
could not receive a lambda. Jobs and answers are small and sent as JSON through a socket. Tensors are passed in memory
that parent and workers share. It has neither name nor file, so nothing remains however the processes end.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedhen.errors import FedhenError
from fedhen.interrupts import block_signals, leave_signals_to_parent

Job = dict[str, Any]
Answer = dict[str, Any]
MAX_DEATHS = 2
"""A job is given up when this many workers have died on it."""
PR_SET_PDEATHSIG = 1


def can_fork() -> bool:
    """Returns whether this process can have workers. With an accelerator, torch's autograd cannot be forked."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


def make_shared_vector(like: Tensor) -> Tensor:
    """Makes a vector of that length and type in memory that this process shares with its later forks."""
    memory = mmap.mmap(-1, max(like.numel() * like.element_size(), 1))
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()) if like.numel() else like.new_empty(0)


@dataclass
class Worker:
    """A worker process and its current job."""

    pid: int
    link: Connection
    job: Job | None = None


class WorkerPool:
    """Up to `number` processes, each with one job at a time. A process starts when there is a job for it.

    `work(worker, job)` runs in a worker and returns its answer. Workers stay alive between jobs; they are killed when a
    `with workers:` block ends, and when this object is deleted.
    """

    def __init__(self, number: int, work: Callable[[int, Job], Answer]) -> None:
        self.number, self.work = number, work
        self.alive: dict[int, Worker] = {}
        weakref.finalize(self, _kill_all, self.alive, os.getpid())

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        _kill_all(self.alive, os.getpid())

    def run(
        self, jobs: Iterable[Job], prepare: Callable[[int, Job], None] = lambda worker, job: None
    ) -> Iterator[tuple[int, Job, Answer]]:
        """Runs jobs in the order given. Yields (worker, job, answer) in the order in which answers arrive.

        `prepare(worker, job)` is called in this process just before the job is sent. A worker that has answered gets
        its next job before the answer is yielded, and the one after that only later. What a job leaves in shared memory
        therefore stays valid while the answer is handled, if jobs alternate between two buffers.

        If a worker dies, its job runs again on another one. After MAX_DEATHS deaths the answer is {"failed": reason}.
        """
        waiting, deaths = deque((job, 0) for job in jobs), dict[int, int]()

        def assign() -> None:
            for index in range(self.number):
                if waiting and (index not in self.alive or self.alive[index].job is None):
                    job, deaths[index] = waiting.popleft()
                    prepare(index, job)
                    self._send(index, job)

        try:
            while waiting or any(worker.job is not None for worker in self.alive.values()):
                assign()
                busy = {worker.link: index for index, worker in self.alive.items() if worker.job is not None}
                for link in wait(list(busy)):
                    index = busy[link]  # type: ignore[index]
                    worker = self.alive[index]
                    job = worker.job or {}
                    try:
                        answer = json.loads(worker.link.recv_bytes())
                        worker.job = None
                    except (EOFError, OSError):
                        why = _kill(self.alive.pop(index))
                        if deaths[index] + 1 < MAX_DEATHS:
                            waiting.appendleft((job, deaths[index] + 1))
                            continue
                        answer = {"failed": f"its worker process died {MAX_DEATHS} times, {why}"}
                    assign()
                    yield index, job, answer
        finally:
            # The caller stopped early and does not need the remaining answers.
            for index in [index for index, worker in self.alive.items() if worker.job is not None]:
                _kill(self.alive.pop(index))

    def _send(self, index: int, job: Job) -> None:
        if index not in self.alive:
            self.alive[index] = self._start(index)
        self.alive[index].job = job
        # A worker that died while idle is noticed when its answer is read.
        with suppress(OSError):
            self.alive[index].link.send_bytes(json.dumps(job).encode())

    def _start(self, index: int) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            # Buffered output would otherwise be printed by both processes.
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        with block_signals():
            try:
                with warnings.catch_warnings():
                    # Python warns that other threads may hold a lock during a fork. Ours have ended or hold none.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if not pid:
                    self._serve(index, theirs, parent)
            except OSError as error:
                raise FedhenError(f"cannot start a worker process: {error.strerror}; set runtime.workers=1") from None
        theirs.close()
        return Worker(pid, ours)

    def _serve(self, index: int, link: Connection, parent: int) -> None:
        """Runs the worker. Never returns."""
        try:
            _become_worker(link.fileno(), parent)
            # In a new thread: a fork has no torch threads of its parent, and only a new thread starts others.
            thread = threading.Thread(target=self._answer, args=(index, link))
            thread.start()
            thread.join()
        finally:
            os._exit(0)

    def _answer(self, index: int, link: Connection) -> None:
        with suppress(EOFError):
            while True:
                answer = self.work(index, json.loads(link.recv_bytes()))
                for stream in (sys.stdout, sys.stderr):
                    with suppress(AttributeError, OSError, ValueError):
                        stream.flush()
                link.send_bytes(json.dumps(answer).encode())


def _become_worker(link: int, parent: int) -> None:
    """Ends with the parent, leaves signals to it, and closes its files, locks and connections."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    leave_signals_to_parent()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in (link, null):
            with suppress(OSError):
                # Their numbers stay in use, so that code that still holds one cannot reach another file by it.
                os.dup2(null, descriptor, inheritable=False)
    # Collecting the parent's objects would copy their pages and close their files a second time.
    gc.freeze()
    with suppress(OSError):
        # When memory runs out, the system should end a worker, which can be replaced, rather than the run.
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def _kill_all(alive: dict[int, Worker], owner: int) -> None:
    """Kills all workers, unless this process is a fork of the one that started them."""
    if os.getpid() == owner:
        for index in list(alive):
            _kill(alive.pop(index))


def _kill(worker: Worker) -> str:
    """Kills a worker if it is alive. Returns how it ended."""
    worker.link.close()
    with suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    except ChildProcessError:
        return "with an unknown exit code"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

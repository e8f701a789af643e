"""Worker processes, forked from this one: they see its data, models and functions without a copy.

Threads would share torch's random numbers and the interpreter's lock; processes started anew would have to import torch
and could not be given a lambda. Jobs and answers are small and travel as JSON through a socket. Tensors travel in
memory that parent and workers share. It has no name and no file, so nothing of it is left behind, however they end.
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
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fedhen.errors import UserError

Job = dict[str, Any]
Answer = dict[str, Any]
MAX_DEATHS = 2
"""A job on which this many workers have died is given up."""
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
"""Signals that the parent answers for its workers."""


def can_fork() -> bool:
    """Whether this process can have workers; torch's autograd cannot be forked beside an accelerator."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


def make_shared_vector(like: Tensor) -> Tensor:
    """A vector of that length and type in memory that this process shares with its later forks."""
    memory = mmap.mmap(-1, max(like.numel() * like.element_size(), 1))
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()) if like.numel() else like.new_empty(0)


@dataclass
class Worker:
    """One process, and the job that it has."""

    pid: int
    link: Connection
    job: Job | None = None


class WorkerPool:
    """Up to `number` processes, each with one job at a time; a process is started when there is a job for it.

    `work(worker, job)` runs in a worker and returns its answer. Inside `with workers:` they are kept from job to job;
    at its end, and when this object goes, they are killed.
    """

    def __init__(self, number: int, work: Callable[[int, Job], Answer]) -> None:
        self.number, self.work = number, work
        self.alive: dict[int, Worker] = {}
        weakref.finalize(self, _kill_all, self.alive, os.getpid())

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
            # Whoever does not wait for the rest does not want it.
            for index in [index for index, worker in self.alive.items() if worker.job is not None]:
                _kill(self.alive.pop(index))

    def _send(self, index: int, job: Job) -> None:
        if index not in self.alive:
            self.alive[index] = self._start(index)
        self.alive[index].job = job
        # A worker that died while it had nothing to do is noticed when its answer is read.
        with suppress(OSError):
            self.alive[index].link.send_bytes(json.dumps(job).encode())

    def _start(self, index: int) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            # What is still in a buffer would be printed by both.
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python warns of threads that hold a lock while another one forks; ours are waited for, or hold none.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                self._serve(index, theirs, parent)
        except OSError as error:
            raise UserError(f"cannot start a worker process: {error.strerror}; set runtime.workers=1") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return Worker(pid, ours)

    def _serve(self, index: int, link: Connection, parent: int) -> None:
        """Be a worker, and never return."""
        try:
            _become_worker(link.fileno(), parent)
            # In a thread of its own: torch's threads of the parent are not here, and only a new thread gets new ones.
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
    """A worker ends with its parent, leaves signals to it, and keeps none of its files, locks and connections open."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in (link, null):
            with suppress(OSError):
                # Their numbers stay taken, so that nobody who still knows one reads or closes another file by it.
                os.dup2(null, descriptor, inheritable=False)
    # What the parent has made is not collected here: it would be copied page by page, and closed a second time.
    gc.freeze()
    with suppress(OSError):
        # When memory runs out the system ends a worker, which can be replaced, rather than the run.
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")


def _kill_all(alive: dict[int, Worker], owner: int) -> None:
    """Kill all workers, unless this is a fork of the process that has them."""
    if os.getpid() == owner:
        for index in list(alive):
            _kill(alive.pop(index))


def _kill(worker: Worker) -> str:
    """Kill a worker, if it has not died already, and say how it ended."""
    worker.link.close()
    with suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
    except ChildProcessError:
        return "and somebody else waited for it"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

"""Several ranks over torch.distributed: NCCL between GPUs, gloo between CPUs. Only tensors and JSON are sent."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from fedhen import interrupts
from fedhen.distributed import communicator as rooms
from fedhen.distributed.communicator import ALONE, RankLost, Ranks
from fedhen.errors import FedhenError
from fedhen.params import Average

T = TypeVar("T")
LONGEST_WAIT = timedelta(minutes=30)
"""How long a rank waits for the others: as long as the slowest share of a round may take."""
MOMENT = timedelta(seconds=10)
"""How long a stopping rank waits for rank 0 to report the same error, and one that lost another may take to end."""


@dataclass(frozen=True, kw_only=True)
class JoinedRanks(Ranks):
    """One of several ranks."""

    where: torch.device
    """The device of tensors that are sent."""
    store: Store
    """Where rank 0 notes the errors that it has printed."""

    def combine(self, average: Average) -> Average:
        """Reduces all sums and counts at once, after the ranks have exchanged which ones they have."""
        names = list(average.shapes)
        # 0: this rank has no such weight, 1: whole tensors only, 2: some elements more often than others.
        own = [int(n in average.sums) + isinstance(average.counts.get(n), Tensor) for n in names]
        found = {n: max(each) for n, *each in zip(names, *self.gather(own), strict=True) if max(each)}
        if not found:
            return average
        whole = [n for n in found if found[n] == 1]
        shapes = average.shapes
        parts = [average.sums[n].reshape(-1) if n in average.sums else self._zeros(shapes[n]) for n in found]
        parts += [self._elements(average, n) for n in found if found[n] == 2]
        counts = torch.tensor([average.counts.get(n, 0.0) for n in whole], dtype=torch.float64, device=self.where)
        flat = torch.cat([part.to(self.where) for part in [*parts, counts]])
        self._reduce(flat)
        result, sizes = Average(shapes), [part.numel() for part in parts]
        *parts, counts = torch.split(flat, [*sizes, len(whole)])
        for name, part in zip([*found, *(n for n in found if found[n] == 2)], parts, strict=True):
            (result.counts if name in result.sums else result.sums)[name] = part.view(shapes[name])
        result.counts.update(zip(whole, counts.tolist(), strict=True))
        return result

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(math.prod(shape), dtype=torch.float64, device=self.where)

    def _elements(self, average: Average, name: str) -> Tensor:
        counts = average.counts.get(name, 0.0)
        return counts.reshape(-1) if isinstance(counts, Tensor) else self._zeros(average.shapes[name]) + counts

    def total(self, vector: Tensor) -> Tensor:
        together = vector.to(self.where, copy=True)
        self._reduce(together)
        return together.to(vector.device)

    def _reduce(self, tensor: Tensor) -> None:
        with detect_lost_rank():
            dist.all_reduce(tensor)

    def gather(self, value: T) -> list[T]:
        """Exchanges the lengths first, then the texts, padded to the longest."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.where)
        lengths = self._every(torch.tensor([len(text)], device=self.where))
        longest = max(int(length) for length in lengths)
        texts = self._every(torch.nn.functional.pad(text, (0, longest - len(text))))
        return [json.loads(t[: int(n)].cpu().numpy().tobytes()) for n, t in zip(lengths, texts, strict=True)]

    def _every(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.number)]
        with detect_lost_rank():
            dist.all_gather(found, tensor)
        return found

    def first(self, act: Callable[[], T]) -> T:
        result: dict[str, T | str] = {}
        if not self.rank:
            try:
                result["value"] = act()
            except FedhenError as error:
                result["error"] = str(error)
        result = self.gather(result)[0]
        if "error" in result:
            raise FedhenError(result["error"])
        return result["value"]  # type: ignore[return-value]

    def carry(self, source: int, to: int, vector: Tensor) -> Tensor:
        with detect_lost_rank():
            if self.rank == source:
                dist.send(vector.to(self.where), to)
                return vector
            arrived = torch.empty_like(vector, device=self.where)
            dist.recv(arrived, source)
            return arrived.to(vector.device)

    def say(self, error: str) -> None:
        """Prints an error on rank 0, and on another rank if rank 0 does not have the same."""
        key = f"fedhen/error/{crc32(error.encode())}"
        if not self.rank:
            print(f"fedhen: {error}", file=sys.stderr, flush=True)
            with contextlib.suppress(RuntimeError):
                self.store.set(key, "")
            return
        try:
            self.store.wait([key], MOMENT)
        except RuntimeError:
            print(f"fedhen: rank {self.rank} stopped: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def detect_lost_rank() -> Iterator[None]:
    """Turns torch's error for a rank that is gone into a RankLost of one line, and leaves the other ranks."""
    try:
        yield
    except RuntimeError as error:
        rooms.set_current_ranks(None)
        reason = re.sub(r"^\[\S+\]\s*", "", str(error).splitlines()[0]).split(". ")[0]
        raise RankLost(f"another rank cannot be reached: {reason}") from None


def join(where: torch.device) -> Ranks:
    """Joins the ranks that this process was launched with, once. Returns ALONE if it was launched by itself."""
    if rooms.current_ranks().number == 1 or isinstance(rooms.current_ranks(), JoinedRanks):
        return rooms.current_ranks() if isinstance(rooms.current_ranks(), JoinedRanks) else ALONE
    # When torch first imports this module, its functions take the current group as a default. They must not keep ours:
    # it would outlive `leave`, and gloo's threads would abort the interpreter at exit when they free their tensors.
    importlib.import_module("torch.distributed.nn")
    backend = "nccl" if where.type == "cuda" else "gloo"
    with detect_lost_rank():
        store, rank, number = next(rendezvous("env://", timeout=LONGEST_WAIT))
        own = where if where.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=number, timeout=LONGEST_WAIT, device_id=own)
    ranks = JoinedRanks(rank=rank, number=number, where=where, store=store)
    rooms.set_current_ranks(ranks)
    atexit.register(leave)
    if threading.current_thread() is threading.main_thread():
        # Python writes to the wakeup only where it has a handler.
        signal.signal(signal.SIGTERM, lambda *_: None)
        interrupts.exit_on_signal(rank, has_lost)
    return ranks


def has_lost() -> bool:
    """Whether this rank, which had joined, cannot reach the others any more, or has taken leave of them."""
    return not isinstance(rooms.current_ranks(), JoinedRanks)


def leave() -> None:
    """Leaves the other ranks."""
    if isinstance(rooms.current_ranks(), JoinedRanks):
        dist.destroy_process_group()
        rooms.set_current_ranks(None)

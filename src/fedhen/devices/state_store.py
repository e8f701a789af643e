"""What is stored for each device that has trained: one packed vector, where there is room for it."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedhen.config.settings import RuntimeConfig
from fedhen.errors import UserError
from fedhen.hardware.memory import free_memory
from fedhen.params import Weights, pack, unpack


class Storage(Protocol):
    """Where vectors are stored; what was read stays as it is when the device's vector is written again."""

    stable: bool
    """Whether what `stored` gives costs no copy."""

    def write(self, key: int, vector: Tensor) -> None:
        """Keep a copy."""
        ...

    def read(self, key: int) -> Tensor:
        """The vector, where devices train."""
        ...

    def stored(self, key: int) -> Tensor:
        """The vector, where it lies."""
        ...

    def forget(self, key: int) -> None:
        """Make room."""
        ...


class Entry(NamedTuple):
    """What is stored for a device: where its vector is, and what it packs."""

    key: int
    layout: Weights


class StateStore(MutableMapping[int, Weights]):
    """Weights by device, packed; nothing is stored for a device before its weights are put here."""

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = storage or InMemory()
        self.keeps_previous = False
        """Whether what is replaced is stored until `commit`; it costs the memory of what a round replaces."""
        self._entries: dict[int, Entry] = {}
        self._previous: dict[int, Entry | None] = {}
        self._keys = itertools.count()
        self._layouts: dict[tuple[object, ...], Weights] = {}

    def __getitem__(self, device: int) -> Weights:
        return unpack(self.vector(device), self._entries[device].layout)

    def __setitem__(self, device: int, weights: Weights) -> None:
        self.put(device, pack(weights), weights)

    def __delitem__(self, device: int) -> None:
        entry = self._entries.pop(device)
        if self._is_first_change(device):
            self._previous[device] = entry
        else:
            self.storage.forget(entry.key)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, device: object) -> bool:
        return device in self._entries

    def vector(self, device: int) -> Tensor:
        """A device's packed weights."""
        return self.storage.read(self._entries[device].key)

    def stored(self, device: int) -> Tensor:
        """The same, not brought to where devices train."""
        return self.storage.stored(self._entries[device].key)

    def put(self, device: int, vector: Tensor, like: Mapping[str, Tensor]) -> None:
        """Keep packed weights, which have the names, shapes and types of others."""
        old = self._entries.get(device)
        if self._is_first_change(device):
            self._previous[device], old = old, None
        key = next(self._keys) if old is None else old.key
        self.storage.write(key, vector)
        kind = tuple((name, tensor.shape, tensor.dtype) for name, tensor in like.items())
        # Devices of a tier share one layout; meta tensors have shape and type and no memory.
        if kind not in self._layouts:
            self._layouts[kind] = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in like.items()}
        self._entries[device] = Entry(key, self._layouts[kind])

    def commit(self) -> None:
        """What has changed since the last time can no longer be undone."""
        for entry in self._previous.values():
            if entry is not None:
                self.storage.forget(entry.key)
        self._previous.clear()

    def rollback(self) -> None:
        """Put back what was here at the last `commit`."""
        for device, entry in self._previous.items():
            if device in self._entries:
                self.storage.forget(self._entries.pop(device).key)
            if entry is not None:
                self._entries[device] = entry
        self._previous.clear()

    def _is_first_change(self, device: int) -> bool:
        return self.keeps_previous and device not in self._previous


class InMemory:
    """In the memory of an accelerator, or of the host; without a place to keep them, where they come from."""

    stable = True

    def __init__(self, keep: torch.device | None = None, back: torch.device | None = None) -> None:
        self.keep, self.back = keep, back
        self.vectors: dict[int, Tensor] = {}

    def write(self, key: int, vector: Tensor) -> None:
        """A copy of its own: the vector may be a view of something larger."""
        self.vectors[key] = vector.to(self.keep or vector.device, copy=True)

    def read(self, key: int) -> Tensor:
        """The vector itself, or a copy where devices train elsewhere."""
        vector = self.vectors[key]
        return vector.to(self.back or vector.device)

    def stored(self, key: int) -> Tensor:
        """The vector itself: it is replaced, and never changed."""
        return self.vectors[key]

    def forget(self, key: int) -> None:
        """Drop it."""
        del self.vectors[key]


class OnDisk:
    """In one growing file without a name, a slot a vector: the system removes it, however the process ends.

    Plain reads and writes, no mapping: a full disk is then an error that can be told, and no fatal signal.
    """

    stable = False

    def __init__(self, folder: str, back: torch.device) -> None:
        self.folder, self.back = folder, back
        self.file: IO[bytes] | None = None
        self.end = 0
        self.slots: dict[int, tuple[int, int, torch.dtype]] = {}
        self.free: dict[int, list[int]] = {}

    def write(self, key: int, vector: Tensor) -> None:
        """Into the slot of that key."""
        content = vector.detach().cpu().contiguous().view(torch.uint8).numpy()
        if key not in self.slots:
            spare = self.free.get(content.nbytes)
            begin = spare.pop() if spare else self.end
            self.end = max(self.end, begin + content.nbytes)
            self.slots[key] = begin, content.nbytes, vector.dtype
        begin = self.slots[key][0]
        try:
            if self.file is None:
                self.file = tempfile.TemporaryFile(dir=self.folder or None)  # noqa: SIM115
            done = 0
            while done < content.nbytes:
                done += os.pwrite(self.file.fileno(), content.data[done:], begin + done)
        except OSError as error:
            where = self.folder or tempfile.gettempdir()
            raise UserError(
                f"cannot keep the devices' models in {where}: {error.strerror}; set runtime.storage_dir"
            ) from None

    def read(self, key: int) -> Tensor:
        """A copy of the slot."""
        return self.stored(key).to(self.back)

    def stored(self, key: int) -> Tensor:
        """A copy of the slot, on the host."""
        begin, size, kind = self.slots[key]
        assert self.file is not None
        content = np.empty(size, dtype=np.uint8)
        done = 0
        # At a place of its own: two threads may read at once, and a file has one position.
        while done < size:
            read = os.preadv(self.file.fileno(), [content.data[done:]], begin + done)
            if not read:
                raise UserError(f"the devices' models in {self.folder or tempfile.gettempdir()} were cut short")
            done += read
        return torch.from_numpy(content).view(kind)

    def forget(self, key: int) -> None:
        """The slot is free for the next one of its size."""
        begin, size, _ = self.slots.pop(key)
        self.free.setdefault(size, []).append(begin)


def make_stores(runtime: RuntimeConfig, accelerator: torch.device, needed: int) -> Callable[[], StateStore]:
    """New shelves as configured; `needed` is how many bytes all devices together would put on all of them."""
    if runtime.storage_dir and not Path(runtime.storage_dir).is_dir():
        raise UserError(f"runtime.storage_dir={runtime.storage_dir} is no folder: make it, or name another")
    near = free_memory(accelerator), free_memory(torch.device("cpu"))
    where = choose_storage(needed, *near) if runtime.storage == "auto" else runtime.storage
    storages: dict[str, Callable[[], Storage]] = {
        "accelerator": lambda: InMemory(accelerator, accelerator),
        "host": lambda: InMemory(torch.device("cpu"), accelerator),
        "disk": lambda: OnDisk(runtime.storage_dir, accelerator),
    }
    return lambda: StateStore(storages[where]())


def choose_storage(needed: int, on_accelerator: int, on_host: int) -> Literal["accelerator", "host", "disk"]:
    """The nearest storage with room: a quarter of the accelerator's free memory, half of the host's, else the disk.

    On a CPU both are the host: more than a quarter of it is then still the host.
    """
    if needed <= on_accelerator // 4:
        return "accelerator"
    return "host" if needed <= on_host // 2 else "disk"

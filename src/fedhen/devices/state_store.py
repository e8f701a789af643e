"""Stores one packed vector for each device that has trained: on the accelerator, on the host, or on disk."""

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

from fedhen.config.runtime_settings import RuntimeConfig
from fedhen.errors import ConfigError, FedhenError
from fedhen.hardware.memory import free_memory
from fedhen.params import Weights, pack, unpack


class Storage(Protocol):
    """Where vectors are stored. A vector that was read does not change when its key is written again."""

    stable: bool
    """Whether `stored` returns the vector itself, without a copy, which stays valid."""

    def write(self, key: int, vector: Tensor) -> None:
        """Stores a copy of the vector."""
        ...

    def read(self, key: int) -> Tensor:
        """Returns the vector on the device where training takes place."""
        ...

    def stored(self, key: int) -> Tensor:
        """Returns the vector where it is stored, or on the host."""
        ...

    def forget(self, key: int) -> None:
        """Removes the vector."""
        ...


class Entry(NamedTuple):
    """The key of a device's vector, and the layout of the weights in it."""

    key: int
    layout: Weights


class StateStore(MutableMapping[int, Weights]):
    """Device -> weights, stored as packed vectors. Changes can be rolled back to the last commit."""

    def __init__(self, storage: Storage | None = None) -> None:
        self.storage = storage or InMemory()
        self.keeps_previous = False
        """Whether replaced vectors are kept until `commit`. This costs the memory of what a round replaces."""
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
        """Returns a device's packed weights on the device where training takes place."""
        return self.storage.read(self._entries[device].key)

    def stored(self, device: int) -> Tensor:
        """Returns a device's packed weights where they are stored, or on the host."""
        return self.storage.stored(self._entries[device].key)

    def put(self, device: int, vector: Tensor, like: Mapping[str, Tensor]) -> None:
        """Stores packed weights with the names, shapes and types of `like`."""
        old = self._entries.get(device)
        if self._is_first_change(device):
            self._previous[device], old = old, None
        key = next(self._keys) if old is None else old.key
        self.storage.write(key, vector)
        layout = tuple((name, tensor.shape, tensor.dtype) for name, tensor in like.items())
        # Devices of a tier share one layout, of meta tensors, which have a shape and a type but no memory.
        if layout not in self._layouts:
            self._layouts[layout] = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in like.items()}
        self._entries[device] = Entry(key, self._layouts[layout])

    def commit(self) -> None:
        """Makes all changes since the last commit permanent."""
        for entry in self._previous.values():
            if entry is not None:
                self.storage.forget(entry.key)
        self._previous.clear()

    def rollback(self) -> None:
        """Restores the state of the last `commit`."""
        for device, entry in self._previous.items():
            if device in self._entries:
                self.storage.forget(self._entries.pop(device).key)
            if entry is not None:
                self._entries[device] = entry
        self._previous.clear()

    def _is_first_change(self, device: int) -> bool:
        return self.keeps_previous and device not in self._previous


class InMemory:
    """Stores vectors in memory: on the device `keep`, or by default on the device of each vector."""

    stable = True

    def __init__(self, keep: torch.device | None = None, back: torch.device | None = None) -> None:
        self.keep, self.back = keep, back
        self.vectors: dict[int, Tensor] = {}

    def write(self, key: int, vector: Tensor) -> None:
        # A copy, since the vector may be a view of something larger.
        self.vectors[key] = vector.to(self.keep or vector.device, copy=True)

    def read(self, key: int) -> Tensor:
        vector = self.vectors[key]
        return vector.to(self.back or vector.device)

    def stored(self, key: int) -> Tensor:
        return self.vectors[key]

    def forget(self, key: int) -> None:
        del self.vectors[key]


class OnDisk:
    """Stores vectors in one growing file without a name, which the system removes however the process ends.

    The file is not memory-mapped, so that a full disk is an error that can be reported, not a fatal signal.
    """

    stable = False

    def __init__(self, folder: str, back: torch.device) -> None:
        self.folder, self.back = folder, back
        self.file: IO[bytes] | None = None
        self.end = 0
        self.slots: dict[int, tuple[int, int, torch.dtype]] = {}
        self.free: dict[int, list[int]] = {}

    def write(self, key: int, vector: Tensor) -> None:
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
            raise FedhenError(
                f"cannot keep the devices' models in {where}: {error.strerror}; set runtime.storage_dir"
            ) from None

    def read(self, key: int) -> Tensor:
        return self.stored(key).to(self.back)

    def stored(self, key: int) -> Tensor:
        begin, size, dtype = self.slots[key]
        assert self.file is not None
        content = np.empty(size, dtype=np.uint8)
        done = 0
        # With an explicit offset, since two threads may read at once and a file has one position.
        while done < size:
            read = os.preadv(self.file.fileno(), [content.data[done:]], begin + done)
            if not read:
                raise FedhenError(f"the devices' models in {self.folder or tempfile.gettempdir()} were cut short")
            done += read
        return torch.from_numpy(content).view(dtype)

    def forget(self, key: int) -> None:
        # The next vector of this size takes its place.
        begin, size, _ = self.slots.pop(key)
        self.free.setdefault(size, []).append(begin)


def make_stores(runtime: RuntimeConfig, accelerator: torch.device, needed: int) -> Callable[[], StateStore]:
    """Returns a function that makes the configured stores. All devices and stores together need `needed` bytes."""
    if runtime.storage_dir and not Path(runtime.storage_dir).is_dir():
        raise ConfigError(f"runtime.storage_dir={runtime.storage_dir} is not a folder: create it, or name another")
    near = free_memory(accelerator), free_memory(torch.device("cpu"))
    where = choose_storage(needed, *near) if runtime.storage == "auto" else runtime.storage
    storages: dict[str, Callable[[], Storage]] = {
        "accelerator": lambda: InMemory(accelerator, accelerator),
        "host": lambda: InMemory(torch.device("cpu"), accelerator),
        "disk": lambda: OnDisk(runtime.storage_dir, accelerator),
    }
    return lambda: StateStore(storages[where]())


def choose_storage(needed: int, on_accelerator: int, on_host: int) -> Literal["accelerator", "host", "disk"]:
    """Chooses a quarter of the accelerator's free memory if that is enough, else half of the host's, else the disk.

    Without an accelerator both are the host, so that half of its memory may be used.
    """
    if needed <= on_accelerator // 4:
        return "accelerator"
    return "host" if needed <= on_host // 2 else "disk"

"""Random streams by address: one for every (seed, purpose, round, device). Nothing else seeds anything.

A device's draws therefore depend neither on the order in which devices train nor on earlier draws, a resumed run draws
the same numbers as an uninterrupted one, and every method sees the same devices and batches.

A run can have a secret in place of the seed, as every fleet has. Then the streams of a device in a round follow from a
key of their own. Who has the key can compute these streams, and no others.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np

Part = int | str
Root = int | bytes
"""What the streams follow from: a seed, or a secret or key of 32 bytes."""
SECRET_BYTES = 32


def number(root: Root, *address: Part) -> int:
    """Returns a 63-bit number that is different for every address."""
    if isinstance(root, bytes):
        digest = _keyed_digest(root, "number", *address)
    else:
        digest = hashlib.sha256(_spell(root, *address)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def stream(root: Root, *address: Part) -> np.random.Generator:
    """Returns the random generator of an address."""
    return np.random.Generator(np.random.PCG64(number(root, *address)))


def draw_secret() -> bytes:
    """Draws a secret from the operating system."""
    return secrets.token_bytes(SECRET_BYTES)


def derive_key(secret: bytes, *address: Part) -> bytes:
    """Returns the key of an address: 32 bytes that tell nothing of the secret, nor of another address's key."""
    return _keyed_digest(secret, "key", *address)


def _keyed_digest(key: bytes, *parts: Part) -> bytes:
    return hmac.digest(key, _spell(*parts), "sha256")


def _spell(*parts: Part) -> bytes:
    return "/".join(f"{type(part).__name__}:{part}" for part in parts).encode()


@dataclass(frozen=True)
class DeviceStreams:
    """The random streams of one device in one round, by purpose."""

    root: Root
    """The seed of the run, or the key of this device and round."""
    where: tuple[int, ...] = ()
    """With a seed, the round and the device."""

    def stream(self, purpose: str, *more: Part) -> np.random.Generator:
        return stream(self.root, purpose, *self.where, *more)

    def randomness(self, purpose: str, *more: Part) -> AbstractContextManager[None]:
        return randomness(self.root, purpose, *self.where, *more)


@dataclass(frozen=True)
class RunStreams:
    """The random streams of a run: those of all devices in all rounds."""

    root: Root
    """The seed, or the secret of the run."""

    def of_device(self, round_number: int, device: int) -> DeviceStreams:
        if isinstance(self.root, bytes):
            return DeviceStreams(self.key_of_device(round_number, device))
        return DeviceStreams(self.root, (round_number, device))

    @property
    def initial(self) -> Root:
        """What the initial weights follow from."""
        return self.initial_key if isinstance(self.root, bytes) else self.root

    @property
    def secret(self) -> bytes:
        """The secret of the run, empty if it has none."""
        return self.root if isinstance(self.root, bytes) else b""

    @property
    def initial_key(self) -> bytes:
        """The key of the initial weights, which every device may have. Only a run with a secret has keys."""
        return derive_key(self.require_secret(), "initial weights")

    def key_of_device(self, round_number: int, device: int) -> bytes:
        """Returns the key of a device's streams in a round. Only a run with a secret has keys."""
        return derive_key(self.require_secret(), "device", round_number, device)

    def require_secret(self) -> bytes:
        if not self.secret:
            raise ValueError("a run without a secret has no keys")
        return self.secret


@dataclass(frozen=True)
class KeyStreams:
    """The random streams that a node of a fleet can compute: of its own device, in the rounds that it has keys of."""

    initial: Root
    keys: Mapping[int, bytes]
    """Round -> the key of this device."""

    def of_device(self, round_number: int, device: int) -> DeviceStreams:
        return DeviceStreams(self.keys[round_number])


Streams = RunStreams | KeyStreams


@contextmanager
def randomness(root: Root, *address: Part) -> Iterator[None]:
    """Seeds the global generators of torch, numpy and Python (initial weights, dropout) from an address.

    On exit their states are restored.
    """
    import torch  # here, so that addresses can be used without it

    here = number(root, *address)
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(here)
    np.random.seed(here % 2**32)
    try:
        with torch.random.fork_rng():
            # Without an accelerator, `torch.manual_seed` spends milliseconds on noting from where it was called.
            seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
            seed_torch(here)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)

"""Random streams by address: one for every (seed, purpose, round, device). Nothing else seeds anything.

A device's draws therefore depend neither on the order in which devices train nor on earlier draws, a resumed run draws
the same numbers as an uninterrupted one, and every method sees the same devices and batches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

Part = int | str


def number(seed: int, *address: Part) -> int:
    """Returns a 63-bit number that is different for every address."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in (seed, *address))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *address: Part) -> np.random.Generator:
    """Returns the random generator of an address."""
    return np.random.Generator(np.random.PCG64(number(seed, *address)))


@contextmanager
def randomness(seed: int, *address: Part) -> Iterator[None]:
    """Seeds the global generators of torch, numpy and Python (initial weights, dropout) from an address.

    On exit their states are restored.
    """
    import torch  # here, so that addresses can be used without it

    here = number(seed, *address)
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

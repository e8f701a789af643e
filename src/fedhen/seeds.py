"""Randomness has an address: a stream for every (seed, purpose, round, device), and nothing else seeds anything.

So a device's draws depend neither on the order in which devices train nor on what was drawn before, a resumed run
goes on with the same numbers, and every method sees the same devices and batches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

Part = int | str


def number(seed: int, *address: Part) -> int:
    """A 63-bit number that is different for every address."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in (seed, *address))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def stream(seed: int, *address: Part) -> np.random.Generator:
    """The stream of random numbers at this address."""
    return np.random.Generator(np.random.PCG64(number(seed, *address)))


@contextmanager
def randomness(seed: int, *address: Part) -> Iterator[None]:
    """Inside, the global draws of torch, numpy and Python (initial weights, dropout) come from this address.

    Outside nothing changes.
    """
    here = number(seed, *address)
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(here)
    np.random.seed(here % 2**32)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(here)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)

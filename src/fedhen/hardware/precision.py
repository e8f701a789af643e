"""The precision of products: fp32, tf32 (shorter factors), or bf16 over full-precision weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fedhen.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """The precision of products on a type of accelerator. Sums, weights and updates keep the weights' type."""

    name: str
    accelerator: str

    def autocast(self) -> torch.autocast:
        """Returns a context in which forward passes, and so their backward passes, compute in this precision."""
        return torch.autocast(self.accelerator, dtype=torch.bfloat16, enabled=self.name == "bf16", cache_enabled=False)

    def choose(self) -> None:
        """Sets how float32 products are computed from now on. By default torch lets convolutions use tf32."""
        torch.backends.cuda.matmul.allow_tf32 = self.name == "tf32"
        torch.backends.cudnn.allow_tf32 = self.name == "tf32"


@contextmanager
def search_convolutions(on: bool) -> Iterator[None]:
    """Lets cuDNN search for the fastest convolution of each shape, which pays off if shapes recur."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def exact_products() -> Iterator[None]:
    """Computes float32 products in full precision, whatever was chosen outside."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    FULL.choose()
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


FULL = Precision("fp32", "cpu")


def choose_precision(name: str, accelerator: torch.device) -> Precision:
    """Returns the precision of that name; auto is bf16 on a GPU that supports it, else fp32."""
    if name == "tf32" and accelerator.type != "cuda":
        raise ConfigError("runtime.precision=tf32 needs a GPU: use fp32 or auto")
    if name == "auto":
        name = "bf16" if accelerator.type == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"
    return Precision(name, accelerator.type)

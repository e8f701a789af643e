"""How products are computed: in full precision, with tf32's shorter factors, or in bf16 over full-precision weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fedhen.errors import UserError


@dataclass(frozen=True)
class Precision:
    """The precision of products on a kind of accelerator; sums, weights and their updates keep the weights' type."""

    name: str
    accelerator: str

    def autocast(self) -> torch.autocast:
        """Inside, forward passes compute in this precision; backward passes follow them."""
        return torch.autocast(self.accelerator, dtype=torch.bfloat16, enabled=self.name == "bf16", cache_enabled=False)

    def choose(self) -> None:
        """From here on products of float32 are computed so; torch's own default lets convolutions use tf32."""
        torch.backends.cuda.matmul.allow_tf32 = self.name == "tf32"
        torch.backends.cudnn.allow_tf32 = self.name == "tf32"


@contextmanager
def searching_convolutions(on: bool) -> Iterator[None]:
    """Inside, cuDNN may search for the fastest convolution of each shape: worth it where shapes come back often."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def exact_products() -> Iterator[None]:
    """Inside, products of float32 are in full precision, whatever was chosen outside."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    FULL.choose()
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


FULL = Precision("fp32", "cpu")


def choose_precision(name: str, accelerator: torch.device) -> Precision:
    """The precision of that name; auto is bf16 on a GPU that has it, and fp32 elsewhere."""
    if name == "tf32" and accelerator.type != "cuda":
        raise UserError("runtime.precision=tf32 needs a GPU: use fp32 or auto")
    if name == "auto":
        name = "bf16" if accelerator.type == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"
    return Precision(name, accelerator.type)

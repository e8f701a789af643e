"""Measures the peak speed of this machine, and the peak memory of a run."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch

from fedhen.hardware.threads import torch_threads, usable_cores


def measure_product_rate(where: torch.device, precision: str) -> float:
    """Returns the TFLOP/s of a large matrix product in that precision, on a CPU with all of its cores."""
    side = 8192 if where.type == "cuda" else 2048
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    a, b = (torch.randn(side, side, device=where).to(kind) for _ in range(2))
    times = []
    with torch_threads(usable_cores()):
        for _ in range(6):
            synchronise(where)
            began = time.perf_counter()
            a @ b
            synchronise(where)
            times.append(time.perf_counter() - began)
    return 2 * side**3 / min(times) / 1e12


def synchronise(where: torch.device) -> None:
    """Waits until all work on a device is done."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def reset_peak_memory(where: torch.device) -> None:
    """Measures peak memory from now on, if the system supports it."""
    if where.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def read_peak_memory(where: torch.device) -> float:
    """Returns the peak memory in bytes, of the GPU or of the process."""
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

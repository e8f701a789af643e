"""Runs of several ranks, started by torchrun on this machine."""

from __future__ import annotations

import subprocess
import sys

from support.tiny import TINY, as_options

SIX_DEVICES = as_options([*TINY, "devices.number=6", "devices.active=3"])


def torchrun(number: int, *command: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number), *command]


def fedhen_lines(text: str) -> list[str]:
    """Returns the lines that fedhen wrote; torchrun adds a report."""
    return [line for line in text.splitlines() if line.startswith("fedhen: ")]


def children(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    return sorted(pid for pid, parent in pairs if parent == process)

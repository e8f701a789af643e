"""Cores and threads: how many a process may use, and who divides them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedhen.config import validation
from fedhen.hardware import threads


def test_cores_are_those_of_affinity_and_quota(tmp_path: Path) -> None:
    """By the files that Linux has for control groups of version 2, of version 1, and of none."""
    assert 1 <= threads.usable_cores() <= len(os.sched_getaffinity(0))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert threads._quota("0::/a/b\n", tmp_path) == 1.5
    assert threads._quota("0::/elsewhere\n", tmp_path) == float("inf")
    (tmp_path / "cpu,cpuacct" / "c").mkdir(parents=True)
    (tmp_path / "cpu,cpuacct" / "c" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu,cpuacct" / "c" / "cpu.cfs_period_us").write_text("100000\n")
    assert threads._quota("4:cpu,cpuacct:/c\n3:memory:/c\n", tmp_path) == 3
    (tmp_path / "cpu,cpuacct" / "c" / "cpu.cfs_quota_us").write_text("-1\n")
    assert threads._quota("4:cpu,cpuacct:/c\n", tmp_path) == float("inf")


def test_ranks_on_one_machine_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = validation.from_mapping({}).runtime
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert (threads.worker_count(runtime), threads.threads_per_worker(runtime)) == (8, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert threads.worker_count(runtime) == 2
    for settings, expected in (({"threads": 2}, (1, 2)), ({"threads": 0}, (1, 2)), ({"workers": 5}, (5, 1))):
        runtime = validation.from_mapping({"runtime": settings}).runtime
        assert (threads.worker_count(runtime), threads.threads_per_worker(runtime)) == expected


@pytest.mark.process
def test_the_affinity_of_a_process_is_seen() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from fedhen.hardware import threads; "
    code += "print(threads.usable_cores())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "1\n"

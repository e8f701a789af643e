"""What a run stores is bounded by the devices that have trained, is where it is configured to be, and sums exactly."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedhen
from fedhen.algorithm.updates import Update
from fedhen.config import validation
from fedhen.data.dataset import Data
from fedhen.devices.state_store import OnDisk, StateStore, choose_storage
from fedhen.errors import FedhenError
from fedhen.exact_sums import FixedPoint
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from fedhen.experiment.reported_models import AllDevicesAverage
from fedhen.hardware.memory import free_memory
from fedhen.params import Weights, is_finite, pack, unpack
from fedhen.runs.reader import read_run
from support.families import two_exits
from support.marks import first_is_quick
from support.tiny import TINY_OPTIONS

CPU = torch.device("cpu")


def data(devices: int) -> Data:
    """Sixty examples, of which every device has the same four or another four."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 6)), rng.integers(0, 3, 60)
    shards = [np.arange(4) + 4 * (device % 10) for device in range(devices)]
    return fedhen.arrays(x[:40], y[:40], x[40:], y[40:], classes=3).split(shards)


def experiment(devices: int, **settings: Any) -> Experiment:
    base: dict[str, Any] = {
        "rounds": 3,
        "devices": {"number": devices, "active": 4},
        "model": {"family": "python"},
        "training": {"epochs": 1},
        "evaluation": {"every": 3},
    }
    config = validation.from_mapping({**base, **settings})
    return build_experiment(config, data=data(devices), family=two_exits(), accelerator="cpu")


def test_rows_are_kept_only_for_devices_that_have_trained() -> None:
    """3 rounds of 4 of 1,000 devices: at most 12 rows, and as many memories."""
    run = experiment(1000, local={"name": "scaffold"})
    trained = {device for step in run.play() for device in step.record["active"]}
    assert set(run.last_models.rows) == trained == set(run.engine.devices.memory)  # type: ignore[attr-defined]
    assert len(trained) <= 12


def count_alive() -> int:
    """Returns the elements of all tensors that are alive, except the symbolic ones that torch keeps of an export."""
    gc.collect()
    return sum(t.numel() for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))


@pytest.mark.slow
def test_ten_thousand_devices_keep_no_more_tensors_than_a_hundred() -> None:
    """Live elements of all tensors after three rounds of the same number of active devices."""

    def alive(devices: int) -> int:
        run = experiment(devices)
        assert len(list(run.play())) == 3
        return count_alive()

    few, many = alive(100), alive(10_000)
    assert many <= few + 3 * 4 * 100, "a row of the larger model is 67 numbers, and some device trained twice of 100"


@pytest.mark.slow
def test_personal_models_are_kept_only_of_devices_that_have_trained() -> None:
    """1,000 devices that keep a model each, of which at most 12 train, and all are scored, one model at a time."""

    def alive(devices: int) -> int:
        own = {"every": 3, "own": True, "devices": False}
        run = experiment(devices, personal={"name": "ditto", "adapt_epochs": 0}, evaluation=own)
        steps = list(run.play())
        trained = {device for step in steps for device in step.record["active"]}
        assert set(run.memory) == trained and len(trained) <= 12
        scored = [len(values) for values in steps[-1].record["own"]["personal"].values()]
        assert sum(scored) == devices
        return count_alive()

    assert alive(1000) <= alive(20) + 3 * 4 * 100, "a copy of the larger model is 67 numbers"


def test_without_the_devices_average_nothing_is_kept_for_it(tmp_path: Path) -> None:
    run = experiment(10, evaluation={"every": 3, "devices": False})
    records = [step.record for step in run.play()]
    assert not run.last_models.rows and run.models().keys() == {"server"}
    assert records[-1]["accuracy"].keys() == {"server"}


@pytest.mark.slow
@pytest.mark.parametrize("local", ["plain", "scaffold", "feddyn"])
def test_the_place_of_the_rows_changes_no_byte(local: str, tmp_path: Path) -> None:
    found = []
    for rows in ("accelerator", "host", "disk", "auto"):
        run = experiment(10, rounds=6, local={"name": local}, runtime={"storage": rows, "storage_dir": str(tmp_path)})
        records = [step.record for step in run.play()]
        found.append((records, {k: {t: pack(w).tolist() for t, w in m.items()} for k, m in run.models().items()}))
    assert all(each == found[0] for each in found)


def open_files(folder: Path) -> list[str]:
    """Files of a folder that this process has open, deleted or not."""
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return [str(target) for link in links if (target := _target(link)) is not None and folder in target.parents]


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:
        return None


@pytest.mark.parametrize("fails", first_is_quick([False, True]))
def test_rows_on_disk_leave_nothing_behind(fails: bool, tmp_path: Path) -> None:
    """The file has no name from the start, so that even a killed process leaves none; its space goes with the run."""

    def activate(number: int, losses: object) -> list[int]:
        if fails and number == 3:
            raise RuntimeError("a user's own function")
        return [0, 9]

    run = experiment(10, runtime={"storage": "disk", "storage_dir": str(tmp_path)})
    run.activate = activate
    steps = run.play()
    next(steps), next(steps)
    assert len(open_files(tmp_path)) == 1 and not list(tmp_path.iterdir())
    if fails:
        with pytest.raises(RuntimeError, match="own function"):
            next(steps)
    else:
        assert len(list(steps)) == 1
    del run, steps
    gc.collect()
    assert not open_files(tmp_path) and not list(tmp_path.iterdir())


def test_a_missing_folder_and_a_full_disk_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FedhenError, match="is not a folder"):
        experiment(10, runtime={"storage_dir": str(tmp_path / "none")})
    store = StateStore(OnDisk("/dev/null", CPU))
    with pytest.raises(FedhenError, match=r"cannot keep the devices' models in /dev/null: .*; set runtime.storage_dir"):
        store[0] = {"w": torch.ones(3)}


def test_slots_on_disk_are_reused(tmp_path: Path) -> None:
    place = OnDisk(str(tmp_path), CPU)
    store = StateStore(place)
    for device in range(5):
        store[device] = {"w": torch.full((4,), float(device)), "h": torch.full((2,), device, dtype=torch.bfloat16)}
    del store[1], store[3]
    size = place.end
    store[7] = {"w": torch.full((4,), 7.0), "h": torch.full((2,), 7, dtype=torch.bfloat16)}
    assert place.end == size and sorted(store) == [0, 2, 4, 7] and 1 not in store
    assert {device: row["w"].tolist() for device, row in store.items()} == {d: [float(d)] * 4 for d in (0, 2, 4, 7)}
    assert store[7]["h"].dtype == torch.bfloat16
    with pytest.raises(KeyError):
        store[1]


@pytest.mark.parametrize("place", [None, "disk"])
def test_a_row_that_was_read_does_not_change_when_it_is_written_again(place: str | None) -> None:
    store = StateStore(OnDisk("", CPU) if place else None)
    block = torch.arange(6.0)
    store[0] = {"w": block[2:4]}
    block += 100
    before = store[0]["w"]
    store[0] = {"w": torch.tensor([8.0, 9.0])}
    assert before.tolist() == [2.0, 3.0] and store[0]["w"].tolist() == [8.0, 9.0]


def test_the_place_of_the_rows_is_the_fastest_with_enough_memory() -> None:
    """A quarter of the accelerator, half of the host."""
    assert choose_storage(25, 100, 1000) == "accelerator"
    assert choose_storage(26, 100, 1000) == choose_storage(500, 100, 1000) == "host"
    assert choose_storage(501, 100, 1000) == "disk"
    assert free_memory(CPU) > 10**8


GROWTH = """
import resource, sys
import numpy as np, torch
from torch import nn
import fedhen
from fedhen.config import validation
from fedhen.experiment.build import build_experiment

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.exit = nn.Linear(100, 10_000), nn.Linear(10_000, 3)

    def forward(self, x):
        return [self.exit(self.body(x).relu())]

def peak(devices, active, rounds, rows):
    x, y = torch.randn(20, 100), torch.arange(20) % 3
    data = fedhen.arrays(x, y, x, y).split([np.arange(4)] * devices)
    config = validation.from_mapping({
        "rounds": rounds, "tiers": {"all": 1.0}, "devices": {"number": devices, "active": active},
        "model": {"family": "python"}, "training": {"epochs": 1}, "evaluation": {"every": rounds},
        "runtime": {"storage": rows, "engine": "plain"},
    })
    experiment = build_experiment(config, data=data, family=fedhen.Family({"all": Wide}), accelerator="cpu")
    for step in experiment.play():
        pass
    rows = len(experiment.last_models.rows)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, rows

for case in ((10, 2, 3, "host"), (1000, 2, 3, "host"), (1000, 4, 25, "disk")):
    print(*peak(*case))
"""


@pytest.mark.process
def test_memory_does_not_grow_with_the_devices() -> None:
    """A model of 1,040,003 floats is 4.2 MB. Peak memory of the process, after one another in the same process:

    10 devices; 1,000 devices, of which 6 train at most (4.2 GB if each had a model); about 95 rows on disk (400 MB).
    """
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    (ten, few), (thousand, as_few), (disk, many) = (
        [float(v) for v in line.split()] for line in done.stdout.splitlines()
    )
    assert few <= 6 and as_few <= 6 and many > 80
    assert thousand - ten < 40, (ten, thousand)
    assert disk - thousand < 120, (thousand, disk)


# Exact sums.


def updates(values: list[list[float]]) -> Iterator[Update]:
    for device, row in enumerate(values):
        yield Update(device, "all", {"w": torch.tensor(row, dtype=torch.float64)}, frozenset("w"), 1, 0.0)


rows_strategy = st.lists(st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=2), min_size=1, max_size=6)


@given(rows_strategy, rows_strategy, st.randoms(use_true_random=False))
def test_the_average_is_exact_whatever_the_order(
    earlier: list[list[float]], last: list[list[float]], random: Any
) -> None:
    """Seven devices, initial 0.3; the mean of the values rounded to multiples of 2^-36, by fractions."""
    initial = {"all": {"w": torch.tensor([0.3, 0.3], dtype=torch.float64)}}
    found = []
    for shuffled in (False, True):
        models = AllDevicesAverage(initial, ["all"] * 7)
        for part in (list(updates(earlier)), list(updates(last))):
            if shuffled:
                random.shuffle(part)
            models.take(part)
        found.append(models.average("all")["w"])
    assert torch.equal(*found)
    kept = last + earlier[len(last) :]
    everyone = kept + [[0.3, 0.3]] * (7 - len(kept))
    for place in range(2):
        steps = [round(Fraction(row[place]) * 2**36) for row in everyone]
        assert found[0][place].item() == pytest.approx(float(Fraction(sum(steps), 7 * 2**36)), rel=1e-15, abs=1e-30)
        assert abs(found[0][place].item() - math.fsum(row[place] for row in everyone) / 7) < 2**-36


def test_a_weight_saturates_and_no_sum_overflows() -> None:
    """Of 1,000 devices each counts for at most 2^26 / 1000 = 67,108.864."""
    like = {"w": torch.zeros(2)}
    fixed = FixedPoint(like, 1000)
    with pytest.warns(UserWarning, match="weights beyond ±67,109"):
        total = fixed.of(torch.tensor([3e38, -3e38])) * 1000
    np.testing.assert_allclose(fixed.mean(total).numpy(), [67108.864, -67108.864])


def test_whole_numbers_are_summed_as_they_are() -> None:
    """Of a counter, (1,000,000 + 2,000,001 + 0) / 3 = 1,000,000.33 is rounded; the float beside it is not."""
    initial = {"all": {"seen": torch.tensor(0), "w": torch.tensor([1.5])}}
    models = AllDevicesAverage(initial, ["all"] * 3)
    for device, seen in enumerate((1_000_000, 2_000_001)):
        weights: Weights = {"seen": torch.tensor(seen), "w": torch.tensor([3.0])}
        models.take([Update(device, "all", weights, frozenset("w"), 1, 0.0)])
    average = models.average("all")
    assert average["seen"].dtype == torch.int64 and average["seen"].item() == 1_000_000
    assert average["w"].tolist() == [2.5]


# Packing, and finiteness of all types.


def test_contiguous_weights_are_packed_without_a_copy() -> None:
    block = torch.arange(20.0)
    weights = {"a": block[3:7].view(2, 2), "b": block[7:8].view(()), "c": block[8:12]}
    vector = pack(weights)
    assert vector.data_ptr() == weights["a"].data_ptr() and vector.tolist() == block[3:12].tolist()
    swapped = {"b": weights["b"], "a": weights["a"]}
    assert pack(swapped).tolist() == [7.0, 3.0, 4.0, 5.0, 6.0]
    transposed = {"a": block[:4].view(2, 2).T, "b": block[4:6]}
    assert pack(transposed).tolist() == [0.0, 2.0, 1.0, 3.0, 4.0, 5.0]
    assert pack({}).tolist() == [] and unpack(pack({}), {}) == {}


def test_packing_keeps_every_type() -> None:
    weights = {
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "whole": torch.tensor([2**40 + 1]),
        "float": torch.tensor([[0.1, 0.2]]),
    }
    back = unpack(pack(weights), weights)
    assert all(back[n].dtype == t.dtype and torch.equal(back[n], t) for n, t in weights.items())


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_largest_numbers_are_finite_and_one_bad_number_is_found(kind: torch.dtype) -> None:
    largest = torch.finfo(kind).max
    good = {"w": torch.tensor([largest, -largest], dtype=kind), "n": torch.tensor([2**62]), "v": torch.ones(3)}
    assert is_finite(good) and is_finite({"n": torch.tensor([1])}) and is_finite({})
    for bad in (math.nan, math.inf, -math.inf):
        assert not is_finite({**good, "bad": torch.tensor([0.0, bad], dtype=kind)})


# Reports of runs without the average.


@pytest.mark.slow
def test_every_command_works_without_the_devices_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedhen.cli import main

    small = [*TINY_OPTIONS, "--rounds", "2"]
    off = ["--set", "evaluation.devices=false", "--set", "evaluation.ensemble=true"]
    one, both = tmp_path / "one", tmp_path / "both"
    assert main(["run", "digits", *small, *off, "--out", str(one)]) == 0
    shown = capsys.readouterr()
    assert "% of the test set (server model)" in shown.out and "simple" in shown.err
    assert sorted(p.name for p in (one / "models").iterdir() if not p.name.startswith("best-server-")) == [
        "server-complex.safetensors",
        "server-simple.safetensors",
    ]
    assert read_run(one).owners == ("server",)
    assert main(["evaluate", str(one)]) == 0
    assert main(["report", str(one)]) == 0
    out = capsys.readouterr().out
    assert (
        "Rounds to target (server model)" in out and "server, exits together" in out and "all devices, final" not in out
    )
    assert out.count("No average of all devices") == 1
    assert main(["run", "digits", *small, "--method", "noside", "--quiet", "--out", str(both)]) == 0
    assert main(["report", str(one), str(both), "--out", str(tmp_path / "report")]) == 0
    out = capsys.readouterr().out
    assert "Rounds to target (server model)" in out and "all devices, final, %" in out
    assert main(["report", str(one), "--of", "devices"]) == 2
    assert "use --of server" in capsys.readouterr().err
    assert main(["paper", "--runs", str(tmp_path), "--out", str(tmp_path / "paper")]) == 0
    with pytest.raises(FedhenError, match="kept no average of all devices"):
        fedhen.load(one, "simple", "devices")

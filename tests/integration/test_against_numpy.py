"""Whole runs of every method against `numpy_reference`, which shares no line with the package."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedhen.config import validation
from fedhen.data.batches import plan_visits
from fedhen.data.dataset import Data
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from fedhen.seeds import DeviceStreams
from support import numpy_reference as reference
from support.families import two_exits
from support.marks import first_is_quick

INPUTS, CLASSES, DEVICES, ROUNDS = 6, 3, 6, 12
TIER_OF = ["simple"] * 3 + ["complex"] * 3
SIZES = [7, 12, 5, 9, 12, 8]


def federation(poisoned: int | None = None) -> Data:
    """Six devices of unequal size; the poisoned one holds a NaN."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(sum(SIZES), INPUTS)) * 3
    ends = np.cumsum(SIZES)
    shards = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    if poisoned is not None:
        x[shards[poisoned][0], 0] = np.nan
    y = rng.integers(0, CLASSES, sum(SIZES))
    test = torch.from_numpy(rng.normal(size=(50, INPUTS))), torch.from_numpy(rng.integers(0, CLASSES, 50))
    return Data(torch.from_numpy(x), torch.from_numpy(y), *test, CLASSES, tuple(shards))


def experiment(method: str, data: Data, task: str = "classification", **training: float) -> Experiment:
    settings = {
        "method": method,
        "task": {"name": task},
        "rounds": ROUNDS,
        "devices": {"number": DEVICES, "active": 2},
        "model": {"family": "python"},
        "training": {"epochs": 3, "batch_size": 4, "lr": 0.2, "weight_decay": 0.01, "clip": 1.0, **training},
        "evaluation": {"every": 1},
    }
    return build_experiment(
        validation.from_mapping(settings), data=data, family=two_exits(INPUTS, CLASSES), accelerator="cpu"
    )


def expected_rounds(run: Experiment, data: Data, active: list[list[int]]) -> list[reference.Round]:
    """The same runs by the reference; of ours it takes the initial weights, who was active, and the order of images."""
    training = run.config.training
    initial = {n: t.numpy().copy() for n, t in run.population.family.initial(run.config.seed).items()}
    x, y = data.x.numpy(), data.y.numpy()

    def batches(number: int, device: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        streams = DeviceStreams(run.config.seed, (number, device))
        plan = plan_visits(np.arange(SIZES[device]), training.epochs, training.batch_size, False, streams)
        return [plan.examples[part] for part in plan.batches()]

    return reference.federated(
        run.config.method,
        initial,
        TIER_OF,
        [(x[shard], y[shard]) for shard in data.shards],
        active,
        batches,
        lr=training.lr,
        clip=training.clip,
        weight_decay=training.weight_decay,
    )


@pytest.mark.parametrize("poisoned", first_is_quick([1, None, 4]))
@pytest.mark.parametrize("method", first_is_quick(["fedhen", "noside", "decouple"]))
def test_a_whole_run_equals_the_reference(method: str, poisoned: int | None) -> None:
    data = federation(poisoned)
    compare_with_reference(experiment(method, data), data)


@pytest.mark.parametrize("method", first_is_quick(["fedhen", "noside", "decouple"]))
def test_a_whole_regression_equals_the_reference(method: str) -> None:
    classes = federation(poisoned=1)
    targets = [
        torch.sin(torch.arange(float(len(y) * CLASSES)).double()).view(-1, CLASSES) for y in (classes.y, classes.y_test)
    ]
    data = replace(classes, y=targets[0], y_test=targets[1], classes=0)
    compare_with_reference(experiment(method, data, "regression"), data)


def compare_with_reference(run: Experiment, data: Data) -> None:
    found = []
    for step in run.play():
        models = {kind: {t: dict(w) for t, w in tiers.items()} for kind, tiers in run.models().items()}
        found.append((step.record, models))
    expected = expected_rounds(run, data, [record["active"] for record, _ in found])
    for (record, models), wanted in zip(found, expected, strict=True):
        assert record["dropped"] == wanted.dropped
        assert (np.nan if record["loss"] is None else record["loss"]) == pytest.approx(
            wanted.loss, rel=1e-10, nan_ok=True
        )
        for kind, theirs in (("server", wanted.server), ("devices", wanted.reported)):
            for tier in ("simple", "complex"):
                assert models[kind][tier].keys() == theirs[tier].keys()
                for name, tensor in models[kind][tier].items():
                    np.testing.assert_allclose(tensor.numpy(), theirs[tier][name], rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.slow
def test_the_compared_runs_contain_the_special_rounds() -> None:
    """Rounds without a simple and without a complex device, a dropped device, and a clip that bites."""
    run = experiment("fedhen", federation(poisoned=1))
    records = [step.record for step in run.play()]
    tiers = [{TIER_OF[d] for d in record["active"]} for record in records]
    assert {"simple"} in tiers and {"complex"} in tiers
    assert any(record["dropped"] == [1] for record in records)
    free = experiment("fedhen", federation(poisoned=1), clip=1e9)
    assert [step.record["loss"] for step in free.play()] != [record["loss"] for record in records]

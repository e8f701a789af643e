"""fedhen from Python: own model, own data, and the models back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedhen
from support.families import two_exits
from support.marks import first_is_quick

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "devices": {"number": 4, "active": 2},
    "training": {"epochs": 1, "batch_size": 8},
}


def blobs(
    seed: int = 0, n: int = 120
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Three well separated clouds in six dimensions."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return np.eye(6)[y] * 4 + rng.normal(size=(n, 6)), y


class TinyTransformer(nn.Module):
    """Not a ResNet: two encoder layers, an exit after the first."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.places = nn.Parameter(torch.randn(3, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(1 + deep)
        )
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(1 + deep))

    def forward(self, x: Tensor) -> list[Tensor]:
        h, logits = self.embed(x.view(len(x), 3, 2)) + self.places, []
        for layer, head in zip(self.layers, self.heads, strict=True):
            h = layer(h)
            logits.append(head(h.mean(1)))
        return logits


def transformers() -> fedhen.Family:
    return fedhen.Family({"simple": lambda: TinyTransformer(False), "complex": lambda: TinyTransformer(True)})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedhen", "noside", "decouple"])
def test_a_users_own_transformer_learns(method: str) -> None:
    x, y = blobs()
    run = fedhen.train(
        transformers(),
        fedhen.FederatedData.from_arrays(x, y, *blobs(1)),
        method,
        rounds=15,
        devices={"number": 6, "active": 4},
        training={"epochs": 3, "batch_size": 8, "lr": 0.1},
        accelerator="cpu",
    )
    assert run.rounds[-1]["loss"] < 0.5 * run.rounds[0]["loss"]
    assert min(run.accuracy["server"].values()) > 0.8


@pytest.mark.parametrize(("method", "exits"), first_is_quick([("fedhen", 2), ("noside", 2), ("decouple", 1)]))
def test_models_come_back_as_they_were_scored(method: str, exits: int, tmp_path: Path) -> None:
    """`Run.model` and `fedhen.load` give the recorded accuracy by an evaluation written here."""
    data = fedhen.FederatedData.from_arrays(*blobs(), *blobs(1))
    run = fedhen.train(transformers(), data, method, run_dir=tmp_path / "run", accelerator="cpu", **SETTINGS)
    for kind in ("server", "devices"):
        for tier in ("simple", "complex"):
            for module in (run.model(tier, kind), fedhen.load(tmp_path / "run", tier, kind, family=transformers())):
                logits = module(data.x_test.float())
                assert len(logits) == (1 if tier == "simple" else exits)
                right = (logits[-1].argmax(1) == data.y_test).float().mean().item()
                assert right == pytest.approx(run.accuracy[kind][tier])
    again = fedhen.evaluate(tmp_path / "run", family=transformers(), data=data, accelerator="cpu")
    assert again == run.accuracy
    assert "Rounds to target" in fedhen.report(tmp_path / "run", out=tmp_path / "report")


def test_one_data_set_per_device() -> None:
    """Each device trains on its own examples only: as many visits as it has, and no split."""
    devices = [blobs(seed, n) for seed, n in ((1, 10), (2, 20), (3, 30), (4, 40))]
    data = fedhen.FederatedData.from_devices(devices, *blobs(9))
    run = fedhen.train(transformers(), data, rounds=1, devices={"active": 4}, training={"epochs": 1}, accelerator="cpu")
    assert run.rounds[0]["active"] == [0, 1, 2, 3]
    for shard, (x, y) in zip(run.experiment.population.data.shards, devices, strict=True):
        assert torch.equal(run.experiment.population.data.y[shard], torch.from_numpy(y))
        torch.testing.assert_close(run.experiment.population.data.x[shard], torch.from_numpy(x).float())


def test_a_run_from_python_is_not_repeated_without_its_family(tmp_path: Path) -> None:
    fedhen.train(
        transformers(),
        fedhen.FederatedData.from_arrays(*blobs(), *blobs(1)),
        run_dir=tmp_path / "r",
        accelerator="cpu",
        **SETTINGS,
    )
    with pytest.raises(fedhen.FedhenError, match="the model family of this run was passed from Python"):
        fedhen.load(tmp_path / "r", "simple")
    with pytest.raises(fedhen.FedhenError, match="the data of this run was passed from Python"):
        fedhen.evaluate(tmp_path / "r", family=transformers())
    with pytest.raises(fedhen.FedhenError, match="does not fit tier 'simple'"):
        fedhen.load(tmp_path / "r", "simple", family=two_exits())
    with pytest.raises(fedhen.FedhenError, match="unknown tier 'simpel': did you mean 'simple'"):
        fedhen.load(tmp_path / "r", "simpel", family=transformers())
    with pytest.raises(fedhen.FedhenError, match="unknown owner 'reported'"):
        fedhen.load(tmp_path / "r", "simple", "reported", family=transformers())


def test_own_method_in_one_expression() -> None:
    """The ablation that the paper leaves out, side objective with tiers kept apart: complex carries the exit itself."""
    mine = fedhen.Method("side-apart", fedhen.sum_of_exits, fedhen.keep_tiers_apart)
    run = fedhen.train(
        transformers(), fedhen.FederatedData.from_arrays(*blobs(), *blobs(1)), mine, accelerator="cpu", **SETTINGS
    )
    assert run.experiment.population.holdings["complex"].exits == ("simple", "complex")
    assert run.rounds[-1]["distance"]["simple"] > 0


def nothing() -> tuple[list[list[float]], list[int]]:
    return [], []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fedhen.FederatedData.from_arrays(*blobs(), *blobs(1), classes=2),
            "training data: label 2 is out of range, labels must be 0 to 1",
        ),
        (
            lambda: fedhen.FederatedData.from_arrays([[1.0]], [-1], [[1.0]], [0]),
            "training data: label -1 is out of range, labels must be 0 to 0",
        ),
        (
            lambda: fedhen.FederatedData.from_arrays([[1.0]], [0.5], [[1.0]], [0]),
            "labels must be whole numbers, found float",
        ),
        (
            lambda: fedhen.FederatedData.from_arrays([[1.0]], [0, 1], [[1.0]], [0]),
            "training data: 1 inputs need as many targets",
        ),
        (
            lambda: fedhen.FederatedData.from_arrays([[1.0]], [0], [[1.0, 2.0]], [0]),
            r"training inputs have shape \(1,\), test inputs \(2,\)",
        ),
        (lambda: fedhen.FederatedData.from_devices([blobs(), nothing()], *blobs(1)), "device 1 has no data"),
        (lambda: fedhen.FederatedData.from_devices([], *blobs(1)), "there are no devices"),
        (
            lambda: fedhen.FederatedData.from_devices([([[1.0]], [0, 1])], *blobs(1)),
            "device 0 has 1 inputs and 2 targets",
        ),
        (
            lambda: fedhen.FederatedData.from_devices(
                [(*blobs(1), *blobs(2)), blobs(3), (*blobs(4), np.ones((2, 3)), [0, 1])]
            ),
            r"device 2 has test inputs of shape \(3,\), device 0 of shape \(",
        ),
        (
            lambda: fedhen.FederatedData.from_devices([(*blobs(1), *blobs(2)), (*blobs(3), blobs(4)[0][:1], [[0]])]),
            r"device 1 has test targets of shape \(1,\), device 0 of shape \(\): they must agree",
        ),
        (
            lambda: fedhen.FederatedData.from_devices([([[1.0]], [[0, 1]]), ([[1.0]], [[0, 1, 1]])]),
            r"device 1 has targets of shape \(3,\), device 0 of shape \(2,\): they must agree",
        ),
    ],
)
def test_bad_data_is_refused_before_training(make: object, message: str) -> None:
    with pytest.raises(fedhen.FedhenError, match=message):
        fedhen.train(transformers(), make(), devices={"number": 2, "active": 1})  # type: ignore[operator]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": {"number": 3, "active": 1}}, "devices.number=3, but data is given for 2 devices"),
        ({"tiers": {"small": 1.0}}, "tiers names small, but the family has, in this order, simple, complex"),
        ({"rouns": 3}, "unknown setting 'rouns': did you mean 'rounds'"),
        ({"devices": {"active": 2}, "method": "fedhem"}, "unknown method 'fedhem': did you mean 'fedhen'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    data = fedhen.FederatedData.from_devices([blobs(1), blobs(2)], *blobs(9))
    with pytest.raises(fedhen.FedhenError, match=message):
        fedhen.train(transformers(), data, **{"devices": {"active": 1}, **settings})  # type: ignore[arg-type]

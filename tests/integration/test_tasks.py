"""Every task with every method: trained, recorded and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedhen
from fedhen import FedhenError
from fedhen.tasks import Task, make_mean_metric
from support.marks import first_is_quick
from support.tasks import SMALL, family, inputs


def targets_of(task: str, x: Tensor) -> Tensor:
    """Targets that follow from the inputs."""
    total = x.sum(1)
    return {
        "regression": total,
        "multi-label": (x[:, :3] > 0).long(),
        "language-modelling": (x[:, :2] > 0).long() + (x[:, 2:] > 1).long(),
        "segmentation": (x.view(-1, 2, 2) > 0).long(),
    }[task]


SHAPES = {"regression": (1,), "multi-label": (3,), "language-modelling": (2, 3), "segmentation": (2, 2, 2)}
PRIMARY = {
    "regression": ("rmse", "lower"),
    "multi-label": ("micro_f1", "higher"),
    "language-modelling": ("perplexity", "lower"),
    "segmentation": ("mean_iou", "higher"),
}


def make_data(task: str) -> fedhen.Data:
    x, x_test = inputs(90, 0), inputs(40, 1)
    return fedhen.arrays(x, targets_of(task, x), x_test, targets_of(task, x_test))


@pytest.mark.parametrize("method", first_is_quick(["fedhen", "noside", "decouple"]))
@pytest.mark.parametrize("task", SHAPES)
def test_every_task_is_trained_and_recorded_with_every_method(task: str, method: str, tmp_path: Path) -> None:
    run = fedhen.train(family(*SHAPES[task]), make_data(task), method, task=task, out=tmp_path / "run", **SMALL)
    name, direction = PRIMARY[task]
    first, last = (record["metrics"][name]["server"] for record in (run.rounds[0], run.rounds[-1]))
    better = 1 if direction == "higher" else -1
    assert better * sum(last.values()) > better * sum(first.values())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"][0]["name"] == name and summary["metrics"][0]["direction"] == direction
    assert summary["final"] == run.metrics[name] and "accuracy" not in run.rounds[-1]


@pytest.mark.parametrize("local", ["fedprox", "scaffold", "feddyn"])
def test_every_local_variant_works_with_regression(local: str) -> None:
    run = fedhen.train(family(1), make_data("regression"), task="regression", local={"name": local}, **SMALL)
    assert run.metrics["rmse"]["server"]["simple"] < float(make_data("regression").y_test.std())


@pytest.mark.parametrize("task", ["multi-label", "language-modelling", "segmentation"])
def test_exits_are_distilled_where_the_task_has_probabilities(task: str) -> None:
    settings = {**SMALL, "objective": {"distillation": 0.1}, "evaluation": {"every": 1, "ensemble": True}}
    run = fedhen.train(family(*SHAPES[task]), make_data(task), task=task, **settings)
    assert run.rounds[-1]["ensemble"]["server"].keys() == {"simple", "complex"}


@pytest.mark.slow
def test_regression_scores_are_those_of_the_models(tmp_path: Path) -> None:
    """The recorded numbers against scikit-learn, on what the saved models predict."""
    from sklearn import metrics as sk  # not at the top: the quick tests only collect this module

    data, built = make_data("regression"), family(1)
    run = fedhen.train(built, data, task=fedhen.tasks.Regression(["rmse", "r2", "mae"]), out=tmp_path / "run", **SMALL)
    for tier in ("simple", "complex"):
        with torch.no_grad():
            predicted = fedhen.load(tmp_path / "run", tier, family=built)(data.x_test)[-1][:, 0]
        assert run.metrics["r2"]["server"][tier] == pytest.approx(sk.r2_score(data.y_test, predicted), rel=1e-5)
        assert run.metrics["mae"]["server"][tier] == pytest.approx(
            sk.mean_absolute_error(data.y_test, predicted), rel=1e-5
        )
    scored = fedhen.evaluate(tmp_path / "run", family=built, data=data)
    assert scored == run.metrics["rmse"]


@pytest.mark.slow
def test_f1_on_an_imbalanced_task() -> None:
    """Metrics by name; accuracy keeps its key."""
    from sklearn import metrics as sk

    x, x_test = inputs(90, 0), inputs(60, 1)
    y, y_test = ((v[:, 0] > 1).long() for v in (x, x_test))
    data, task = fedhen.arrays(x, y, x_test, y_test), {"name": "classification", "metrics": ["accuracy", "macro_f1"]}
    run = fedhen.train(family(2), data, task=task, **SMALL)
    with torch.no_grad():
        predicted = run.model("complex")(x_test)[-1].argmax(1)
    assert run.accuracy["server"]["complex"] == sk.accuracy_score(y_test, predicted)
    assert run.metrics["macro_f1"]["server"]["complex"] == pytest.approx(
        sk.f1_score(y_test, predicted, average="macro", zero_division=0)
    )


class Quantile(Task):
    name = "quantile"
    metrics = (make_mean_metric("coverage", lambda output, y: y <= output[:, 0], unit="%"),)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        error = targets - output[:, 0]
        return torch.maximum(0.9 * error, -0.1 * error).mean()


@pytest.mark.slow
def test_an_own_task_in_a_few_lines(tmp_path: Path) -> None:
    """The 90 % quantile of standard normal targets that do not depend on the inputs covers about 90 %."""
    noise = torch.Generator().manual_seed(0)
    y, y_test = torch.randn(600, generator=noise), torch.randn(400, generator=noise)
    data = fedhen.arrays(inputs(600, 0), y, inputs(400, 1), y_test)
    settings = {**SMALL, "rounds": 30, "evaluation": {"every": 30}}
    run = fedhen.train(family(1), data, task=Quantile(), out=tmp_path / "run", **settings)
    assert run.metrics["coverage"]["server"]["complex"] == pytest.approx(0.9, abs=0.05)
    with pytest.raises(FedhenError, match="the task of this run was passed from Python: pass it again"):
        fedhen.resume(tmp_path / "run", family=family(1), data=data, rounds=31)
    again = fedhen.resume(tmp_path / "run", family=family(1), data=data, task=Quantile(), rounds=31)
    assert len(again.rounds) == 31


class Masked(nn.Module):
    """A mean of embedded words, without those that a mask leaves out."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.words, self.exit = nn.Embedding(20, 8), nn.Linear(8, 2)
        self.top = nn.Linear(8, 2) if deep else None

    def forward(self, ids: Tensor, mask: Tensor) -> list[Tensor]:
        h = (self.words(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return [self.exit(h)] if self.top is None else [self.exit(h), self.top(h.tanh())]


def masked_family() -> fedhen.Family:
    return fedhen.Family({"simple": lambda: Masked(False), "complex": lambda: Masked(True)})


def words(number: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    noise = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (number, 5), generator=noise)
    mask = (torch.arange(5) < torch.randint(1, 6, (number, 1), generator=noise)).float()
    return {"ids": ids, "mask": mask}, (ids[:, 0] < 10).long()


def test_ids_and_an_attention_mask(tmp_path: Path) -> None:
    """A mapping of tensors, float and integer, with 1 and 2 workers to the same bytes, as a tuple too."""
    (x, y), (x_test, y_test) = words(120, 0), words(60, 1)
    data = fedhen.arrays(x, y, x_test, y_test)
    texts = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        fedhen.train(masked_family(), data, out=out, **{**SMALL, "runtime": {"workers": workers}})
        texts.append((out / "rounds.jsonl").read_bytes())
    assert texts[0] == texts[1]
    run = fedhen.train(masked_family(), fedhen.arrays(tuple(x.values()), y, tuple(x_test.values()), y_test), **SMALL)
    assert run.rounds == [json.loads(line) for line in texts[0].splitlines()]


def test_a_mapping_with_unequal_lengths_is_refused() -> None:
    with pytest.raises(FedhenError, match="the inputs have unequal lengths: 'ids' has 3, 'mask' has 2 examples"):
        fedhen.arrays({"ids": torch.zeros(3, 2), "mask": torch.zeros(2, 2)}, [0, 1, 1])


def test_each_devices_own_held_out_data() -> None:
    devices = []
    for seed in range(6):
        x, x_test = inputs(20, seed), inputs(5, 100 + seed)
        devices.append((x, (x[:, 0] > 0).long(), x_test, (x_test[:, 0] > 0).long()))
    data = fedhen.per_device(devices)
    assert len(data.y_test) == 30
    run = fedhen.train(family(2), data, **{**SMALL, "devices": {"active": 4}})
    assert run.accuracy["server"]["simple"] > 0.5


def test_no_test_data_at_all(tmp_path: Path) -> None:
    x = inputs(60, 0)
    run = fedhen.train(family(2), fedhen.arrays(x, (x[:, 0] > 0).long()), out=tmp_path / "run", **SMALL)
    assert run.metrics == {} and len(run.rounds) == 3
    assert (
        len(
            fedhen.resume(
                tmp_path / "run", family=family(2), data=fedhen.arrays(x, (x[:, 0] > 0).long()), rounds=4
            ).rounds
        )
        == 4
    )
    with pytest.raises(FedhenError, match="no accuracies: its metrics are none, since there is no test data"):
        _ = run.accuracy


def test_a_task_that_does_not_fit_the_outputs_names_the_shape() -> None:
    with pytest.raises(
        FedhenError, match=r"must return a list of 1 logits of shape \(2, 3\), .* it returned \[\(2, 2\)\]"
    ):
        fedhen.train(family(2), make_data("multi-label"), task="multi-label", **SMALL)
    with pytest.raises(FedhenError, match="unknown task 'regresion': did you mean 'regression'"):
        fedhen.train(family(1), make_data("regression"), task="regresion", **SMALL)
    with pytest.raises(FedhenError, match="label_smoothing is not a setting of regression"):
        fedhen.train(family(1), make_data("regression"), task={"name": "regression", "label_smoothing": 0.1}, **SMALL)


def test_the_loss_of_regression_is_the_mean_squared_error() -> None:
    """One step of one device by hand: w − lr · d/dw mean((w·x − y)²)."""
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 5.0])

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([[1.0]]))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [functional.linear(x, self.w)]

    run = fedhen.train(
        fedhen.Family({"only": Line}),
        fedhen.per_device([(x, y)]),
        task="regression",
        rounds=1,
        training={"epochs": 1, "batch_size": 2, "lr": 0.1, "weight_decay": 0.0},
    )
    # The errors are −2 and −3, so that the slope is 2·(−2·1 − 3·2)/2 = −8.
    assert float(run.model("only").state_dict()["w"]) == pytest.approx(1.8)


def test_an_enormous_metric_ends_no_run(tmp_path: Path) -> None:
    """A finite number of any size is recorded; an own metric called accuracy need not be a share."""
    x, x_test = inputs(60, 0), inputs(20, 1)
    data = fedhen.arrays(x, x.sum(1), x_test, x_test.sum(1) * 1e15)
    out = tmp_path / "run"
    run = fedhen.train(family(1), data, task={"name": "regression", "metrics": ["mse"]}, out=out, **SMALL)
    assert run.metrics["mse"]["server"]["simple"] > 1e29
    more = fedhen.resume(out, family=family(1), data=data, rounds=4)
    assert len(more.rounds) == 4


class Percent(Task):
    name = "percent"
    metrics = (make_mean_metric("accuracy", lambda output, y: 100.0 * (output.argmax(1) == y)),)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets)


def test_a_metric_of_ones_own_called_accuracy_need_not_be_a_share(tmp_path: Path) -> None:
    x, x_test = inputs(60, 0), inputs(20, 1)
    data = fedhen.arrays(x, (x[:, 0] > 0).long(), x_test, (x_test[:, 0] > 0).long())
    run = fedhen.train(family(2), data, task=Percent(), out=tmp_path / "run", **SMALL)
    assert run.metrics["accuracy"]["server"]["simple"] > 1
    assert fedhen.evaluate(tmp_path / "run", family=family(2), data=data, task=Percent()) == run.metrics["accuracy"]
    with pytest.raises(FedhenError, match="the run's task is 'python', and another one was passed: 'classification'"):
        fedhen.evaluate(tmp_path / "run", family=family(2), data=data, task=fedhen.tasks.Classification())


@pytest.mark.parametrize(
    ("task", "targets", "message"),
    [
        ("language-modelling", torch.full((30, 2), 7), "with a vocabulary of at least 8"),
        ("segmentation", torch.full((30, 2, 2), 5), "with at least 6 classes"),
        ("segmentation", torch.full((30, 2, 2), -1), "class -1 is below 0"),
    ],
)
def test_targets_that_a_model_has_no_output_for_are_refused(task: str, targets: Tensor, message: str) -> None:
    with pytest.raises(FedhenError, match=message):
        fedhen.train(family(*SHAPES[task]), fedhen.arrays(inputs(30, 0), targets), task=task, **SMALL)


def test_an_own_task_is_tried_before_the_first_round() -> None:
    class NoMean(Percent):
        def loss(self, output: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(output, targets, reduction="none")

    x = inputs(30, 0)
    with pytest.raises(
        FedhenError, match=r"task 'percent' fails on two examples: ValueError: the loss has shape \(2,\)"
    ):
        fedhen.train(family(2), fedhen.arrays(x, (x[:, 0] > 0).long()), task=NoMean(), **SMALL)


def test_initial_weights_that_are_not_finite_are_refused() -> None:
    x = inputs(30, 0)
    with pytest.raises(FedhenError, match=r"initial: weight 'body.weight' holds NaN or infinity"):
        fedhen.train(
            family(2),
            fedhen.arrays(x, (x[:, 0] > 0).long()),
            initial={"body.weight": torch.full((6, 4), float("nan"))},
            **SMALL,
        )

"""Methods, objectives and nests against each other and against computations written out here."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedhen
from fedhen.algorithm.methods import METHODS, Method
from fedhen.algorithm.objectives import SumOfExits, last_exit, sum_of_exits
from fedhen.algorithm.sampling import make_sampler
from fedhen.cli import main
from fedhen.config import toml, validation
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import DevicesConfig
from fedhen.data.dataset import Data
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from fedhen.models.exits import Exits
from fedhen.models.preact_resnet import Shape, preact_resnet
from fedhen.params import Average
from fedhen.runs.reader import read_run
from support.families import two_exits
from support.tiny import TINY, as_options

SMALL = [*TINY, "data.limit=120", "devices.number=6", "devices.active=4", "rounds=2", "evaluation.every=1"]


def played(method: str, *settings: str, recipe: str = "digits") -> tuple[list[dict[str, Any]], Experiment]:
    """A short run: its records and what it came to."""
    config = validation.from_mapping(
        {**METHODS[method].settings(load_recipe(recipe)), "method": method}, load_recipe(recipe)
    )
    config = METHODS[method].keep_tiers(toml.apply_settings(config, [*SMALL, *settings]))
    experiment = build_experiment(config, accelerator="cpu")
    return [step.record for step in experiment.play()], experiment


def same(a: tuple[list[dict[str, Any]], Experiment], b: tuple[list[dict[str, Any]], Experiment]) -> bool:
    """The same records and the same weights, to the byte."""
    (records, one), (others, other) = a, b
    tiers = one.server.keys() == other.server.keys()
    return (
        tiers
        and records == others
        and all(
            torch.equal(weights[name], other.server[tier][name])
            for tier, weights in one.server.items()
            for name in weights
        )
    )


@pytest.mark.slow
def test_neutral_settings_change_no_byte() -> None:
    plain = played("fedhen")
    assert same(plain, played("fedhen", "local.name=fedprox", "local.mu=0"))
    assert same(plain, played("fedhen", "objective.distillation=0", "objective.temperature=3"))
    assert same(plain, played("fedhen", "objective.exit_weights={simple=1.0, complex=1.0}"))
    assert not same(plain, played("fedhen", "local.name=fedprox", "local.mu=1"))
    assert not same(plain, played("fedhen", "objective.distillation=1"))


def test_an_exit_of_weight_0_is_left_out() -> None:
    """FedHeN whose complex devices do not count the simple exit is NoSide: no gradient or decay touches it there."""
    assert same(played("noside"), played("fedhen", "objective.exit_weights.simple=0"))


@pytest.mark.slow
def test_with_one_tier_the_methods_are_one() -> None:
    one = ["tiers={simple=1.0}", "targets={}"]
    fedavg = played("fedavg", *one)
    for method in ("fedhen", "noside", "decouple", "side-apart"):
        assert same(fedavg, played(method, *one))


@pytest.mark.slow
def test_heterofl_at_full_rate_without_its_devices_is_fedavg() -> None:
    """One tier with all channels; masked loss and label rows off. The scaler divides by 1."""
    whole = ["tiers={complex=1.0}", "targets={}"]
    off = ["training.masked_loss=false", "server.rows_by_class=false", "model.rates={complex=1.0}"]
    fedavg = played("fedavg", *whole, "model.nesting=width", "model.rates={complex=1.0}")
    assert same(fedavg, played("heterofl", *whole, *off))
    for on in ("training.masked_loss=true", "server.rows_by_class=true"):
        assert not same(fedavg, played("heterofl", *whole, *off, on))


def test_the_scaler_divides_by_the_rate_before_every_norm_in_training() -> None:
    """At rate ½ the first norm sees twice the input, and the last one is scaled too. In evaluation nothing changes."""
    shape = {"size": 8, "channels": 1, "widths": (4, 4), "blocks": (1, 1), "strides": (1, 2), "final_norm": True}
    nets = [
        preact_resnet(Shape(**shape, nesting="width", rates={"s": 0.5, "c": 1.0}, scaler=on)).build("s")  # type: ignore[arg-type]
        for on in (True, False)
    ]
    nets[1].load_state_dict(nets[0].state_dict())
    seen: list[dict[str, Tensor]] = []
    for net in nets:
        found: dict[str, Tensor] = {}
        for name, module in net.named_modules():
            if isinstance(module, torch.nn.GroupNorm):
                module.register_forward_pre_hook(lambda m, args, n=name, f=found: f.__setitem__(n, args[0]))
        net.train()(torch.ones(1, 1, 8, 8))[-1].sum()
        seen.append(found)
    assert len(seen[0]) == 5 and seen[0].keys() == seen[1].keys()
    torch.testing.assert_close(seen[0]["stages.0.0.norm1"], 2 * seen[1]["stages.0.0.norm1"])
    for net in nets:
        net.eval()
    assert torch.equal(*(net(torch.ones(1, 1, 8, 8))[-1] for net in nets))


@pytest.mark.slow
def test_four_tiers_share_and_report() -> None:
    records, run = played("fedhen", recipe="digits-4")
    tiers = ("tiny", "small", "medium", "large")
    assert tuple(records[-1]["accuracy"]["server"]) == tiers
    assert records[-1]["distance"] == {"tiny": 0.0, "small": 0.0, "medium": 0.0}
    assert [run.population.holdings[tier].exits for tier in tiers] == [tiers[:k] for k in (1, 2, 3, 4)]
    _, apart = played("decouple", recipe="digits-4")
    assert [apart.population.holdings[tier].exits for tier in tiers] == [(tier,) for tier in tiers]


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["width", "both"])
def test_every_method_runs_on_every_nest(nesting: str) -> None:
    for method in METHODS:
        records, run = played(method, f"model.nesting={nesting}", "rounds=1", recipe="digits-4")
        assert all(math.isfinite(x) for x in records[-1]["accuracy"]["server"].values())
        shared = method not in ("decouple", "side-apart")
        assert all((d == 0) == shared for d in records[-1]["distance"].values())
        assert len(records[-1]["distance"]) == len(run.server) - 1


def test_sizes_of_heterofls_levels() -> None:
    """Its r = ¼ level of PreActResNet18 has 701,018 parameters with a final norm."""
    family = preact_resnet(Shape(nesting="width", rates={"quarter": 0.25, "whole": 1.0}, final_norm=True))
    assert sum(p.numel() for p in family.build("quarter").parameters()) == 701_018


def test_a_width_nest_is_averaged_element_by_element() -> None:
    """Device 0 holds the upper row of a 2×2 weight, device 1 all of it: (2 + 6) / 2, (4 + 8) / 2, the rest as sent."""
    from fedhen.algorithm.merging import merge, share_common_weights
    from fedhen.algorithm.updates import Update
    from fedhen.config.settings import ServerConfig

    whole = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    server = {"half": {"w": whole[:1]}, "full": {"w": whole}}
    updates = [
        Update(0, "half", {"w": torch.tensor([[2.0, 4.0]])}, frozenset("w"), 1, 0.0),
        Update(1, "full", {"w": torch.tensor([[6.0, 8.0], [10.0, 12.0]])}, frozenset("w"), 1, 0.0),
    ]
    after = merge(server, updates, share_common_weights, ServerConfig()).models
    assert after["full"]["w"].tolist() == [[4.0, 6.0], [10.0, 12.0]]
    assert after["half"]["w"].tolist() == [[4.0, 6.0]]
    only_half = merge(server, updates[:1], share_common_weights, ServerConfig()).models
    assert only_half["full"]["w"].tolist() == [[2.0, 4.0], [1.0, 1.0]], "what nobody holds keeps its value"


def test_label_rows_by_hand() -> None:
    """Rows 0 and 1 of a 3×1 output from device A (1, 2, 3), rows 1 and 2 from B (10, 20, 30): 1, (2 + 20) / 2, 30."""
    average = Average({"w": (3, 1)})
    average.add({"w": torch.tensor([[1.0], [2.0], [3.0]])}, 1.0, {"w": torch.tensor([True, True, False])})
    average.add({"w": torch.tensor([[10.0], [20.0], [30.0]])}, 1.0, {"w": torch.tensor([False, True, True])})
    assert average.finish({"w": torch.zeros(3, 1)})["w"].flatten().tolist() == [1.0, 11.0, 30.0]


def test_masked_loss_by_hand() -> None:
    """A device with classes 0 and 2 of 3: the logit of class 1 counts as 0 in its loss; its gradient is 0 there."""
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.tensor([0, 2, 2, 1, 1, 1])
    shards = (np.array([0, 1, 2]), np.array([3, 4, 5]))
    settings = {"model": {"family": "python"}, "devices": {"number": 2, "active": 1}, "training": {"masked_loss": True}}
    config = validation.from_mapping(settings)
    run = build_experiment(config, data=Data(x, y, x, y, 3, shards), family=two_exits(), accelerator="cpu")
    logits = torch.tensor([[1.0, 5.0, -2.0]], requires_grad=True, dtype=torch.float64)
    (seen,) = run.engine.devices.sequential.logit_mask(0)([logits])  # type: ignore[attr-defined]
    loss = cross_entropy(seen, torch.tensor([2]))
    expected = math.log(math.exp(1.0) + math.exp(0.0) + math.exp(-2.0)) + 2.0
    assert loss.item() == pytest.approx(expected)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None and logits.grad[0, 1] == 0 and logits.grad[0, 0] != 0


def test_the_side_objective_on_a_width_nest_is_the_sum_of_two_separate_networks() -> None:
    """Its gradient is that of the wide net alone plus, in the corner, that of a narrow net cut from it, in float64."""
    family = preact_resnet(
        Shape(
            size=8,
            channels=1,
            widths=(4, 4, 8, 8),
            blocks=(1,) * 4,
            nesting="width",
            rates={"s": 0.5, "c": 1.0},
            exit_pool=1,
        )
    )
    torch.manual_seed(0)
    wide, narrow = family.build("c").double(), family.build("s").double()
    narrow.load_state_dict({n: wide.get_parameter(n)[tuple(map(slice, p.shape))] for n, p in narrow.named_parameters()})
    x, y = torch.randn(5, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4])
    sum_of_exits(wide(x), y).backward()  # type: ignore[no-untyped-call]
    both = {name: p.grad.clone() for name, p in wide.named_parameters() if p.grad is not None}
    wide.zero_grad()
    cross_entropy(wide(x)[-1], y).backward()  # type: ignore[no-untyped-call]
    cross_entropy(narrow(x)[-1], y).backward()  # type: ignore[no-untyped-call]
    for name, p in wide.named_parameters():
        expected = p.grad.clone()  # type: ignore[union-attr]
        small = narrow.get_parameter(name)
        assert small.grad is not None
        expected[tuple(map(slice, small.shape))] += small.grad
        torch.testing.assert_close(both[name], expected, rtol=1e-10, atol=1e-12)


def test_an_unused_exit_is_not_computed() -> None:
    asked = []

    def thunk(place: int) -> Tensor:
        asked.append(place)
        return torch.zeros(2, 3, requires_grad=True)

    logits = Exits([lambda: thunk(0), lambda: thunk(1)])
    last_exit(logits, torch.tensor([0, 1]))
    assert asked == [1] and len(logits) == 2
    sum_of_exits(logits, torch.tensor([0, 1]))
    assert asked == [1, 0]


def test_distillation_by_hand() -> None:
    """Two exits at T = 2: λ·T²·(KL(q₂‖q₁) + KL(q₁‖q₂)) beside the two cross-entropies, in numpy."""
    z = [np.array([[1.0, 2.0, 0.5]]), np.array([[0.0, 1.0, 3.0]])]

    def softmax(v: Any) -> Any:
        e = np.exp(v)
        return e / e.sum()

    q = [softmax(v / 2) for v in z]
    kl = [float((q[1] * np.log(q[1] / q[0])).sum()), float((q[0] * np.log(q[0] / q[1])).sum())]
    expected = -sum(math.log(softmax(v)[0, 1]) for v in z) + 0.3 * 4 * sum(kl)
    objective = SumOfExits(slice(None), distillation=0.3, temperature=2.0)
    found = objective([torch.from_numpy(v) for v in z], torch.tensor([1]))
    assert found.item() == pytest.approx(expected)
    lone = objective([torch.from_numpy(z[0])], torch.tensor([1]))
    assert lone.item() == pytest.approx(-math.log(softmax(z[0])[0, 1])), "an only exit has nobody to learn from"


def test_teachers_are_held_fixed() -> None:
    """The gradient of the distillation at one exit is that of KL towards the other's constant output, T²(p − q)/T."""
    a = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([[0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    objective = SumOfExits(slice(None), distillation=1.0, temperature=2.0)
    plain = sum_of_exits([a, b], torch.tensor([0]))
    (with_it,), (without,) = (
        torch.autograd.grad(f, a, retain_graph=True) for f in (objective([a, b], torch.tensor([0])), plain)
    )
    expected = 2.0 * (torch.softmax(a / 2, 1) - torch.softmax(b / 2, 1))
    torch.testing.assert_close(with_it - without, expected.detach())


def test_exit_weights_by_hand() -> None:
    logits, labels = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])], torch.tensor([0])
    objective = SumOfExits(slice(None), exits=("simple", "complex"), weights={"simple": 0.25})
    expected = 0.25 * math.log(1 + math.exp(-1)) + math.log(1 + math.exp(3))
    assert objective(logits, labels).item() == pytest.approx(expected)


def test_the_ensemble_is_the_mean_prediction_of_the_exits() -> None:
    records, run = played("fedhen", "evaluation.ensemble=true")
    for kind, models in run.models().items():
        for tier, weights in models.items():
            module = run.population.family.build(tier).eval()
            module.load_state_dict(weights)
            with torch.no_grad():
                mean = torch.stack([z.softmax(1) for z in module(run.population.data.test_inputs(slice(None)))]).mean(0)
            right = (mean.argmax(1) == run.population.data.y_test).double().mean().item()
            assert records[-1]["ensemble"][kind][tier] == pytest.approx(right)
    assert "ensemble" not in played("fedhen")[0][-1]


def test_power_of_choice_takes_the_highest_losses_among_the_candidates() -> None:
    """Of 5 devices all are candidates: those that never trained first, then by their last loss."""
    activate = make_sampler(DevicesConfig(number=5, active=2, sampling="loss", candidates=5), seed=0)
    assert activate(1, {0: 1.0, 1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0}) == [1, 3]
    assert activate(1, {0: 1.0, 1: 5.0, 2: 3.0, 3: 4.0}) == [1, 4]
    few = make_sampler(DevicesConfig(number=100, active=2, sampling="loss", candidates=3), seed=0)
    losses = {device: float(device) for device in range(100)}
    assert len({tuple(few(t, losses)) for t in range(1, 30)}) > 20, "candidates are drawn anew each round"
    records, _ = played("fedhen", "devices.sampling=loss")
    assert all(len(record["active"]) == 4 for record in records)


def test_a_users_own_activation() -> None:
    x = torch.randn(40, 6, dtype=torch.float64)
    data = fedhen.arrays(x, torch.arange(40) % 3, x, torch.arange(40) % 3)
    seen: list[dict[int, float]] = []

    def mine(number: int, losses: Any) -> list[int]:
        seen.append(dict(losses))
        return [number, number + 1]

    settings: dict[str, Any] = {"rounds": 3, "devices": {"number": 10, "active": 2}, "accelerator": "cpu"}
    run = fedhen.train(two_exits(), data, activate=mine, **settings)
    assert [record["active"] for record in run.rounds] == [[1, 2], [2, 3], [3, 4]]
    assert [sorted(losses) for losses in seen] == [[], [1, 2], [1, 2, 3]]
    doubled = fedhen.train(two_exits(), data, activate=lambda *_: [np.int64(2), 2, 1], **settings)
    assert doubled.rounds[0]["active"] == [1, 2]
    for wrong in ([99], [-1]):
        with pytest.raises(fedhen.UserError, match="numbered from 0 to 9"):
            fedhen.train(two_exits(), data, activate=lambda *_, w=wrong: w, **settings)


def test_methods_bring_their_settings_from_python_too() -> None:
    x = torch.randn(40, 6, dtype=torch.float64)
    data = fedhen.arrays(x, torch.arange(40) % 3, x, torch.arange(40) % 3)
    settings: dict[str, Any] = {"rounds": 1, "devices": {"number": 10, "active": 2}, "accelerator": "cpu"}
    run = fedhen.train(two_exits(), data, "fedavg", **settings)
    assert list(run.experiment.server) == ["complex"]
    with pytest.raises(fedhen.UserError, match="names its outputs"):
        fedhen.train(two_exits(), data, "heterofl", **settings)


def documented_method() -> str:
    """The example of docs/methods.md."""
    docs = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", docs, flags=re.DOTALL)
    assert len(example.splitlines()) < 30
    return str(example)


@pytest.mark.slow
def test_a_users_own_method_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mymethod.py").write_text(documented_method())
    small = as_options(SMALL)
    assert main(["run", "digits", "--method", "./mymethod.py:MINE", "--quiet", "--out", "own", *small]) == 0
    run = read_run(Path("own"))
    assert run.method == "twice" and run.config["method_file"] == f"{tmp_path}/mymethod.py:MINE"
    assert main(["run", "--config", "own/config.toml", "--quiet", "--out", "again"]) == 0
    assert Path("again/rounds.jsonl").read_bytes() == Path("own/rounds.jsonl").read_bytes()
    assert (
        main(["compare", "digits", "--methods", "fedhen,./mymethod.py:MINE", "--quiet", "--out", "both", *small]) == 0
    )
    capsys.readouterr()
    for wrong, message in (
        ("./nowhere.py:MINE", "nowhere.py does not exist"),
        ("./mymethod.py:YOURS", "defines no method 'YOURS': it defines MINE"),
    ):
        assert main(["run", "digits", "--method", wrong]) == 2
        assert message in capsys.readouterr().err
    Path("broken.py").write_text("1 / 0")
    assert main(["run", "digits", "--method", "broken.py:MINE"]) == 2
    assert "broken.py cannot be imported: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_combinations_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = as_options(SMALL)
    methods = "fedhen,noside,decouple,heterofl,fedavg"
    assert (
        main(["compare", "digits", "--methods", methods, "--local", "feddyn", "--quiet", "--out", "out", *small]) == 0
    )
    out = capsys.readouterr().out
    assert "fedhen+feddyn" in out and "heterofl+feddyn" in out
    assert read_run(Path("out/fedavg")).tiers == ("complex",)
    assert read_run(Path("out/heterofl")).config["model"]["nesting"] == "width"
    for arguments, message in (
        (["--local", "fedprocks"], "unknown value of local.name 'fedprocks': did you mean 'fedprox'?"),
        (["--tier", "simpel"], "unknown tier 'simpel': did you mean 'simple'?"),
        (["--set", "model.rates.simple=2"], "model.rates.simple = 2"),
        (["--method", "noside", "--set", "objective.distillation=0.5"], "need a method that reads several exits"),
        (
            ["--set", "objective.exit_weights.simpel=0.5"],
            "unknown exit in objective.exit_weights 'simpel': did you mean 'simple'?",
        ),
        (["--set", "objective.exit_weights.simple=-1"], "objective.exit_weights must not be negative"),
        (["--set", "model.nesting=with"], "unknown value of model.nesting 'with': did you mean 'width'?"),
    ):
        assert main(["run", "digits", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_combinations_that_are_impossible_are_refused() -> None:
    own = Method("own", lambda logits, labels: cross_entropy(logits[-1], labels), METHODS["fedhen"].pools)
    x = torch.randn(40, 6, dtype=torch.float64)
    data = fedhen.arrays(x, torch.arange(40) % 3, x, torch.arange(40) % 3)
    fleet = {"number": 10, "active": 2}
    with pytest.raises(fedhen.UserError, match="need a sum of exits"):
        fedhen.train(two_exits(), data, own, devices=fleet, objective={"distillation": 0.1})
    with pytest.raises(fedhen.UserError, match="needs a family that names its outputs"):
        fedhen.train(two_exits(), data, devices=fleet, server={"rows_by_class": True})

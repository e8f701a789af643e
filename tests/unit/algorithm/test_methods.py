"""Methods and nests against each other and against computations written out here."""

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
from fedhen.algorithm.averaging import ByHolder
from fedhen.algorithm.methods import METHODS, Method
from fedhen.algorithm.objectives import sum_of_exits
from fedhen.algorithm.sampling import make_sampler
from fedhen.cli import main
from fedhen.config import toml, validation
from fedhen.config.devices_settings import DevicesConfig
from fedhen.config.recipes import load_recipe
from fedhen.experiment.build import build_experiment
from fedhen.experiment.experiment import Experiment
from fedhen.models.preact_resnet import Shape, preact_resnet
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


@pytest.mark.slow
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
    from fedhen.config.training_settings import ServerConfig

    whole = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    server = {"half": {"w": whole[:1]}, "full": {"w": whole}}
    updates = [
        Update(0, "half", {"w": torch.tensor([[2.0, 4.0]])}, frozenset("w"), 1, 0.0),
        Update(1, "full", {"w": torch.tensor([[6.0, 8.0], [10.0, 12.0]])}, frozenset("w"), 1, 0.0),
    ]
    after = merge(server, updates, share_common_weights, ByHolder(ServerConfig())).models
    assert after["full"]["w"].tolist() == [[4.0, 6.0], [10.0, 12.0]]
    assert after["half"]["w"].tolist() == [[4.0, 6.0]]
    only_half = merge(server, updates[:1], share_common_weights, ByHolder(ServerConfig())).models
    assert only_half["full"]["w"].tolist() == [[2.0, 4.0], [1.0, 1.0]], "what nobody holds keeps its value"


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


@pytest.mark.slow
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
        with pytest.raises(fedhen.FedhenError, match="numbered from 0 to 9"):
            fedhen.train(two_exits(), data, activate=lambda *_, w=wrong: w, **settings)


def test_methods_bring_their_settings_from_python_too() -> None:
    x = torch.randn(40, 6, dtype=torch.float64)
    data = fedhen.arrays(x, torch.arange(40) % 3, x, torch.arange(40) % 3)
    settings: dict[str, Any] = {"rounds": 1, "devices": {"number": 10, "active": 2}, "accelerator": "cpu"}
    run = fedhen.train(two_exits(), data, "fedavg", **settings)
    assert list(run.experiment.server) == ["complex"]
    with pytest.raises(fedhen.FedhenError, match="names its outputs"):
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
    with pytest.raises(fedhen.FedhenError, match="need a sum of exits"):
        fedhen.train(two_exits(), data, own, devices=fleet, objective={"distillation": 0.1})
    with pytest.raises(fedhen.FedhenError, match="needs a family that names its outputs"):
        fedhen.train(two_exits(), data, devices=fleet, server={"rows_by_class": True})

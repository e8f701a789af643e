"""Bounded updates and attacks in whole runs: in a simulation, and in a fleet inside one process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from fedhen.cli.training import describe_result
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.devices.population import assign_tiers
from fedhen.errors import ConfigError, FleetError
from fedhen.experiment.build import build_experiment
from fedhen.experiment.resume import ResumePolicy
from fedhen.experiment.runner import play_run
from fedhen.fleet.app import recipe_app
from fedhen.fleet.server import play
from fedhen.privacy.accounting import default_delta, poisson_epsilon
from fedhen.privacy.choose import choose_sampler
from fedhen.privacy.refusals import check_promise, refusals
from support.families import two_exits
from support.fleets import SECRET, fleet_config, fleet_run, play_fleet, same_models, simulate
from support.inside import grid
from support.marks import first_is_quick
from support.refused import REFUSED
from support.tiny import TINY


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def small(*changes: str) -> Config:
    settings = [*TINY, "rounds=3", "evaluation.devices=false", "devices.active=4", "runtime.engine=plain", *changes]
    return toml.apply_settings(load_recipe("digits"), settings)


def norms(config: Config) -> Iterator[float]:
    """Yields by how far each round has moved the complex model."""
    experiment = build_experiment(config, accelerator="cpu")
    before = experiment.server["complex"]
    for _ in experiment.play():
        after = experiment.server["complex"]
        yield sum(float((after[n].double() - before[n].double()).square().sum()) for n in after) ** 0.5
        before = after


@pytest.mark.slow
def test_a_bad_device_moves_the_model_by_at_most_the_bound() -> None:
    """An average of changes that are no longer than S is on each block no longer than S, so √2·S on two blocks."""
    attack = ("attack.kind=shifted", "attack.strength=1e6", "attack.share.complex=0.5")
    assert next(norms(small(*attack))) > 1e5
    assert max(norms(small(*attack, "privacy.mechanism=bounded", "privacy.bound=0.3"))) <= 0.3 * 2**0.5 * 1.0001


@pytest.mark.fleet
def test_a_bounded_fleet_is_the_bounded_simulation(tmp_path: Path) -> None:
    config = fleet_config("fedhen", "plain", "privacy.mechanism=bounded", "privacy.bound=0")
    simulated = simulate(config, tmp_path / "simulated")
    fleet = play_fleet(config, tmp_path / "fleet", tmp_path / "state")
    assert same_models(simulated, fleet)
    assert lines(simulated) == lines(fleet)
    assert all(line["bound"] > 0 for line in lines(fleet))


@pytest.mark.fleet
def test_attacks_are_not_played_in_a_fleet(tmp_path: Path) -> None:
    config = fleet_config("fedhen", "plain", "attack.kind=scaled")
    inside = grid(assign_tiers(config), tmp_path / "state")
    with pytest.raises(FleetError, match="simulations only"):
        next(play(inside, recipe_app(), fleet_run(config, tmp_path / "run")))


CENTRAL = ("privacy.mechanism=central", "privacy.bound=0.5", "privacy.noise=0.5")


@pytest.mark.slow
def test_what_a_private_run_writes(tmp_path: Path) -> None:
    """Nothing that anybody may read says who took part or what a device's loss was; ε is in each record."""
    config = small(*CENTRAL, "devices.sampling=bernoulli", "devices.active=2", "evaluation.every=3")
    folder = simulate(config, tmp_path / "run")
    (private := folder / "private").stat()
    assert [path.stat().st_mode & 0o777 for path in (private, folder / "checkpoints")] == [0o700, 0o700]
    hidden = [json.loads(line) for line in (private / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in hidden] == [1, 2, 3] and any(line["active"] for line in hidden)
    for number, line in enumerate(lines(folder), start=1):
        assert (line["active"], line["dropped"], line["loss"], line["bound"]) == ([], [], None, 0.5)
        assert line["epsilon"] == pytest.approx(poisson_epsilon(0.5, 0.5, number, default_delta(4)))
        assert line["bytes"] == lines(folder)[0]["bytes"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["privacy"]["epsilon"] == lines(folder)[-1]["epsilon"]
    assert summary["privacy"]["delta"] == default_delta(4)
    assert summary["privacy"]["guarantee"].startswith("simulated")
    shown = describe_result(folder)
    spent = summary["privacy"]["epsilon"]
    assert f"differential privacy: ε = {spent:.3g}, δ = 0.01 (Rényi divergence" in shown and "\nsimulated:" in shown
    assert sorted(path.name for path in (folder / "models").iterdir()) == [
        "server-complex.safetensors",
        "server-simple.safetensors",
    ]
    with safe_open(next((folder / "checkpoints").glob("round-*.safetensors")), framework="pt") as saved:
        assert all(math.isnan(loss) for loss in saved.get_tensor("losses").tolist())


@pytest.mark.slow
def test_nothing_that_may_be_published_depends_exactly_on_data(tmp_path: Path) -> None:
    """No number of examples and no checksum, but for runs that make no promise."""
    folders = [simulate(small(*more, "rounds=1"), tmp_path / str(n)) for n, more in enumerate([(), CENTRAL])]
    found = [
        {name: json.loads((f / name).read_text()) for name in ("environment.json", "summary.json")} for f in folders
    ]
    assert found[0]["environment.json"]["data_digest"] and found[0]["summary.json"]["examples"]
    assert "data_digest" not in found[1]["environment.json"]
    assert not {"examples", "tier_examples"} & found[1]["summary.json"].keys()


@pytest.mark.slow
def test_a_budget_ends_the_run_before_it_is_passed_and_can_be_raised(tmp_path: Path) -> None:
    """ε of 1, 2, 3 rounds with z = 0.5 and q = 0.5 at δ = 0.01 is 6.4, 9.5, 12.3: a budget of 10 allows two rounds."""
    base = (*CENTRAL, "devices.sampling=bernoulli", "devices.active=2", "privacy.delta=0.01", "evaluation.every=1")
    folder = simulate(small(*base, "privacy.budget=10"), tmp_path / "run")
    spent = [line["epsilon"] for line in lines(folder)]
    assert len(spent) == 2 and spent[-1] <= 10 < poisson_epsilon(0.5, 0.5, 3, 0.01)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["stopped"]["reason"].startswith("privacy.budget=10: another round would make ε")
    raised = build_experiment(small(*base, "privacy.budget=100"), accelerator="cpu", secret=SECRET)
    for _ in play_run(folder, raised, ResumePolicy(resume=True)):
        pass
    whole = simulate(small(*base, "privacy.budget=100"), tmp_path / "whole")
    assert [line["epsilon"] for line in lines(folder)] == [line["epsilon"] for line in lines(whole)]
    assert same_models(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("separation", first_is_quick([1, 2]))
def test_workers_and_order_do_not_matter(separation: int, tmp_path: Path) -> None:
    """Noisy sums are exact, so the fast engine has the bytes of the plain one."""
    more = (*CENTRAL, "devices.active=2", f"privacy.separation={separation}")
    plain = simulate(small(*more), tmp_path / "plain")
    fast = simulate(small(*more, "runtime.engine=fast", "runtime.workers=2"), tmp_path / "fast")
    assert lines(plain) == lines(fast) and same_models(plain, fast)


def test_a_device_rests_for_the_separation() -> None:
    """In 30 rounds with b = 5 and 20 devices, any two rounds of a device are 5, 10, ... rounds apart."""
    config = toml.apply_settings(
        load_recipe("digits"),
        [*CENTRAL, "privacy.separation=5", "evaluation.devices=false", "devices.active=4"],
    )
    active = choose_sampler(config, assign_tiers(config), config.seed)
    rounds = [active(number, {}) for number in range(1, 31)]
    assert all(len(each) == 4 for each in rounds)
    for device in range(20):
        took_part = [number for number, each in enumerate(rounds) if device in each]
        assert took_part and all((later - first) % 5 == 0 for first, later in pairwise(took_part))


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_breaks_the_promise_is_refused(change: str, message: str) -> None:
    """By the function that the server and every node call."""
    config = small(*CENTRAL, change)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_promise(config, two_exits(), is_fleet=True)


def test_every_reason_is_named_at_once() -> None:
    changes = [change for change, _ in REFUSED if change.split(".")[0] not in ("local", "fleet", "privacy")]
    changes += ["privacy.bound=0"]
    assert len(refusals(small(*CENTRAL, *changes), two_exits(), own_sampler=True)) == len(changes) + 1
    assert refusals(small(*CENTRAL, "fleet.spare_devices=1"), two_exits()) == [], "simulations ignore it"
    assert refusals(small(*CENTRAL, "devices.sampling=bernoulli"), two_exits(), is_fleet=True) != []
    assert refusals(small("privacy.noise=1"), two_exits()) == [
        "it adds no noise: set privacy.mechanism=central, or privacy.noise=0"
    ]


def test_an_own_sampler_is_refused() -> None:
    with pytest.raises(ConfigError, match="an own `activate` may depend on data"):
        build_experiment(small(*CENTRAL), accelerator="cpu", activate=lambda number, losses: [0])

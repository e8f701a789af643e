"""What a device's training in a round depends on, and what it sends back."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from fedhen.algorithm.local_training import learning_rate
from fedhen.algorithm.methods import NOSIDE
from fedhen.algorithm.rounds import Rules
from fedhen.algorithm.updates import Update
from fedhen.config import toml
from fedhen.config.recipes import load_recipe
from fedhen.config.training_settings import TrainingConfig
from fedhen.data.batches import plan_visits
from fedhen.experiment.build import build_experiment
from fedhen.seeds import DeviceStreams
from support.families import two_exits
from support.noise import experiment, first, one_round


def first_update(method: str = "fedhen", active: int = 0, **settings: object) -> Update:
    run = experiment(method, **settings)
    return first(run, 1, [active])


def differs(a: Update, b: Update) -> bool:
    return any(not torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


@pytest.mark.parametrize(
    "training",
    [
        {"momentum": 0.9},
        {"last_batch": "drop"},
        {"weight_decay": 0.5},
        {"clip": 0.01},
        {"epochs": 2},
        {"batch_size": 3},
    ],
)
def test_every_setting_of_local_training_reaches_the_device(training: dict[str, object]) -> None:
    """8 images in batches of 5: the last is short."""
    base: dict[str, object] = {"epochs": 1, "batch_size": 5}
    assert differs(first_update(training=base), first_update(training={**base, **training}))


def test_momentum_by_hand() -> None:
    """Two steps of SGD with momentum m: the second moves by lr · (m · g₁ + g₂), gradients taken here one by one."""
    settings = {"epochs": 1, "batch_size": 4, "momentum": 0.9, "weight_decay": 0.0, "clip": 1e9, "lr": 0.1}
    run = experiment(training=settings)
    found = first(run, 1, [0]).weights
    plan = plan_visits(run.population.data.shards[0], 1, 4, False, DeviceStreams(0, (1, 0)))
    module = two_exits().build("simple")
    module.load_state_dict(run.server["simple"])
    velocity = [torch.zeros_like(p) for p in module.parameters()]
    for part in plan.batches():
        index = torch.from_numpy(plan.examples[part])
        loss = torch.nn.functional.cross_entropy(module(run.population.data.x[index])[0], run.population.data.y[index])
        for p, v, g in zip(
            module.parameters(), velocity, torch.autograd.grad(loss, list(module.parameters())), strict=True
        ):
            v.mul_(0.9).add_(g)
            p.data.sub_(0.1 * v)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


def test_an_update_has_the_number_of_images_and_the_trained_weights() -> None:
    """80 images on 10 devices are 8 each; NoSide's complex devices do not train the exit."""
    assert first_update().samples == 8
    assert {n for n in first_update("noside", 7).weights if n not in first_update("noside", 7).trained} == {
        "exit.weight",
        "exit.bias",
    }
    assert first_update("fedhen", 7).trained == first_update("fedhen", 7).weights.keys()


def test_nosides_exit_averaged_over_simple_devices_only() -> None:
    """With `server.untrained_weights=skip` the server's exit is the mean over simple devices, 2 of the 3 active."""
    run = experiment("noside", server={"untrained_weights": "skip"})
    (done,) = one_round(run, run.engine.devices, [0, 1, 7], Rules(NOSIDE, run.activate, run.mechanism.begin))
    simple = [u.weights["exit.weight"] for u in done.updates if u.tier == "simple"]
    torch.testing.assert_close(done.server["complex"]["exit.weight"], (simple[0] + simple[1]) / 2)


def test_the_split_follows_seed_and_kind() -> None:
    """Another seed deals otherwise; by-class gives unequal sizes, the others equal ones."""

    def shards(seed: int = 0, kind: str = "iid") -> list[list[int]]:
        many = {"kind": kind, "alpha": 0.5, "minimum": 1}
        return [s.tolist() for s in experiment(seed=seed, split=many).population.data.shards]

    assert shards(0) == shards(0) != shards(1)
    assert {len(s) for s in shards(kind="iid")} == {len(s) for s in shards(kind="dirichlet")} == {8}
    assert len({len(s) for s in shards(kind="dirichlet-by-class")}) > 1
    assert shards(kind="dirichlet") != shards(kind="iid")


def test_augmentation_reaches_the_training() -> None:
    def trained(augmentation: str) -> Update:
        small = load_recipe("digits")
        changes = [f"data.augmentation={augmentation}", "data.limit=100", "model.widths=[4, 4, 4, 4]"]
        run = build_experiment(toml.apply_settings(small, changes), accelerator="cpu")
        return first(run, 1, [0])

    three = [trained(augmentation) for augmentation in ("none", "crop-flip", "half-crop-flip")]
    assert all(differs(*pair) for pair in combinations(three, 2))


def test_the_learning_rate_can_rise_first() -> None:
    """By a quarter of η in each of 4 rounds; the schedule applies as well, during and after them."""
    rising = TrainingConfig(lr=0.1, lr_warmup=4)
    assert [learning_rate(rising, t, 9) for t in (1, 2, 3, 4, 5, 9)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1, 0.1]
    )
    both = TrainingConfig(lr=0.1, lr_warmup=4, lr_schedule="cosine")
    assert [learning_rate(both, t, 4) for t in (1, 3)] == pytest.approx([0.025, 0.0375])
    assert (
        learning_rate(TrainingConfig(lr=0.1), 1, 9) == learning_rate(TrainingConfig(lr=0.1, lr_warmup=1), 1, 9) == 0.1
    )


def test_the_cosine_schedule() -> None:
    """η · (1 + cos(π (t − 1) / T)) / 2: in round 1 of 4 all of it, in round 3 half of it."""
    cosine = TrainingConfig(lr=0.1, lr_schedule="cosine")
    assert [learning_rate(cosine, t, 4) for t in (1, 3)] == pytest.approx([0.1, 0.05])
    assert learning_rate(cosine, 2, 4) == pytest.approx(0.1 * (1 + math.sqrt(0.5)) / 2)

"""The server's optimisers against numbers worked out by hand and against torch, on weights that tiers share or not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedhen.algorithm import merging
from fedhen.algorithm.averaging import ByHolder
from fedhen.algorithm.merging import Merged, Pools, keep_tiers_apart, share_common_weights
from fedhen.algorithm.server_optimizers import make_server_optimizer
from fedhen.algorithm.updates import Update
from fedhen.config.training_settings import ServerConfig
from fedhen.params import TierModels


def update(device: int, tier: str, **values: Any) -> Update:
    weights = {name: torch.as_tensor(value) for name, value in values.items()}
    return Update(device, tier, weights, frozenset(weights), 1, loss=0.0)


def start(server: TierModels, rule: ServerConfig, learned: str) -> Merged:
    return Merged(server, make_server_optimizer(rule).start(server, {tier: set(learned) for tier in server}))


def merge(before: Merged, updates: list[Update], rule: ServerConfig, pools: Pools = share_common_weights) -> Merged:
    return merging.merge(before.models, updates, pools, ByHolder(rule), make_server_optimizer(rule), before.moments)


def one_weight(rule: ServerConfig, averages: list[float]) -> list[float]:
    """The server's weight after each round in which one device returns that number; it starts at 1."""
    state, found = start({"only": {"w": torch.tensor([1.0], dtype=torch.float64)}}, rule, "w"), []
    for average in averages:
        state = merge(state, [update(0, "only", w=torch.tensor([average], dtype=torch.float64))], rule)
        found.append(state.models["only"]["w"].item())
    return found


ADAPTIVE: dict[str, Any] = {"lr": 0.5, "beta1": 0.5, "tau": 0.1}


@pytest.mark.parametrize(
    ("rule", "squares"),
    [
        # v_0 = τ² = 0.01 and Δ_1 = 2: adagrad 0.01 + 4.
        (ServerConfig(optimizer="adagrad", **ADAPTIVE), lambda v, d: v + d * d),
        (ServerConfig(optimizer="adam", beta2=0.75, **ADAPTIVE), lambda v, d: 0.75 * v + 0.25 * d * d),
        # sign(v − Δ²) = −1: v grows by (1 − β2)·Δ².
        (
            ServerConfig(optimizer="yogi", beta2=0.75, **ADAPTIVE),
            lambda v, d: v - 0.25 * d * d * math.copysign(1, v - d * d),
        ),
    ],
    ids=["adagrad", "adam", "yogi"],
)
def test_two_rounds_of_the_adaptive_ones(rule: ServerConfig, squares: Any) -> None:
    """m = m/2 + Δ/2, v by each rule from v_0 = 0.01, w += m / 2 / (√v + 0.1), on plain numbers.

    Round 1: w = 1, the average is 3, Δ = 2, m = 1. Round 2: the average is 1.5 and Δ is from where the server stands.
    """
    m, v, w, expected = 0.0, 0.01, 1.0, []
    for average in (3.0, 1.5):
        delta = average - w
        m, v = m / 2 + delta / 2, squares(v, delta)
        w += 0.5 * m / (math.sqrt(v) + 0.1)
        expected.append(w)
    assert one_weight(rule, [3.0, 1.5]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("optimizer", "expected"), [("adagrad", 1.237812), ("adam", 1.453004), ("yogi", 1.452494)])
def test_the_first_step_in_numbers(optimizer: Any, expected: float) -> None:
    """Δ = 2, m = 1, lr = 0.5, τ = 0.1. v is 4.01, 1.0075 and 0.01 + 0.25·4 = 1.01; w = 1 + 0.5 / (√v + 0.1).

    √4.01 = 2.002498, √1.0075 = 1.003743, √1.01 = 1.004988.
    """
    found = one_weight(ServerConfig(optimizer=optimizer, beta2=0.75, **ADAPTIVE), [3.0])
    assert found == pytest.approx([expected], abs=1e-6)


def test_momentum_is_sgd_with_momentum_on_the_gradient_minus_delta() -> None:
    """Hsu et al. 2019: torch's SGD with the same momentum, whose gradient is old − average in every round."""
    torch.manual_seed(0)
    rule = ServerConfig(optimizer="momentum", lr=0.7, beta1=0.9)
    state = start({"only": {"w": torch.randn(5, dtype=torch.float64)}}, rule, "w")
    theirs = torch.nn.Parameter(state.models["only"]["w"].clone())
    expected = torch.optim.SGD([theirs], lr=0.7, momentum=0.9)
    for _ in range(5):
        average = torch.randn(5, dtype=torch.float64)
        state = merge(state, [update(0, "only", w=average)], rule)
        theirs.grad = theirs.detach() - average
        expected.step()
        torch.testing.assert_close(state.models["only"]["w"], theirs.detach(), rtol=1e-14, atol=1e-14)


def test_adam_without_a_mean_is_rmsprop() -> None:
    """With β1 = 0 the step is lr·Δ / (√v + τ): torch's RMSprop with α = β2 and ε = τ, if its v starts at τ² too."""
    rule = ServerConfig(optimizer="adam", lr=0.3, beta1=0.0, beta2=0.9, tau=0.01)
    state = start({"only": {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}}, rule, "w")
    theirs = torch.nn.Parameter(state.models["only"]["w"].clone())
    expected = torch.optim.RMSprop([theirs], lr=0.3, alpha=0.9, eps=0.01)
    expected.state[theirs] = {"step": torch.tensor(0.0), "square_avg": torch.full_like(theirs, 0.01**2)}
    for average in torch.tensor([[1.5, -2.5], [1.2, -1.0], [0.3, -1.4]], dtype=torch.float64):
        state = merge(state, [update(0, "only", w=average)], rule)
        theirs.grad = theirs.detach() - average
        expected.step()
        torch.testing.assert_close(state.models["only"]["w"], theirs.detach(), rtol=1e-12, atol=1e-12)


def nested() -> TierModels:
    shared = torch.tensor([100.0])
    return {"simple": {"a": shared}, "complex": {"a": shared, "b": torch.tensor([200.0])}}


HEAVY = ServerConfig(optimizer="momentum", beta1=0.5, lr=1.0)
ROUNDS = [
    [update(0, "simple", a=[90.0]), update(2, "complex", a=[70.0], b=[240.0])],
    [update(0, "simple", a=[100.0]), update(1, "simple", a=[80.0])],
]
"""The complex devices are active in the first round only."""


def play(rule: ServerConfig, pools: Pools, learned: str = "ab") -> Merged:
    state = start(nested(), rule, learned)
    for updates in ROUNDS:
        state = merge(state, updates, rule, pools)
    return state


def test_tiers_that_share_a_weight_share_its_moments() -> None:
    """Round 1: a's average is 80, Δ = −20 = m; b's is 240, Δ = 40 = m. a = 80, b = 240.

    Round 2: a's average is 90, Δ = 10, m = −10 + 10 = 0, so that a stays at 80. Nobody has b: b and its m = 40 stay.
    """
    state = play(HEAVY, share_common_weights)
    assert state.models["simple"]["a"] is state.models["complex"]["a"], "w_s = [w_c]_M"
    assert (state.models["simple"]["a"].item(), state.models["complex"]["b"].item()) == (80.0, 240.0)
    moments = {tier: {key: tensor.item() for key, tensor in of.items()} for tier, of in state.moments.items()}
    assert moments == {"simple": {"mean/a": 0.0}, "complex": {"mean/a": 0.0, "mean/b": 40.0}}


def test_tiers_kept_apart_have_moments_of_their_own() -> None:
    """Simple: Δ = −10, a = 90; then the average is 90, Δ = 0, m = −5, a = 85. Complex: Δ = −30, a = 70, then idle."""
    state = play(HEAVY, keep_tiers_apart)
    moments = {tier: {key: tensor.item() for key, tensor in of.items()} for tier, of in state.moments.items()}
    assert {tier: model["a"].item() for tier, model in state.models.items()} == {"simple": 85.0, "complex": 70.0}
    assert moments == {"simple": {"mean/a": -5.0}, "complex": {"mean/a": -30.0, "mean/b": 40.0}}


def test_what_is_not_learned_takes_the_average() -> None:
    """As b does here, and a whole number: the average of 3 and 6 is rounded to 4, as without an optimiser."""
    state = play(HEAVY, share_common_weights, learned="a")
    assert state.models["complex"]["b"].item() == 240.0 and "mean/b" not in state.moments["complex"]
    state = start({"only": {"w": torch.zeros(1), "n": torch.tensor(1)}}, HEAVY, "w")
    state = merge(state, [update(0, "only", w=[1.0], n=3), update(1, "only", w=[2.0], n=6)], HEAVY)
    assert state.models["only"]["n"].item() == 4 and state.models["only"]["n"].dtype == torch.int64
    assert state.models["only"]["w"].item() == 1.5


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad", "adam", "yogi"])
def test_an_element_of_a_width_nest_that_nobody_held_keeps_its_value_and_its_moments(optimizer: Any) -> None:
    """The full model is trained in round 1, only its corner in round 2: the rest is to the bit as after round 1."""
    rule = ServerConfig(optimizer=optimizer, lr=0.5)
    whole = torch.ones(2, 2)
    state = start({"half": {"w": whole[:1]}, "full": {"w": whole}}, rule, "w")
    full = update(1, "full", w=[[6.0, 8.0], [10.0, 12.0]])
    first = merge(state, [update(0, "half", w=[[2.0, 4.0]]), full], rule)
    second = merge(first, [update(0, "half", w=[[0.0, 1.0]])], rule)
    parts = [(first.models["full"]["w"], second.models["full"]["w"])]
    parts += [(first.moments["full"][key], second.moments["full"][key]) for key in first.moments["full"]]
    for before, after in parts:
        assert torch.equal(before[1:], after[1:]) and (before[:1] != after[:1]).all()
    for key, tensor in second.moments["half"].items():
        assert torch.equal(tensor, second.moments["full"][key][:1])
    assert torch.equal(second.models["half"]["w"], second.models["full"]["w"][:1])
    assert first.moments["full"]["mean/w"].dtype == torch.float64


def test_output_rows_of_classes_that_nobody_has_stay() -> None:
    """`server.rows_by_class`: the only device has class 1."""
    present = torch.tensor([False, True])
    trained = Update(0, "only", {"w": torch.tensor([5.0, 5.0])}, frozenset("w"), 1, 0.0, rows={"w": present})
    state = merge(start({"only": {"w": torch.tensor([1.0, 1.0])}}, HEAVY, "w"), [trained], HEAVY)
    assert state.models["only"]["w"].tolist() == [1.0, 5.0] and state.moments["only"]["mean/w"].tolist() == [0.0, 4.0]


def test_without_an_optimiser_the_average_is_taken_and_nothing_is_kept() -> None:
    plain = ServerConfig()
    state = start(nested(), plain, "ab")
    assert state.moments == {} and merge(state, ROUNDS[0], plain).moments == {}
    assert play(plain, share_common_weights).models["simple"]["a"].item() == 90.0

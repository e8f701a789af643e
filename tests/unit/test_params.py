"""The algebra of named weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhen.params import Average, Shapes, Weights, count_bytes, count_elements, distance, is_finite, select, shapes_of

SHAPES: Shapes = {"deep": (2,), "shared": (3,)}


def averaged(models: list[Weights], otherwise: Weights) -> Weights:
    average = Average(shapes_of(otherwise))
    for model in models:
        average.add(model)
    return average.finish(otherwise)


def test_each_weight_is_averaged_over_the_models_that_hold_it() -> None:
    """shared: (1 + 2 + 6) / 3 = 3; deep: only the last two hold it, (10 + 20) / 2 = 15; nobody holds lone."""
    before = {"shared": torch.zeros(1), "deep": torch.zeros(1), "lone": torch.tensor([7.0])}
    models = [
        {"shared": torch.tensor([1.0])},
        {"shared": torch.tensor([2.0]), "deep": torch.tensor([10.0])},
        {"shared": torch.tensor([6.0]), "deep": torch.tensor([20.0])},
    ]
    after = averaged(models, before)
    assert {name: tensor.item() for name, tensor in after.items()} == {"shared": 3.0, "deep": 15.0, "lone": 7.0}


def test_a_leading_corner_is_averaged_element_by_element() -> None:
    """2×2 [[1, 2], [3, 4]] and the 1×2 corner [[5, 6]]: first row (1 + 5) / 2 and (2 + 6) / 2, second row as it is.

    Of a 3×2 supernet the third row, which nobody holds, keeps its 9s.
    """
    models = [{"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, {"w": torch.tensor([[5.0, 6.0]])}]
    after = averaged(models, {"w": torch.full((3, 2), 9.0)})
    assert after["w"].tolist() == [[3.0, 4.0], [3.0, 4.0], [9.0, 9.0]]


def test_weighted_average() -> None:
    """(1·10 + 3·20) / 4 = 17.5."""
    average = Average({"w": (1,)})
    average.add({"w": torch.tensor([10.0])}, 1)
    average.add({"w": torch.tensor([20.0])}, 3)
    assert average.finish({"w": torch.zeros(1)})["w"].item() == 17.5


numbers = st.floats(-1e3, 1e3, width=32)
models_strategy = st.lists(
    st.fixed_dictionaries(
        {"shared": st.lists(numbers, min_size=3, max_size=3)},
        optional={"deep": st.lists(numbers, min_size=1, max_size=2)},
    ),
    max_size=6,
)


def as_weights(model: dict[str, list[float]]) -> Weights:
    return {name: torch.tensor(values) for name, values in model.items()}


@given(models_strategy, st.randoms(use_true_random=False))
def test_the_average_does_not_depend_on_the_order(models: list[dict[str, list[float]]], random: object) -> None:
    otherwise = {"deep": torch.full((2,), 5.0), "shared": torch.full((3,), 5.0)}
    weights = [as_weights(model) for model in models]
    shuffled = list(weights)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for name, expected in averaged(weights, otherwise).items():
        torch.testing.assert_close(averaged(shuffled, otherwise)[name], expected, rtol=0, atol=1e-4)


@given(models_strategy, st.integers(0, 6))
def test_two_averages_combined_are_one(models: list[dict[str, list[float]]], cut: int) -> None:
    otherwise = {"deep": torch.full((2,), 5.0), "shared": torch.full((3,), 5.0)}
    parts = [Average(SHAPES), Average(SHAPES)]
    for number, model in enumerate(models):
        parts[number >= cut].add(as_weights(model))
    parts[0].combine(parts[1])
    for name, expected in averaged([as_weights(model) for model in models], otherwise).items():
        torch.testing.assert_close(parts[0].finish(otherwise)[name], expected, rtol=0, atol=1e-4)


@given(st.lists(st.lists(numbers, min_size=1, max_size=1), min_size=1, max_size=9))
def test_the_average_is_the_mean(values: list[list[float]]) -> None:
    mean = averaged([{"w": torch.tensor(v)} for v in values], {"w": torch.zeros(1)})["w"].item()
    assert math.isclose(mean, math.fsum(v[0] for v in values) / len(values), rel_tol=1e-6, abs_tol=1e-4)


def test_distance_is_the_squared_norm_over_what_both_hold() -> None:
    """(1 − 3)² + (2 − 2)² = 4 for w; the other names are not common."""
    a = {"w": torch.tensor([1.0, 2.0])}
    b = {"w": torch.tensor([3.0, 2.0]), "deep": torch.tensor([100.0])}
    assert distance(a, b) == 4.0
    assert distance(a, a) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_seen(bad: float) -> None:
    assert is_finite({"a": torch.ones(2), "b": torch.ones(1)})
    assert not is_finite({"a": torch.tensor([1.0, bad]), "b": torch.ones(1)})


def test_count_bytes_and_select() -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.zeros((), dtype=torch.float64)}
    assert count_elements(weights) == 7
    assert count_bytes(weights) == 6 * 4 + 8
    assert select(weights, {"a": (1, 2)})["a"].shape == (1, 2)
    assert select(weights, {"a": (2, 3)})["a"] is weights["a"]

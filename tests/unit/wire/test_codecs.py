"""What each codec writes and what is read from it, worked out by hand or by the statistics of rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhen import seeds
from fedhen.params import Weights, count_bytes
from fedhen.wire.codecs import INDICES, SCALES, VALUES, Codec, Int8, TopK, Whole
from fedhen.wire.layout import Layout, make_layout
from fedhen.wire.wire import CodedWire, round_to_bf16

CODECS: Sequence[Codec] = [Whole(), Whole(torch.bfloat16), Int8(), TopK(0.5)]


def draw(number: int) -> Tensor:
    return torch.from_numpy(seeds.stream(0, "test").random(number, dtype=np.float32))


def no_draw(number: int) -> Tensor:
    return torch.zeros(number)


def layout_of(*sizes: int) -> Layout:
    return make_layout({f"w{place}": torch.zeros(size) for place, size in enumerate(sizes)}, [])


def test_the_mean_of_10_000_roundings_is_the_change() -> None:
    """A rounding to a grid of step s has a variance of at most s²/4: the mean of 10,000 deviates by s/200.

    A deviation of 4.5 times that has a probability below 1e-5 at each of the 20 weights.
    """
    layout, stream = layout_of(20), np.random.default_rng(5)
    change = torch.from_numpy(stream.normal(size=20)).float()
    total = torch.zeros(20, dtype=torch.float64)
    for number in range(10_000):
        found = seeds.stream(0, "wire", number, 3).random(20, dtype=np.float32)
        total += Int8().decode(Int8().encode(change, layout, lambda _, u=found: torch.from_numpy(u)).tensors, layout)  # type: ignore[misc]
    step = float(change.abs().max()) / 127
    assert float((total / 10_000 - change).abs().max()) < 4.5 * step / 200


def test_an_8_bit_number_is_a_step_off_at_most() -> None:
    """The step is the largest change of its own tensor divided by 127, however large another tensor's is."""
    layout = layout_of(500, 300)
    change = torch.cat([torch.randn(500, generator=torch.Generator().manual_seed(1)), 1000 * torch.randn(300)])
    sent = Int8().encode(change, layout, draw)
    found = Int8().decode(sent.tensors, layout)
    for part, read in zip(layout.split(change), layout.split(found), strict=True):
        step = float(part.abs().max()) / 127
        assert float((part - read).abs().max()) <= step * (1 + 1e-5)
    assert sent.rest is None and count_bytes(sent.tensors) == 800 + 2 * 4


def test_8_bit_numbers_by_hand() -> None:
    """The step is 127 / 127 = 1; draws of .5 round 2.4 to 2 and 2.6 to 3, .1 rounds -.2 to -1, .9 to 0."""
    change, layout = torch.tensor([127.0, 2.4, 2.6, -0.2, -0.2, -127.0]), layout_of(6)
    draws = torch.tensor([0.0, 0.5, 0.5, 0.1, 0.9, 0.99])
    sent = Int8().encode(change, layout, lambda number: draws[:number])
    assert sent.tensors[VALUES].tolist() == [127, 2, 3, -1, 0, -127] and sent.tensors[SCALES].tolist() == [1.0]


def test_a_tensor_without_a_change_costs_no_error() -> None:
    layout = layout_of(3, 0, 2)
    change = torch.tensor([0.0, 0.0, 0.0, 1.0, -2.0])
    found = Int8().decode(Int8().encode(change, layout, draw).tensors, layout)
    assert found[:3].tolist() == [0, 0, 0] and float(found[4]) == pytest.approx(-2)


def test_the_largest_changes_are_sent_with_their_places() -> None:
    """Of eight changes four are kept: -9, 7, 5, and the first of the two of size 3, at places 1, 3, 4 and 6."""
    change, layout = torch.tensor([0.0, -9.0, 1.0, 5.0, 3.0, -3.0, 7.0, 2.0]), layout_of(3, 5)
    sent = TopK(0.5).encode(change, layout, no_draw)
    assert sent.tensors[INDICES].tolist() == [1, 3, 4, 6] and sent.tensors[VALUES].tolist() == [-9, 5, 3, 7]
    assert sent.rest is not None and sent.rest.tolist() == [0, 0, 1, 0, 0, -3, 0, 2]
    assert TopK(0.5).decode(sent.tensors, layout).tolist() == [0, -9, 0, 5, 3, 0, 7, 0]


def test_shared_weights_are_not_crowded_out_by_deeper_ones() -> None:
    """A width nest: the simple tier holds the left upper corner of w, so places 0, 1, 4 and 5, and none of the rest."""
    model = {"w": torch.zeros(3, 4), "deep": torch.zeros(4)}
    layout = make_layout(model, [{"w": (2, 2)}])
    assert [group.tolist() for group in layout.groups] == [[0, 1, 4, 5], [2, 3, 6, 7, *range(8, 16)]]
    change = torch.arange(16.0)
    sent = TopK(0.25).encode(change, layout, no_draw).tensors
    # One of four shared ones, the largest of them, and three of twelve deeper ones.
    assert sent[INDICES].tolist() == [5, 13, 14, 15]


def test_four_tiers_have_four_groups() -> None:
    """Each weight belongs to the shallowest tier that holds it, whatever deeper tiers hold of it."""
    model = {name: torch.zeros(2) for name in "abcd"}
    layout = make_layout(model, [{"a": (2,)}, {"a": (2,), "b": (2,)}, {"a": (2,), "b": (2,), "c": (2,)}])
    assert [group.tolist() for group in layout.groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_was_sent_and_what_is_left_add_up_to_the_changes() -> None:
    """Changes are multiples of 2^-10 below 2^5, whose sums have at most 24 digits: in float32 they are exact."""
    model = {"a": torch.zeros(40), "b": torch.zeros(6, 5)}
    wire, stream = CodedWire(lambda tensor: tensor, TopK(0.1), [{"a": (40,)}]), np.random.default_rng(2)
    kept: Weights = {}
    arrived, changed = ({name: torch.zeros_like(tensor) for name, tensor in model.items()} for _ in range(2))
    for _ in range(60):
        change = {
            n: torch.from_numpy(stream.integers(-500, 500, tuple(t.shape))).float() / 1024 for n, t in model.items()
        }
        letter = wire.send_up(change, model, kept, no_draw)
        kept, found = letter.kept, wire.receive_up(letter.tensors, model)
        for name in model:
            arrived[name] += found[name]
            changed[name] += change[name]
    assert all(torch.equal(arrived[n] + kept[f"residual/{n}"], changed[n]) for n in model)
    assert any(bool(kept[f"residual/{n}"].any()) for n in model)


def test_the_server_adds_the_change_to_its_own_weights() -> None:
    """A change far below a step of bfloat16, which is 2^-7 between 1 and 2, is not lost on the way."""
    server, wire = {"w": torch.tensor([1.0001, 1.5])}, CodedWire(round_to_bf16, Whole(), [])
    received = wire.receive_down(wire.send_down(server), server)
    assert received["w"].tolist() == [1.0, 1.5] and received["w"].dtype == torch.float32
    trained = {"w": received["w"] + 2.0**-12}
    letter = wire.send_up(trained, received, {}, no_draw)
    assert torch.equal(wire.receive_up(letter.tensors, server)["w"], server["w"] + 2.0**-12)


def test_whole_numbers_are_sent_as_they_are() -> None:
    """A layer's count of batches, which is no weight."""
    model = {"w": torch.zeros(4), "count": torch.tensor(3)}
    wire = CodedWire(round_to_bf16, TopK(0.5), [])
    assert wire.send_down(model)["count"].dtype == torch.int64
    letter = wire.send_up({"w": torch.ones(4), "count": torch.tensor(7)}, model, {}, no_draw)
    assert int(wire.receive_up(letter.tensors, model)["count"]) == 7 and [*letter.kept] == ["residual/w"]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_change_that_is_not_finite_arrives_as_one(codec: Codec, wrong: float) -> None:
    change = torch.tensor([1.0, 2.0, wrong, 4.0, 0.0, 1.0])
    layout = layout_of(2, 4)
    assert not bool(codec.decode(codec.encode(change, layout, draw).tensors, layout).isfinite().all())


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_server_knows_what_to_expect(codec: Codec, kind: torch.dtype) -> None:
    """Names, types and shapes of what is sent depend on the shapes of the weights alone, and have no fault."""
    layout = make_layout({"a": torch.zeros(7, dtype=kind), "b": torch.zeros(3, 3, dtype=kind)}, [{"a": (7,)}])
    sent = codec.encode(torch.linspace(-1, 1, 16).to(kind), layout, draw).tensors
    assert {n: (t.shape, t.dtype) for n, t in sent.items()} == {
        n: (t.shape, t.dtype) for n, t in codec.like(layout).items()
    }
    assert not codec.find_fault(sent, layout) and codec.decode(sent, layout).dtype == kind


FAULTS: list[tuple[Codec, str, int, float, str]] = [
    (Int8(), VALUES, 0, -128, "below -127"),
    (Int8(), SCALES, 1, -1.0, "negative"),
    (TopK(0.5), INDICES, 0, 5, "not in order"),
    (TopK(0.5), INDICES, 1, 0, "not in order"),
    (TopK(0.5), INDICES, 0, -1, "not those of weights"),
    (TopK(0.5), INDICES, 3, 2**31 - 1, "not those of weights"),
    (TopK(0.5), INDICES, 2, 3, "not those of weights"),
]


@pytest.mark.parametrize(("codec", "name", "place", "value", "why"), FAULTS, ids=str)
def test_tensors_that_cannot_be_decoded_are_found(codec: Codec, name: str, place: int, value: float, why: str) -> None:
    """The places are 0 and 1 of the shared weight and two of those of the deeper one, 4 to 7."""
    layout = make_layout({"a": torch.zeros(4), "b": torch.zeros(4)}, [{"a": (4,)}])
    tensors = codec.encode(torch.tensor([9.0, 8.0, 1.0, 1.0, 7.0, 6.0, 1.0, 1.0]), layout, no_draw).tensors
    tensors[name][place] = value
    assert why in codec.find_fault(tensors, layout)

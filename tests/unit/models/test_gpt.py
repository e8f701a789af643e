"""The nested GPT: its size, its exits, what it sees, and attention written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedhen.config.validation import from_mapping
from fedhen.errors import FedhenError
from fedhen.models.family import find_reached_weights, load_weights
from fedhen.models.gpt import GPTBlock, GPTShape, gpt
from fedhen.models.registry import make_family

TINY = GPTShape(vocabulary=9, context=6, width=8, heads=2, exits={"a": 1, "b": 2, "c": 4})


def test_parameter_counts_by_hand() -> None:
    """Width d = 64, context 64, 65 characters, and tiers of 1 and 3 blocks.

    Embeddings: 65·d + 64·d = 8,256. A block: two norms of 2·d, the attention's d·3d + 3d and d·d + d, the perceptron's
    d·4d + 4d and 4d·d + d, together 12·d² + 13·d = 49,984. An exit: a norm of 2·d and 65·d + 65, together 4,353.
    """
    family = gpt(GPTShape(vocabulary=65, context=64))
    simple, complex_ = (sum(p.numel() for p in family.build(tier).parameters()) for tier in ("simple", "complex"))
    assert simple == 8_256 + 49_984 + 4_353 == 62_593
    assert complex_ == 8_256 + 3 * 49_984 + 2 * 4_353 == 166_914


def test_every_exit_is_what_the_tier_alone_computes() -> None:
    family, x = gpt(TINY), torch.randint(0, 9, (5, 6))
    weights, outputs = family.initial(0), {}
    for place, tier in enumerate("abc"):
        module = family.build(tier)
        load_weights(module, {name: weights[name] for name in module.state_dict()})
        outputs[tier] = module(x)
        assert [output.shape for output in outputs[tier]] == [(5, 6, 9)] * (place + 1)
        for shallow, output in zip("abc", outputs[tier], strict=False):
            torch.testing.assert_close(output, outputs[shallow][-1])
        assert set().union(*find_reached_weights(module, outputs[tier])) == {*module.state_dict()}
    assert family.outputs == {f"exits.{end}.1.{name}" for end in (1, 2, 4) for name in ("weight", "bias")}
    assert family.outputs <= {*weights}


def test_no_position_sees_a_later_one() -> None:
    family, x = gpt(TINY), torch.randint(0, 9, (1, 6))
    module = family.build("c")
    other = x.clone()
    other[0, 4] = (x[0, 4] + 1) % 9
    for before, after in zip(module(x), module(other), strict=True):
        torch.testing.assert_close(before[:, :4], after[:, :4])
        assert not torch.allclose(before[:, 4], after[:, 4])
    for whole, start in zip(module(x), module(x[:, :3]), strict=True):
        torch.testing.assert_close(whole[:, :3], start)


def test_a_block_written_out() -> None:
    """x + project(attention) and then + narrow(gelu(widen(norm))), each head and position on its own."""
    torch.manual_seed(0)
    block, x = GPTBlock(8, 2).double(), torch.randn(1, 3, 8, dtype=torch.float64)
    query, key, value = block.attend(F.layer_norm(x, (8,)))[0].split(8, dim=1)
    attended = torch.zeros(3, 8, dtype=torch.float64)
    for head in (slice(0, 4), slice(4, 8)):
        for here in range(3):
            scores = torch.stack([query[here, head] @ key[k, head] / math.sqrt(4) for k in range(here + 1)])
            shares = scores.exp() / scores.exp().sum()
            attended[here, head] = sum(share * value[k, head] for k, share in enumerate(shares))
    middle = x[0] + attended @ block.project.weight.T + block.project.bias
    wide = F.layer_norm(middle, (8,)) @ block.widen.weight.T + block.widen.bias
    wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
    expected = middle + wide @ block.narrow.weight.T + block.narrow.bias
    torch.testing.assert_close(block(x)[0], expected)


@pytest.mark.slow
def test_it_learns_a_text_that_repeats() -> None:
    """Of nine tokens in a fixed order, the next one is certain; at the start the loss is near log 9 = 2.2."""
    torch.manual_seed(0)
    module = gpt(TINY).build("b")
    text = torch.arange(700) % 9
    windows = torch.stack([text[k : k + 7] for k in range(0, 690, 3)])
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for _ in range(60):
        logits = torch.stack(module(windows[:, :-1])).flatten(0, 2)
        loss = F.cross_entropy(logits, windows[:, 1:].flatten().repeat(2))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.1


def test_the_family_of_a_configuration() -> None:
    config = from_mapping({"model": {"family": "gpt", "width": 16, "heads": 4, "exits": {"simple": 1, "complex": 2}}})
    module = make_family(config, (10,), 30).build("complex")
    assert [z.shape for z in module(torch.zeros(2, 10, dtype=torch.long))] == [(2, 10, 30)] * 2
    assert module.get_parameter("tokens.weight").shape == (30, 16)
    with pytest.raises(FedhenError, match=r"gpt needs sequences of token ids, found inputs of shape \(3, 8, 8\)"):
        make_family(config, (3, 8, 8), 30)
    with pytest.raises(FedhenError, match=r"unknown model family 'gtp': did you mean 'gpt'\?"):
        make_family(from_mapping({"model": {"family": "gtp"}}), (10,), 30)
    with pytest.raises(FedhenError, match="gpt is nested by depth"):
        make_family(from_mapping({"model": {"nesting": "width"}}, config), (10,), 30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exits": {"simple": 3, "complex": 1}}, "rising order"),
        ({"exits": {"simple": 0, "complex": 1}}, "from 1 on"),
        ({"exits": {"simple": 1, "complex": 2000}}, "at most 1000 are allowed"),
        ({"width": 10}, "model.width=10 must be a multiple of model.heads=4"),
        ({"width": 400_000}, "does not fit in memory"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(FedhenError, match=message):
        GPTShape(65, 64, **change)  # type: ignore[arg-type]

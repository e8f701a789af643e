"""Families that are cut from encoders and decoders of transformers, built from small configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedhen import Family, FedhenError, nest
from fedhen.models.family import find_reached_weights, load_weights
from support.families import with_outputs

# Importing transformers takes several seconds.
pytestmark = pytest.mark.slow

IDS = torch.tensor([[7, 6, 3, 2, 1], [1, 2, 5, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
EMBEDDINGS, LAYER, POOLER = 20 * 8 + 12 * 8 + 2 * 8 + 16, 4 * 72 + 16 + 144 + 136 + 16, 72
"""Of BERT: words, positions, types and a norm; a layer's four products of attention, norm, two products and a norm."""
TOKENS, BLOCK, NORM = 20 * 8 + 12 * 8, 16 + 216 + 72 + 16 + 288 + 264, 16
"""Of GPT-2: words and positions; a block's norm, attention, its product, norm, and two products; a norm."""


def make(kind: str, config: str, **settings: Any) -> nn.Module:
    import transformers  # not at the top: the quick tests only collect this module

    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    return model.eval()


def bert(kind: str) -> nn.Module:
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    return make(kind, "BertConfig", vocab_size=20, max_position_embeddings=12, num_labels=3, **sizes)


def gpt2(kind: str) -> nn.Module:
    sizes = {"vocab_size": 20, "n_positions": 12, "n_embd": 8, "n_layer": 3, "n_head": 2}
    return make(kind, "GPT2Config", bos_token_id=0, eos_token_id=0, **sizes)


def parameters(family: Family) -> list[int]:
    return [sum(p.numel() for p in family.build(tier).parameters()) for tier in family.tiers]


def check_nesting(family: Family, model: nn.Module) -> dict[str, list[Tensor]]:
    """Checks names, values, equal exits and gradients. Returns the outputs for IDS."""
    weights, given = family.initial(0), model.state_dict()
    for name, tensor in weights.items():
        assert name.startswith("heads.") or torch.equal(tensor, given[name])
    outputs = {}
    for place, tier in enumerate(family.tiers):
        module = family.build(tier).eval()
        load_weights(module, {name: weights[name] for name in module.state_dict()})
        outputs[tier] = module(IDS)
        assert len(outputs[tier]) == place + 1
        for shallow, output in zip(family.tiers, outputs[tier], strict=False):
            torch.testing.assert_close(output, outputs[shallow][-1], rtol=1e-5, atol=1e-6)
        reached = set().union(*find_reached_weights(module, outputs[tier]))
        assert reached == set(dict(module.named_parameters(remove_duplicate=False)))
    return outputs


def test_a_classifier_in_two_tiers() -> None:
    """The simple tier: embeddings, a layer and a head of 8·3 + 3; the complex one also two layers and its own end."""
    model = bert("BertForSequenceClassification")
    family = nest(model, ends={"simple": "bert.encoder.layer.0", "complex": None})
    simple = EMBEDDINGS + LAYER + 27
    assert parameters(family) == [simple, simple + 2 * LAYER + POOLER + 27] == [915, 2214]
    outputs = check_nesting(family, model)
    torch.testing.assert_close(outputs["complex"][-1], model(IDS).logits)
    family.check(IDS, with_outputs(3))
    names = {*family.build("simple").state_dict()} - {"heads.simple.linear.weight", "heads.simple.linear.bias"}
    assert names == {
        name for name in model.state_dict() if name.startswith(("bert.embeddings.", "bert.encoder.layer.0."))
    }


def test_an_encoder_in_three_tiers_with_heads_of_all_kinds() -> None:
    model = bert("BertModel")
    ends = {tier: f"encoder.layer.{layer}" for layer, tier in enumerate("abc")}
    family = nest(model, ends, {"a": "first", "b": "mean", "c": "first"}, outputs=4, sample=IDS)
    head = 8 * 4 + 4
    assert parameters(family) == [EMBEDDINGS + k * (LAYER + head) for k in (1, 2, 3)], "no tier holds the pooler"
    outputs = check_nesting(family, model)
    weights, hidden = family.initial(0), model(IDS, output_hidden_states=True).hidden_states
    for tier, state in (("a", hidden[1][:, 0]), ("b", hidden[2].mean(1)), ("c", hidden[3][:, 0])):
        linear = f"heads.{tier}.linear" if tier == "b" else f"heads.{tier}.1"
        expected = state @ weights[f"{linear}.weight"].T + weights[f"{linear}.bias"]
        torch.testing.assert_close(outputs["c"]["abc".index(tier)], expected)
    family.check(IDS, with_outputs(4))


def test_inputs_by_name_and_in_order_and_the_mean_without_padding() -> None:
    """With a mask, the mean is over the first three positions of the second text: what follows them does not count."""
    model = bert("BertForSequenceClassification")
    family = nest(
        model, {"simple": "bert.encoder.layer.1", "complex": None}, sample={"input_ids": IDS, "attention_mask": MASK}
    )
    module = family.build("complex").eval()
    named = module(input_ids=IDS, attention_mask=MASK)
    ordered = module(IDS, MASK)
    other = IDS.clone()
    other[1, 3:] = 9
    padded = module(input_ids=other, attention_mask=MASK)
    for one, two, three, plain in zip(named, ordered, padded, module(other), strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(one[1], plain[1])
    short = module(IDS[1:, :3])
    for exit_, alone in zip(named, short, strict=True):
        torch.testing.assert_close(exit_[1:], alone, rtol=1e-5, atol=1e-6)


def test_a_language_model_in_two_tiers() -> None:
    """The simple tier: tokens, a block and its head, a norm and 8·20 + 20; the complex one ends with tied weights."""
    model = gpt2("GPT2LMHeadModel")
    family = nest(model, {"simple": "transformer.h.0", "complex": None}, {"simple": "linear"})
    simple = TOKENS + BLOCK + NORM + 180
    assert parameters(family) == [simple, simple + 2 * BLOCK + NORM] == [1324, 3084]
    outputs = check_nesting(family, model)
    torch.testing.assert_close(outputs["complex"][-1], model(IDS).logits)
    assert outputs["complex"][0].shape == (2, 5, 20)
    deep = family.build("complex")
    assert deep.get_parameter("lm_head.weight") is deep.get_parameter("transformer.wte.weight"), "they stay tied"


def test_a_decoder_in_three_tiers_with_tied_heads() -> None:
    """A tied head has a norm only: its logits are the products with the words' vectors."""
    model = gpt2("GPT2Model")
    ends = {tier: f"h.{block}" for block, tier in enumerate("abc")}
    family = nest(model, ends, dict.fromkeys("abc", "tied"))
    assert parameters(family) == [TOKENS + k * (BLOCK + NORM) for k in (1, 2, 3)]
    outputs = check_nesting(family, model)
    hidden = model(IDS, output_hidden_states=True).hidden_states
    for place in (0, 1):
        expected = nn.functional.layer_norm(hidden[place + 1], (8,)) @ model.get_parameter("wte.weight").T
        torch.testing.assert_close(outputs["c"][place], expected, rtol=1e-4, atol=1e-5)
    module = family.build("c")
    torch.cat(module(IDS)).square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in module.parameters())


def test_a_block_that_runs_several_times_ends_a_tier_at_its_first_run() -> None:
    """ALBERT runs one layer three times; the simple tier runs it once, and both tiers hold the same weights."""
    settings = {"vocab_size": 20, "embedding_size": 8, "hidden_size": 8, "num_attention_heads": 2}
    settings |= {"num_hidden_layers": 3, "intermediate_size": 16, "max_position_embeddings": 12, "num_labels": 3}
    model = make("AlbertForSequenceClassification", "AlbertConfig", **settings)
    block = "albert.encoder.albert_layer_groups.0"
    family = nest(model, {"simple": block, "complex": None}, {"simple": "first"})
    outputs = check_nesting(family, model)
    weights, hidden = family.initial(0), model(IDS, output_hidden_states=True).hidden_states
    expected = hidden[1][:, 0] @ weights["heads.simple.1.weight"].T + weights["heads.simple.1.bias"]
    torch.testing.assert_close(outputs["complex"][0], expected)
    own = {n for n in family.initial(0) if n.startswith(("albert.pooler", "classifier"))}
    assert {*weights} - {*family.build("simple").state_dict()} == own


def test_images_in_patches() -> None:
    settings = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8}
    settings |= {"intermediate_size": 16, "patch_size": 4, "num_labels": 3}
    model, x = make("ViTForImageClassification", "ViTConfig", **settings), torch.randn(2, 3, 8, 8)
    block = next(name for name, m in model.named_modules() if type(m).__name__ == "ViTLayer")
    family = nest(model, {"simple": block, "complex": None}, {"simple": "first"}, sample=x)
    family.check(x, with_outputs(3))
    torch.testing.assert_close(family.build("complex").eval()(x)[-1], model(x).logits)


def test_a_block_with_a_wrong_name_gets_the_nearest_ones() -> None:
    with pytest.raises(FedhenError, match=r"'bert.encoder.layers.0': did you mean 'bert.encoder.layer.0'\?") as error:
        nest(bert("BertForSequenceClassification"), {"simple": "bert.encoder.layers.0", "complex": None})
    assert len(str(error.value)) < 250

"""Makes a family of nested models from one model, the blocks after which tiers end, and their heads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fedhen import seeds
from fedhen.errors import ConfigError
from fedhen.models.cut_model import CutModel, heads_name
from fedhen.models.family import Family
from fedhen.models.heads import Head, check_head, choose_head, make_head
from fedhen.models.probing import (
    Inputs,
    check_arguments,
    check_blocks,
    check_tiers,
    find_embedding,
    find_sample,
    find_states,
    try_module,
)
from fedhen.models.unused_layers import find_used, keep_only


def nest(
    model: nn.Module,
    ends: Mapping[str, str | None],
    heads: Mapping[str, Head | None] | None = None,
    *,
    outputs: int | None = None,
    sample: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor] | None = None,
    average_buffers: bool = False,
) -> Family:
    """Cuts one model into a family of nested models, one for each tier.

    A tier's module runs the model up to the block where the tier ends and contains only what it runs. It returns the
    outputs of the tiers' heads, shallowest first. Weights keep the names and values that they have in the model, so
    that a pretrained model gives a pretrained family; those of the heads are called `heads.<tier>...` (`tier_heads` if
    the model has `heads` already). The model itself is copied and never changed.

    Modules are called as the model is: with a tensor, with a mapping of named tensors, or with a tuple of tensors.

    Args:
        model: A module: a chain of blocks, like `nn.Sequential`, a ResNet, or an encoder or decoder of transformers.
        ends: Tier -> the name of the block after which it ends, as in `model.named_modules()`. Shallowest first. The
            last tier may have None: it ends where the model ends.
        heads: Tier -> its head. A head is a module, which is copied; a function that takes a hidden state and returns a
            module; or a name:

            - "pool": average pooling of images and a linear layer,
            - "mix": the mix pooling of the paper's early exits and a linear layer,
            - "first", "mean": the first position of a sequence, or the mean of those that `attention_mask` keeps, and
              a linear layer,
            - "linear": a linear layer; in a sequence at every position, after a norm,
            - "tied": a norm, then the model's own embedding at every position.

            None, for the last tier only, is the model's own output (`.logits` if it has them). By default a tier that
            ends where the model ends has the model's own output; others have "pool", "mean" or "linear", by the shape
            of their hidden state.
        outputs: The number of outputs, like classes or words; by default that of the model's own output.
        sample: Inputs for the model, at least two; a model of transformers has its own.
        average_buffers: Allows layers that store statistics of the data, like BatchNorm, and averages these too.

    Returns:
        A family with the tiers of `ends`.

    Example:
        A ResNet for ten classes. The simple devices hold its first two stages::

            family = fedhen.nest(
                resnet, ends={"simple": "layer2", "complex": "layer4"}, outputs=10, sample=torch.zeros(2, 3, 32, 32)
            )
            fedhen.train(family, data)
    """
    heads = heads or {}
    check_arguments(model, ends, heads, outputs)
    model = copy.deepcopy(model)
    check_tiers(ends, heads)
    check_blocks(model, ends)
    inputs = find_sample(model, sample)
    with seeds.randomness(0, "nest"):
        states, own = find_states(model, ends, inputs)
        chosen = {t: heads[t] if t in heads else _choose(t, states[t], own, outputs) for t in ends}
        for tier, head in chosen.items():
            if isinstance(head, str):
                check_head(tier, head, states[tier])
        embedding = find_embedding(model) if "tied" in chosen.values() else None
        outputs = outputs or _count_outputs(chosen, own, model, embedding)
        plans = {}
        for place, tier in enumerate(ends, start=1):
            tiers = list(ends)[:place]
            plans[tier] = _Plan(model, {t: _Exit(ends[t], chosen[t], states[t]) for t in tiers}, outputs, embedding)
            plans[tier].truncate(inputs)
        rows = plans[tier].find_output_weights()
    return Family({t: plan.build for t, plan in plans.items()}, average_buffers=average_buffers, outputs=rows)


@dataclass(frozen=True)
class _Exit:
    """Where a tier ends, and what reads the hidden state there."""

    block: str | None
    head: Head | None
    hidden: Tensor

    @property
    def end(self) -> str | None:
        """The block after which the pass stops, or None if the model runs to its end."""
        return None if self.head is None else self.block


@dataclass
class _Plan:
    """How the module of a tier is built."""

    model: nn.Module
    exits: dict[str, _Exit]
    """Those of the tiers nested in it, its own last."""
    outputs: int | None
    embedding: str | None

    def build(self) -> CutModel:
        """Builds a module that shares nothing with any other."""
        # Shallowest first: with the same seed, a tier draws the same heads as the tiers that contain it.
        heads = {
            tier: None if e.head is None else make_head(tier, e.head, e.hidden, self.outputs)
            for tier, e in self.exits.items()
        }
        ends = {tier: e.end for tier, e in self.exits.items()}
        return CutModel(copy.deepcopy(self.model), ends, heads, self.embedding).train()

    def truncate(self, inputs: Inputs) -> None:
        """Checks the outputs, and removes what the tier does not run from its model."""
        module = self.build().requires_grad_(True)
        own = list(self.exits)[-1]
        used = find_used(module, partial(try_module, f"the module of tier {own!r}", module, inputs))
        self._check_outputs(used.outputs)
        if self.exits[own].end is not None:
            used.finished.discard("")
        self.model = copy.deepcopy(self.model)
        keep_only(self.model, used)

    def _check_outputs(self, outputs: Sequence[Tensor]) -> None:
        if len(outputs) < len(self.exits):
            raise ConfigError(f"tier {list(self.exits)[len(outputs)]!r}: its block does not always run")
        for (tier, e), output in zip(self.exits.items(), outputs, strict=True):
            expected = self.outputs or outputs[-1].shape[-1]
            if not output.dim() or output.shape[-1] != expected:
                what = "the model's own output" if e.head is None else "what its head returns"
                raise ConfigError(
                    f"tier {tier!r}: {what} has shape {tuple(output.shape)}: the last number must be {expected}, "
                    "as outputs=... or the last tier says"
                )

    def find_output_weights(self) -> frozenset[str]:
        """Returns the names of the weights whose rows are the outputs: none, unless every tier has a linear layer."""
        module, names, heads = self.build(), set[str](), heads_name(self.model)
        for tier, e in self.exits.items():
            layers = [
                name
                for name, layer in module.named_modules()
                if isinstance(layer, nn.Linear) and f"{name}.".startswith(f"{heads}.{tier}.")
            ]
            if e.head is None or not layers:
                return frozenset()
            names |= {f"{layers[-1]}.{name}" for name, _ in module.get_submodule(layers[-1]).named_parameters()}
        return frozenset(names)


def _choose(tier: str, hidden: Tensor, own: Tensor | None, outputs: int | None) -> str | None:
    """Returns the default head: the model's own output where the model ends, if it has as many outputs."""
    # An image is not an output, even if it is as wide as there are classes.
    if hidden is own and hidden.dim() < 4 and outputs in (None, own.shape[-1]):
        return None
    return choose_head(tier, hidden)


def _count_outputs(
    heads: Mapping[str, Head | None], own: Tensor | None, model: nn.Module, embedding: str | None
) -> int | None:
    """Returns the number of outputs, or None if the user's heads say it."""
    if embedding is not None:
        return len(model.get_submodule(embedding).get_parameter("weight"))
    if not any(head is None or isinstance(head, str) for head in heads.values()):
        return None
    if own is None:
        raise ConfigError("the model has no output of its own: pass outputs=..., the number of classes or words")
    return own.shape[-1]

"""The result is a model: the weights of each tier in safetensors, and ready modules from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from fedhen.errors import UserError, one_line
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import PART
from fedhen.models.family import Family, load_weights
from fedhen.params import TierModels, Weights, count_elements
from fedhen.runs.layout import MODELS

LARGEST_SIDE = 1 << 16
"""No input is longer in any dimension."""


def model_path(folder: Path, kind: str, tier: str) -> Path:
    """Where a run folder keeps that model."""
    return folder / MODELS / f"{kind}-{tier}.safetensors"


def save_models(folder: Path, models: Mapping[str, TierModels], about: Mapping[str, Mapping[str, Any]]) -> None:
    """Write every kind's model of every tier, with what is to be known about it."""
    (folder / MODELS).mkdir(exist_ok=True)
    for kind, tiers in models.items():
        for tier, weights in tiers.items():
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
            # One key: safetensors writes several in any order, and the same run must give the same bytes.
            text = json.dumps({"kind": kind, "tier": tier, **about[tier]})
            _save(model_path(folder, kind, tier), tensors, text)


def _save(path: Path, tensors: Weights, about: str) -> None:
    """Beside and renamed: a file of that name is whole."""
    beside = path.with_name(path.name + PART)
    try:
        save_file(tensors, beside, metadata={"fedhen": about})
        beside.replace(path)
    except SafetensorError as error:
        beside.unlink(missing_ok=True)
        # Of a full disk safetensors tells in words.
        raise OSError(str(error)) from None


@dataclass(frozen=True)
class SavedModel:
    """A model file, read back."""

    weights: Weights
    exits: list[str]
    """The exits that it holds."""
    inputs: tuple[int, ...]
    """The shape of one input."""
    classes: int


def read_model(folder: Path, kind: str, tier: str) -> SavedModel:
    """Read a model file of a run folder."""
    path = model_path(folder, kind, tier)
    if not path.is_file():
        raise UserError(f"{path} is missing: has the run finished?")
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = untrusted.parse_json(file.metadata()["fedhen"])
        return _checked(weights, about)
    except (SafetensorError, OSError, *untrusted.PARSE_ERRORS) as error:
        raise UserError(f"{path} is damaged: {untrusted.describe_error(error)}") from None


def _checked(weights: Weights, about: Any) -> SavedModel:
    """What the file says of itself, which decides how large a module is built for it."""
    exits, inputs = (
        [untrusted.check_text(name) for name in about["exits"]],
        [untrusted.check_int(n, 1) for n in about["inputs"]],
    )
    classes = untrusted.check_int(about["classes"], 1)
    if max(inputs, default=0) > LARGEST_SIDE:
        raise ValueError(f"inputs of shape {inputs}")
    if classes > count_elements(weights):
        raise ValueError(f"{classes} classes are more than there are weights")
    return SavedModel(weights, exits, tuple(inputs), classes)


def build_ready_module(family: Family, tier: str, weights: Weights, held: Sequence[str]) -> nn.Module:
    """A module with these weights, which returns the logits of the exits that are held, shallowest first."""
    exits, module = family.exits(tier), _built(family, tier)
    expected = module.state_dict()
    for name, tensor in weights.items():
        if name not in expected or expected[name].shape != tensor.shape:
            raise UserError(
                f"the saved weight {name!r} does not fit tier {tier!r} of this family: is it the run's own?"
            )
    if set(exits) == set(held) and (missing := dict(module.named_parameters()).keys() - weights.keys()):
        raise UserError(f"the saved model of tier {tier!r} lacks the weight {min(missing)!r}: is it the run's own?")
    load_weights(module, weights)
    places = [place for place, name in enumerate(exits) if name in held]
    if len(places) < len(exits):
        # An exit that the method does not hold was never trained.
        module.register_forward_hook(lambda _module, _inputs, logits: [logits[place] for place in places])
    return module.eval()


def _built(family: Family, tier: str) -> nn.Module:
    try:
        return family.build(tier)
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"the model of tier {tier!r} cannot be built: {one_line(str(error))}") from None

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

from fedhen.algorithm.merging import Server
from fedhen.errors import UserError
from fedhen.models.nesting import Family, load_weights
from fedhen.params import Weights
from fedhen.records import MODELS


def model_path(folder: Path, kind: str, tier: str) -> Path:
    """Where a run folder keeps that model."""
    return folder / MODELS / f"{kind}-{tier}.safetensors"


def save_models(folder: Path, models: Mapping[str, Server], about: Mapping[str, Mapping[str, Any]]) -> None:
    """Write every kind's model of every tier, with what is to be known about it."""
    (folder / MODELS).mkdir(exist_ok=True)
    for kind, tiers in models.items():
        for tier, weights in tiers.items():
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
            # One key: safetensors writes several in any order, and the same run must give the same bytes.
            text = json.dumps({"kind": kind, "tier": tier, **about[tier]})
            save_file(tensors, model_path(folder, kind, tier), metadata={"fedhen": text})


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
            about = json.loads(file.metadata()["fedhen"])
            return SavedModel(weights, list(about["exits"]), tuple(about["inputs"]), int(about["classes"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def ready_module(family: Family, tier: str, weights: Weights, held: Sequence[str]) -> nn.Module:
    """A module with these weights, which returns the logits of the exits that are held, shallowest first."""
    exits, module = family.exits(tier), family.build(tier)
    expected = module.state_dict()
    for name, tensor in weights.items():
        if name not in expected or expected[name].shape != tensor.shape:
            raise UserError(
                f"the saved weight {name!r} does not fit tier {tier!r} of this family: is it the run's own?"
            )
    load_weights(module, weights)
    places = [place for place, name in enumerate(exits) if name in held]
    if len(places) < len(exits):
        # An exit that the method does not hold was never trained.
        module.register_forward_hook(lambda _module, _inputs, logits: [logits[place] for place in places])
    return module.eval()

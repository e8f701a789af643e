"""The result is a model: the weights of each tier in safetensors, and ready modules from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def save_models(folder: Path, models: Mapping[str, Server], exits: Mapping[str, Sequence[str]]) -> None:
    """Write every kind's model of every tier."""
    (folder / MODELS).mkdir(exist_ok=True)
    for kind, tiers in models.items():
        for tier, weights in tiers.items():
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
            # One key: safetensors writes several in any order, and the same run must give the same bytes.
            about = json.dumps({"kind": kind, "tier": tier, "exits": list(exits[tier])})
            save_file(tensors, model_path(folder, kind, tier), metadata={"fedhen": about})


def read_model(folder: Path, kind: str, tier: str) -> tuple[Weights, list[str]]:
    """The saved weights of a model, and the exits that it holds."""
    path = model_path(folder, kind, tier)
    if not path.is_file():
        raise UserError(f"{path} is missing: has the run finished?")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["fedhen"])["exits"]  # noqa: SIM118
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

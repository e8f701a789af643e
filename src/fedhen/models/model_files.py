"""Saves the models of each tier as safetensors files, and builds ready modules from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from fedhen.data.spec import LARGEST_SIDE
from fedhen.errors import CheckpointError, one_line
from fedhen.fileio import untrusted
from fedhen.fileio.atomic import PART
from fedhen.models.family import Family, load_weights
from fedhen.models.model_card import ModelCard, read_card
from fedhen.params import TierModels, Weights, count_elements
from fedhen.runs.layout import MODELS


def model_path(folder: Path, kind: str, tier: str) -> Path:
    """Returns the path of a model in a run folder."""
    return folder / MODELS / f"{kind}-{tier}.safetensors"


def save_models(folder: Path, models: Mapping[str, TierModels], about: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the models of every owner and tier, each with its metadata."""
    (folder / MODELS).mkdir(exist_ok=True)
    for kind, tiers in models.items():
        for tier, weights in tiers.items():
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
            # One key only: safetensors orders several at random, and the same run must give the same bytes.
            text = json.dumps({"kind": kind, "tier": tier, **about[tier]})
            _save(model_path(folder, kind, tier), tensors, text)


def _save(path: Path, tensors: Weights, about: str) -> None:
    part = path.with_name(path.name + PART)
    try:
        save_file(tensors, part, metadata={"fedhen": about})
        part.replace(path)
    except SafetensorError as error:
        part.unlink(missing_ok=True)
        # safetensors reports a full disk in its message only.
        raise OSError(str(error)) from None


@dataclass(frozen=True)
class SavedModel:
    """A model that was read from a file."""

    weights: Weights
    card: ModelCard
    round: int = 0
    """The round that it is of; 0 if that is not known."""

    @property
    def exits(self) -> tuple[str, ...]:
        return self.card.exits

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.card.inputs

    @property
    def classes(self) -> int:
        return self.card.classes

    def check_size(self) -> None:
        """Raises a CheckpointError if a module that is built from the card could be far too large."""
        if max(self.inputs, default=0) > LARGEST_SIDE or self.classes > count_elements(self.weights):
            found = f"inputs of shape {self.inputs} and {self.classes} classes"
            raise CheckpointError(f"the saved model is damaged: {found} do not fit its weights")


def read_model(folder: Path, kind: str, tier: str) -> SavedModel:
    """Reads a model of a run folder. Raises a CheckpointError if the file is missing or damaged."""
    path = model_path(folder, kind, tier)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: has the run finished?")
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = untrusted.parse_json(file.metadata()["fedhen"])
        return make_saved_model(weights, about)
    except (SafetensorError, OSError, *untrusted.PARSE_ERRORS) as error:
        raise CheckpointError(f"{path} is damaged: {untrusted.describe_error(error)}") from None


def read_initial_weights(path: Path) -> Weights:
    """Reads weights to start from. Raises a CheckpointError if the file is missing or is not a safetensors file."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: name a safetensors file with weights to start from")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file, or is damaged: {untrusted.describe_error(error)}"
        ) from None


def make_saved_model(weights: Weights, about: Any) -> SavedModel:
    """Checks the metadata, which determine how large a module is built. Raises one of PARSE_ERRORS if it is damaged."""
    return SavedModel(weights, read_card(about))


def build_ready_module(family: Family, tier: str, weights: Weights, held: Sequence[str]) -> nn.Module:
    """Builds a module with these weights. It returns the logits of the exits in `held`, shallowest first."""
    exits, module = family.exits(tier), _build(family, tier)
    expected = module.state_dict()
    for name, tensor in weights.items():
        if name not in expected or expected[name].shape != tensor.shape:
            raise CheckpointError(
                f"the saved weight {name!r} does not fit tier {tier!r} of this family: pass the run's family"
            )
    if set(exits) == set(held) and (missing := dict(module.named_parameters()).keys() - weights.keys()):
        raise CheckpointError(
            f"the saved model of tier {tier!r} lacks the weight {min(missing)!r}: pass the run's family"
        )
    load_weights(module, weights)
    return keep_exits(module, exits, held).eval()


def keep_exits(module: nn.Module, exits: Sequence[str], held: Sequence[str]) -> nn.Module:
    """Lets a module with these exits return the logits of those in `held` only."""
    places = [place for place, name in enumerate(exits) if name in held]
    if len(places) < len(exits):
        # An exit that the method does not hold has never been trained.
        module.register_forward_hook(lambda _module, _inputs, logits: [logits[place] for place in places])
    return module


def _build(family: Family, tier: str) -> nn.Module:
    try:
        return family.build(tier)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(f"the model of tier {tier!r} cannot be built: {one_line(str(error))}") from None

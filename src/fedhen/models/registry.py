"""Makes model families by name."""

from __future__ import annotations

from fedhen.config.data_settings import OWN
from fedhen.config.settings import Config
from fedhen.errors import ConfigError, unknown_name
from fedhen.fileio.python_files import refuse_reference
from fedhen.models.family import Family
from fedhen.models.gpt import GPTShape, gpt
from fedhen.models.preact_resnet import Shape, preact_resnet

FAMILIES = ("preact-resnet", "gpt")


def make_family(config: Config, inputs: tuple[int, ...], classes: int) -> Family:
    """Returns the model family that a configuration names, for inputs of that shape."""
    model = config.model
    if model.family == OWN:
        raise ConfigError(
            "the model family of this run was passed from Python: pass it again as family=..., or with "
            "--family FILE.py:NAME"
        )
    refuse_reference(model.family, "family")
    if model.family not in FAMILIES:
        raise unknown_name("model family", model.family, FAMILIES)
    if model.family == "gpt":
        if len(inputs) != 1:
            raise ConfigError(f"gpt needs sequences of token ids, found inputs of shape {inputs}")
        if model.nesting != "depth":
            raise ConfigError(f"gpt is nested by depth: model.nesting = {model.nesting!r} is for preact-resnet")
        return gpt(GPTShape(classes, inputs[0], model.width, model.heads, model.exits))
    if len(inputs) != 3 or inputs[1] != inputs[2]:
        raise ConfigError(f"preact-resnet needs square images (channels, size, size), found inputs of shape {inputs}")
    shape = Shape(
        channels=inputs[0],
        size=inputs[1],
        classes=classes,
        widths=model.widths,
        blocks=model.blocks,
        strides=model.strides,
        exits=model.exits,
        groups=model.groups,
        exit_pool=model.exit_pool,
        exit_mix=model.exit_mix,
        final_norm=model.final_norm,
        nesting=model.nesting,
        rates=model.rates,
        scaler=model.scaler,
    )
    return preact_resnet(shape)

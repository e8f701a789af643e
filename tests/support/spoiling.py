"""Client apps of nodes that train correctly but send a wrong answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load, save

from fedhen.fleet import wire_format
from fedhen.fleet.app import recipe_app
from fedhen.fleet.apps import client_app
from fedhen.fleet.client_state import store_configs
from fedhen.params import Weights
from fedhen.wire.codecs import INDICES, SCALES, VALUES

Spoil = Callable[[RecordDict], Any]


def array_of(content: RecordDict) -> Array:
    record = content["model"]
    assert isinstance(record, ArrayRecord)
    return record["weights"]


def data_of(content: RecordDict) -> bytes:
    return array_of(content).data


def weights(content: RecordDict) -> Weights:
    return load(data_of(content))


def put(content: RecordDict, model: Weights | bytes) -> RecordDict:
    data = model if isinstance(model, bytes) else save(model)
    content["model"] = ArrayRecord({"weights": Array("uint8", (len(data),), "safetensors", data)})
    return content


def nan(content: RecordDict) -> RecordDict:
    model = weights(content)
    next(iter(model.values())).view(-1)[0] = math.nan
    return put(content, model)


def wrong_shape(content: RecordDict) -> RecordDict:
    model = weights(content)
    name = next(name for name, tensor in model.items() if tensor.dim() > 1)
    return put(content, {**model, name: model[name].flatten()})


def wrong_type(content: RecordDict) -> RecordDict:
    model = weights(content)
    # The order of the weights is arbitrary, and the places of an update have this type.
    name = next(name for name, tensor in model.items() if tensor.dtype != torch.int32)
    return put(content, {**model, name: model[name].view(torch.int32)})


def extra_name(content: RecordDict) -> RecordDict:
    return put(content, {**weights(content), "top.weight": torch.zeros(1)})


def missing_name(content: RecordDict) -> RecordDict:
    model = weights(content)
    del model[next(iter(model))]
    return put(content, model)


def enormous(content: RecordDict) -> RecordDict:
    return put(content, {**weights(content), "one": torch.zeros(2**24)})


def claims_to_be_enormous(content: RecordDict) -> RecordDict:
    """Sends a header that announces an exabyte."""
    head = b'{"w":{"dtype":"F32","shape":[1099511627776,1048576],"data_offsets":[0,4611686018427387904]}}'
    return put(content, len(head).to_bytes(8, "little") + head + b"\0" * len(data_of(content)))


def garbage(content: RecordDict) -> RecordDict:
    return put(content, bytes(range(256)) * (len(data_of(content)) // 256 + 1))


def another_record(content: RecordDict) -> RecordDict:
    return RecordDict({"model": MetricRecord({"a": 1.0}), "update": content["update"]})


def two_arrays(content: RecordDict) -> RecordDict:
    content["model"] = ArrayRecord({"weights": array_of(content), "more": Array("uint8", (1,), "x", b"1")})
    return content


def nothing(content: RecordDict) -> RecordDict:
    return RecordDict()


def new_record(content: RecordDict) -> RecordDict:
    content["more"] = ConfigRecord({"a": 1})
    return content


def no_loss(content: RecordDict) -> RecordDict:
    content["update"] = ConfigRecord({"format": wire_format.FORMAT, "loss": "low", "present": [0]})
    return content


def other_classes(content: RecordDict) -> RecordDict:
    content["update"] = ConfigRecord({"format": wire_format.FORMAT, "loss": 0.5, "present": [10**9]})
    return content


def steering(content: RecordDict) -> RecordDict:
    return RecordDict({"failure": ConfigRecord({"error": "\x1b[2J\n" * 1000})})


def raised(content: RecordDict) -> Error:
    return Error(code=2, reason="<class 'ValueError'>\n\x1b[2J")


def below_the_least(content: RecordDict) -> RecordDict:
    """Sends -128, which no 8-bit value of an update is."""
    model = weights(content)
    model[VALUES][0] = -128
    return put(content, model)


def negative_scale(content: RecordDict) -> RecordDict:
    model = weights(content)
    model[SCALES][-1] = -1.0
    return put(content, model)


def place_beyond_the_end(content: RecordDict) -> RecordDict:
    model = weights(content)
    model[INDICES][-1] = 2**31 - 1
    return put(content, model)


def places_out_of_order(content: RecordDict) -> RecordDict:
    """Sends a place twice."""
    model = weights(content)
    model[INDICES][1] = model[INDICES][0]
    return put(content, model)


def places_of_deeper_weights(content: RecordDict) -> RecordDict:
    """Sends the largest changes of the whole model in the place of those of the shared weights."""
    model = weights(content)
    number = len(model[INDICES])
    model[INDICES] = torch.arange(int(model[INDICES][-1]) - number, int(model[INDICES][-1])).to(torch.int32)
    return put(content, model)


def uncoded(content: RecordDict) -> RecordDict:
    """Sends weights as they are, although the run codes them."""
    return put(content, {"body.weight": torch.zeros(100), "top.weight": torch.zeros(1)})


def spoiling(spoil: Spoil) -> ClientApp:
    """Builds the client app of a node that trains correctly but sends a wrong answer."""
    honest, app = client_app(recipe_app()), ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return honest(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(spoil(honest(message, context).content), reply_to=message)

    return app


BY_ROUND = [nan, wrong_shape, extra_name, enormous, garbage]


def spoiling_by_round(name: str) -> ClientApp:
    """Builds an app whose complex node spoils every round in another way, but only in runs of this recipe."""
    honest, app = client_app(recipe_app()), ClientApp()
    app.query()(lambda message, context: honest(message, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply, order = honest(message, context), wire_format.read_order(message.content)
        # The honest app has stored the configuration if this order carried it.
        stored = store_configs(Path(str(context.node_config["state"]))).read(order.config_digest) or b""
        if context.node_config["tier"] != "complex" or f'recipe = "{name}"' not in stored.decode():
            return reply
        spoil = BY_ROUND[(int(message.metadata.group_id) - 1) % len(BY_ROUND)]
        return Message(spoil(reply.content), reply_to=message)

    return app

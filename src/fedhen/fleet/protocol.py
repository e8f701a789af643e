"""What server and nodes say to each other, as Flower's records, and nothing that is taken for more than it is.

Weights travel in safetensors' format: nothing is unpickled. Whoever receives weights knows which ones to expect, and
compares lengths, names, types and shapes before a byte becomes a number.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError, deserialize
from safetensors.torch import save
from torch import Tensor

from fedhen.algorithm.failures import LONGEST
from fedhen.errors import one_line
from fedhen.experiment.checkpoint_files import SAFETENSORS_TYPES
from fedhen.fileio import untrusted
from fedhen.params import Weights, count_bytes, is_finite

FORMAT = 2
WEIGHTS, SAFETENSORS, CONFIG_REQUEST = "weights", "safetensors", "config-request"
LONGEST_HEADER = 2**20
"""Bytes that names, shapes and types of a model may take."""
LONGEST_NAME, MOST_SAMPLES = 100, 2**40


class Malformed(ValueError):
    """A message that is not what it should be, and why, in one line."""


@dataclass(frozen=True)
class Identity:
    """What a node says of itself when it is asked."""

    tier: str
    samples: int
    name: str
    """That it keeps when it comes back under another node id."""
    place: int = -1
    """Which device of the fleet it would be, where it says so."""


@dataclass(frozen=True)
class Order:
    """What a node is to do in a round."""

    run: str
    """Which run's memory it is to use."""
    round: int
    device: int
    tier: str
    omega: float
    memory: int
    """The round after which its memory is what the server knows of; 0: it has none yet."""
    inputs: tuple[int, ...]
    classes: int
    config_digest: str
    """SHA-256 of the run's configuration as TOML, in hexadecimal."""
    config_text: str = ""
    """The configuration itself. Only the first order to a node carries it; the node stores it."""


@dataclass(frozen=True)
class Answer:
    """What a node sends back when it has trained."""

    weights: Weights
    change: Weights
    """By how much its memory changed, where that is sent."""
    loss: float
    present: tuple[int, ...]
    """The classes that it holds, where the server averages by them."""


def pack_question(config: str) -> RecordDict:
    """Who are you? With the run's configuration as TOML, since a trial's data follows from it."""
    return RecordDict({"question": ConfigRecord({"format": FORMAT, "config": config})})


def read_question(content: RecordDict) -> str:
    """The run's configuration."""
    try:
        return untrusted.check_text(_table(content, "question")["config"])
    except untrusted.PARSE_ERRORS as error:
        raise Malformed(f"the server's question cannot be read: {untrusted.describe_error(error)}") from None


def pack_identity(node: Identity) -> RecordDict:
    """A node's answer to the server's question who it is."""
    return RecordDict({"node": ConfigRecord({"format": FORMAT, **vars(node)})})


def read_identity(content: RecordDict) -> Identity:
    """Who a node says it is."""
    said = _table(content, "node")
    try:
        tier, name = untrusted.check_text(said["tier"]), untrusted.check_text(said["name"])
        samples, place = untrusted.check_int(said["samples"], 1), untrusted.check_int(said["place"], -1)
    except untrusted.PARSE_ERRORS as error:
        raise Malformed(f"it does not say who it is: {untrusted.describe_error(error)}") from None
    if samples > MOST_SAMPLES or max(len(tier), len(name)) > LONGEST_NAME:
        raise Malformed("what it says of itself is out of range")
    return Identity(one_line(tier), samples, one_line(name), place)


def pack_order(order: Order, model: ArrayRecord, mean: ArrayRecord | None) -> RecordDict:
    """A node's work for a round; the records of weights may be shared by all nodes of a tier."""
    said = {**vars(order), "format": FORMAT, "inputs": list(order.inputs)}
    parts: dict[str, ArrayRecord | ConfigRecord] = {"order": ConfigRecord(said), "model": model}
    return RecordDict({**parts, **({"mean": mean} if mean is not None else {})})


def read_order(content: RecordDict) -> Order:
    """A node's work for a round."""
    said = _table(content, "order")
    try:
        return Order(
            run=untrusted.check_text(said["run"]),
            round=untrusted.check_int(said["round"], 1),
            device=untrusted.check_int(said["device"]),
            tier=untrusted.check_text(said["tier"]),
            omega=untrusted.check_number(said["omega"]),
            memory=untrusted.check_int(said["memory"]),
            inputs=tuple(untrusted.check_int(n, 1) for n in said["inputs"]),
            classes=untrusted.check_int(said["classes"], 1),
            config_digest=_check_digest(said["config_digest"]),
            config_text=untrusted.check_text(said["config_text"]),
        )
    except untrusted.PARSE_ERRORS as error:
        raise Malformed(f"the server's order cannot be read: {untrusted.describe_error(error)}") from None


def digest_of(config_text: str) -> str:
    return hashlib.sha256(config_text.encode()).hexdigest()


def pack_config_request() -> RecordDict:
    """Builds the reply of a node that does not have the configuration of an order."""
    return RecordDict({CONFIG_REQUEST: ConfigRecord({"format": FORMAT})})


def is_config_request(content: RecordDict | str) -> bool:
    return not isinstance(content, str) and [*content] == [CONFIG_REQUEST]


def pack_answer(answer: Answer) -> RecordDict:
    """What a node has trained."""
    said = ConfigRecord({"format": FORMAT, "loss": answer.loss, "present": list(answer.present)})
    parts: dict[str, ArrayRecord | ConfigRecord] = {"update": said, "model": pack_weights(answer.weights)}
    return RecordDict({**parts, **({"change": pack_weights(answer.change)} if answer.change else {})})


def pack_failure(error: str) -> RecordDict:
    """What a node says that could not train."""
    return RecordDict({"failure": ConfigRecord({"error": error})})


def read_answer(content: RecordDict, model: Mapping[str, Tensor], change: Mapping[str, Tensor], classes: int) -> Answer:
    """What a node has trained, if it has the names, shapes and types that it was sent, and nothing else."""
    if "failure" in content:
        said = content["failure"]
        error = said.get("error") if isinstance(said, ConfigRecord) else None
        raise Malformed(one_line(str(error))[:LONGEST] or "it could not train")
    needed, known = {"update", "model"}, {"update", "model", *(["change"] if change else [])}
    if odd := sorted((needed - content.keys()) | (content.keys() - known)):
        raise Malformed(f"record {one_line(odd[0])[:LONGEST_NAME]!r} is {'missing' if odd[0] in needed else 'new'}")
    update = _table(content, "update")
    loss, present = update.get("loss"), update.get("present")
    if not isinstance(loss, float) or not isinstance(present, list):
        raise Malformed("its loss or its classes are missing")
    if not all(type(label) is int and 0 <= label < classes for label in present):
        raise Malformed("it holds classes that there are not")
    weights = unpack_weights(content["model"], model)
    if not is_finite(weights):
        # The server will drop it: what it remembers does not change, and it says nothing of that.
        change = {}
    remembered = unpack_weights(content.get("change"), change) if change else {}
    return Answer(weights, remembered, loss if math.isfinite(loss) else math.nan, tuple(sorted({*present})))


def pack_weights(weights: Mapping[str, Tensor]) -> ArrayRecord:
    """Weights as one array of Flower's, in safetensors' format: every array costs requests of its own."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})
    return ArrayRecord({WEIGHTS: Array("uint8", (len(content),), SAFETENSORS, content)})


def unpack_weights(record: object, like: Mapping[str, Tensor]) -> Weights:
    """Weights with just the names, shapes and types of others: all is compared before anything becomes a tensor."""
    if not isinstance(record, ArrayRecord) or [*record] != [WEIGHTS] or record[WEIGHTS].stype != SAFETENSORS:
        raise Malformed("there are no weights")
    data, expected = record[WEIGHTS].data, count_bytes(like)
    if not expected <= len(data) <= expected + LONGEST_HEADER:
        raise Malformed(f"its weights are {len(data)} bytes instead of {expected}")
    try:
        found = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise Malformed(f"its weights cannot be read: {one_line(str(error))[:LONGEST_NAME]}") from None
    if odd := sorted(found.keys() ^ like.keys()):
        name = one_line(odd[0])[:LONGEST_NAME]
        raise Malformed(f"weight {name!r} is {'missing' if odd[0] in like else 'not one that was sent'}")
    for name, tensor in like.items():
        if found[name]["dtype"] != SAFETENSORS_TYPES[tensor.dtype]:
            raise Malformed(f"weight {name!r} is of another type than was sent")
        if (shape := tuple(found[name]["shape"])) != tuple(tensor.shape):
            raise Malformed(f"weight {name!r} has shape {str(shape)[:60]}, sent was {tuple(tensor.shape)}")
    # In the order of the model, whatever order they came in.
    return {name: _tensor(found[name]["data"], tensor) for name, tensor in like.items()}


def _check_digest(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", untrusted.check_text(value)):
        raise ValueError("the configuration's digest is not a SHA-256 digest")
    return str(value)


def _tensor(data: bytearray, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.zeros_like(like)
    # A copy of its own, which may be written to.
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape).to(like.device)


def _table(content: RecordDict, name: str) -> Mapping[str, Any]:
    found = content.get(name)
    if not isinstance(found, ConfigRecord):
        raise Malformed(f"there is no record {name!r}")
    if found.get("format") != FORMAT:
        raise Malformed("it speaks another format: install the same version of fedhen on server and nodes")
    return found

"""The messages about scores on a device's own test data: an order to score models, and the sums that come back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedhen.fileio.untrusted import PARSE_ERRORS, check_text, describe_error, parse_json
from fedhen.fleet.wire_format import FORMAT, Malformed, Order, check_hexadecimal, pack_order, read_table


def pack_scoring(order: Order, model: ArrayRecord, owners: Sequence[str], start_key: str) -> RecordDict:
    """Builds a node's order to score models on its own test data.

    `start_key` is the key of the device's streams before the first round, empty if no model needs it.
    """
    content = pack_order(order, model)
    content["scoring"] = ConfigRecord({"format": FORMAT, "owners": list(owners), "start_key": start_key})
    return content


def read_scoring(content: RecordDict) -> tuple[tuple[str, ...], str]:
    """Returns whose models a node is to score, and the key of its streams before the first round."""
    values = read_table(content, "scoring")
    try:
        owners, key = [check_text(owner) for owner in values["owners"]], check_text(values["start_key"])
        return tuple(owners), check_hexadecimal(key) if key else ""
    except PARSE_ERRORS as error:
        raise Malformed(f"the server's order to score cannot be read: {describe_error(error)}") from None


def pack_sums(sums: Mapping[str, object]) -> RecordDict:
    """Builds a node's reply: by owner, what its test data adds to each metric."""
    return RecordDict({"scores": ConfigRecord({"format": FORMAT, "sums": json.dumps(sums)})})


def read_sums(content: RecordDict, owners: Sequence[str], like: Sequence[Tensor]) -> dict[str, list[list[float]]]:
    """Reads a node's sums by owner; those of an owner are empty if the node has no test data.

    Raises `Malformed` unless there are numbers of the shapes of `like` for every metric and owner.
    """
    try:
        found = parse_json(check_text(read_table(content, "scores")["sums"]))
        if [*found] != [*owners]:
            raise ValueError("other models were scored")
        for sums in found.values():
            tensors = [torch.tensor(each, dtype=torch.float64) for each in sums]
            if sums and [each.shape for each in tensors] != [each.shape for each in like]:
                raise ValueError("the sums of a metric have another shape")
            if not all(bool(torch.isfinite(each).all()) for each in tensors):
                raise ValueError("a sum is not finite")
    except PARSE_ERRORS as error:
        raise Malformed(f"its scores cannot be read: {describe_error(error)}") from None
    return dict(found)

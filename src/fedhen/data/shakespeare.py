"""Reads Shakespeare by speaking role, for the prediction of the next character: each role is a device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedhen.data.dataset import Data, Index
from fedhen.data.published import SHAKESPEARE, require
from fedhen.data.spec import DataSpec, InputSpec
from fedhen.errors import DataError

PADDING = -100
"""The target of a position after the end of a text: torch's losses ignore it."""
HELD_OUT = 10
"""One character in so many is held out for testing: the last ones of each role."""


@dataclass(frozen=True)
class RoleTexts:
    """Windows of the roles' texts. The target of a position is the character after it, or PADDING."""

    x: Tensor
    """(windows, context): characters, each as its place in the vocabulary."""
    y: Tensor
    shards: tuple[Index, ...]
    """The training windows of each role."""
    x_test: Tensor
    y_test: Tensor
    test_shards: tuple[Index, ...]
    """The test windows of each role; a role of few words may have none."""
    roles: tuple[str, ...]
    vocabulary: str
    """The characters of the whole text, in order."""


def load_shakespeare(root: Path, roles: int, context: int) -> Data:
    """Returns the data of the largest roles, each a device.

    Roles are dealt by size to four groups in turns, to and fro, and the devices are those of the groups one after the
    other. So tiers, which are given to devices in order, have roles of all sizes.
    """
    files = SHAKESPEARE
    texts = read_shakespeare(root / files.folder / next(iter(files.train)), roles, context)
    group = [min(place % 8, 7 - place % 8) for place in range(roles)]
    order = sorted(range(roles), key=lambda role: (group[role], role))
    shards, test_shards = (tuple(own[role] for role in order) for own in (texts.shards, texts.test_shards))
    about = DataSpec((InputSpec(alphabet=texts.vocabulary, padding=0),), tuple(texts.vocabulary), "next character")
    return Data(texts.x, texts.y, texts.x_test, texts.y_test, 0, shards, test_shards, about=about)


def read_shakespeare(path: Path, devices: int, context: int) -> RoleTexts:
    """Reads the published file: the `devices` largest roles, in windows of `context` characters."""
    require(SHAKESPEARE, path)
    return split_by_role(path.read_text(encoding="utf-8"), devices, context)


def split_by_role(text: str, devices: int, context: int) -> RoleTexts:
    """Deals a text to its largest roles by number of characters, ties by name. The last tenth of each is for testing.

    Windows overlap by one character, the last target of one and the first input of the next, so that every character
    of a part but its first is a target exactly once.
    """
    vocabulary, speeches = "".join(sorted(set(text))), join_speeches(text)
    roles = sorted(speeches, key=lambda role: (-len(speeches[role]), role))[:devices]
    if len(roles) < devices:
        raise DataError(f"devices.number={devices} is more than the {len(roles)} roles that speak: lower it")
    ends = {role: len(speeches[role]) - len(speeches[role]) // HELD_OUT for role in roles}
    for role in roles:
        if ends[role] < 2:
            raise DataError(f"the role {role!r} has too little text to train on: lower devices.number={devices}")
    x, y, shards = _cut([speeches[role][: ends[role]] for role in roles], vocabulary, context)
    x_test, y_test, test_shards = _cut([speeches[role][ends[role] :] for role in roles], vocabulary, context)
    return RoleTexts(x, y, shards, x_test, y_test, test_shards, tuple(roles), vocabulary)


def join_speeches(text: str) -> Mapping[str, str]:
    """Returns role -> its speeches, one below the other.

    Speeches are separated by empty lines, and each begins with a line `ROLE:`. Roles that are named but say nothing are
    left out.
    """
    speeches: dict[str, list[str]] = {}
    for block in re.split(r"\n{2,}", text.strip("\n")):
        name, _, speech = block.partition("\n")
        if name.endswith(":") and speech:
            speeches.setdefault(name[:-1], []).append(speech)
    return {role: "\n".join(parts) for role, parts in speeches.items()}


def _cut(texts: Sequence[str], vocabulary: str, context: int) -> tuple[Tensor, Tensor, tuple[Index, ...]]:
    """Returns inputs, targets and each text's windows. A text of one character has none: nothing follows it."""
    places = {character: place for place, character in enumerate(vocabulary)}
    inputs, targets, shards, begin = [], [], [], 0
    for text in texts:
        codes = np.array([places[character] for character in text], dtype=np.int64)
        windows = -(-max(len(codes) - 1, 0) // context)
        missing = windows * context - max(len(codes) - 1, 0)
        # What stands at the end of a short input does not matter: nothing before it sees it, and its target is padding.
        inputs.append(np.pad(codes[:-1], (0, missing)).reshape(windows, context))
        targets.append(np.pad(codes[1:], (0, missing), constant_values=PADDING).reshape(windows, context))
        shards.append(np.arange(begin, begin + windows, dtype=np.int64))
        begin += windows
    x, y = (torch.from_numpy(np.concatenate(parts)) for parts in (inputs, targets))
    return x, y, tuple(shards)

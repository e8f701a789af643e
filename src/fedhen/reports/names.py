"""Words that the tables, charts and pages of all reports share."""

from __future__ import annotations

from collections.abc import Sequence

from fedhen.runs.layout import SERVER
from fedhen.runs.reader import Run

GAIN = "Gain"
OWNER_NAMES = {"devices": "all-devices average", "server": "server model"}
OWNER_LABELS = {"devices": "all devices", "server": "server"}
OWN_NAME, OWN_LABEL = "devices’ own models", "devices’ own"
"""The same for runs whose server has no whole model."""
SEEDS = "n runs with different seeds: mean ± sample standard deviation"
SEEDS_TO_TARGET = f"{SEEDS}, where all of them reached the target."
LOWER_BOUND = (
    "A “>” marks a lower bound: some run of another method ended short of the target, and counts with all that it had "
    "spent by then."
)


def name_owner(runs: Sequence[Run], owner: str) -> str:
    """Returns whose models the scores of an owner are about; the devices' own if the server has no whole model."""
    own = dict.fromkeys(run.method for run in runs if run.scores_own_models) if owner == SERVER else {}
    if not own:
        return OWNER_NAMES[owner]
    all_own = all(run.scores_own_models for run in runs)
    return OWN_NAME if all_own else f"{OWNER_NAMES[owner]}; of {', '.join(own)} {OWN_NAME}"


def label_owner(runs: Sequence[Run], owner: str) -> str:
    """Returns the same as `name_owner` in a word or two, for the rows of tables."""
    return OWN_LABEL if name_owner(runs, owner) == OWN_NAME else OWNER_LABELS[owner]


def capitalise(text: str) -> str:
    """Returns a text with a capital first letter and the other letters as they are."""
    return text[:1].upper() + text[1:]

"""Words that the tables, charts and pages of all reports share."""

from __future__ import annotations

GAIN = "Gain"
OWNER_NAMES = {"devices": "all-devices average", "server": "server model"}
OWNER_LABELS = {"devices": "all devices", "server": "server"}
SEEDS = "n runs with different seeds: mean ± sample standard deviation"
SEEDS_TO_TARGET = f"{SEEDS}, where all of them reached the target."
LOWER_BOUND = (
    "A “>” marks a lower bound: some run of another method ended short of the target, and counts with all that it had "
    "spent by then."
)


def capitalise(text: str) -> str:
    """Returns a text with a capital first letter and the other letters as they are."""
    return text[:1].upper() + text[1:]

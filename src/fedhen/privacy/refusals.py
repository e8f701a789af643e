"""What cannot be combined with a mechanism, because its promise would not hold."""

from __future__ import annotations

from fedhen.config.settings import Config


def refusals(config: Config) -> list[str]:
    """Returns why a run cannot keep what its mechanism promises, a line for each reason; empty if it can."""
    if config.privacy.mechanism == "none":
        return []
    found = []
    if config.local.name in ("scaffold", "feddyn"):
        found.append(
            f"local.name={config.local.name} keeps a memory on the server that has no bound: set local.name=plain"
        )
    return found

"""Named experiments: functions that return a whole configuration."""

from __future__ import annotations

from collections.abc import Callable

from fedhen.config import (
    Config,
    DataConfig,
    DevicesConfig,
    EvaluationConfig,
    ModelConfig,
    RuntimeConfig,
    SplitConfig,
    TrainingConfig,
)
from fedhen.errors import unknown


def digits() -> Config:
    """FedHeN's effect in two minutes on two cores: 8×8 digits on 20 devices, half of them simple (embedded data)."""
    return Config(
        recipe="digits",
        rounds=40,
        data=DataConfig(name="digits", limit=1400),
        split=SplitConfig(kind="dirichlet", alpha=0.3),
        devices=DevicesConfig(number=20, active=6),
        model=ModelConfig(
            widths=(16, 32, 64, 128), blocks=(1, 1, 1, 1), strides=(1, 2, 2, 1), exit_pool=1, exit_mix=0.5
        ),
        training=TrainingConfig(epochs=3, batch_size=14),
        evaluation=EvaluationConfig(every=1),
        # So small a net gains nothing from a second thread, and the numbers then do not depend on the number of cores.
        runtime=RuntimeConfig(threads=1),
        targets={"simple": (90.0, 88.0), "complex": (88.0,)},
    )


RECIPES: dict[str, Callable[[], Config]] = {"digits": digits}


def recipe_named(name: str) -> Config:
    """The configuration of that name."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]()

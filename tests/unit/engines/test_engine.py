"""What the GPU engine cannot train is known before it is started."""

from __future__ import annotations

import pytest

from fedhen.algorithm.personal import make_personal
from fedhen.config.settings import Config
from fedhen.config.training_settings import TrainingConfig
from fedhen.config.validation import from_mapping
from fedhen.engines.engine import has_triton, why_no_kernels


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        (TrainingConfig(optimizer="adam"), "has no kernel for training.optimizer=adam"),
        (TrainingConfig(optimizer="adamw", optimizer_state="device"), "has no kernel for training.optimizer=adamw"),
        (TrainingConfig(momentum=0.9, optimizer_state="device"), "has no kernel for training.optimizer_state=device"),
        (TrainingConfig(momentum=0.9), "" if has_triton() else "needs Triton, which is not installed"),
    ],
    ids=["adam", "adamw", "kept momentum", "sgd"],
)
def test_settings_without_a_kernel(training: TrainingConfig, reason: str) -> None:
    assert why_no_kernels(training, make_personal(Config())) == reason


@pytest.mark.parametrize(("name", "has_kernel"), [("finetune", True), ("ditto", False), ("fedbabu", False)])
def test_personal_models_without_a_kernel(name: str, has_kernel: bool) -> None:
    """Fine-tuning changes nothing in a round; a second copy and weights that never travel need the plain loop."""
    config = from_mapping({"personal": {"name": name}})
    reason = "" if has_kernel else f"has no kernel for personal.name={name}"
    assert why_no_kernels(config.training, make_personal(config)) == reason or (has_kernel and not has_triton())

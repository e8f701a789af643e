"""What the GPU engine cannot train is known before it is started."""

from __future__ import annotations

import pytest

from fedhen.config.settings import TrainingConfig
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
    assert why_no_kernels(training) == reason

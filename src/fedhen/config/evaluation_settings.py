"""The settings of evaluation, and of when a run stops before its last round."""

from __future__ import annotations

from dataclasses import dataclass

from fedhen.config.setting import setting


@dataclass(frozen=True)
class EvaluationConfig:
    """When and how models are scored on the test set."""

    every: int = setting(5, "rounds between evaluations; the last round is always evaluated", least=1)
    devices: bool = setting(
        True,
        "also score the average of all devices' last models, which the paper reports; false: their models are not kept",
    )
    own: bool = setting(
        False,
        "also score the server's model of each device's tier on the device's own test data, recorded as `own`; test "
        "data that does not come split is dealt in the class mix of the device's training data",
    )
    local_epochs: int = setting(
        0,
        "own: epochs of training on a device's data alone, from the initial weights, whose scores after the last round "
        "stand beside; 0: not at all",
        least=0,
    )
    ensemble: bool = setting(False, "also score the mean prediction of a model's exits, recorded as `ensemble`")
    batch_size: int = setting(0, "test images scored at a time; 0: 1000 on a GPU, 100 on a CPU", least=0)
    validation: float = setting(
        0.0,
        "share of the training examples that is held out to choose the best round and to stop, recorded as "
        "`validation`; 0: both look at the test set",
        least=0,
        most=0.9,
    )


@dataclass(frozen=True)
class StopConfig:
    """When a run stops before its last round, by the models that reports show. It may change on resume."""

    until: dict[str, float] = setting(
        {},
        "value of the primary metric by tier; the run stops after the first evaluation in which all are reached; "
        "shares like accuracy in percent",
    )
    patience: int = setting(0, "stop after this many evaluations in a row that improve no tier; 0: never", least=0)

"""`fedhen evaluate --exits`: what early exits of a run's last tier give."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fedhen.deploy.manifest import NEVER, ExitStudy, ThresholdRow
from fedhen.runs.reader import read_run
from fedhen.runs.records import MetricInfo

if TYPE_CHECKING:
    from fedhen.experiment.build import OwnParts


def show_exits(options: argparse.Namespace, own: OwnParts) -> int:
    """Prints the score of every exit, what thresholds give, and what one gives that was chosen on other examples."""
    from fedhen.api.deploying import study

    metric = read_run(options.run_folder).metric
    found = study(options.run_folder, family=own.family, data=own.data, task=own.task, data_dir=options.data_dir)
    for line in describe_study(found.study, metric):
        print(line)
    return 0


def describe_study(study: ExitStudy, metric: MetricInfo) -> list[str]:
    """Returns the study as lines of text."""
    most = max(study.operations.values()) or 1
    lines = [f"{'exit':12}{metric.name:>14}{'operations':>12}"]
    lines += [
        f"{exit:12}{metric.format(score):>14}{100 * study.operations[exit] / most:>10.1f} %"
        for exit, score in study.score.items()
    ]
    lines += ["", f"{'threshold':12}{metric.name:>14}{'operations':>12}{'leave early':>13}"]
    lines += [_row(row, metric) for row in study.table]
    if study.overthinking is not None:
        lines += ["", f"right at the first exit and wrong at the last: {100 * study.overthinking:.1f} %"]
    if study.held_out is not None:
        lines += [
            f"threshold without loss on one half: {_threshold(study.chosen)}; on the other half:",
            _row(study.held_out, metric),
            f"{'last exit':12}{metric.format(study.last_on_held_out):>14}{100:>10.1f} %",
        ]
    else:
        lines.append(f"{study.examples} test examples are too few to choose a threshold")
    return lines


def _row(row: ThresholdRow, metric: MetricInfo) -> str:
    return (
        f"{_threshold(row.threshold):12}{metric.format(row.score):>14}{100 * row.operations:>10.1f} %"
        f"{100 * row.early:>11.1f} %"
    )


def _threshold(value: float) -> str:
    return "never" if value >= NEVER else f"{value:g}"

"""The lines that show the progress of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedhen.runs.records import ACCURACY, MetricInfo
from fedhen.tracking.console import Bars, Lines, Pace, is_notebook, make_display
from fedhen.tracking.observers import RunInfo

RMSE = MetricInfo("rmse", "", "lower")
TIMING = {"total": 2.0}


def record(number: int, **scores: Any) -> dict[str, Any]:
    return {"round": number, "active": [0], "dropped": [], **scores}


def both(simple: float | None, complex_: float | None = None) -> dict[str, dict[str, float | None]]:
    """Scores in which the server's, which are not shown, are 9."""
    return {"server": {"simple": 9.0, "complex": 9.0}, "devices": {"simple": simple, "complex": complex_}}


def test_lines_of_a_regression(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines({"fedhen": 2}, RMSE)
    lines.start(RunInfo("fedhen", 2))
    lines.round(record(1, metrics={"rmse": both(5.52, None), "mae": both(4.0, 3.0)}), TIMING)
    lines.round(record(2, metrics={"rmse": both(0.123456, 1234.56)}), TIMING)
    assert capsys.readouterr().err.splitlines() == [
        "fedhen  round 1/2  simple 5.52  complex not finite  2.00 s a round  2 s left",
        "fedhen  round 2/2  simple 0.1235  complex 1235  2.00 s a round  took 4 s",
    ]


def test_lines_of_a_classification(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines({"fedhen": 1})
    lines.start(RunInfo("fedhen", 1))
    lines.round(record(1, accuracy=both(0.8444, 0.5), metrics={"loss": both(1.0)}), TIMING)
    assert capsys.readouterr().err == "fedhen  round 1/1  simple 84.4 %  complex 50.0 %  2.00 s a round  took 2 s\n"


def test_lines_without_scores(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines({"fedhen": 1})
    lines.start(RunInfo("fedhen", 1))
    lines.round(record(1), TIMING)
    assert capsys.readouterr().err == "fedhen  round 1/1  2.00 s a round  took 2 s\n"


def test_bars_of_a_regression() -> None:
    bars = Bars({f"seed {seed}": 2 for seed in range(4)}, RMSE)
    bars.start(RunInfo("seed 1", 2))
    bars.round(record(1, metrics={"rmse": both(5.52, 4.0)}), TIMING)
    shown = {task.description: task.fields["scores"] for task in bars.progress.tasks}
    assert shown["seed 0"] == "waiting" and shown["seed 1"] == "simple 5.52  complex 4" and shown["all"] == ""


def test_the_last_scores_stay_until_there_are_others() -> None:
    pace = Pace(3, MetricInfo("micro_f1", "%"))
    pace.add(record(1, metrics={"micro_f1": both(0.25, 0.5)}), TIMING)
    pace.add(record(2), TIMING)
    assert pace.scores == "simple 25.0 %  complex 50.0 %"
    # The primary metric is shown, also if accuracy is a further one.
    pace.add(record(3, accuracy=both(0.9, 0.9), metrics={"micro_f1": both(0.375, 0.5)}), TIMING)
    assert pace.scores == "simple 37.5 %  complex 50.0 %"


def test_a_metric_that_was_not_announced_is_shown_without_unit() -> None:
    pace = Pace(1, ACCURACY)
    pace.add(record(1, metrics={"rmse": both(0.5, 0.25)}), TIMING)
    assert pace.scores == "simple 0.5  complex 0.25"
    pace = Pace(1, RMSE)
    pace.add(record(1, accuracy=both(0.5, 0.25)), TIMING)
    assert pace.scores == "simple 50.0 %  complex 25.0 %"


def test_no_runs_are_shown_without_complaint() -> None:
    """As for a command that finds all its runs finished."""
    with Lines({}), Bars({}):
        pass


def test_percents_are_rounded_as_before_there_were_other_metrics() -> None:
    """The shares of 10000 test images: a value may be halfway between two tenths of a percent."""
    assert all(ACCURACY.format(n / 10000) == f"{100 * (n / 10000):.1f} %" for n in range(10001))


def test_a_resumed_run_starts_where_it_was() -> None:
    bars = Bars({"fedhen": 8})
    bars.start(RunInfo("fedhen", 8, after=5))
    assert [task.completed for task in bars.progress.tasks] == [5]
    bars.round(record(6), TIMING)
    assert [(task.completed, task.fields["left"]) for task in bars.progress.tasks] == [(6, "4 s left")]


def test_a_table_in_a_notebook_is_updated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What IPython is given to show: plain text and HTML, under one id. Only a notebook's shell has a kernel."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell.instance()
    try:
        assert not is_notebook()
        monkeypatch.setattr(shell, "kernel", object(), raising=False)
        assert is_notebook()
        with capture_output() as shown, make_display({"<mine>": 4}, RMSE, lines=False) as table:
            table.start(RunInfo("<mine>", 4, after=2))
            assert [each.data["text/plain"] for each in shown.outputs] == ["<mine>  round 0/4  waiting"]
            table.round(record(3, metrics={"rmse": both(5.52, 4.0)}), TIMING)
            table.round(record(4, metrics={"rmse": both(2.5, 3.0)}), TIMING)
        with capture_output() as nothing, make_display({"mine": 4}, RMSE, quiet=True) as silent:
            silent.start(RunInfo("mine", 4))
    finally:
        InteractiveShell.clear_instance()
    last = shown.outputs[-1]
    assert last.data["text/plain"] == "<mine>  round 4/4  simple 2.5  complex 3  2.00 s a round  took 4 s"
    assert '<progress value="4" max="4"></progress>' in last.data["text/html"]
    assert "<td>&lt;mine&gt;</td>" in last.data["text/html"] and "<mine>" not in last.data["text/html"]
    assert len({each.transient["display_id"] for each in shown.outputs}) == 1 and not nothing.outputs
    assert [each.update for each in shown.outputs] == [False] + [True] * (len(shown.outputs) - 1)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_from_python_on_a_terminal_only(terminal: bool, tmp_path: Path) -> None:
    code = (
        "import sys, fedhen\n"
        "from support.families import two_exits\n"
        "from support.trackers import SMALL, data\n"
        "for progress in (False, True):\n"
        "    fedhen.train(two_exits(), data(), rounds=2, **{**SMALL, 'progress': progress})\n"
        "    print('---', file=sys.stderr, flush=True)\n"
    )
    reader, writer = os.openpty() if terminal else os.pipe()
    tests = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with os.fdopen(reader, "rb", buffering=0) as shown:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stderr=writer, env={**os.environ, "PYTHONPATH": tests, "TERM": "xterm"}
        )
        os.close(writer)
        text = b""
        with suppress(OSError):  # how a terminal says that nobody writes any more
            while part := shown.read(1 << 16):
                text += part
        assert process.wait() == 0, text
    off, on, _ = text.split(b"---")
    assert off == b"" and (b"2/2" in on if terminal else not on.strip())

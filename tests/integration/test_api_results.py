"""What a run tells about itself: history, curves, scores, and its looks in a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from torch import Tensor

import fedhen
from support.points import SMALL, family, points


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds, the last two of which are evaluated."""
    place = tmp_path_factory.mktemp("runs") / "run"
    fedhen.train(family(), points(), run_dir=place, **SMALL)
    return place


def test_the_history_is_what_the_files_say(folder: Path) -> None:
    run = fedhen.open_run(folder)
    records = [json.loads(line) for line in (folder / "rounds.jsonl").open()]
    timing = [json.loads(line) for line in (folder / "timing.jsonl").open()]
    table = pandas.DataFrame(run.history)
    assert [*table] == [
        *("round", "loss", "bytes", "seconds"),
        *("devices simple accuracy", "devices complex accuracy", "server simple accuracy", "server complex accuracy"),
    ]
    assert [*table["round"]] == [1, 2, 3] and [*table["loss"]] == [record["loss"] for record in records]
    assert [*table["seconds"]] == [each["total"] for each in timing]
    down, up = records[0]["bytes"]["down"], records[0]["bytes"]["up"]
    assert table["bytes"][0] == down["simple"] + down["complex"] + up["simple"] + up["complex"]
    assert [*table["server complex accuracy"].isna()] == [True, False, False]
    assert table["server complex accuracy"][2] == records[2]["accuracy"]["server"]["complex"]
    assert run.rounds == records and run.accuracy == records[2]["accuracy"]


@pytest.mark.process
def test_a_saved_run_is_read_and_drawn_without_torch(folder: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        f"import fedhen\nrun = fedhen.open_run({str(folder)!r})\n"
        "assert len(run.history) == 3 and run.plot() is not None and repr(run) and run._repr_html_()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plot_has_the_curves_of_the_scores(folder: Path) -> None:
    run = fedhen.open_run(folder)
    spent = 0
    for over, owner in (("rounds", "devices"), ("bytes", "server")):
        figure = run.plot(over, owner if owner == "server" else None)  # type: ignore[arg-type]
        for panel, tier in zip(figure.axes, ("simple", "complex"), strict=True):
            (line,) = panel.get_lines()  # and no targets, since the configuration has none
            scores = [100 * row["accuracy"][owner][tier] for row in run.rounds[1:]]
            assert line.get_ydata() == pytest.approx(scores)
            assert over == "bytes" or np.asarray(line.get_xdata()).tolist() == [2, 3]
            spent += len(scores)
    assert spent == 8
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(fedhen.ConfigError, match="unknown measure 'time': choose from rounds, bytes"):
        run.plot("time")  # type: ignore[arg-type]


def test_a_run_has_a_short_repr(folder: Path) -> None:
    run = fedhen.open_run(folder)
    simple, complex_ = (f"{100 * run.accuracy['devices'][tier]:.1f} %" for tier in ("simple", "complex"))
    scores = f"accuracy (all devices): simple {simple}, complex {complex_}"
    assert repr(run) == f"<Run: fedhen on custom, seed 0, 3 of 3 rounds; {scores}; {folder}>"


class Odd(fedhen.Classification):
    """A metric with a name that is markup."""

    def __init__(self) -> None:
        self.name = "odd"
        super().__init__([fedhen.make_mean_metric("<b>&", lambda output, y: (output.argmax(1) == y).float(), unit="%")])


def test_everything_in_a_notebook_is_escaped(tmp_path: Path) -> None:
    place = tmp_path / "<script>alert(1)<"
    run = fedhen.train(family(), points(), task=Odd(), run_dir=place, **SMALL)
    shown = run._repr_html_()
    assert "<script" not in shown and "<b>&" not in shown
    assert "&lt;b&gt;&amp;, server" in shown and "&lt;script&gt;" in shown
    assert shown.count("<tr>") == 3 and f"{100 * run.metrics['<b>&']['server']['simple']:.1f} %" in shown
    found = fedhen.compare(fedhen.Config(), ["fedhen"], family=family(), data=points(), task=Odd(), **SMALL)
    assert "&lt;b&gt;&amp;" in found._repr_html_() and "<b>" not in found._repr_html_()


def test_data_without_tests_trains_without_scores(tmp_path: Path) -> None:
    run = fedhen.train(family(), points(tests=0), run_dir=tmp_path / "run", **SMALL)
    assert [*pandas.DataFrame(run.history)] == ["round", "loss", "bytes", "seconds"] and run.metrics == {}
    assert repr(run) == f"<Run: fedhen on custom, seed 0, 3 of 3 rounds; {tmp_path / 'run'}>"
    assert run.model("simple") is not None and "No scores" in fedhen.report(tmp_path / "run")
    with pytest.raises(fedhen.DataError, match="no accuracies: its metrics are none, since there is no test data"):
        _ = run.accuracy
    with pytest.raises(fedhen.DataError, match="nothing to plot"):
        run.plot()
    with pytest.raises(fedhen.DataError, match="no test data to score"):
        fedhen.evaluate(tmp_path / "run", family=family(), data=points(tests=0))


@pytest.mark.slow
def test_a_report_takes_what_the_command_takes(folder: Path, tmp_path: Path) -> None:
    """Targets by hand, the server's models, the first rounds, and a folder that contains runs."""
    text = fedhen.report(folder.parent, out=tmp_path, targets={"simple": [1.0]}, of="server", rounds=2)
    assert "Rounds to target (server model)" in text
    assert "Only the first 2 of 3 rounds are used" in text and "1.0 %" in text
    with pytest.raises(fedhen.ConfigError, match="rounds is 0: it must be at least 1"):
        fedhen.report(folder, out=tmp_path, rounds=0)


def test_models_of_a_saved_run_need_its_family(folder: Path) -> None:
    with pytest.raises(fedhen.FedhenError, match="passed from Python"):
        fedhen.open_run(folder).model("simple")
    run, data = fedhen.open_run(folder, family=family()), points()
    output: Tensor = run.model("simple")(data.x_test)[-1]
    assert (output.argmax(1) == data.y_test).float().mean().item() == pytest.approx(run.accuracy["server"]["simple"])

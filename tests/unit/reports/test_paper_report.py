"""The paper's figures, and the page, Markdown and LaTeX that are written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedhen.config.recipes import load_recipe
from fedhen.config.toml import to_toml
from fedhen.errors import FedhenError
from fedhen.reports.curves import choose_looks
from fedhen.reports.paper.drawing import draw_figure
from fedhen.reports.paper.figures import PaperFigure, make_figures
from fedhen.reports.paper.report import PAPER_RUNS, write_paper
from fedhen.reports.paper.selection import select_runs
from fedhen.reports.paper.values import METHODS
from fedhen.runs.reader import Run, read_run
from support.pages import Checker
from support.paper_runs import cells, federated, from_the_paper, make_all_runs, one_place, tables
from support.report_fixtures import write_folder


@pytest.fixture(scope="module")
def all_runs() -> list[Run]:
    return make_all_runs()


def drawn(runs: Sequence[Run]) -> list[tuple[PaperFigure, Figure]]:
    return [(each, draw_figure(each)) for each in make_figures(select_runs(runs), "devices")]


@pytest.mark.slow
def test_figures_are_arranged_as_in_the_paper(all_runs: list[Run]) -> None:
    titles = [[axis.get_title() for axis in figure.axes] for _, figure in drawn(all_runs)]
    assert titles == [
        ["CIFAR-10 IID, simple model", "CIFAR-10 IID, complex model"],
        ["CIFAR-10 non-IID, simple model", "CIFAR-10 non-IID, complex model"],
        [f"CIFAR-100 {split}, {tier} model" for split in ("IID", "non-IID") for tier in ("simple", "complex")],
    ]


@pytest.mark.slow
def test_curves_targets_and_references_are_drawn_where_they_belong(all_runs: list[Run]) -> None:
    (_, figure), *_ = drawn(all_runs)
    simple = figure.axes[0]
    curves, levels = simple.lines[:3], simple.lines[3:]
    assert [line.get_color() for line in curves] == [choose_looks([method])[method][0] for method in METHODS]
    assert curves[0].get_zorder() > curves[1].get_zorder() > curves[2].get_zorder()
    assert curves[0].get_ydata()[288] == pytest.approx(84.4)  # type: ignore[index]
    assert curves[0].get_xdata()[288] == 289  # type: ignore[index]
    assert [line.get_ydata()[0] for line in levels] == [84.4, 83.4, 75.0, 75.0]  # type: ignore[index]
    assert said(simple) == {"84.4", "83.4", "all data 75.0 (ours)", "half data 75.0 (ours)"}
    assert simple.get_xlim() == (0, 1000)
    ticks = [each for _, figure in drawn(all_runs) for axis in figure.axes for each in axis.get_yticks()]
    assert {each % 10 for each in ticks} == {0} and set(range(10, 91, 10)) <= set(ticks)


def said(axis: Any) -> set[str]:
    return {text.get_text() for text in [*axis.texts, *axis.get_legend().get_texts()]}


def test_figures_say_what_has_not_been_run() -> None:
    empty = [axis for _, figure in drawn([]) for axis in figure.axes]
    assert len(empty) == 8
    assert all("not run yet" in said(axis) for axis in empty)
    assert said(empty[1]) == {"not run yet", "88.5", "87.5", "all data 93.0 (paper)", "half data 90.5 (paper)"}
    partial = [
        from_the_paper("cifar10-iid", "fedhen"),
        federated("cifar10-iid", "noside", {"simple": [], "complex": []}, planned=1000),
    ]
    partial += [one_place("cifar10", "simple", 1.0, [0.88] * 100)]
    simple, complex_ = drawn(partial)[0][1].axes
    assert {"not run yet: Decouple", "not evaluated yet: NoSide", "all data 88.0 (ours)"} < said(simple)
    assert "all data 93.0 (paper)" in said(complex_)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [0, 1, 2])
def test_nothing_is_cut_off_or_too_small_to_print(seeds: int) -> None:
    """At 5 inches and 100 dots an inch: all text inside the image, none below 6 points."""
    runs = [from_the_paper(*place, seed, seed) for place in PAPER_RUNS[:3] for seed in range(seeds)]
    for each, figure in drawn(runs):
        assert figure.get_figwidth() <= 5
        figure.set_dpi(100)
        figure.draw_without_rendering()
        for text in figure.findobj(Text):
            assert isinstance(text, Text)
            if not text.get_text():
                continue
            box, where = text.get_window_extent(), (each.number, text.get_text())
            assert float(text.get_fontsize()) >= 6, where
            assert -1 <= box.x0 < box.x1 <= figure.bbox.x1 + 1, where
            assert -1 <= box.y0 < box.y1 <= figure.bbox.y1 + 1, where
        for axis in figure.axes:
            upper, lower = (text.get_window_extent() for text in axis.texts[:2])
            assert upper.y0 >= lower.y1


@pytest.mark.slow
def test_all_files_are_written(all_runs: list[Run], tmp_path: Path) -> None:
    report = write_paper(all_runs, tmp_path / "new" / "folder")
    names = ["paper.html", "paper.md", "paper.tex"]
    names += [f"figure-{number}.{kind}" for number in (1, 2, 3) for kind in ("png", "svg")]
    assert [path.name for path in report.paths] == names
    assert sorted(names) == sorted(path.name for path in (tmp_path / "new/folder").iterdir())
    text = (tmp_path / "new/folder/paper.md").read_text(encoding="utf-8")
    assert "| CIFAR-10 | 84.4 % | 289 (289) | 943 (943) | 805 (805) | **2.8× (2.8×)** |" in text
    assert "|  | 83.4 % | 249 (249) | 731 (731) | 669 (669) | **2.7× (2.7×)** |" in text
    assert all(f"(figure-{number}.png)" in text for number in (1, 2, 3))
    assert "Finished: 12 of the paper’s 12 runs, and 8 of its 8 centralised references." in report.text
    assert max(map(len, report.text.splitlines())) <= 100


@pytest.mark.slow
def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    runs = [from_the_paper("cifar10-iid", "fedhen")]
    first, second = (write_paper(runs, tmp_path / name) for name in ("one", "two"))
    for one, two in zip(first.paths, second.paths, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name


@pytest.mark.slow
def test_the_terminal_text_of_several_seeds_fits_in_100_columns(tmp_path: Path) -> None:
    runs = [from_the_paper(*place, seed, -20 * seed) for place in PAPER_RUNS for seed in range(3)]
    assert max(map(len, write_paper(runs, tmp_path).text.splitlines())) <= 100


@pytest.mark.slow
def test_the_page_is_well_formed_and_needs_nothing_else(all_runs: list[Run], tmp_path: Path) -> None:
    write_paper(all_runs, tmp_path)
    page = Checker((tmp_path / "paper.html").read_text(encoding="utf-8"))
    assert [name for name, count in page.ids.items() if count > 1] == []
    assert page.links == []
    # the paper's, auto, bytes of two kinds, accuracies, centralised, a recipe each
    assert page.tags["table"] - page.tags["figure"] == 2 + 2 + 4 + 1 + 1 + 4
    assert page.tags["polyline"] == 3 * (2 + 2 + 4)
    assert page.tags["link"] == page.tags["img"] == 0 and page.tags["script"] == 1
    assert "1000 (1000)" in page.text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.slow
@pytest.mark.parametrize("complete", [False, True])
def test_latex_is_balanced_and_its_rows_are_full(all_runs: list[Run], tmp_path: Path, complete: bool) -> None:
    write_paper(all_runs if complete else all_runs[:1], tmp_path)
    source = (tmp_path / "paper.tex").read_text(encoding="utf-8")
    assert source.startswith("% needs \\usepackage{booktabs,multirow,graphicx}")
    bare = re.sub(r"\\[{}&%]", "", source)
    assert bare.count("{") == bare.count("}")
    assert Counter(re.findall(r"\\begin\{(\w+)\}", source)) == Counter(re.findall(r"\\end\{(\w+)\}", source))
    tabulars = re.findall(r"\\begin\{tabular\}\{(l+r+)\}(.*?)\\end\{tabular\}", bare, flags=re.DOTALL)
    assert len(tabulars) == (14 if complete else 7)
    for columns, body in tabulars:
        rows = [row for row in body.split(r"\\") if "&" in row]
        assert rows
        assert {row.count("&") for row in rows} == {len(columns) - 1}
    assert r"\multirow{2}{*}{CIFAR-10} & 84.4 \% & 289 (289)" in source
    assert not set(re.sub(r"[“”]", "", source)) - set(map(chr, range(128)))


@pytest.mark.process
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_compiles(all_runs: list[Run], tmp_path: Path) -> None:
    write_paper(all_runs, tmp_path)
    (tmp_path / "main.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs,multirow,graphicx}\begin{document}\input{paper}\end{document}"
    )
    subprocess.run(["pdflatex", "-halt-on-error", "main.tex"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


def test_the_servers_models_are_reported_on_request(tmp_path: Path) -> None:
    run = from_the_paper("cifar10-iid", "fedhen")
    run.rounds[99].accuracy["server"]["simple"] = 0.9
    table = tables([run], owner="server")["table-1"]
    assert cells(table)["simple", "CIFAR-10", "84.4 %"][0] == "100 (289)"
    assert "server model" in table.meaning
    assert "all-devices average" in table.notes[0]
    with pytest.raises(FedhenError, match="unknown owner 'servers'"):
        write_paper([run], tmp_path, owner="servers")


@pytest.mark.slow
def test_names_from_files_cannot_inject_markup(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>'
    run = replace(from_the_paper("cifar10-iid", "fedhen"), folder=Path(evil.replace("/", "")), summary=None)
    run.environment["gpu"] = evil
    write_paper([run], tmp_path)
    page = Checker((tmp_path / "paper.html").read_text(encoding="utf-8"))
    assert page.tags["script"] == 1  # the page's own
    assert evil in page.text


@pytest.mark.slow
def test_from_a_folder_from_no_runs_and_into_a_path_that_is_a_file(tmp_path: Path) -> None:
    folder = write_folder(from_the_paper("cifar10-iid", "fedhen"), tmp_path / "runs" / "fedhen")
    config = replace(load_recipe("cifar10-iid"), method="fedhen")
    (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    report = write_paper([read_run(folder)], tmp_path / "paper")
    assert "289 (289)" in report.text
    assert "Finished: 1 of the paper’s 12 runs" in report.text
    assert "Finished: 0 of the paper’s 12 runs" in write_paper([], tmp_path / "empty").text
    (tmp_path / "file").write_text("")
    with pytest.raises(FedhenError, match="cannot write to"):
        write_paper([], tmp_path / "file")


@pytest.mark.process
def test_it_needs_no_torch_and_its_tables_no_matplotlib() -> None:
    blocked = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib'] = None\n"
        "from fedhen.reports.paper.selection import select_runs\n"
        "from fedhen.reports.paper.tables import make_paper_tables\n"
        "assert len(make_paper_tables(select_runs([]), 'devices')) == 2\n"
    )
    subprocess.run([sys.executable, "-c", blocked], check=True)

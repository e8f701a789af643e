"""`fedhen data partition` shows the split that a run trains on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from fedhen.cli import data as data_commands
from fedhen.cli.main import Parser
from fedhen.config.data_settings import SplitConfig
from fedhen.config.devices_settings import DevicesConfig
from fedhen.config.recipes import load_recipe
from fedhen.config.settings import Config
from fedhen.data.published import PUBLISHED
from fedhen.data.storage import data_root
from fedhen.errors import FedhenError
from fedhen.experiment.build import build_experiment
from fedhen.reports.partition import ALL_DEVICES, Partition, draw_partition, make_table, to_dict, write_partition

# Two simple devices and one complex device.
COUNTS = [[4, 0, 0], [1, 1, 2], [0, 6, 2]]
CONFIG = Config(
    recipe="mine",
    seed=3,
    devices=DevicesConfig(number=3, active=1),
    split=SplitConfig(kind="dirichlet", alpha=0.5),
    tiers={"simple": 2 / 3, "complex": 1 / 3},
)
SMALL = Partition(CONFIG, COUNTS)


def fedhen(*arguments: object) -> int:
    """Runs the command line with only the `data` commands."""
    top = Parser(prog="fedhen")
    data_commands.add_commands(top.add_subparsers(dest="command", required=True))
    options = top.parse_args([str(argument) for argument in arguments])
    return int(options.run(options))


def test_statistics_by_hand() -> None:
    assert SMALL.statistics() == {
        "simple": {
            "devices": 2,
            "examples": {"least": 4, "mean": 4, "most": 4},
            "classes": {"least": 1, "mean": 2, "most": 3},
            "top_class_share": (4 / 4 + 2 / 4) / 2,
        },
        "complex": {
            "devices": 1,
            "examples": {"least": 8, "mean": 8, "most": 8},
            "classes": {"least": 2, "mean": 2, "most": 2},
            "top_class_share": 6 / 8,
        },
        ALL_DEVICES: {
            "devices": 3,
            "examples": {"least": 4, "mean": 16 / 3, "most": 8},
            "classes": {"least": 1, "mean": 2, "most": 3},
            "top_class_share": (4 / 4 + 2 / 4 + 6 / 8) / 3,
        },
    }


def test_the_table_says_the_same() -> None:
    shown = make_table(SMALL)
    assert shown.title == "mine: digits, Dirichlet split, α = 0.5, seed 3"
    assert shown.groups[0].rows == (
        ("simple", "2", "4 / 4.0 / 4", "1 / 2.0 / 3", "75.0 %"),
        ("complex", "1", "8 / 8.0 / 8", "2 / 2.0 / 2", "75.0 %"),
        ("all devices", "3", "4 / 5.3 / 8", "1 / 2.0 / 3", "75.0 %"),
    )


def test_what_has_no_classes_is_counted_and_drawn_by_device() -> None:
    sizes = Partition(CONFIG, [[4], [6], [8]])
    shown = make_table(sizes)
    assert shown.columns == ("", "devices", "examples") and not shown.notes
    assert shown.groups[0].rows[2] == ("all devices", "3", "4 / 6.0 / 8")
    assert sizes.statistics()["complex"] == {"devices": 1, "examples": {"least": 8, "mean": 8, "most": 8}}
    (only,) = draw_partition(sizes).axes
    assert [bar.get_height() for bar in only.patches] == [4, 6, 8] and only.get_xlabel() == "device"  # type: ignore[attr-defined]


def brightness(panel: Axes, number: int) -> float:
    """Returns the brightness of a count in the heat map; 1 is white."""
    (cells,) = panel.images
    return float(np.mean(cells.to_rgba(np.array([number]))[0, :3]))


def test_the_picture_holds_every_count_and_marks_the_tiers() -> None:
    upper, lower, *_ = draw_partition(SMALL).axes
    (cells,) = lower.images
    assert np.array_equal(np.asarray(cells.get_array()), np.array(COUNTS).T)
    none, one, six = (brightness(lower, number) for number in (0, 1, 6))
    assert none == 1 > one > six > 0, "none is white, and more is darker"
    assert [bar.get_extents().height / upper.bbox.height * upper.get_ylim()[1] for bar in upper.patches] == (
        pytest.approx([4, 4, 8])
    )
    assert [text.get_text() for text in upper.texts] == ["2 simple", "1 complex"]
    assert len({bar.get_facecolor() for bar in upper.patches}) == 2
    assert [line.get_xdata()[0] for line in lower.lines] == [1.5]  # type: ignore[index]


def test_one_image_among_thousands_is_not_white() -> None:
    _, lower, *_ = draw_partition(Partition(CONFIG, [[1, 0, 9000], [1, 1, 1], [1, 1, 1]])).axes
    assert brightness(lower, 1) < 0.95


@pytest.mark.slow
def test_what_is_written_is_always_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_partition(SMALL, tmp_path / name)
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == ["partition.json", "partition.png", "partition.svg"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    written = json.loads((tmp_path / "one" / "partition.json").read_text())
    assert written == json.loads(json.dumps(to_dict(SMALL)))
    assert written["counts"] == COUNTS and written["tiers"] == {"simple": 2, "complex": 1} and written["seed"] == 3
    with Image.open(tmp_path / "one" / "partition.png") as picture:
        assert picture.width > 1000


@pytest.mark.process
def test_the_drawing_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fedhen.config.devices_settings import DevicesConfig\n"
        "from fedhen.config.settings import Config\n"
        "from fedhen.reports.partition import Partition, draw_partition, make_table\n"
        "split = Partition(Config(devices=DevicesConfig(number=2, active=1)), [[1, 2], [3, 4]])\n"
        "draw_partition(split), make_table(split)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dirichlet", "iid", "dirichlet-by-class"])
def test_the_command_shows_the_split_that_a_run_trains_on(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"split.kind={kind}", "data.limit=300", "devices.number=6", "model.widths=[4, 4, 4, 4]"]
    changes = [word for setting in settings for word in ("--set", setting)]
    assert fedhen("data", "partition", "digits", *changes, "--seed", 5, "--out", tmp_path) == 0
    shown = capsys.readouterr().out
    assert f"picture: {tmp_path / 'partition.png'}" in shown and "seed 5" in shown
    written = json.loads((tmp_path / "partition.json").read_text())

    from fedhen.config.toml import apply_settings

    data = build_experiment(
        apply_settings(load_recipe("digits"), [*settings, "seed=5"]), accelerator="cpu"
    ).population.data
    labels = data.y.tolist()
    counts = [[sum(labels[i] == c for i in shard) for c in range(10)] for shard in data.shards]
    assert written["counts"] == counts
    tops = [max(row) / sum(row) for row in counts]
    everyone = written["statistics"][ALL_DEVICES]
    assert everyone["top_class_share"] == pytest.approx(sum(tops) / 6)
    assert everyone["examples"]["mean"] == 50 and sum(map(sum, counts)) == 300
    assert f"{100 * sum(tops) / 6:.1f} %" in shown


@pytest.mark.slow
def test_without_out_every_call_gets_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert fedhen("data", "partition", "digits") == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["partition-digits", "partition-digits-2"]


@pytest.mark.slow
def test_your_own_data_and_a_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert fedhen("data", "partition", "digits", "--data", tmp_path / "own.npz", "--out", tmp_path / "out") == 0
    assert re.search(r"all devices +20 +2 / 2.0 / 2", capsys.readouterr().out)
    assert np.array(json.loads((tmp_path / "out" / "partition.json").read_text())["counts"]).sum(0).tolist() == [10] * 4
    (tmp_path / "mine.toml").write_text('recipe = "mine"\n[devices]\nnumber = 7\nactive = 1\n')
    assert fedhen("data", "partition", "--config", tmp_path / "mine.toml", "--out", tmp_path / "out") == 0
    assert "mine: digits, IID split, seed 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "which recipe?"),
        (["digitss"], "did you mean 'digits'?"),
        (["digits", "--set", "devices.number=100000"], "lower devices.number"),
        (["cifar10-iid", "--data-dir", "nowhere"], "`fedhen data fetch cifar10 --to nowhere`"),
        (["digits", "--out", "/dev/null/out"], "choose another --out"),
    ],
)
def test_an_impossible_split_is_refused_in_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(FedhenError) as error:
        fedhen("data", "partition", *arguments)
    assert says in str(error.value) and "\n" not in str(error.value)


def dealt(recipe: str, out: Path) -> dict[str, Any]:
    """Returns the statistics of all devices of a recipe; skips the test if its real files are missing."""
    files = PUBLISHED[load_recipe(recipe).data.name]
    if not (data_root() / files.folder).is_dir():
        pytest.skip(f"{files.name} is not in {data_root()}: set FEDHEN_DATA to test with the real files")
    assert fedhen("data", "partition", recipe, "--out", out) == 0
    written: dict[str, Any] = json.loads((out / "partition.json").read_text())
    counts = np.array(written["counts"])
    assert counts.shape == (100, files.classes)
    assert (counts.sum(1) == 500).all() and (counts.sum(0) == 50_000 // files.classes).all()
    statistics: dict[str, Any] = written["statistics"][ALL_DEVICES]
    return statistics


@pytest.mark.parametrize("recipe", ["cifar10-iid", "cifar100-iid"])
def test_the_papers_iid_splits_of_the_real_files(recipe: str, tmp_path: Path) -> None:
    """500 random images: a class's share is 1/k within a few times √(p (1 − p) / 500)."""
    classes = PUBLISHED[load_recipe(recipe).data.name].classes
    share = 1 / classes
    top = dealt(recipe, tmp_path)["top_class_share"]
    assert share < top < share + 4 * (share * (1 - share) / 500) ** 0.5


@pytest.mark.parametrize("recipe", ["cifar10-noniid", "cifar100-noniid"])
def test_the_papers_dirichlet_splits_of_the_real_files(recipe: str, tmp_path: Path) -> None:
    """A little below the mean largest share of a prior, because classes run out for the last devices."""
    classes = PUBLISHED[load_recipe(recipe).data.name].classes
    priors = np.random.default_rng(0).dirichlet(np.full(classes, 0.3), 20_000)
    expected = float(priors.max(1).mean())
    assert 0.85 * expected < dealt(recipe, tmp_path)["top_class_share"] < 1.1 * expected

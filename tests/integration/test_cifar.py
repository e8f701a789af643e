"""The paper's experiments on files in the official format: small ones made here, and the real ones where they are."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedhen.algorithm.methods import FEDHEN
from fedhen.cli import main
from fedhen.config.recipes import load_recipe, make_centralised
from fedhen.config.toml import apply_settings
from fedhen.data import cifar
from fedhen.data.published import CIFAR10, CIFAR100, PUBLISHED, Files
from fedhen.data.storage import data_root
from fedhen.errors import FedhenError
from fedhen.experiment.build import build_experiment, build_populations
from fedhen.runs.reader import read_run
from support.tiny import TINY_OPTIONS, as_options

NARROW = ["model.widths=[8, 8, 16, 16]", "model.blocks=[1, 1, 1, 1]", "devices.number=10", "devices.active=4"]


def small_cifar10(root: Path) -> Files:
    """Ten classes, each a colour on noise, 60 images a file, written as the official files are."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (10, 3, 1, 1))
    folder = root / CIFAR10.folder
    folder.mkdir(parents=True)
    sha1, sizes = {}, {}
    for name in CIFAR10.checksums:
        labels = rng.integers(0, 10, 60).astype(np.uint8)
        images = np.clip(colours[labels] + rng.normal(0, 40, (60, 3, 32, 32)), 0, 255).astype(np.uint8)
        content = np.concatenate([labels[:, None], images.reshape(60, -1)], axis=1).tobytes()
        (folder / name).write_bytes(content)
        sha1[name], sizes[name] = hashlib.sha1(content).hexdigest(), len(content)
    train = {name: sha1[name] for name in CIFAR10.train}
    return replace(CIFAR10, train=train, test={n: sha1[n] for n in CIFAR10.test}, sizes=sizes)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder whose small files count as the published ones."""
    monkeypatch.setitem(PUBLISHED, "cifar10", small_cifar10(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cifar10-iid", "cifar10-noniid"])
def test_a_narrow_net_learns_from_official_files(recipe: str, root: Path) -> None:
    """The whole recipe (crop, flip, split, clip, decay) with a narrow net for 6 rounds: the loss falls by a third."""
    command = ["run", recipe, "--data-dir", str(root), "--rounds", "6", "--quiet", "--out", "run", *as_options(NARROW)]
    assert main([*command, "--set", "training.batch_size=10"]) == 0
    run = read_run(Path("run"))
    losses = [record.loss for record in run.rounds if record.loss is not None]
    assert losses[-1] < 0.67 * losses[0]
    assert [r.round for r in run.rounds if r.accuracy] == [5, 6]
    assert run.curve("simple", "server")[-1][1] > 0.3


def test_real_cifar10_learns(tmp_path: Path) -> None:
    if not (data_root() / CIFAR10.folder).is_dir():
        pytest.skip("the real CIFAR-10 is not here: `fedhen data fetch cifar10`, or set FEDHEN_DATA")
    command = ["run", "cifar10-iid", "--rounds", "4", "--quiet", "--out", str(tmp_path / "run"), *as_options(NARROW)]
    assert main([*command, "--set", "data.limit=1000", "--set", "training.batch_size=20"]) == 0
    losses = [r.loss for r in read_run(tmp_path / "run").rounds if r.loss is not None]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("files", [CIFAR10, CIFAR100], ids=lambda files: files.name)
def test_published_means_and_deviations_from_the_real_files(files: Files) -> None:
    if not (data_root() / files.folder).is_dir():
        pytest.skip(f"the real {files.name} is not here: `fedhen data fetch {files.name}`, or set FEDHEN_DATA")
    data = cifar.read(files, data_root())
    pixels = data.x.numpy().reshape(50_000, 3, -1)
    np.testing.assert_allclose(pixels.mean((0, 2)) / 255, files.mean, atol=6e-5)
    np.testing.assert_allclose(pixels.std((0, 2)) / 255, files.std, atol=6e-5)
    normal = data.inputs(slice(5000))
    assert abs(float(normal.mean())) < 0.05 and abs(float(normal.std()) - 1) < 0.05
    assert data.y.bincount().tolist() == [50_000 // files.classes] * files.classes


def test_images_stay_bytes_in_one_tensor(root: Path) -> None:
    run = build_experiment(apply_settings(load_recipe("cifar10-iid"), NARROW), data_dir=root, accelerator="cpu")
    assert run.population.data.x.dtype == torch.uint8 and run.population.data.x.shape == (300, 3, 32, 32)


@pytest.mark.parametrize(
    ("recipe", "split", "targets"),
    [
        ("cifar10-iid", "iid", {"simple": (84.4, 83.4), "complex": (88.5, 87.5)}),
        ("cifar10-noniid", "dirichlet", {"simple": (79.4, 78.4), "complex": (84.2, 83.2)}),
        ("cifar100-iid", "iid", {"simple": (46.4, 45.4), "complex": (46.8, 45.8)}),
        ("cifar100-noniid", "dirichlet", {"simple": (43.8, 42.8), "complex": (44.8, 43.8)}),
    ],
)
def test_the_recipes_are_the_papers(recipe: str, split: str, targets: dict[str, tuple[float, ...]]) -> None:
    """Section "Experiments", appendix "Hyperparameters", Tables 1 and 2, and the defaults for what they leave open."""
    c = load_recipe(recipe)
    assert (c.rounds, c.devices.number, c.devices.active, c.tiers) == (1000, 100, 10, {"simple": 0.5, "complex": 0.5})
    t = c.training
    assert (t.epochs, t.lr, t.clip, t.batch_size, t.weight_decay, t.momentum, t.lr_decay) == (
        5,
        0.1,
        10,
        50,
        1e-3,
        0,
        1,
    )
    assert (c.data.name, c.data.augmentation, c.split.kind, c.split.alpha) == (
        recipe.split("-")[0],
        "crop-flip",
        split,
        0.3,
    )
    assert c.evaluation.every == 5
    assert (
        c.model.widths == (64, 128, 256, 512) and c.model.exits == {"simple": 2, "complex": 4} and c.model.groups == 2
    )
    assert c.targets == targets


@pytest.mark.slow
def test_centralised_is_the_same_loop_with_one_device(root: Path) -> None:
    """One device of one tier holds half of the 300 images; the complex model then carries no exit."""
    command = ["centralised", "cifar10-iid", "--tier", "complex", "--fraction", "0.5", "--rounds", "3"]
    widths = ["--set", NARROW[0], "--set", NARROW[1]]
    assert main([*command, "--data-dir", str(root), "--quiet", *widths]) == 0
    run = read_run(Path("runs") / "cifar10-centralised-complex-0.5-seed0")
    assert run.tiers == ("complex",) and run.recipe == "cifar10-centralised"
    assert [r.active for r in run.rounds] == [[0]] * 3
    assert run.config["data"]["fraction"] == 0.5
    assert [r.round for r in run.rounds if r.accuracy] == [1, 2, 3]
    assert run.rounds[-1].loss < run.rounds[0].loss  # type: ignore[operator]
    config = apply_settings(make_centralised(load_recipe("cifar10-iid"), "complex", 0.5), NARROW[:2])
    found = build_experiment(config, data_dir=root, accelerator="cpu")
    assert [len(shard) for shard in found.population.data.shards] == [150]
    assert len(found.population.data.y_test) == 60
    assert found.population.holdings["complex"].exits == ("complex",)


@pytest.mark.slow
def test_the_papers_centralised_sizes() -> None:
    """695,371 parameters for the simple model, and 11,171,146 for the complex one, which carries no exit."""
    from fedhen.algorithm.holdings import find_holdings
    from fedhen.algorithm.methods import FEDAVG
    from fedhen.models.registry import make_family

    family = make_family(load_recipe("cifar10-iid"), (3, 32, 32), 10)
    batch = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    for tier, number in (("simple", 695_371), ("complex", 11_171_146)):
        shapes = find_holdings(family, {tier: FEDAVG.objective}, FEDAVG.pools, batch)[tier].shapes
        assert sum(int(np.prod(shape)) for shape in shapes.values()) == number


@pytest.mark.slow
def test_paper_runs_what_is_missing_and_skips_what_is_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["paper", "--run", "--only", "cifar10-iid", "--runs", "results", "--data-dir", str(root), "--rounds", "2"]
    small = [*as_options(NARROW), "--set", "evaluation.every=1", "--set", "training.epochs=1", "--quiet"]
    assert main([*command, *small]) == 0
    names = sorted(p.name for p in Path("results").iterdir() if (p / "config.toml").is_file())
    assert names == [f"cifar10-iid-{m}-seed0" for m in ("decouple", "fedhen", "noside")]
    before = {name: (Path("results") / name / "summary.json").stat().st_mtime_ns for name in names}
    assert "not run (249)" not in capsys.readouterr().out
    assert main([*command, *small]) == 0
    assert sorted(p.name for p in Path("results").iterdir() if (p / "config.toml").is_file()) == names
    assert {name: (Path("results") / name / "summary.json").stat().st_mtime_ns for name in names} == before
    for name in ("paper.html", "paper.md", "paper.tex", "figure-1.png", "figure-3.svg"):
        assert (Path("results") / "paper" / name).stat().st_size > 500


@pytest.mark.slow
def test_paper_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").mkdir()
    assert main(["paper", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "not run (289)" in capsys.readouterr().out
    assert main(["paper", "--runs", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["paper", "--run", "--only", "cifar10"]) == 2
    assert "unknown experiment 'cifar10': did you mean 'cifar10-iid'?" in capsys.readouterr().err


@pytest.mark.slow
def test_every_setting_of_a_centralised_run_can_be_set(root: Path) -> None:
    """The schedule that the docs state, and each value changed from the command line."""
    c = make_centralised(load_recipe("cifar10-iid"), "simple")
    t = c.training
    assert (c.rounds, t.epochs, t.lr, t.lr_schedule, t.lr_warmup, t.momentum, t.batch_size, t.weight_decay) == (
        *(100, 1, 0.1, "cosine", 5),
        *(0.9, 128, 5e-4),
    )
    words = make_centralised(load_recipe("shakespeare"), "simple").training
    recipe = load_recipe("shakespeare").training
    assert words == replace(recipe, epochs=1, max_steps=0), "SGD's schedule is not for another optimiser"
    settings = ["training.lr=0.05", "training.momentum=0.0", "training.batch_size=64", "rounds=1", NARROW[0], NARROW[1]]
    command = ["centralised", "cifar10-iid", "--tier", "simple", "--data-dir", str(root), "--quiet", "--out", "c"]
    assert main([*command, *as_options(settings)]) == 0
    training = read_run(Path("c")).config["training"]
    assert (training["lr"], training["momentum"], training["batch_size"]) == (0.05, 0.0, 64)
    assert len(read_run(Path("c")).rounds) == 1


@pytest.mark.slow
def test_own_data_under_a_recipe_is_another_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = rng.integers(0, 255, (60, 8, 8), dtype=np.uint8)
    np.savez("my data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    small = ["--rounds", "1", "--quiet", *TINY_OPTIONS]
    assert main(["run", "digits", "--data", "my data.npz", "--out", "run", *small]) == 0
    run = read_run(Path("run"))
    assert run.recipe == "digits-on-my-data" and run.config["targets"] == {}
    assert main(["centralised", "digits", "--tier", "simple", "--data", "my data.npz", "--out", "c", *small[:3]]) == 0


def test_a_hundred_classes_are_read_by_their_fine_label(tmp_path: Path) -> None:
    """Two label bytes before each image: the coarse one, then the fine one that counts."""
    rows = np.zeros((4, 2 + 3072), np.uint8)
    rows[:, 0], rows[:, 1] = [19, 18, 17, 16], [5, 6, 7, 99]
    folder = tmp_path / CIFAR100.folder
    folder.mkdir()
    sha1, sizes = {}, {}
    for name in CIFAR100.checksums:
        (folder / name).write_bytes(rows.tobytes())
        sha1[name], sizes[name] = hashlib.sha1(rows.tobytes()).hexdigest(), rows.nbytes
    files = replace(CIFAR100, train={"train.bin": sha1["train.bin"]}, test={"test.bin": sha1["test.bin"]}, sizes=sizes)
    assert cifar.read(files, tmp_path).y.tolist() == [5, 6, 7, 99]
    (folder / "test.bin").write_bytes(rows.tobytes()[:-1])
    with pytest.raises(
        FedhenError, match=r"test.bin has 12295 bytes instead of 12296: get it with `fedhen data fetch cifar100 --to"
    ):
        cifar.read(files, tmp_path)
    (folder / "test.bin").write_bytes(rows.tobytes()[:-1] + b"x")
    with pytest.raises(FedhenError, match=r"test.bin was altered"):
        cifar.read(files, tmp_path)


@pytest.mark.slow
def test_the_limit_holds_for_both_parts_and_a_fraction_for_training(root: Path) -> None:
    run = build_experiment(
        apply_settings(load_recipe("cifar10-iid"), [*NARROW, "data.limit=40"]), data_dir=root, accelerator="cpu"
    )
    assert (len(run.population.data.y), len(run.population.data.y_test)) == (40, 40)
    recipe = load_recipe("cifar10-iid")
    configs = [apply_settings(recipe, [*NARROW, "data.fraction=0.5", f"seed={s}"]) for s in (0, 1, 0)]
    chosen = [(config, FEDHEN) for config in [*configs, apply_settings(recipe, NARROW)]]
    *halves, whole = build_populations(chosen, "cpu", root)
    assert [len(half.data.y) for half in halves] == [150] * 3
    assert torch.equal(halves[0].data.x, halves[2].data.x) and not torch.equal(halves[0].data.x, halves[1].data.x)
    assert halves[0].data.x is halves[2].data.x, "the same data is in memory once"
    held = np.sort(np.concatenate(whole.data.shards[:5]))
    assert torch.equal(halves[0].data.x, whole.data.x[held])

"""`predict` takes raw inputs from each kind of data: bytes, images, rows, arrays, several tensors, text."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fedhen
from fedhen import FedhenError
from fedhen.data.published import CIFAR100, PUBLISHED, SHAKESPEARE
from fedhen.data.shakespeare import read_shakespeare
from fedhen.data.storage import data_root
from support import tiny_archive
from support.predictions import SMALL, command, family, last_accuracy, share_right
from support.tiny import TINY_OPTIONS, as_options


def test_cifar_from_raw_bytes_with_its_class_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels are read here from the official file: a label, then 3,072 bytes."""
    tiny = replace(tiny_archive.TINY, class_names=PUBLISHED["cifar10"].class_names, mean=(0.5,) * 3, std=(0.2,) * 3)
    monkeypatch.setitem(PUBLISHED, "cifar10", tiny)
    for name, content in tiny_archive.UNPACKED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    small = ["model.widths=[4, 4, 8, 8]", "model.blocks=[1, 1, 1, 1]", "devices.number=4", "devices.active=2"]
    run = tmp_path / "run"
    command("run", "cifar10-iid", "--data-dir", str(tmp_path), "--rounds", "1", "--out", str(run), *as_options(small))
    rows = np.frombuffer(tiny_archive.CONTENTS["test_batch.bin"], np.uint8).reshape(-1, 3073)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    images, labels = rows[:, 1:].reshape(-1, 3, 32, 32), [names[label] for label in rows[:, 0]]
    for tier, accuracy in last_accuracy(run)["server"].items():
        model = fedhen.load(run, tier)
        assert share_right(model, images, labels) == accuracy
        assert share_right(model, images.transpose(0, 2, 3, 1), labels) == accuracy, "as an image library has them"
    assert len(CIFAR100.class_names) == 100 and list(CIFAR100.class_names) == sorted({*CIFAR100.class_names})


@pytest.mark.parametrize("size", [0, 8])
def test_images_of_a_folder_by_the_names_of_its_classes(size: int, tmp_path: Path) -> None:
    rng, paths, labels = np.random.default_rng(0), [], []
    for part, name, level in ((p, n, k) for p in ("train", "test") for n, k in (("owl", 40), ("cat", 200))):
        folder = tmp_path / "photos" / part / name
        folder.mkdir(parents=True)
        for number in range(8):
            side = 10 + (number if size else 0)
            pixels = np.clip(rng.normal(level, 20, (side, side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            if part == "test":
                paths.append(folder / f"{number}.png")
                labels.append(name)
    options = [*TINY_OPTIONS, "--set=data.limit=0", f"--set=data.size={size}"]
    command("run", "digits", "--data", f"{tmp_path}/photos", "--rounds", "2", "--out", f"{tmp_path}/run", *options)
    for tier, accuracy in last_accuracy(tmp_path / "run")["server"].items():
        model = fedhen.load(tmp_path / "run", tier)
        assert share_right(model, paths, labels) == accuracy
        assert share_right(model, [Image.open(path) for path in paths], labels) == accuracy
    assert set(model.predict(paths[0])[0].probabilities) == {"cat", "owl"}
    if not size:
        with pytest.raises(FedhenError, match=r"9\.png has 12×10 pixels, and the model's images 10×10: resize it"):
            Image.new("RGB", (12, 10)).save(tmp_path / "9.png")
            model.predict(tmp_path / "9.png")


@pytest.mark.filterwarnings("ignore:models hardly learn from large numbers")
def test_rows_of_a_table_by_the_names_of_its_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    table: dict[str, Any] = {
        "age": rng.integers(20, 80, 60),
        "weight": rng.normal(70, 9, 60),
        "ill": ["no", "yes", "maybe"] * 20,
    }
    data = fedhen.from_table(table, target="ill")
    fedhen.train(family(2, 3), data, out=tmp_path / "run", **SMALL)
    model = fedhen.load(tmp_path / "run", "complex", family=family(2, 3))
    x: Any = np.stack([table["age"], table["weight"]], 1)
    with torch.no_grad():
        expected = [("maybe", "no", "yes")[k] for k in model(torch.from_numpy(x).float())[-1].argmax(1)]
    frame = pandas.DataFrame(table)
    frame.to_csv(tmp_path / "new.csv")
    rows = frame.to_dict("records")
    for raw in (x, x.tolist(), frame, frame[["weight", "ill", "age"]], rows, str(tmp_path / "new.csv"), table):
        assert [each.value for each in model.predict(raw)] == expected
    assert [model.predict(row)[0].value for row in rows[:5]] == expected[:5]
    assert model.model_card.data is not None and model.model_card.data.target == "ill"
    for raw, says in (
        (frame[["age"]], "column 'weight' is missing: the model needs age, weight"),
        ([{"age": 3}], "column 'weight' is missing in a row"),
        ({"age": [3], "weight": [np.nan]}, "'weight' has empty cells or numbers that are not finite"),
        ({"age": ["old"], "weight": [3]}, "column 'age' is text"),
        (x * np.nan, "holds NaN or infinity"),
        (x[:, :1], r"has shape \(60, 1\): one example has shape \(2,\)"),
        (frame[:0], "it has no rows"),
    ):
        with pytest.raises(FedhenError, match=says):
            model.predict(raw)


def test_a_regression_predicts_in_the_unit_of_its_target(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(80, 2))
    table = {"a": x[:, 0], "b": x[:, 1], "mass": 50 + x.sum(1)}
    data = fedhen.from_table(table, target="mass", unit="kg")
    run = fedhen.train(family(2, 1), data, task="regression", out=tmp_path / "run", **SMALL)
    model = fedhen.load(tmp_path / "run", "simple", family=family(2, 1))
    with torch.no_grad():
        expected = model(torch.from_numpy(x).float())[-1][:, 0].tolist()
    assert [each.value for each in model.predict(x)] == expected
    assert model.predict(x)[0].probability is None and model.predict(x)[0].probabilities == {}
    held = [each.value for each in model.predict(data.x_test)]
    rmse = float(np.sqrt(np.mean((np.array(held) - data.y_test.numpy()) ** 2)))
    assert rmse == pytest.approx(run.metrics["rmse"]["server"]["simple"], rel=1e-6)
    assert model.model_card.data is not None and (model.model_card.data.target, model.model_card.data.unit) == (
        "mass",
        "kg",
    )


def test_own_arrays_are_normalised_as_they_were_for_training(tmp_path: Path) -> None:
    """Bytes with two channels, by a mean and a deviation each: computed here from what the module returns."""
    x = torch.randint(0, 256, (60, 2, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = fedhen.arrays(x, (x[:, 0, 0, 0] > 99).long(), normalisation=([100, 50], [20.0, 10.0]))
    normal = (x.float() - torch.tensor([100.0, 50.0]).view(2, 1, 1)) / torch.tensor([20.0, 10.0]).view(2, 1, 1)
    assert torch.equal(data.inputs(slice(None)), normal)
    fedhen.train(family(18, 2), data, out=tmp_path / "run", **SMALL)
    model = fedhen.load(tmp_path / "run", "simple", family=family(18, 2))
    assert [each.value for each in model.predict(x)] == [str(int(k)) for k in model(normal)[-1].argmax(1)]
    with pytest.raises(FedhenError, match="is float32, and the model was trained on whole numbers: pass uint8"):
        model.predict(normal)
    rows = fedhen.arrays(torch.ones(4, 2), torch.arange(4) % 2, normalisation=([1, 3], [1, 2]))
    assert rows.inputs(slice(1)).tolist() == [[0, -1]]


def test_what_follows_from_nothing_must_be_right() -> None:
    x, y = torch.zeros(6, 2), torch.arange(6) % 3
    assert fedhen.arrays(x, y, class_names=["a", "b", "c", "d"]).classes == 4
    for given, says in (
        ({"class_names": ["a", "a"]}, "class_names has 'a' twice"),
        ({"class_names": ["a"], "classes": 3}, "class_names has 1 names, and there are 3 classes"),
        ({"normalisation": 3}, "must be .mean, std."),
        ({"normalisation": (0, 0)}, "deviations above 0"),
        ({"normalisation": (float("nan"), 1)}, "finite means"),
        ({"normalisation": ([1, 2, 3], [1, 2, 3])}, r"3 means and 3 deviations, and inputs have shape \(2,\)"),
    ):
        with pytest.raises(FedhenError, match=says):
            fedhen.arrays(x, y, **given)


class Two(nn.Module):
    """An exit that reads two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.exit = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> list[Tensor]:
        return [self.exit((self.words(ids) * mask[..., None]).sum(1))]


def test_several_inputs_by_name(tmp_path: Path) -> None:
    ids = torch.randint(0, 5, (40, 3), generator=torch.Generator().manual_seed(0))
    inputs = {"ids": ids, "mask": torch.ones(40, 3)}
    only = fedhen.Family({"simple": Two})
    data = fedhen.arrays(inputs, (ids[:, 0] > 2).long(), class_names=["few", "many"])
    fedhen.train(only, data, out=tmp_path / "run", tiers={"simple": 1.0}, **SMALL)
    model = fedhen.load(tmp_path / "run", "simple", family=only)
    expected = [("few", "many")[k] for k in model(**inputs)[-1].argmax(1)]
    assert [each.value for each in model.predict(inputs)] == expected
    assert [each.value for each in model.predict({"ids": ids.tolist(), "mask": np.ones((40, 3))})] == expected
    for raw, says in (
        ({"ids": ids}, "the input 'mask' is missing: pass a mapping with ids, mask"),
        (ids, "the input 'ids' is missing"),
        ({**inputs, "ids": ids[:3]}, "unequal numbers of examples: 3, 40"),
        ({**inputs, "ids": ids / 2}, "the input 'ids' is float32, and the model was trained on whole numbers"),
        ({**inputs, "ids": ids + 7}, "the model fails on these inputs: IndexError"),
    ):
        with pytest.raises(FedhenError, match=says):
            model.predict(raw)


def test_labels_above_a_half_and_the_class_of_each_pixel() -> None:
    """Of outputs that are given: sigmoid(2) = 0.880797, sigmoid(-1) = 0.268941."""
    [labels] = fedhen.tasks.MultiLabel().interpret(torch.tensor([[2.0, -1.0, 0.5]]), ["a", "b"])
    assert labels.value == ("a", "2") and labels.probability == pytest.approx(0.622459, abs=1e-6)
    assert labels.probabilities == pytest.approx({"a": 0.880797, "b": 0.268941, "2": 0.622459}, abs=1e-6)
    output = torch.tensor([[[[0.0, 2.0]], [[0.0, 0.0]]]])
    [pixels] = fedhen.tasks.Segmentation().interpret(output, ["sky", "road"])
    assert pixels.value.tolist() == [[0, 0]]
    assert pixels.probabilities == pytest.approx({"sky": 0.690399, "road": 0.309601}, abs=1e-6)
    assert pixels.probability == pytest.approx(0.690399, abs=1e-6)
    [numbers] = fedhen.tasks.Regression().interpret(torch.tensor([[1.0, 2.0]]), [])
    assert numbers.value == [1, 2] and numbers.probability is None


class Quantile(fedhen.Task):
    """A task from Python."""

    name = "quantile"
    metrics = (fedhen.tasks.make_mean_metric("error", lambda output, y: (output[:, 0] - y).abs()),)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output[:, 0] - targets).abs().mean()


class Words(Quantile):
    """The same, with words for its predictions."""

    def interpret(self, output: Tensor, names: Any, lengths: Tensor | None = None) -> list[fedhen.tasks.Prediction]:
        return [fedhen.tasks.Prediction("high" if row > 0 else "low") for row in output[:, 0]]


def test_a_task_from_python_says_what_its_predictions_are(tmp_path: Path) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    fedhen.train(family(3, 1), fedhen.arrays(x, x[:, 0]), task=Quantile(), out=tmp_path / "run", **SMALL)
    plain = fedhen.load(tmp_path / "run", "simple", family=family(3, 1))
    outputs = plain(x)[-1].detach()
    assert torch.equal(torch.stack([each.value for each in plain.predict(x)]), outputs)
    words = fedhen.load(tmp_path / "run", "simple", family=family(3, 1), task=Words())
    assert [each.value for each in words.predict(x)] == ["high" if z > 0 else "low" for z in outputs[:, 0]]


def small_text(path: Path) -> Path:
    """Twelve roles that say different things."""
    lines = [f"ROLE {k}:\n{'to be or not to be, that is the question. ' * 5}{chr(97 + k) * 9}\n" for k in range(12)]
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("real", [False, True])
def test_text_is_continued_by_the_next_character(real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = data_root() if real else tmp_path / "data"
    path = root / SHAKESPEARE.folder / "input.txt"
    if real and not ("FEDHEN_DATA" in os.environ and path.is_file()):
        pytest.skip("the data folder has no Shakespeare")
    if not real:
        monkeypatch.setattr("fedhen.data.shakespeare.require", lambda files, path: None)
        small_text(path)
    options = ["devices.number=8", "devices.active=4", "data.roles=8", "data.context=20", "training.max_steps=2"]
    run = ["run", "shakespeare", "--data-dir", str(root), "--rounds", "1", "--out", str(tmp_path / "run")]
    command(*run, *as_options([*options, "model.width=16", "evaluation.devices=false"]))
    model = fedhen.load(tmp_path / "run", "complex")
    vocabulary = read_shakespeare(path, 8, 20).vocabulary
    texts = ["to be or", "t", "not to be, that is the question. "]
    ids = [[vocabulary.index(character) for character in text][-20:] for text in texts]
    for text, tokens, found in zip(texts, ids, model.predict(texts), strict=True):
        with torch.no_grad():
            last = model(torch.tensor([tokens]))[-1][0, -1].double().softmax(0)
        assert [*found.probabilities.values()] == pytest.approx(last.tolist(), rel=1e-4), "padding changes nothing"
        assert list(found.probabilities) == [*vocabulary][: len(last)]
        assert found.value == vocabulary[int(last.argmax())]
        assert model.predict(text)[0].value == model.predict(tokens)[0].value == found.value
    assert [each.value for each in model.predict(ids)] == [each.value for each in model.predict(texts)]
    for raw, says in (("ä", "does not know the character 'ä'"), ([""], "empty"), ([[-1]], "token -1 is out of range")):
        with pytest.raises(FedhenError, match=says):
            model.predict(raw)

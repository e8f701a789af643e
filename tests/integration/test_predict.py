"""Saved models take raw inputs: `predict` scores as the run did, from each kind of data, and says what does not fit."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedhen
from fedhen import FedhenError
from fedhen.cli import main
from fedhen.config.recipes import load_recipe
from fedhen.data.digits import load_digits
from fedhen.data.published import CIFAR100, PUBLISHED, SHAKESPEARE
from fedhen.data.shakespeare import read_shakespeare
from fedhen.data.spec import DataSpec, InputSpec
from fedhen.data.storage import data_root
from fedhen.fileio.untrusted import PARSE_ERRORS
from fedhen.models.loaded_model import LoadedModel
from fedhen.models.model_card import read_card
from support import tiny_archive
from support.tiny import TINY_OPTIONS, as_options

SMALL: dict[str, Any] = {
    "rounds": 1,
    "devices": {"number": 4, "active": 2},
    "training": {"epochs": 1, "batch_size": 8},
    "runtime": {"workers": 1},
    "accelerator": "cpu",
}


class Net(nn.Module):
    """Two linear exits for inputs of any shape, and a method of a name that `LoadedModel` has too."""

    def __init__(self, inputs: int, outputs: int, deep: bool) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, 8)
        self.exit = nn.Linear(8, outputs)
        self.top = nn.Linear(8, outputs) if deep else None

    def predict(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x.flatten(1)))

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.predict(x)
        return [self.exit(h)] if self.top is None else [self.exit(h), self.top(h)]


def family(inputs: int, outputs: int) -> fedhen.Family:
    return fedhen.Family({"simple": lambda: Net(inputs, outputs, False), "complex": lambda: Net(inputs, outputs, True)})


def command(*arguments: str) -> None:
    assert main([*arguments, "--quiet", "--accelerator", "cpu"]) == 0


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "run"
    command("run", "digits", "--rounds", "3", "--out", str(folder), *TINY_OPTIONS, "--set", "data.limit=1400")
    return folder


def last_accuracy(folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])["accuracy"]
    return found


def share_right(model: LoadedModel, raw: Any, names: list[str]) -> float:
    """Returns the accuracy of the predicted names, as a share of the examples."""
    found = [prediction.value for prediction in model.predict(raw)]
    return sum(map(str.__eq__, found, names)) / len(names)


def test_raw_pixels_of_the_digits_score_exactly_what_the_run_recorded(digits: Path) -> None:
    data = load_digits()
    names = [str(int(label)) for label in data.y_test]
    for kind, tiers in last_accuracy(digits).items():
        for tier, accuracy in tiers.items():
            assert share_right(fedhen.load(digits, tier, kind), data.x_test, names) == accuracy


def test_predictions_are_the_softmax_of_the_exit(digits: Path) -> None:
    """Computed here from the logits of pixels divided by 16."""
    model, pixels = fedhen.load(digits, "complex"), load_digits().x_test[:7]
    logits = dict(zip(("simple", "complex"), model(pixels.float() / 16), strict=True))
    for exit, expected in logits.items():
        found = model.predict(pixels, exit=exit, batch_size=3)
        shares = expected.double().softmax(1).tolist()
        for prediction, row in zip(found, shares, strict=True):
            assert list(prediction.probabilities) == list("0123456789") and prediction.exit == exit
            assert [*prediction.probabilities.values()] == pytest.approx(row, rel=1e-5)
            assert prediction.probability == max(prediction.probabilities.values())
            assert prediction.probabilities[prediction.value] == prediction.probability
    assert model.predict(pixels)[0].exit == "complex", "the last one by default"
    assert repr(model.predict(pixels[0])[0]).count("0.") == 1, "the repr is short"


def test_images_may_have_their_channels_first_last_or_nowhere(digits: Path) -> None:
    model, pixels = fedhen.load(digits, "simple"), load_digits().x_test[:3]
    expected = [each.value for each in model.predict(pixels)]
    forms = [pixels[:, 0], pixels.permute(0, 2, 3, 1), pixels.numpy(), pixels.tolist(), [*pixels], pixels.long()]
    images = [Image.fromarray(each.numpy()) for each in pixels[:, 0]]
    for raw in [*forms, images, pixels[:, 0].numpy().astype(np.uint16)]:
        assert [each.value for each in model.predict(raw)] == expected
    assert [model.predict(each)[0].value for each in (pixels[0], pixels[1, 0], images[2])] == expected


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "normalised": (lambda x: x / 16, "float32: pass pixels as whole numbers from 0 to 16, not normalised"),
    "NaN": (lambda x: x * torch.nan, "is float32"),
    "bright": (lambda x: x * 16, "has pixels from 0 to 240: the model's are from 0 to 16"),
    "negative": (lambda x: x.long() - 1, "pixels from -1 to"),
    "true or false": (lambda x: x > 3, "is bool"),
    "large": (lambda x: torch.zeros(2, 1, 28, 28, dtype=torch.uint8), r"has shape \(2, 1, 28, 28\): an image has"),
    "coloured": (lambda x: x.expand(-1, 3, -1, -1), r"has shape \(2, 3, 8, 8\)"),
    "no images": (lambda x: x[:0], "there are no inputs"),
    "an empty list": (lambda x: [], "there are no inputs"),
    "nothing": (lambda x: None, "not an array of numbers"),
    "a mapping": (lambda x: {"x": x}, "not an array of numbers"),
    "ragged": (lambda x: [[1], [2, 3]], "cannot be read"),
    "words": (lambda x: np.array([["a"]]), "not an array of numbers of one shape"),
    "a large image": (lambda x: Image.new("L", (9, 8)), "the image has 9×8 pixels, and the model's images 8×8"),
    "a bright image": (lambda x: Image.new("L", (8, 8), 200), "pixels up to 200: the model's are from 0 to 16"),
    "a deep image": (lambda x: Image.new("I", (8, 8)), "more than 8 bits per pixel"),
    "no file": (lambda x: "missing.png", "missing.png cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_one_line(digits: Path, name: str) -> None:
    change, says = WRONG[name]
    with pytest.raises(FedhenError, match=says) as error:
        fedhen.load(digits, "simple").predict(change(load_digits().x_test[:2]))
    assert "\n" not in str(error.value)


def test_wrong_arguments_are_one_line(digits: Path) -> None:
    model = fedhen.load(digits, "simple")
    with pytest.raises(FedhenError, match="unknown exit 'complex'"):
        model.predict(load_digits().x_test, exit="complex")
    with pytest.raises(FedhenError, match="batch_size is 0"):
        model.predict(load_digits().x_test, batch_size=0)


def test_a_loaded_model_is_the_module(tmp_path: Path) -> None:
    """Its weights, modes, types and copies are those of the module, which may have a method of the same name."""
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    data = fedhen.arrays(x, (x[:, 0] > 0).long(), class_names=["low", "high"])
    run = fedhen.train(family(3, 2), data, out=tmp_path / "run", **SMALL)
    model, plain = fedhen.load(tmp_path / "run", "complex", family=family(3, 2)), Net(3, 2, True)
    assert isinstance(model, nn.Module) and not model.training
    plain.load_state_dict(model.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict()) == [name for name, _ in model.named_parameters()]
    assert torch.equal(model(x)[-1], plain(x)[-1]) and model.exit is model._loaded[0].exit
    expected = [each.value for each in model.predict(x)]
    assert expected == [("low", "high")[k] for k in plain(x)[-1].argmax(1)]
    assert [each.value for each in run.model("complex").predict(x)] == expected
    double = copy.deepcopy(model).double().train()
    assert next(model.parameters()).dtype == torch.float32 and double(x.double())[0].dtype == torch.float64
    assert [each.value for each in double.predict(x)] == expected and double.training, "its mode is as before"
    with torch.no_grad():
        model.top.bias.copy_(torch.tensor([100.0, 0.0]))
    assert {each.value for each in model.predict(x)} == {"low"}, "weights that change count"


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


def about_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["fedhen"])
    return found


@pytest.fixture
def own(digits: Path) -> Any:
    """The path of a model file that may be changed."""
    path = digits / "models" / "server-simple.safetensors"
    good = path.read_bytes()
    yield path
    path.write_bytes(good)


def test_files_of_earlier_versions_load_and_predict_says_what_is_missing(digits: Path, own: Path) -> None:
    old = {key: value for key, value in about_of(own).items() if key not in ("task", "data")}
    save_file(load_file(own), own, metadata={"fedhen": json.dumps(old)})
    model = fedhen.load(digits, "simple")
    assert model(torch.zeros(1, 1, 8, 8))[0].shape == (1, 10)
    with pytest.raises(FedhenError, match=r"does not say what its raw inputs are.*call it with inputs prepared"):
        model.predict(load_digits().x_test)


INPUT = ("data", "inputs", 0)
DAMAGES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "data": (("data",), 3),
    "no inputs": (("data", "inputs"), []),
    "inputs of words": (("data", "inputs"), "abc"),
    "many inputs": (("data", "inputs"), [{}] * 1000),
    "another shape": ((*INPUT, "shape"), [1, 9, 9]),
    "a giant shape": ((*INPUT, "shape"), [1, 10**12, 8]),
    "a giant image": ((*INPUT, "shape"), [1, 10**9, 8]),
    "a deep shape": ((*INPUT, "shape"), [1] * 100),
    "a negative shape": ((*INPUT, "shape"), [-1, 8, 8]),
    "an unknown type": ((*INPUT, "dtype"), "complex64"),
    "a type of code": ((*INPUT, "dtype"), "__class__"),
    "no type": ((*INPUT, "dtype"), None),
    "a name": ((*INPUT, "name"), 3),
    "half a character": ((*INPUT, "name"), "\ud800"),
    "too many means": ((*INPUT, "mean"), [0.0, 1.0]),
    "a mean in words": ((*INPUT, "mean"), ["a"]),
    "a giant mean": ((*INPUT, "mean"), [1e300]),
    "no deviation": ((*INPUT, "std"), [0.0]),
    "a tiny deviation": ((*INPUT, "std"), [1e-300]),
    "a negative deviation": ((*INPUT, "std"), [-1.0]),
    "a deviation that is true": ((*INPUT, "std"), [True]),
    "a pixel of 256": ((*INPUT, "highest"), 256),
    "half a pixel": ((*INPUT, "highest"), 0.5),
    "resized in words": ((*INPUT, "resized"), "yes"),
    "columns of images": ((*INPUT, "columns"), ["a"]),
    "an alphabet of lists": ((*INPUT, "alphabet"), ["a"]),
    "a character twice": ((*INPUT, "alphabet"), "aa"),
    "padding": ((*INPUT, "padding"), -1),
    "names of numbers": (("data", "class_names"), [1]),
    "a name twice": (("data", "class_names"), ["a", "a"]),
    "names in words": (("data", "class_names"), "abc"),
    "a unit of numbers": (("data", "unit"), 3),
    "a target of lists": (("data", "target"), []),
    "the task": (("task",), "classification"),
    "an unknown task": (("task", "name"), "evil"),
    "a task from a file": (("task", "name"), "/tmp/evil.py:TASK"),
    "an unknown setting": (("task", "evil"), 1),
    "a setting in words": (("task", "label_smoothing"), "much"),
    "no exits": (("exits",), []),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_metadata_is_one_line(digits: Path, own: Path, name: str) -> None:
    about = about_of(own)
    (*way, last), value = DAMAGES[name]
    where: Any = about
    for key in way:
        where = where[key]
    where[last] = value
    save_file(load_file(own), own, metadata={"fedhen": json.dumps(about)})
    with pytest.raises(FedhenError, match="damaged") as error:
        fedhen.load(digits, "simple")
    assert "\n" not in str(error.value)


@pytest.mark.fuzz
def test_any_value_anywhere_in_the_metadata_is_read_or_refused(digits: Path) -> None:
    """Each place is replaced by each of some odd values: the model predicts, or an error says why not."""
    odd: list[Any] = [
        None,
        True,
        -1,
        0,
        10**30,
        0.5,
        "",
        "x",
        "\x00\n",
        [],
        [0],
        [[]],
        ["x"],
        {},
        {"x": 1},
        [1e308] * 3,
    ]
    path = digits / "models" / "server-simple.safetensors"
    good, module, pixels = about_of(path), fedhen.load(digits, "simple"), load_digits().x_test[:2]

    def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            yield (*way, key)
            yield from places(value[key], (*way, key))

    refused = 0
    for way in places(good):
        for value in odd:
            about = copy.deepcopy(good)
            where: Any = about
            for key in way[:-1]:
                where = where[key]
            where[way[-1]] = value
            try:
                card = read_card(about)
            except PARSE_ERRORS:
                refused += 1
                continue
            try:
                LoadedModel(module, card).predict(pixels)
            except FedhenError as error:
                assert "\n" not in str(error)
    assert refused > 200


def test_a_description_survives_what_is_done_to_data() -> None:
    data = load_digits()
    index = [np.arange(10), np.arange(10, 1437)]
    for changed in (data.split(index), data.to(torch.device("cpu")), data.in_type_of(nn.Linear(1, 1).double())):
        assert changed.describe() == data.describe()
    assert replace(data, about=None).describe() is None
    names = DataSpec((InputSpec("ids"), InputSpec("mask")), ("a", "b"))
    own = replace(fedhen.arrays({"p": torch.zeros(2, 3), "q": torch.zeros(2)}, torch.zeros(2).long()), about=names)
    described = own.describe()
    assert described is not None and [(i.name, i.shape) for i in described.inputs] == [("p", (3,)), ("q", ())]


def test_an_app_of_a_fleet_says_what_its_raw_inputs_are() -> None:
    """Without test data the server knows nothing of normalisation: only `about` says it."""
    from fedhen.fleet.app import App, recipe_app

    config = load_recipe("digits")
    there = recipe_app().load_server_data(config).describe()
    assert there is not None and there == load_digits().describe()
    blind = App(lambda node, config: (), inputs=(1, 8, 8), classes=10)
    assert blind.load_server_data(config).describe() is None
    assert replace(blind, about=there).load_server_data(config).describe() == there
    pixels = np.zeros((4, 1, 8, 8), np.uint8)
    seeing = App(lambda node, config: (), lambda config: (pixels, np.arange(4)), about=DataSpec(class_names=("a", "b")))
    described = seeing.load_server_data(config).describe()
    assert described is not None and described.class_names == ("a", "b") and described.inputs[0].dtype == "uint8"

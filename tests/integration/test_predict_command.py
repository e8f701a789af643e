"""`fedhen predict` with a run: tables by their columns, numbers with their unit, pixels as Python takes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.data.digits import load_digits
from support.cli import refused
from support.predictions import command, family
from support.tiny import TINY_OPTIONS

FEW = ("--set", "devices.number=4", "--set", "devices.active=2")
PARTS = """
import fedhen
from support.predictions import family

FAMILY = family(2, {outputs})


def data():
    return fedhen.FederatedData.from_table({path!r}, target={target!r}, unit={unit!r}, standardise=True)
"""


def write_parts(tmp_path: Path, target: str, outputs: int, unit: str = "") -> tuple[list[str], np.ndarray]:
    """Writes a table of people and the parts of a run. Returns the options that name them, and the inputs."""
    rng = np.random.default_rng(0)
    x = np.stack([rng.integers(20, 80, 60), rng.normal(70, 9, 60).round(2)], 1)
    rows = [f"{age:g},{weight:g},{('no', 'yes', 'maybe')[k % 3]},{age * 2:g}" for k, (age, weight) in enumerate(x)]
    path = tmp_path / "people.csv"
    path.write_text("\n".join(["age,weight,ill,dose", *rows]) + "\n")
    text = PARTS.format(outputs=outputs, path=str(path), target=target, unit=unit)
    (tmp_path / "parts.py").write_text(text.replace("target=", "inputs=['age', 'weight'], target="))
    return ["--family", f"{tmp_path / 'parts.py'}:FAMILY", "--data", f"{tmp_path / 'parts.py'}:data"], x


def standardise(x: np.ndarray, run: Path) -> torch.Tensor:
    """Computed here, over the rows that the run trained on."""
    data = fedhen.FederatedData.from_table(
        run.parent / "people.csv", target="ill", inputs=["age", "weight"], standardise=True
    )
    train = data.x.double().numpy()
    return torch.from_numpy((x - train.mean(0)) / train.std(0)).float()


@pytest.mark.slow
def test_a_table_by_the_names_of_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, x = write_parts(tmp_path, "ill", 3)
    run = tmp_path / "run"
    command("run", *parts, "--run-dir", str(run), "--rounds", "1", *FEW)
    capsys.readouterr()
    turned = tmp_path / "new.csv"
    turned.write_text("\n".join(["weight,name,age", *(f"{weight:g},x,{age:g}" for age, weight in x[:7])]) + "\n")
    assert main(["predict", str(run), str(turned), "--json", "--tier", "complex", *parts]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = fedhen.load(run, "complex", family=family(2, 3))
    with torch.no_grad():
        logits = model(standardise(x[:7], run))[-1]
    assert [line["class"] for line in lines] == [("maybe", "no", "yes")[k] for k in logits.argmax(1)]
    assert [line["probability"] for line in lines] == pytest.approx(logits.softmax(1).amax(1).tolist(), abs=2e-6)
    assert [line["input"] for line in lines] == [f"new.csv[{k}]" for k in range(7)]
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    exported = tmp_path / "export"
    assert main(["export", str(run), "--out", str(exported), *parts]) == 0
    capsys.readouterr()
    assert main(["predict", str(exported), str(turned), "--json", "--tier", "complex"]) == 0
    same = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["class"] for line in same] == [line["class"] for line in lines]
    assert [line["probability"] for line in same] == pytest.approx([line["probability"] for line in lines], abs=1e-4)
    assert "a row has, in order: age, weight" in (exported / "README.md").read_text()
    for text, says in (
        ("age\n3\n", "column 'weight' is missing: the model needs age, weight"),
        ("age,weight\n3,\n", "column 'weight' has '' in row 1: write a number"),
        ("age,weight\n3,4\n5\n", "column 'weight' has '' in row 2: write a number"),
        ("age,weight\n3,heavy\n", "column 'weight' has 'heavy' in row 1: write a number"),
        ("age,weight\n3,inf\n", "holds NaN or infinity"),
        ("age,weight\n", "has no rows"),
        ("", "has no rows"),
    ):
        turned.write_text(text)
        assert says in refused(capsys, "predict", str(exported), str(turned))
    turned.write_text("age\n3\n")
    assert "column 'weight' is missing: the model needs age, weight" in refused(
        capsys, "predict", str(run), str(turned), *parts
    )


@pytest.mark.slow
def test_a_number_has_its_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, x = write_parts(tmp_path, "dose", 1, "mg")
    run = tmp_path / "run"
    command("run", *parts, "--task", "regression", "--run-dir", str(run), "--rounds", "1", *FEW)
    capsys.readouterr()
    np.save(tmp_path / "x.npy", x[:2])
    assert main(["predict", str(run), str(tmp_path / "x.npy"), "--tier", "simple", *parts]) == 0
    shown = capsys.readouterr().out.splitlines()
    with torch.no_grad():
        expected = fedhen.load(run, "simple", family=family(2, 1))(standardise(x[:2], run))[-1][:, 0].tolist()
    assert shown[:2] == [f"x.npy[{k}]  {value:.6g} mg  simple" for k, value in enumerate(expected)]
    assert main(["predict", str(run), str(tmp_path / "x.npy"), "--json", *parts]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[0])
    assert set(line) == {"input", "value", "unit", "exit"} and line["unit"] == "mg"
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    exported = tmp_path / "export"
    assert main(["export", str(run), "--out", str(exported), *parts]) == 0
    capsys.readouterr()
    np.save(tmp_path / "x.npy", x[:2].astype(np.float32))
    assert main(["predict", str(exported), str(tmp_path / "x.npy"), "--tier", "simple"]) == 0
    same = capsys.readouterr().out.splitlines()
    assert [line.split()[2:] for line in same[:2]] == [["mg", "simple"], ["mg", "simple"]]
    assert [float(line.split()[1]) for line in same[:2]] == pytest.approx(expected, rel=1e-4)


def test_pixels_are_read_as_python_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    command("run", "digits", "--rounds", "1", "--out", str(run), *TINY_OPTIONS)
    pixels, found = load_digits().x_test.numpy()[:3], []
    for k, given in enumerate((pixels, pixels[:, 0], pixels.transpose(0, 2, 3, 1))):
        np.save(tmp_path / f"{k}.npy", given)
        capsys.readouterr()
        assert main(["predict", str(run), str(tmp_path / f"{k}.npy"), "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found.append([(line["class"], line["probability"], line["exit"]) for line in lines])
    assert found[0] == found[1] == found[2] and len(found[0]) == 3
    np.save(tmp_path / "bright.npy", pixels * 15)
    wrong = refused(capsys, "predict", str(run), str(tmp_path / "bright.npy"))
    assert "the model's are from 0 to 16" in wrong


@pytest.mark.slow
@pytest.mark.filterwarnings("default:the data of .* has changed since")
def test_the_training_table_is_not_needed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and normalisation are those of the training: predictions are the same if the table changes or is gone."""
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    parts, x = write_parts(tmp_path, "ill", 3)
    run, table = tmp_path / "run", tmp_path / "people.csv"
    named = ["--data", str(table), "--set", "data.target=ill", "--set", 'data.inputs=["age", "weight"]']
    options = [*parts[:2], *named, "--set", "data.standardise=true", *FEW]
    command("run", *options, "--run-dir", str(run), "--rounds", "1")
    np.save(tmp_path / "x.npy", x[:5].astype(np.float32))

    def predict(folder: Path, *more: str) -> list[tuple[str, float]]:
        capsys.readouterr()
        assert main(["predict", str(folder), str(tmp_path / "x.npy"), "--json", "--tier", "complex", *more]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(line["class"], round(line["probability"], 4)) for line in lines]

    before = predict(run, *parts[:2])
    rows = table.read_text().splitlines()
    table.write_text("\n".join([*rows[:40], "79,300,no,3"]) + "\n")
    assert predict(run, *parts[:2]) == before
    capsys.readouterr()
    assert main(["export", str(run), "--out", str(tmp_path / "export"), "--force", *parts[:2]]) == 0
    assert "has changed since: scores are those of other examples" in capsys.readouterr().err
    assert main(["evaluate", str(run), *parts[:2]]) == 1
    assert "has changed since: scores are those of other examples" in capsys.readouterr().err
    assert predict(tmp_path / "export") == before
    table.unlink()
    assert predict(run, *parts[:2]) == before


def test_what_is_no_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, x = write_parts(tmp_path, "ill", 3)
    table, digits = tmp_path / "table", tmp_path / "digits"
    command("run", *parts, "--run-dir", str(table), "--rounds", "1", *FEW)
    command("run", "digits", "--rounds", "1", "--out", str(digits), *TINY_OPTIONS)
    capsys.readouterr()
    one, two = tmp_path / "1.csv", tmp_path / "2.csv"
    one.write_text("age,weight\n30,60\n")
    two.write_text("age\n30\n")
    np.savez(tmp_path / "columns.npz", weight=x[:3, 1], age=x[:3, 0])
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    assert main(["predict", str(table), str(tmp_path / "columns.npz"), *parts]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 + 1
    for run, given, says in (
        (table, [one, two], "1.csv is an array or a table: give it alone"),
        (table, [two], "2.csv: column 'weight' is missing"),
        (table, [tmp_path / "none.csv"], "none.csv: it cannot be read: No such file"),
        (table, ["hello"], "hello: the model takes rows of a table: give a .csv, .npy or .npz file"),
        (table, [tmp_path / "objects.npy"], "objects.npy cannot be read: it holds Python objects"),
        (digits, [one], "1.csv is not one of .png"),
        (digits, [tmp_path / "objects.npy", tmp_path / "columns.npz"], "give it alone"),
    ):
        own = parts if run == table else []
        assert says in refused(capsys, "predict", str(run), *map(str, given), *own)
    assert "give a number from 0 to 1" in refused(capsys, "predict", str(table), str(one), "--threshold", "2", *parts)


def test_text_is_not_predicted_as_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, _ = write_parts(tmp_path, "ill", 1)
    wrong = refused(capsys, "run", *parts, "--task", "regression", "--run-dir", str(tmp_path / "run"), *FEW)
    assert "the target is text (maybe, no, yes), and the task is regression, which predicts numbers" in wrong
    wrong = refused(capsys, "run", "--family", "parts.py", "--data", str(tmp_path / "people.csv"))
    assert "--family parts.py: name what it holds too, as parts.py:NAME" in wrong

"""A run on the digits becomes files that onnxruntime runs to the same answers; what is damaged or wrong is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import fedhen
from fedhen.cli import main
from fedhen.data.digits import load_digits
from fedhen.deploy.exit_file import read_exits
from fedhen.deploy.export import export_models
from fedhen.deploy.manifest import CARD, MANIFEST, NEVER
from fedhen.deploy.runtime import open_export
from fedhen.deploy.source import Source, TierModel
from fedhen.errors import CheckpointError, DataError, FedhenError
from fedhen.tasks.standard import Classification
from support.cli import refused
from support.early_exits import Branching, FixedBatch, make
from support.tiny import TINY_OPTIONS

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
ort = pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
# In one process, which trains the run and exports it once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("an export")]

FILES = ["simple.onnx", "complex.onnx", "cascade.onnx"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    assert main(["run", "digits", "--rounds", "1", "--quiet", "--out", str(folder), *TINY_OPTIONS[1:-1]]) == 0
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    fedhen.export(run, int8=True, tolerance=5)
    return run / "export"


def session(content: bytes) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(content, options)


def copy(exported: Path, folder: Path) -> Path:
    return Path(shutil.copytree(exported, folder / "copy"))


def test_files_answer_raw_pixels_as_the_trained_modules_do(run: Path, exported: Path) -> None:
    """The modules are loaded and fed with pixels divided by 16, as the digits' normalisation says, by hand."""
    data = load_digits()
    with torch.no_grad():
        simple, deep = (list(fedhen.load(run, tier)(data.x_test.float() / 16)) for tier in ("simple", "complex"))
    pixels = data.x_test.numpy()
    for name, expected in (("simple.onnx", simple), ("complex.onnx", deep)):
        loaded = session((exported / name).read_bytes())
        assert [output.name for output in loaded.get_outputs()] == ["logits_simple", "logits_complex"][: len(expected)]
        for size in (1, 7, 360):
            found = loaded.run(None, {"input": pixels[:size]})
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other[:size].numpy(), rtol=1e-4, atol=1e-5)


def test_in_the_cascade_each_example_takes_its_own_exit_at_any_batch_size(run: Path, exported: Path) -> None:
    data = load_digits()
    with torch.no_grad():
        low, high = (z.numpy() for z in fedhen.load(run, "complex")(data.x_test.float() / 16))
    sure = np.exp(low - low.max(1, keepdims=True))
    sure = (sure / sure.sum(1, keepdims=True)).max(1)
    loaded = session((exported / "cascade.onnx").read_bytes())
    for threshold in (0.0, float(np.median(sure)) + 1e-6, 0.9, NEVER):
        expected = np.where(sure >= threshold, 0, 1)
        for size in (1, 7, 360):
            given = {"input": data.x_test.numpy()[:size], "threshold": np.array(threshold, np.float32)}
            logits, exits = loaded.run(None, given)
            assert exits.tolist() == expected[:size].tolist()
            right = np.where(expected[:size, None] == 0, low[:size], high[:size])
            np.testing.assert_allclose(logits, right, rtol=1e-4, atol=1e-5)
    default = loaded.run(None, {"input": data.x_test.numpy()})[1]
    assert default.tolist() == np.where(sure >= 0.9, 0, 1).tolist()


def digest_weights(path: Path) -> str:
    """SHA-256 of shape, type and bytes of one weight after the other."""
    found = sha256()
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            found.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def test_the_manifest_says_what_the_files_are(run: Path, exported: Path) -> None:
    manifest = open_export(exported).manifest
    int8 = [name.replace(".", "-int8.") for name in FILES]
    assert sorted(file.name for file in manifest.files) == sorted(FILES + int8)
    names = {path.name for path in exported.iterdir()}
    assert names == {MANIFEST, CARD, *FILES, *int8}
    recorded = json.loads((run / "summary.json").read_text())["final"]["server"]
    for file in manifest.files:
        content = (exported / file.name).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), sha256(content).hexdigest())
        if file.quantisation:
            whole = (exported / file.name.replace("-int8", "")).stat().st_size
            assert file.bytes < (0.45 if file.tier == "simple" else 0.3) * whole
        if file.kind == "model" and not file.quantisation:
            assert file.score[file.tier] == recorded[file.tier] == file.score_of_model[file.tier]
            assert file.agreement.same == 1 and file.agreement.difference <= file.agreement.tolerance
            assert (file.agreement.examples, file.agreement.batches) == (360, [1, 7, 360])
        assert file.weights == digest_weights(run / "models" / f"server-{file.tier}.safetensors")
    assert manifest.mean == [0.0] and manifest.std == [16.0]
    (record,) = manifest.files[0].inputs
    assert (record.name, record.type, record.shape) == ("input", "uint8", [1, 8, 8])
    assert manifest.operations["simple"] < manifest.operations["complex"]
    assert manifest.operations == json.loads((run / "summary.json").read_text())["operations"]
    assert manifest.cascade is not None and manifest.cascade.study is not None
    assert manifest.cascade.study.operations == manifest.operations


def test_no_path_and_no_date_and_the_same_bytes_again(run: Path, exported: Path, tmp_path: Path) -> None:
    fedhen.export(run, tmp_path / "again", int8=True, tolerance=5)
    for path in exported.iterdir():
        content = path.read_bytes()
        assert content == (tmp_path / "again" / path.name).read_bytes(), path.name
        for told in (str(run), str(Path.cwd()), sys.prefix, "site-packages", "stack_trace", str(tmp_path)):
            assert told.encode() not in content, (path.name, told)
        if path.suffix != ".onnx":
            assert not re.search(rb"20\d\d-\d\d-\d\d", content)


def test_predictions_of_an_export_are_those_of_the_run(run: Path, exported: Path) -> None:
    images = load_digits().x_test[:50]
    cascade = fedhen.Cascade(fedhen.load(run, "complex"), 0.5)
    logits, exits = cascade(images.float() / 16)
    answer = open_export(exported).predict(images.numpy(), threshold=0.5)
    assert answer.exits == [("simple", "complex")[place] for place in exits]
    assert answer.output.argmax(1).tolist() == logits.argmax(1).tolist()
    assert open_export(exported).predict(images.numpy(), tier="simple").exits == ["simple"] * 50


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "onnx", "onnxscript", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
import numpy as np
from pathlib import Path
from fedhen.deploy.runtime import open_export
print(open_export(Path(sys.argv[1])).predict(np.zeros((3, 1, 8, 8), np.uint8)).output.shape)
"""


def test_the_command_predicts_images_alike_with_a_run_and_with_its_export(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = load_digits().x_test.numpy()
    folder = tmp_path / "images"
    folder.mkdir()
    for place in range(5):
        image.fromarray(pixels[place, 0]).save(folder / f"{place}.png")
    np.save(tmp_path / "pixels.npy", pixels[:5])
    shown = []
    for model in (run, exported):
        for given in (folder, tmp_path / "pixels.npy"):
            assert main(["predict", str(model), str(given), "--json", "--threshold", "0.5"]) == 0
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            shown.append([(line["class"], round(line["probability"], 3), line["exit"]) for line in lines])
    assert shown[0] == shown[1] == shown[2] == shown[3] and len(shown[0]) == 5
    image.fromarray(pixels[0, 0]).resize((9, 8)).save(folder / "wide.png")
    (folder / "torn.png").write_bytes((folder / "0.png").read_bytes()[:40])
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    for given, says in (
        (folder / "wide.png", "is 9×8 pixels, and the model takes 8×8: resize it"),
        (folder / "torn.png", "cannot be read"),
        (tmp_path / "missing.png", "cannot be read: No such file or directory"),
        (tmp_path / "objects.npy", "cannot be read: it holds Python objects"),
    ):
        assert says in refused(capsys, "predict", str(exported), str(given))
    wrong = refused(capsys, "predict", str(exported), str(folder), "--threshold", "3")
    assert "give a number from 0 to 1, or 'never'" in wrong


def test_the_command_studies_the_exits(run: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--exits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    manifest = open_export(exported).manifest
    assert manifest.cascade is not None and manifest.cascade.study is not None
    study = manifest.cascade.study
    kept = read_exits(run)
    assert kept is not None and (kept.round, kept.study) == (1, study)
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["simple"][0] == f"{100 * (study.score['simple'] or 0):.1f}"
    assert rows["complex"][2:] == ["100.0", "%"]
    for row in study.table:
        name = "never" if row.threshold == NEVER else f"{row.threshold:g}"
        assert (
            rows[name][2:] == [f"{100 * row.operations:.1f}", "%", f"{100 * row.early:.1f}", "%"] or name in lines[-2]
        )


@pytest.mark.process
def test_an_export_runs_without_torch(exported: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(exported)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("(3, 10)\n", 0), done.stderr


def test_damaged_files_and_wrong_inputs(exported: Path, tmp_path: Path) -> None:
    folder = copy(exported, tmp_path)
    pixels = np.zeros((1, 1, 8, 8), np.uint8)
    for wrong, says in (
        (pixels.astype(np.float32), "is float32: the model takes uint8"),
        (pixels[:, :, :7], r"the model takes \(examples, 1, 8, 8\)"),
        (pixels[:0], "is empty"),
    ):
        with pytest.raises(DataError, match=says):
            open_export(folder).predict(wrong)
    content = bytearray((folder / "cascade.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "cascade.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match="its checksum is not the manifest's"):
        open_export(folder).predict(pixels)
    (folder / "simple.onnx").write_bytes((exported / "simple.onnx").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged: it has"):
        open_export(folder).predict(pixels, tier="simple")
    with pytest.raises(FedhenError, match="unknown tier 'simpel': did you mean 'simple'"):
        open_export(folder).predict(pixels, tier="simpel")


def test_bad_commands_say_why_in_one_line_and_leave_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    command = ["export", str(run), "--out"]
    assert "unknown tier 'simpel'" in refused(capsys, *command, str(out), "--tier", "simpel")
    assert "give a number from 0 to 1, or 'never'" in refused(capsys, *command, str(out), "--threshold", "2.5")
    assert "is not empty" in refused(capsys, *command, str(taken))
    assert "does not hold an export" in refused(capsys, *command, str(taken), "--force")
    assert "is a file" in refused(capsys, *command, str(taken / "mine.txt"))
    assert "is not a run folder" in refused(capsys, "export", str(taken))
    assert "needs ExecuTorch" in refused(capsys, *command, str(out), "--to", "executorch")
    model = run / "models" / "server-complex.safetensors"
    kept = model.read_bytes()
    try:
        model.write_bytes(kept[:-10])
        assert "is damaged" in refused(capsys, *command, str(out))
    finally:
        model.write_bytes(kept)
    assert sorted(tmp_path.iterdir()) == [taken] and [p.name for p in taken.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Branching(), "tier 'only' cannot be exported: .*branches on values"),
        (FixedBatch(), "tier 'only' takes batches of 2"),
    ],
)
def test_models_that_cannot_be_captured(module: nn.Module, says: str, tmp_path: Path) -> None:
    source = Source([TierModel("only", module, ("only",))], Classification(), torch.randn(2, 6))
    with pytest.raises(FedhenError, match=says):
        export_models(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_int8_needs_examples_and_must_not_lose_too_much(run: Path, tmp_path: Path) -> None:
    module, x = make("tied")
    source = Source([TierModel("high", module, ("low", "high"))], Classification(), x)
    with pytest.raises(FedhenError, match="int8 needs training examples to calibrate on"):
        export_models(source, tmp_path / "out", int8=True)
    with pytest.raises(
        FedhenError, match=r"simple-int8\.onnx is .* points below the model, and the tolerance is -100: not written"
    ):
        fedhen.export(run, tmp_path / "out", int8=True, tier="simple", tolerance=-100)
    assert not list(tmp_path.iterdir())


LIMITED = """
import resource, sys
from fedhen.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.process
def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", LIMITED, "export", str(run), "--tier", "simple", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=os.environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"fedhen: cannot write to {out}: File too large; choose another --out\n"
    assert not list(tmp_path.iterdir())

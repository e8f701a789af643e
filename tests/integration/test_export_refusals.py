"""What is wrong with an export, its inputs or its surroundings is one line with exit code 2, and nothing is left."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedhen.deploy import check
from fedhen.deploy.capture import capture
from fedhen.deploy.export import export_models
from fedhen.deploy.manifest import MANIFEST
from fedhen.deploy.runtime import OnnxSession
from fedhen.deploy.source import Source, TierModel
from fedhen.errors import FedhenError
from fedhen.tasks.standard import Classification
from support.cli import refused
from support.early_exits import Tied, make

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytestmark = pytest.mark.slow
EXITS = ("low", "high")


def source_of(module: nn.Module, x: torch.Tensor) -> Source:
    return Source([TierModel("high", module, EXITS)], Classification(), x)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a module that takes six floats."""
    folder = tmp_path_factory.mktemp("refusals") / "out"
    export_models(source_of(*make("tied")), folder)
    return folder


def copy(exported: Path, folder: Path) -> Path:
    folder.mkdir()
    for path in exported.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


GOOD = np.zeros((2, 6), np.float32)


def huge(path: Path) -> None:
    """Writes an array whose header promises 2⁴⁰ rows."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 6), }"
    header += b" " * (64 - (10 + len(header) + 1) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


def saved(array: Any) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (saved(GOOD.astype(np.int16)), "input 'input' is int16: the model takes float32"),
        (saved(GOOD[:, :5]), "has shape (2, 5): the model takes (examples, 6)"),
        (saved(GOOD[0]), "has shape (6,): the model takes (examples, 6)"),
        (saved(np.float32(0)), "has shape (): the model takes (examples, 6)"),
        (saved(GOOD[:0]), "is empty: give at least one example"),
        (saved(GOOD * np.nan), "holds NaN or infinity"),
        (saved(GOOD + np.inf), "holds NaN or infinity"),
        (huge, "x.npy cannot be read: "),
        (lambda path: path.write_bytes(b""), "x.npy cannot be read: "),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), "x.npy cannot be read: "),
    ],
)
def test_wrong_inputs(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], write: Callable[[Path], None], says: str
) -> None:
    write(tmp_path / "x.npy")
    assert says in refused(capsys, "predict", str(exported), str(tmp_path / "x.npy"))


def change_manifest(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / MANIFEST).read_text())
    values["files"][-1] |= changes
    (folder / MANIFEST).write_text(json.dumps(values))


def put(folder: Path, content: bytes) -> None:
    """Writes another file in place of the cascade, with a manifest that fits it."""
    (folder / "cascade.onnx").write_bytes(content)
    change_manifest(folder, bytes=len(content), sha256=sha256(content).hexdigest())


def flip(folder: Path) -> None:
    content = bytearray((folder / "cascade.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "cascade.onnx").write_bytes(content)


def refer_outside(folder: Path) -> None:
    """Moves a weight of the cascade to a file that exists on every machine."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(folder / "cascade.onnx")
    tensor = next(each for each in model.graph.initializer if each.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    put(folder, model.SerializeToString())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flip, "cascade.onnx is damaged: its checksum is not the manifest's"),
        (lambda f: (f / "cascade.onnx").write_bytes((f / "cascade.onnx").read_bytes()[:-9]), "is damaged: it has"),
        (lambda f: (f / "cascade.onnx").unlink(), "cascade.onnx does not exist"),
        (lambda f: put(f, b"\x08\x0a" * 9), "cascade.onnx cannot be loaded"),
        (lambda f: put(f, b"\xff" * 99), "cascade.onnx cannot be loaded"),
        (refer_outside, "cascade.onnx refers to data in another file"),
        (lambda f: change_manifest(f, name="../cascade.onnx"), "is not in the folder"),
        (lambda f: change_manifest(f, name="/etc/passwd"), "is not in the folder"),
        (lambda f: change_manifest(f, exits=["low"]), "manifest.json is damaged"),
        (lambda f: change_manifest(f, inputs=[]), "manifest.json is damaged"),
        (lambda f: change_manifest(f, bytes=-1), "manifest.json is damaged"),
        (lambda f: put(f, (f / "high.onnx").read_bytes()), "cascade.onnx does not answer as its manifest says"),
        (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"), "manifest.json is damaged"),
        (lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text()[:-40]), "manifest.json is damaged"),
        (lambda f: (f / MANIFEST).unlink(), "is not a run folder"),
    ],
)
def test_damaged_and_hostile_exports(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], says: str
) -> None:
    folder = copy(exported, tmp_path / "out")
    np.save(tmp_path / "x.npy", GOOD)
    damage(folder)
    assert says in refused(capsys, "predict", str(folder), str(tmp_path / "x.npy"))


def test_unknown_tiers_and_thresholds(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", GOOD)
    command = ("predict", str(exported), str(tmp_path / "x.npy"))
    assert "unknown tier 'hihg': did you mean 'high'" in refused(capsys, *command, "--tier", "hihg")
    for wrong in ("1.1", "-0.1", "nan", "sometimes"):
        assert "give a number from 0 to 1, or 'never'" in refused(capsys, *command, f"--threshold={wrong}")
    assert "has no int8 cascade" in refused(capsys, *command, "--int8")


@pytest.mark.parametrize(
    ("found", "to", "says"),
    [
        ({"onnxscript": ""}, "onnx", "export needs ONNX, and onnxscript is not installed: pip install 'fedhen[onnx]'"),
        ({"onnx": "1.20.9"}, "onnx", "export needs onnx 1.21 or newer, this is 1.20.9: pip install 'fedhen[onnx]'"),
        ({"executorch": ""}, "executorch", "which is not installed: pip install 'fedhen[executorch]'"),
        (
            {"executorch": "1.5.1", "torch": "2.13.0+cpu"},
            "executorch",
            "executorch 1.5.1 is for torch 2.14, this is 2.13.0: pip install 'executorch==1.4.1'",
        ),
    ],
)
def test_missing_extras_and_wrong_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, str], to: str, says: str
) -> None:
    """What is installed is asked of importlib.metadata, which answers here as if it was otherwise."""

    def answer(name: str) -> str:
        if not found.get(name, "installed"):
            raise PackageNotFoundError(name)
        return found.get(name) or version(name)

    monkeypatch.setattr("fedhen.deploy.versions.version", answer)
    with pytest.raises(FedhenError) as raised:
        export_models(source_of(*make("tied")), tmp_path / "out", to=to)
    assert str(raised.value).endswith(says) and not list(tmp_path.iterdir())


class OneClassLess(Tied):
    """Rules class 0 out, as people do with a large number."""

    def forward(self, x: Tensor) -> list[Tensor]:
        possible = torch.tensor([False, True, True])
        return [torch.where(possible, z, -1e30) for z in super().forward(x)]


@pytest.mark.parametrize("family", [Tied, OneClassLess])
def test_a_file_that_differs_from_its_model_is_refused(family: type[Tied], exported: Path) -> None:
    """The model is changed by 0.3 in one output of its first exit after the file was made from it."""
    torch.manual_seed(3)
    module, x = family().eval(), torch.randn(9, 6)
    source = source_of(module, x)
    from fedhen.deploy import onnx

    content = onnx.describe(onnx.make_model(capture(module, x), ["logits_low", "logits_high"]), {})
    session = OnnxSession(content, "high.onnx")
    check.check_model(session, check.make_reference(source.models[0], source), "high.onnx")
    with torch.no_grad():
        module.exit.bias[1] += 0.3
    reference = check.make_reference(source.models[0], source)
    with pytest.raises(FedhenError, match=r"high\.onnx differs from the model by 0\.[36] on example \d+, more than"):
        check.check_model(session, reference, "high.onnx")


def test_a_path_of_this_machine_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedhenError, match=r"simple\.onnx would hold the path .*: not written"):
        check.check_paths(b"\x00" + str(tmp_path).encode() + b"/model.py\x00", "simple.onnx")

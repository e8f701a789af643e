"""ExecuTorch files of a run on the digits, in their runtime: `make executorch` makes the environment for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedhen
from fedhen.cli import main
from fedhen.data.digits import load_digits
from fedhen.deploy.export import export_models
from fedhen.deploy.runtime import ExecutorchSession, open_export, read_checked
from fedhen.deploy.source import Source, TierModel
from fedhen.errors import CheckpointError, DataError
from fedhen.tasks.standard import Classification
from support.early_exits import make
from support.tiny import TINY_OPTIONS

pytest.importorskip("executorch", reason="ExecuTorch is not installed here: make executorch")
pytestmark = [pytest.mark.executorch, pytest.mark.slow]
of_one_run = pytest.mark.xdist_group("the run and its files")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    assert main(["run", "digits", "--rounds", "1", "--quiet", "--out", str(folder), *TINY_OPTIONS[1:]]) == 0
    fedhen.export(folder, to="executorch", int8=True, tolerance=5)
    return folder


@of_one_run
def test_methods_answer_raw_pixels_as_the_trained_module_does(run: Path) -> None:
    export = open_export(run / "export-executorch")
    assert [file.name for file in export.manifest.files] == [
        *("simple.pte", "simple-int8.pte", "complex.pte", "complex-int8.pte")
    ]
    file = export.choose_file("complex")
    assert list(file.methods) == ["forward", "first", "rest"]
    content, pixels = read_checked(export.folder, file), load_digits().x_test[:5]
    methods = {name: ExecutorchSession(content, file.name, name) for name in file.methods}
    with torch.no_grad():
        low, high = fedhen.load(run, "complex")(pixels.float() / 16)
    for place in range(5):
        inputs = {"input": pixels[place : place + 1].numpy()}
        for found, expected in zip(methods["forward"](inputs), (low, high), strict=True):
            np.testing.assert_allclose(found, expected[place : place + 1].numpy(), rtol=1e-4, atol=1e-5)
        _, confidence, *given = methods["first"](inputs)
        np.testing.assert_allclose(confidence, low[place].softmax(0).max().numpy(), rtol=1e-5)
        taken = dict(zip(file.methods["first"].gives[2:], given, strict=True))
        (last,) = methods["rest"]({name: taken[name] for name in file.methods["rest"].takes})
        np.testing.assert_allclose(last, high[place : place + 1].numpy(), rtol=1e-4, atol=1e-5)


@of_one_run
def test_a_flipped_byte_is_found_before_the_runtime_sees_it(run: Path, tmp_path: Path) -> None:
    export = open_export(run / "export-executorch")
    path = export.folder / "simple.pte"
    kept = path.read_bytes()
    content = bytearray(kept)
    content[len(content) // 2] ^= 1
    try:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="its checksum is not the manifest's"):
            export.predict(load_digits().x_test[:1].numpy(), tier="simple")
    finally:
        path.write_bytes(kept)
    with pytest.raises(DataError, match="is float32: the model takes uint8"):
        export.predict(np.zeros((1, 1, 8, 8), np.float32), tier="simple")


@of_one_run
def test_the_same_run_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    fedhen.export(run, tmp_path / "again", to="executorch", tier="simple", int8=True, tolerance=5)
    for name in ("simple.pte", "simple-int8.pte"):
        content = (tmp_path / "again" / name).read_bytes()
        assert content == (run / "export-executorch" / name).read_bytes()
        assert str(Path.cwd()).encode() not in content


@pytest.mark.parametrize("name", ["four exits", "tied"])
def test_own_families(name: str, tmp_path: Path) -> None:
    module, sample = make(name)
    exits = tuple("abcd"[: 4 if name == "four exits" else 2])
    source = Source([TierModel(exits[-1], module, exits)], Classification(), sample)
    manifest = export_models(source, tmp_path / "out", to="executorch")
    assert len(manifest.files[0].methods) == 1 + len(exits)

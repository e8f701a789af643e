"""Hostile model files and archives give one line and execute nothing."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fedhen
from fedhen.cli import main
from fedhen.errors import FedhenError
from support.cli import refused
from support.marks import first_is_quick
from support.tiny import TINY_OPTIONS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["run", "digits", "--rounds", "1", *TINY_OPTIONS, "--quiet", "--out", str(folder)]) == 0
    return folder


def hostile_models() -> dict[str, Callable[[Path], None]]:
    """Name -> what is done to a model file."""

    def raw(content: bytes) -> Callable[[Path], None]:
        def act(path: Path) -> None:
            path.write_bytes(content)

        return act

    def header(value: Any) -> Callable[[Path], None]:
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        return raw(struct.pack("<Q", len(text)) + text)

    def about(**values: Any) -> Callable[[Path], None]:
        def act(path: Path) -> None:
            good = {"exits": ["simple"], "inputs": [1, 8, 8], "classes": 10}
            save_file(load_file(path), path, metadata={"fedhen": json.dumps({**good, **values})})

        return act

    def weights(act: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
        def rewrite(path: Path) -> None:
            tensors = load_file(path)
            act(tensors)
            save_file(
                tensors,
                path,
                metadata={"fedhen": json.dumps({"exits": ["simple"], "inputs": [1, 8, 8], "classes": 10})},
            )

        return rewrite

    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return {
        "empty": raw(b""),
        "a header without end": raw(struct.pack("<Q", 2**63 - 1) + b"{}"),
        "a header of nothing": header(b"{"),
        "a deep header": header(b"[" * 100_000),
        "an offset outside": header({"w": {**one, "data_offsets": [0, 2**40]}}),
        "a giant shape": header({"w": {**one, "shape": [2**40, 2**40]}}),
        "a negative shape": header({"w": {**one, "shape": [-2]}}),
        "no metadata": lambda path: save_file(load_file(path), path),
        "metadata that is no JSON": lambda path: save_file(load_file(path), path, metadata={"fedhen": "{"}),
        "metadata that is deep": lambda path: save_file(load_file(path), path, metadata={"fedhen": "[" * 99_999}),
        "metadata that is a list": lambda path: save_file(load_file(path), path, metadata={"fedhen": "[]"}),
        "more classes than weights": about(classes=10**12),
        "no classes": about(classes=-1),
        "classes in words": about(classes="ten"),
        "inputs without end": about(inputs=[1, 10**9, 10**9]),
        "inputs of words": about(inputs="abc"),
        "exits of numbers": about(exits=[1]),
        "a wrong shape": weights(lambda t: t.update({k: torch.zeros(3, 3) for k in list(t)[:1]})),
        "a weight too many": weights(lambda t: t.update(evil=torch.zeros(1))),
        "a weight too few": weights(lambda t: t.pop(next(iter(t)))),
    }


@pytest.mark.parametrize("name", first_is_quick(hostile_models()))
def test_a_hostile_model_file_is_one_line(trained: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = trained / "models" / "server-simple.safetensors"
    good = path.read_bytes()
    try:
        hostile_models()[name](path)
        with pytest.raises(FedhenError) as error:
            fedhen.load(trained, "simple")
        assert "\n" not in str(error.value)
        if not name.startswith(("exits", "inputs", "more")):
            refused(capsys, "evaluate", str(trained))
    finally:
        path.write_bytes(good)
    fedhen.load(trained, "simple")


@pytest.mark.slow
def test_nothing_that_a_run_folder_names_is_executed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only training reads a method file, and names of tiers cannot lead out of the folder."""
    config, evil = trained / "config.toml", tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'owned')!r}, 'w')")
    good = config.read_text()
    try:
        config.write_text(good.replace('method_file = ""', f'method_file = "{evil}:M"'))
        assert main(["report", str(trained), "--out", str(tmp_path / "report")]) == 0
        assert main(["evaluate", str(trained)]) == 0
        assert main(["paper", "--runs", str(trained), "--out", str(tmp_path / "paper")]) == 0
        assert not (tmp_path / "owned").exists()
        capsys.readouterr()
        config.write_text(good.replace("simple = ", '"../../simple" = '))
        with pytest.raises(FedhenError, match="cannot be a name here"):
            fedhen.load(trained, "../../simple")
    finally:
        config.write_text(good)


@pytest.mark.parametrize("size", [10**9, 10**7])
def test_a_model_that_is_too_large_to_be_built_is_one_line(
    trained: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained / "config.toml"
    good = config.read_text()
    try:
        config.write_text(good.replace("widths = [4, 4, 8, 8]", f"widths = [{size}, {size}, 8, 8]"))
        refused(capsys, "evaluate", str(trained))
    finally:
        config.write_text(good)


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def giant_header(shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (open, (str(self.place), "w"))


def archive(path: Path, **members: bytes) -> Path:
    labels = npy(np.arange(4) % 2)
    images = npy(np.zeros((4, 8, 8), np.uint8))
    whole = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels, **members}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in whole.items():
            file.writestr(f"{name}.npy", content)
    return path


def test_pickles_in_an_archive_are_never_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = np.array([Evil(tmp_path / "owned")] * 4, dtype=object)
    for name in ("x_train", "y_test"):
        data = archive(tmp_path / "data.npz", **{name: npy(evil)})
        assert "Python objects (pickles), which are not read" in refused(capsys, "run", "digits", "--data", str(data))
    raw = archive(tmp_path / "raw.npz", x_train=b"\x80\x04cbuiltins\nopen\n(S'owned'\nS'w'\ntR.")
    refused(capsys, "run", "digits", "--data", str(raw))
    assert not (tmp_path / "owned").exists() and not Path("owned").exists()


@pytest.mark.parametrize("shape", [(2**40, 8, 8), (4, 2**31, 2**31), (2**62, 2**62)])
def test_giant_dimensions_are_refused(
    tmp_path: Path, shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    data = archive(tmp_path / "data.npz", x_train=giant_header(shape) + bytes(100))
    refused(capsys, "run", "digits", "--data", str(data))


@pytest.mark.parametrize(("claimed", "says"), [(2**50, "unpacks to 1125899.9 GB, and "), (200, "is damaged")])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(
    tmp_path: Path, claimed: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what it says that it unpacks to; one that claims less than it holds is not unpacked further than that."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, array in (("x", np.zeros((4, 1000, 1000), np.uint8)), ("y", np.arange(4) % 2)):
            for part in ("train", "test"):
                file.writestr(f"{name}_{part}.npy", npy(array))
        file.infolist()[0].file_size = claimed
    assert path.stat().st_size < 50_000
    assert says in refused(capsys, "run", "digits", "--data", str(path))


def test_an_archive_with_two_arrays_of_one_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = archive(tmp_path / "data.npz")
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("x_train.npy", npy(np.zeros((4, 8, 8), np.uint8)))
    assert "has 2 arrays named x_train" in refused(capsys, "run", "digits", "--data", str(path))


@pytest.mark.fuzz
@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 40))
@example(b"", 0, 0)
def test_any_change_of_an_archive_is_one_line_or_data(content: bytes, at: int, cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        path = archive(Path(place) / "data.npz")
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + content + whole[at + cut :])
        from fedhen.data.sources import read_own_data

        try:
            data = read_own_data(path)
        except FedhenError as error:
            assert "\n" not in str(error)
        else:
            assert data.x.shape[1:] == (1, 8, 8)

"""An export folder is not trusted: manifests, checksums, data outside of a file, and what arrays must be."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedhen.deploy.manifest import MANIFEST, Agreement, FileRecord, InputRecord, Manifest, read_manifest
from fedhen.deploy.protobuf import has_external_data
from fedhen.deploy.runtime import check_inputs, open_export
from fedhen.deploy.versions import check_pair
from fedhen.errors import CheckpointError, DataError, FedhenError

CONTENT = b"not a model"
FILE: dict[str, Any] = {
    "name": "simple.onnx",
    "kind": "model",
    "tier": "simple",
    "target": "onnx",
    "bytes": len(CONTENT),
    "sha256": sha256(CONTENT).hexdigest(),
    "exits": ["simple"],
    "inputs": [{"name": "input", "type": "uint8", "shape": [2, 3]}],
    "outputs": ["logits_simple"],
    "agreement": {"examples": 1, "batches": [1], "difference": 0.0, "tolerance": 0.1, "same": 1.0},
}


def write(folder: Path, **changes: Any) -> Path:
    """Writes an export whose one file is as the changes say."""
    (folder / "simple.onnx").write_bytes(CONTENT)
    values = {
        "format": 1,
        "versions": {},
        "run": {},
        "task": "classification",
        "metric": "accuracy",
        "examples": "test",
    }
    (folder / MANIFEST).write_text(json.dumps({**values, "files": [{**FILE, **changes}]}))
    return folder


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = FileRecord(
        **{**FILE, "inputs": [InputRecord(**FILE["inputs"][0])], "agreement": Agreement(**FILE["agreement"])}
    )
    manifest = Manifest(
        format=1, versions={}, run={}, task="regression", metric="rmse", examples="random", files=[record]
    )
    (tmp_path / MANIFEST).write_text(json.dumps(asdict(manifest)))
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize("name", ["../simple.onnx", "/etc/passwd", "a/b.onnx", "..", "", "a\\b.onnx"])
def test_a_manifest_that_names_paths_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not in the folder") as raised:
        open_export(write(tmp_path, name=name))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": [{"name": "input", "type": "uint8", "shape": [1 << 40]}]},
        {"inputs": [{"name": "input", "type": "object", "shape": [2]}]},
        {"inputs": []},
        {"kind": "script"},
        {"target": "pickle"},
        {"bytes": 0},
        {"agreement": 3},
    ],
)
def test_damaged_manifests(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        open_export(write(tmp_path, **change))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": NaN}', '{"format": 2}', "[" * 100_000])
def test_torn_manifests(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        open_export(tmp_path)


def test_files_are_what_the_manifest_says_before_a_runtime_sees_them(tmp_path: Path) -> None:
    export = open_export(write(tmp_path))
    file = export.manifest.files[0]
    (tmp_path / "simple.onnx").write_bytes(b"not a m0del")
    with pytest.raises(CheckpointError, match="its checksum is not the manifest's"):
        export.open(file)
    (tmp_path / "simple.onnx").write_bytes(CONTENT[:-1])
    with pytest.raises(CheckpointError, match="it has 10 bytes, and had 11"):
        export.open(file)
    (tmp_path / "simple.onnx").unlink()
    (tmp_path / "simple.onnx").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="does not exist"):
        export.open(file)


def test_a_file_that_is_no_model_is_refused_although_its_checksum_fits(tmp_path: Path) -> None:
    export = open_export(write(tmp_path))
    with pytest.raises(CheckpointError, match=r"simple\.onnx cannot be loaded"):
        export.open(export.manifest.files[0])


INPUTS = [InputRecord(name="x", type="float32", shape=[2, 3])]


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros((1, 2, 3)), "is float64: the model takes float32"),
        (np.zeros((1, 3, 2), np.float32), r"has shape \(1, 3, 2\): the model takes \(examples, 2, 3\)"),
        (np.zeros((2, 3), np.float32), r"the model takes \(examples, 2, 3\)"),
        (np.zeros((0, 2, 3), np.float32), "is empty"),
        (np.full((1, 2, 3), np.nan, np.float32), "holds NaN or infinity"),
        (np.full((1, 2, 3), np.inf, np.float32), "holds NaN or infinity"),
        (np.broadcast_to(np.float32(0), (1, 1 << 20, 3)), "no side may be over 65536"),
        (np.array([["a"]]), "is str32: the model takes float32"),
        (np.array([object()]), "is object: the model takes float32"),
    ],
)
def test_arrays_are_checked_before_a_runtime_sees_them(array: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        check_inputs(array, INPUTS)


def test_names_and_numbers_of_examples_must_agree() -> None:
    two = [*INPUTS, InputRecord(name="mask", type="int64", shape=[3])]
    x, mask = np.zeros((2, 2, 3), np.float32), np.zeros((2, 3), np.int64)
    assert list(check_inputs({"mask": mask, "x": x}, two)) == ["x", "mask"]
    with pytest.raises(DataError, match="unequal numbers of examples: x has 2, mask has 1"):
        check_inputs({"x": x, "mask": mask[:1]}, two)
    with pytest.raises(DataError, match="input 'mask' is missing: the model takes x, mask"):
        check_inputs(x, two)
    with pytest.raises(FedhenError, match="unknown input 'masks': did you mean 'mask'"):
        check_inputs({"x": x, "masks": mask}, two)


@pytest.mark.parametrize("place", ["initializer", "constant", "branch", "function"])
def test_data_outside_of_a_file_is_found_wherever_it_is(place: str) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    tensor = helper.make_tensor("w", kind, [1], [1.0])
    inside = helper.make_node("Constant", [], ["y"], value=tensor)
    deep = helper.make_graph([inside], "branch", [], [helper.make_tensor_value_info("y", kind, [1])])
    node = {
        "initializer": helper.make_node("Identity", ["w"], ["y"]),
        "constant": inside,
        "branch": helper.make_node("If", ["c"], ["y"], then_branch=deep, else_branch=deep),
        "function": helper.make_node("f", [], ["y"], domain="d"),
    }[place]
    graph = helper.make_graph([node], "g", [], [], [tensor] if place == "initializer" else [])
    function = helper.make_function("d", "f", [], ["y"], [inside], [helper.make_opsetid("", 18)])
    model = helper.make_model(graph, functions=[function] if place == "function" else [])
    assert not has_external_data(model.SerializeToString())
    text = model.SerializeToString()
    outside = onnx.TensorProto()
    outside.CopyFrom(tensor)
    outside.ClearField("float_data")
    outside.data_location = onnx.TensorProto.EXTERNAL
    outside.external_data.add(key="location", value="/etc/passwd")
    for each in (model.graph.initializer,):
        for found in each:
            found.CopyFrom(outside)
    for nodes in (model.graph.node, deep.node, *(f.node for f in model.functions)):
        for found in nodes:
            for attribute in found.attribute:
                for part in (
                    attribute,
                    *(n for n in attribute.g.node),
                ):
                    inner = [part] if part is attribute else list(part.attribute)
                    for one in inner:
                        if one.HasField("t"):
                            one.t.CopyFrom(outside)
    assert model.SerializeToString() != text
    assert has_external_data(model.SerializeToString())


@pytest.mark.parametrize("content", [b"\x0a", b"\x3a\x7f", b"\xff" * 20, b"\x3b", b"\x3a\x02\x0a\x05"])
def test_torn_protobuf_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="it is"):
        has_external_data(content)


def test_graphs_nested_without_end_are_an_error() -> None:
    content = b""
    for field in [6, 5, 1] * 40:  # attribute.g, node.attribute, graph.node, from the inside out
        size, length = len(content), b""
        while size >= 128:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        content = bytes([field << 3 | 2]) + length + bytes([size]) + content
    size, length = len(content), b""
    while size >= 128:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    with pytest.raises(ValueError, match="nested too deeply"):
        has_external_data(bytes([7 << 3 | 2]) + length + bytes([size]) + content)


def test_an_executorch_that_was_built_for_another_torch_is_refused() -> None:
    check_pair("1.4.1", "2.13.0+cpu")
    with pytest.raises(FedhenError) as raised:
        check_pair("1.5.1", "2.13.0+cpu")
    assert str(raised.value) == "executorch 1.5.1 is for torch 2.14, this is 2.13.0: pip install 'executorch==1.4.1'"
    with pytest.raises(FedhenError, match="is not known to fit any torch"):
        check_pair("0.7", "2.13.0")

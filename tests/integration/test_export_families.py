"""Files of every kind of family agree with their modules, and cascades with an oracle that goes example by example."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedhen
from fedhen.data.inputs import call_module
from fedhen.deploy.export import export_models
from fedhen.deploy.runtime import open_export
from fedhen.deploy.source import Source, TierModel, make_up_examples
from fedhen.models.model_files import build_ready_module
from fedhen.tasks.positions import LanguageModelling
from fedhen.tasks.standard import Classification
from support.early_exits import make
from support.families import two_exits

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["four exits", "recurrent", "attending", "tied", "gpt", "bert"])
def test_own_families(name: str, tmp_path: Path) -> None:
    module, sample = make(name)
    task = LanguageModelling() if name == "gpt" else Classification()
    inputs = make_up_examples(sample)
    with torch.no_grad():
        outputs = [output.numpy() for output in call_module(module, inputs)]
    exits = tuple("abcd"[: len(outputs)])
    source = Source([TierModel(exits[-1], module, exits)], task, sample)
    manifest = export_models(source, tmp_path / "out")
    assert manifest.examples == "random" and [file.kind for file in manifest.files] == ["model", "cascade"]
    export = open_export(tmp_path / "out")
    arrays = {k: v.numpy() for k, v in inputs.items()} if isinstance(inputs, dict) else inputs.numpy()
    for threshold in (0.0, 0.37, 0.42, 2.0):
        answer = export.predict(arrays, threshold=threshold)
        for example in range(len(answer.exits)):
            place = next((k for k, z in enumerate(outputs[:-1]) if sure(z[example]) >= threshold), len(exits) - 1)
            assert answer.exits[example] == exits[place]
            np.testing.assert_allclose(answer.output[example], outputs[place][example], rtol=1e-4, atol=1e-5)


def sure(logits: np.ndarray) -> float:
    """Returns the largest probability, of tokens their mean."""
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return float(shares.max(-1).mean())


def test_width_nests_have_files_and_no_cascade(tmp_path: Path) -> None:
    module, sample = make("width")
    source = Source([TierModel("high", module, ("low", "high"))], Classification(), sample)
    manifest = export_models(source, tmp_path / "out")
    assert [file.name for file in manifest.files] == ["high.onnx"]
    assert manifest.no_cascade.startswith("the model is nested by width")


def test_decouples_complex_model_has_one_exit(tmp_path: Path) -> None:
    family = two_exits()
    module = build_ready_module(family, "complex", family.initial(0), ["complex"])
    source = Source([TierModel("complex", module, ("complex",))], Classification(), torch.randn(2, 6).double())
    manifest = export_models(source, tmp_path / "out")
    assert [(file.name, file.outputs) for file in manifest.files] == [("complex.onnx", ["logits_complex"])]
    assert manifest.no_cascade == "the model of tier 'complex' has one exit: there is no cascade"
    with pytest.raises(fedhen.FedhenError, match="has no cascade: the model of tier 'complex' has one exit"):
        open_export(tmp_path / "out").choose_file(cascade=True)

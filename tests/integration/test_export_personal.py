"""The personal model of a device becomes a file, checked on the device's own test data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedhen
from fedhen.deploy.runtime import open_export
from support.cli import refused
from support.points import TINY

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
pytestmark = pytest.mark.slow


def test_the_model_of_a_device_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its file answers raw pixels as the loaded module does pixels divided by 16, and has the recorded score."""
    folder, devices = tmp_path / "run", {"number": 4, "active": 4}
    run = fedhen.run("digits", run_dir=folder, **{**TINY, "devices": devices}, personal={"name": "fedper"})
    manifest = fedhen.export(folder, device=1)
    population = run.experiment.population
    assert population.tier_of[1] == "simple" and manifest.run["models"] == "device 1"
    (file,) = manifest.files
    own = population.data.test_shards[1]
    assert file.agreement.examples == len(own) and manifest.examples == "test"
    assert list(file.score.values()) == [run.rounds[-1]["own"]["personal"]["simple"][1]]
    pixels = population.data.x_test[torch.from_numpy(own)]
    found = open_export(folder / "export-device1").predict({"input": pixels.numpy()}, "simple").output
    with torch.no_grad():
        expected = fedhen.load(folder, device=1)(pixels.float() / 16)[-1].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(fedhen.ConfigError, match="a device has one model, the last: leave out tier, of and at"):
        fedhen.export(folder, device=1, tier="simple")
    assert "device 9 is not in" in refused(capsys, "export", str(folder), "--device", "9")
    assert "fedhen export RUN --device 0" in refused(capsys, "export", str(folder))
    assert not (folder / "export").exists() and not (folder / "export-device9").exists()

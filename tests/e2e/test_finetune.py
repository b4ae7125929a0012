"""From a run to a folder of images: what docs/tutorials/finetune.md does, in few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.runner import ROOT, Runner

SHORT = {
    "CONFIG_BUDGET_STEPS": "y",
    "CONFIG_DEVICE_CPU": "y",
    "CONFIG_PRECISION_FP32": "y",
    "CONFIG_RESNET18_WIDTH": "4",
    "CONFIG_AUTO_METHOD_TABLE": "y",
}


@pytest.mark.slow
@pytest.mark.long
def test_a_run_is_fine_tuned_on_a_folder_of_images(tmp_path: Path) -> None:
    before, after, images = Runner(tmp_path / "before"), Runner(tmp_path / "after"), tmp_path / "shapes"
    for runner in (before, after):
        runner.folder.mkdir()
    before.configure("pretrain-resnet", SHORT | {"CONFIG_MAX_STEPS": "2", "CONFIG_DATA_LIMIT": "256"})
    before.run("train")
    command = [sys.executable, "-m", "scripts.sample_images", str(images)]
    written = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert written.stdout == f"600 images of 5 classes in {images}\n"
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and "exists; name a directory that does not exist" in again.stderr
    own = {
        "CONFIG_DATA_DIR": str(images),
        "CONFIG_INITIAL_WEIGHTS": str(before.runs),
        "CONFIG_MAX_STEPS": "3",
    }
    after.configure("finetune-resnet", SHORT | own | {"CONFIG_RESET_HEAD": "n"})
    refused = after.run("train", status=2)
    assert "classifier.weight is (10, 32), and the model has (5, 32)" in refused
    assert "CONFIG_RESET_HEAD=y starts with a new head" in refused and not after.runs.exists()
    after.configure("finetune-resnet", SHORT | own)
    output = after.run("train")
    assert "120 weights match; new head, not read: classifier.weight, classifier.bias" in output
    assert "Frozen: 15 of 62 weights" in output and "Layer-wise decay 0.7 over 10 depths" in output
    given, found = before.weights(), after.weights()
    same = {name for name in found if torch.equal(found[name], given[name])}
    assert same == {name for name in found if name.startswith(("stem.", "stages.0."))}
    # Its weights were read once: it is evaluated without them.
    before.runs.rename(tmp_path / "gone")
    assert "accuracy" in after.run("eval")

"""make ab and make runs, for real: four runs of two steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.forked import ROOT

pytestmark = pytest.mark.long


def called(module: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    variables = os.environ | environment | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_two_configurations_are_trained_and_judged(tmp_path: Path) -> None:
    fragments, out = tmp_path / "fragments", tmp_path / "runs"
    fragments.mkdir()
    (fragments / "faster").write_text('CONFIG_LEARNING_RATE="0.1"\n')
    options = ["--a=lenet5+tiny", "--b=lenet5+tiny+faster", "--seeds=2", f"--runs={out}", "--jobs=2"]
    first = called("scripts.ab", *options, ANNEAL_CONFIG_PATH=str(fragments))
    assert first.count(": done, ") == 4 and "after 2 pairs: " in first, first
    second = called("scripts.ab", *options, ANNEAL_CONFIG_PATH=str(fragments))
    assert len(list((out / "ab").glob("*/*/*/metrics.jsonl"))) == 4
    assert ": done, " not in second and second.splitlines()[-3:] == first.splitlines()[-3:]
    listed = json.loads(called("scripts.runs", f"--runs={out}", "--where=seed=2 lr=0.1", "--json"))
    assert [(run["state"], run["step"], run["model"]) for run in listed] == [("done", 2, "lenet5")]

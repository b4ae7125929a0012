"""A sweep of tiny models in processes of their own: killed, failing, and finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lib.errors import ToolkitError
from lib.scaling.experiments import ROOT, ScalingExperiments, raise_failures
from lib.scaling.results import TIMINGS, ScalingConfig
from tests.e2e.forked import Forked
from train.report import report

pytestmark = pytest.mark.slow

SWEEP = """
import sys
from lib.scaling.experiments import ScalingExperiments
from lib.scaling.results import ScalingConfig
experiments = ScalingExperiments(sys.argv[1], corpus="file:" + sys.argv[2], workers=1)
common = {"batch_size": 4, "tokens": 6_000, "device": "cpu", "compile": False}
common["corpus"] = experiments.corpus_name
experiments.run([ScalingConfig(16, layers, **common) for layers in map(int, sys.argv[3:])])
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        lines = (f"{number} times {other} is {number * other}.\n" for other in range(200))
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


def start(out: Path, text: Path, *layers: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SWEEP, str(out), str(text), *layers], cwd=ROOT)


def trained(out: Path, text: Path, *configs: ScalingConfig, **corpus: float) -> ScalingExperiments:
    """A sweep by a program off which its runs are forked. corpus: what it believes of that."""
    words = [str(out), str(text), json.dumps(corpus), *(json.dumps(asdict(config)) for config in configs)]
    environment = os.environ | {"KCONFIG_CONFIG": str(out / "no-config")}  # by which its processes are named
    output = text.with_name("output")
    worker = Forked("tests.e2e.scaling_worker", words, environment=environment, output=output, ranks=True)
    said, _ = worker.communicate(timeout=300)
    assert worker.returncode == 0, said
    return ScalingExperiments(out, corpus=f"file:{text}", workers=1)


def results(out: Path) -> list[dict[str, object]]:
    return [
        {name: value for name, value in result.items() if name not in TIMINGS}
        for result in json.loads((out / "all_scaling_results.json").read_text())
    ]


@pytest.mark.long
def test_a_killed_sweep_repeats_no_finished_run_and_ends_the_same(tmp_path: Path, text: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(killed, text, "1", "2")
    first = killed / "d16_l1_results.json"
    deadline = time.monotonic() + 240
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)  # into the second run
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = first.stat().st_mtime_ns, first.read_bytes()
    assert not (killed / "d16_l2_results.json").exists(), "killed in the middle"
    assert start(killed, text, "1", "2").wait() == 0
    assert (first.stat().st_mtime_ns, first.read_bytes()) == before
    assert start(whole, text, "2").wait() == 0, "the run that was killed, undisturbed"
    assert len(results(killed)) == 2 and results(killed)[1:] == results(whole)


def test_a_failed_run_is_listed_and_the_others_are_kept(tmp_path: Path, text: Path) -> None:
    good = ScalingConfig(
        16, 1, batch_size=4, tokens=5_000, device="cpu", corpus=f"file:{text}", compile=False
    )
    experiments = trained(tmp_path / "out", text, good, replace(good, n_layers=2, lr=1000.0))
    with pytest.raises(ToolkitError, match=r"1 of 2 runs have no valid result.*d16 l2.*LEARNING_RATE"):
        raise_failures(experiments.results())
    law = experiments.analyze_scaling_laws()
    assert law["num_data_points"] == 1 and len(law["excluded"]) == 1
    assert "1 of 2 runs have no valid result" in experiments.report()
    (run,) = (tmp_path / "out" / "runs").glob("d16_l1-*/resnet_bk/*")
    for folder, title in ((tmp_path / "out", "Scaling sweep on"), (run, "resnet_bk on")):
        assert report(str(folder), root=ROOT, runs=tmp_path, out=None) == 0
        page = (folder / "report.html").read_text()
        assert f"<h1>{title}" in page and "L = E + A N^-alpha + B D^-beta" in page
        assert "d16 l2, 5000 tokens, seed 1: failed" in page and "insufficient: 1 points, and 12" in page
    assert [path.name for path in experiments.plot_scaling_laws()] == [
        "scaling_laws.png",
        "scaling_laws_2.png",
    ]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"d16_l1_results.json", "all_scaling_results.json", "scaling_law.json", "report.txt"} <= names


def test_a_loss_below_the_floor_is_a_leak(tmp_path: Path, text: Path) -> None:
    config = ScalingConfig(
        16, 1, batch_size=4, tokens=2_000, device="cpu", corpus=f"file:{text}", compile=False
    )
    (result,) = trained(tmp_path / "out", text, config, entropy_rate=100.0).results()
    assert result.status == "suspect_leak" and "no model reaches" in result.reason

"""The script and the driver of run.ray.yaml, on a Ray cluster of two nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lib import kconf
from lib.config import config_from_values
from lib.distributed.job_specs import RUNS
from scripts import cluster
from tests.e2e.machines import has_namespaces, joined_machines
from tests.e2e.runner import ROOT, TINY, Runner

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray"),
    pytest.mark.skipif(not has_namespaces(), reason="needs the rights to make network namespaces"),
]


def test_the_emitted_file_trains_on_two_nodes(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    settings = {"CONFIG_DEVICE_CPU": "y", "CONFIG_DIST_NNODES": "2", "CONFIG_MAX_STEPS": "3"}
    runner.configure("lenet5", TINY | settings | {"CONFIG_LOG_INTERVAL_STEPS": "1"})
    resolved = kconf.load(root=ROOT, config_file=tmp_path / ".config", overrides={})
    given = {"image": "here/anneal:1", "storage": "runs", "accelerator": ""}
    config, text = config_from_values(resolved.values), resolved.minimal
    emitted = cluster.file_of(config, to="ray", name="lenet5-a", configuration=text, given=given)
    spec = yaml.safe_load(emitted)["spec"]
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    script = workers["template"]["spec"]["containers"][0]["env"][0]["value"]
    (python := tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # As Kubernetes hands it over, but for the mounted storage.
        "ANNEAL_START": script.replace("$$", "$").replace(f"--runs {RUNS}", f"--runs {runner.runs}"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with joined_machines(tmp_path, ("one",)) as network:
        command = [*network.within[0], sys.executable, str(Path(__file__).with_name("ray_cluster.py"))]
        done = subprocess.run(
            [*command, *spec["entrypoint"].split()],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("Rendezvous at 10.61.0.1:29500: 2 nodes train") == 2, done.stdout
    status = runner.newest().status()
    assert (status.state, status.step) == ("done", 3)
    assert json.loads((runner.newest().path / "plan.json").read_text())["world"] == 2

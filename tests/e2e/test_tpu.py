"""TPUs from the command to the last checkpoint, on a stand-in for torch_tpu."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lib.runs import checkpoint
from tests.e2e.runner import ROOT, TINY, Runner
from tests.support.stubbed import TPU_STUB

pytestmark = pytest.mark.long

# The machine that plans is given a TPU among its PCI devices; who trains does not look.
ON_TPU_VM = """
import sys
from pathlib import Path
from lib.devices import accelerators
from lib.errors import run_main
accelerators.PCI_DEVICES = Path({pci!r})
from train.__main__ import main
sys.exit(run_main(main))
"""


def test_a_run_on_two_devices(tmp_path: Path) -> None:
    pci = tmp_path / "pci/0000:00:05.0"
    pci.mkdir(parents=True)
    (pci / "vendor").write_text("0x1ae0\n")
    (pci / "device").write_text("0x0063\n")
    settings = TINY | {"CONFIG_MAX_STEPS": "4", "CONFIG_NUM_DEVICES": "2"}
    there = Runner(tmp_path)
    there.configure("lenet5", settings | {"CONFIG_DEVICE_TPU": "y"})
    done = subprocess.run(
        [sys.executable, "-c", ON_TPU_VM.format(pci=str(pci.parent)), "--runs", str(there.runs), "train"],
        cwd=ROOT,
        env=there.environment() | {"PYTHONPATH": str(TPU_STUB), "STUB_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = there.newest()
    assert "EXPERIMENTAL, never run on TPU hardware" in " ".join(done.stdout.split())
    assert run.status().state == "done"
    plan = run.read_json("plan")
    assert (plan["device"], plan["world"], plan["precision"]) == ("tpu", 2, "fp32")
    found = checkpoint.load(run.checkpoints, log=print)
    assert found is not None and found[0] == 4

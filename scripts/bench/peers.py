"""make bench PEERS=1: the toolkit beside Lightning, accelerate, Hugging Face's Trainer and nanoGPT's loop.

Each case is a process in the environment build/peers, which is made first, where all programs take turns.
Time to the first step and peak memory are of processes with one program each. Time to a loss is first, as it
needs the text of Tiny Shakespeare (CONFIG_DATA_DIR, or a download): where that is missing, the rest follows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import ToolkitError
from lib.kconf.project import Project, given_overrides
from lib.units import bytes_text, seconds_text
from scripts.bench.interleaved_timing import table

ROOT = Path(__file__).resolve().parents[2]
CASES = ("lenet5", "resnet18", "gpt2-shakespeare")
PRECISIONS = ("fp32", "bf16")
NOT_INSTALLED = "nothing is compared: the other programs cannot be installed; is PyPI reachable?"


def compare_all(timing: Sequence[str], *, out: Path | None) -> int:
    """Print a table for each case, and write the figures to the JSON file `out`.

    timing: options of docs/benchmarks/comparison/peers.py.
    """
    place = (ROOT / Project.of_environment(ROOT).output / "build" / "peers").absolute()
    requirements = ROOT / "docs" / "benchmarks" / "comparison" / "peers.txt"
    script = ROOT / "scripts" / "extra_environment.sh"
    if subprocess.run([script, sys.executable, requirements, place], check=False).returncode:
        print(NOT_INSTALLED)
        return 1
    python, figures = place / "bin" / "python", list[dict[str, Any]]()
    curves = time_to_loss(python)
    for case in CASES:
        for precision in PRECISIONS:
            found = _measured(python, "--case", case, precision, *timing)
            note = f"{case}, {precision}, {found['unit']}"
            load = os.getloadavg()[0]
            print(*table(found["seconds"], note=note, load=load), sep="\n", flush=True)
            figures.append({"case": case, "precision": precision, "load": load, **found})
        print(f"{case:32}{'first step':>11}{'peak':>11}{'lines':>8}")
        for program in found["seconds"]:
            began = time.time()
            row = _measured(python, "--case", case, "fp32", "--only", program)
            row["first_step_seconds"] = first = row.pop("first_step_at") - began
            memory = bytes_text(row["peak_bytes"])
            print(f"{program:32}{seconds_text(first):>11}{memory:>11}{row['lines']:>8}", flush=True)
            figures.append({"case": case, "program": program, **row})
    figures += [] if curves is None else [curves]
    if out is not None:
        atomic.write_text(out, json.dumps(figures, indent=1) + "\n")
    return int(curves is None)


def time_to_loss(python: Path) -> dict[str, Any] | None:
    """Print the seconds to a loss of the toolkit and of nanoGPT's recipe; return their curves.

    None where they were not measured, as without the text.
    """
    with tempfile.TemporaryDirectory() as folder:
        curves = Path(folder) / "curves.json"
        command = [str(python), "-m", "docs.benchmarks.comparison.time_to_loss", "--out", str(curves)]
        given = given_overrides().get("CONFIG_DATA_DIR")
        command += ["--data-dir", given] if given else []
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            print("time to a loss is not measured, for the reason above", flush=True)
            return None
        return {"case": "time to a loss", "curves": json.loads(curves.read_text())}


def _measured(python: Path, *arguments: str) -> dict[str, Any]:
    """Return what a process of build/peers measures. Raises ToolkitError where it fails."""
    command = [str(python), "-m", "docs.benchmarks.comparison.peers", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolkitError(f"{' '.join(arguments)} failed", why=done.stderr.strip()[-500:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found

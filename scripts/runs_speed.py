"""CPU time of `make runs` with 10,000 runs: first without an index, then with it, a filter and an order."""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import kconf
from lib.errors import run_main
from lib.runs.directory import RunDir

COMMAND = [sys.executable, "-m", "scripts.runs", "--where", "model=lenet5 lr>0.1", "--sort", "loss", "--runs"]


def make_runs(folder: Path, model: str, count: int) -> None:
    """Make runs with different learning rates, 180 rows of training and 20 evaluations."""
    values = kconf.load(root=Path.cwd(), config_file=Path("defconfigs", model)).to_json()["values"]
    files = {"config": "", "values": values, "plan": {"effective_batch": 64}, "data": {}}
    first = RunDir.create(folder, model=model, identity="0" * 8, files=files)
    rows = ({"kind": "train" if step % 10 else "eval", "step": step, "loss": 0.5} for step in range(1, 201))
    first.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first.set_status("done", step=200, seconds=60.0, loss=0.005)
    for path in first.path.iterdir():
        os.utime(path, ns=(0, 0))  # what has just changed would be read again
    for number in range(1, count):
        copy = shutil.copytree(first.path, first.path.with_name(f"{first.name[:-8]}{number:08x}"))
        (copy / "values.json").write_text(json.dumps({**values, "LEARNING_RATE": number / count}))
        os.utime(copy, ns=(0, 0))


def main() -> int:
    """Measure make runs without and with an index, and print both."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as made:
        make_runs(Path(made), "lenet5", 5000)
        make_runs(Path(made), "gpt2-tiny", 5000)
        for title in ("index rebuilt", "index read"):
            used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
            lines = subprocess.run([*COMMAND, made], check=True, stdout=subprocess.PIPE).stdout.splitlines()
            used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - used
            print(f"{title}: {used:.2f} CPU seconds; {lines[-1].decode()}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))

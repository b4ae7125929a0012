"""A run directory with all that a report shows, made without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.plan.types import Memory, fixed_plan
from lib.reports.page import curve, table
from lib.reports.run_report import Findings
from lib.runs.directory import RunDir

HARDWARE = {
    "kind": "cuda",
    "devices": [
        {
            "name": "NVIDIA H100 80GB HBM3",
            "total_bytes": 80 * 10**9,
            "free_bytes": 70 * 10**9,
            "capability": [9, 0],
        }
    ],
    "cpu_name": "cpu",
    "cpu_count": 8,
    "cpu_bf16": "none",
}
PIXEL = (  # a grey PNG of one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGOoBwAAgQCBmYBy4AAAAABJRU5ErkJggg=="
)


def write_rows(run: RunDir, count: int, *, every: int = 10) -> list[dict[str, Any]]:
    """Write `count` rows of training and an evaluation after each `every` of them; return all."""
    rows: list[dict[str, Any]] = []
    for step in range(1, count + 1):
        train = {"kind": "train", "step": step, "epoch": step / 50, "loss": 2 / step + math.sin(step) / 9}
        train |= {"learning_rate": 1e-3, "samples_per_second": 900.0 + step % 7, "seconds": step / 5}
        rows.append({**train, "micro_batch": 32, "peak_memory_bytes": 32 * 10**8 + 10**8 * (step > 1)})
        if step % every == 0:
            accuracy = 0.9 - 1 / (step + 1)
            rows.append(
                {"kind": "eval", "step": step, "epoch": step / 50, "samples": 100, "accuracy": accuracy}
            )
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def reported_run(folder: Path, number: int = 1, *, rows: int = 60, **values: Any) -> RunDir:
    """A run that is done, with a plan for a GPU and a log."""
    memory = Memory(
        parts={"activations": 3 * 10**9, "parameters": 10**8}, reserve_bytes=10**8, usable_bytes=7 * 10**10
    )
    plan = fixed_plan("a reason", micro_batch=32, accumulation=2, device="cuda", memory=memory)
    files: dict[str, str | Mapping[str, Any]] = {
        "config": "",
        "values": {"LEARNING_RATE": 0.1, "EMA": False, "SEED": number, **values},
        "origins": {"LEARNING_RATE": "command line", "EMA": "default", "SEED": "default"},
        "plan": plan.to_json(),
        "hardware": HARDWARE,
        "data": {"name": "digits", "synthetic": True},
        "env": {"torch": "2.13.0"},
    }
    run = RunDir.create(folder, model="lenet5", identity=f"{number:08x}", files=files)
    write_rows(run, rows)
    run.set_status("done", step=rows, seconds=12.0, part="test part of digits, synthetic", accuracy=0.88)
    run.release()
    return run


def all_findings(**changes: Any) -> Findings:
    """Findings with every kind of exhibit."""
    line = curve("Reliability", {"model": [(0.1, 0.2), (0.9, 0.8)]}, x="confidence", y="accuracy")
    cells = [[["1", "given"], ["", "empty"]], [["2", "right"], ["3", "wrong"]]]
    exhibits = [
        {"kind": "matrix", "title": "Confusion matrix", "names": ["cat", "dog"], "counts": [[9, 1], [2, 8]]},
        line,
        {
            "kind": "pictures",
            "title": "Worst samples",
            "pictures": [{"png": PIXEL, "caption": "3 taken for 5"}],
        },
        {"kind": "text", "title": "Text after step 5", "text": "once upon\na time"},
        {"kind": "boards", "title": "A puzzle", "boards": [{"caption": "after step 1", "rows": cells}]},
        table("Controls", ("input", "rate"), [("zeros", "0.1")]),
    ]
    known: dict[str, Any] = {
        "steps": [],
        "step": 60,
        "naive_loss": 2.3026,
        "memory": line,
        "exhibits": exhibits,
    }
    return known | changes

"""Short runs of one configuration on one device and, with each parallelism strategy, on several.

They are real runs of `python -m train` in fp32, so that losses can be compared. Each process has a device.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import ToolkitError
from lib.runs.directory import RunDir
from scripts.short_run import ROOT, rows_of, short_run

STEPS = 8
CLOSE = 1e-3  # relative difference of the losses of a step, which rounding in fp32 makes grow with the steps
LEAST_DEVICES = {"hsdp": 4, "sequential": 1}  # 2 for the others
RUN_SECONDS = 150.0
PLANNED = ("strategy", "world", "shard", "branch_devices", "micro_batch", "accumulation")

SETTINGS = {
    "CONFIG_PRECISION_FP32": "y",
    "CONFIG_COMPILE_MANUAL": "y",
    "CONFIG_COMPILE_MODEL": "n",
    "CONFIG_BUDGET_STEPS": "y",
    "CONFIG_MAX_STEPS": str(STEPS),
    "CONFIG_LOG_INTERVAL_STEPS": "1",
    "CONFIG_EVAL_INTERVAL_STEPS": "1000000",
    "CONFIG_RESUME_NEVER": "y",
}


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A shipped configuration with settings, and the strategies that it is trained with."""

    defconfig: str
    settings: Mapping[str, str]
    strategies: tuple[str, ...]


LAYOUT_CASES = (
    LayoutCase(
        "gpt2-tiny",
        {"CONFIG_GPT2_SIZE_124M": "y", "CONFIG_OPTIMIZER_ADAMW": "y", "CONFIG_TARGET_EFFECTIVE_BATCH": "64"},
        strategies=("ddp", "zero1", "zero2", "fsdp", "hsdp", "pipeline"),
    ),
    LayoutCase(
        "latentwire-tiny",
        {"CONFIG_FROZEN_STEPS": "20", "CONFIG_DATA_LIMIT": "2048"},
        strategies=("split", "sequential"),
    ),
)


def shipped_cases() -> list[LayoutCase]:
    """Return the cases whose configurations are there: an experiment may be deleted."""
    return [case for case in LAYOUT_CASES if (ROOT / "defconfigs" / case.defconfig).exists()]


def layout_row(
    case: LayoutCase, strategy: str, *, devices: int, one: Sequence[float], folder: Path, seconds: float
) -> dict[str, Any]:
    """Train `case` with `strategy` on `devices`, or on one with "single"; return what was measured.

    one: losses of the run on one device; empty where there is none to compare with. seconds: of the run.
    The row has status "ok", "too_few_devices" or "failed", with the reason.
    """
    least = 1 if strategy == "single" else LEAST_DEVICES.get(strategy, 2)
    count = 1 if strategy == "single" else devices
    if strategy == "hsdp":
        count -= count % 2  # two groups
    row: dict[str, Any] = {"case": case.defconfig, "strategy": strategy, "devices": count}
    if devices < least:
        return row | {"status": "too_few_devices", "least": least}
    chosen = {} if strategy == "single" else {f"CONFIG_DIST_STRATEGY_{strategy.upper()}": "y"}
    settings = {**SETTINGS, **case.settings, **chosen, "CONFIG_NUM_DEVICES": str(count)}
    try:
        run = short_run(case.defconfig, settings, folder=folder / strategy, seconds=seconds)
    except ToolkitError as error:
        return row | {"status": "failed", "reason": str(error)}
    found = measured(run)
    pairs = [*zip(one, found["losses"], strict=True)] if one else []
    difference = max((abs(ours - theirs) / abs(theirs) for theirs, ours in pairs), default=None)
    alike = None if difference is None else difference <= CLOSE
    return row | {"status": "ok", "difference": difference, "alike": alike, **found}


def measured(run: RunDir) -> dict[str, Any]:
    """Return the losses of a run, and predicted and measured bytes and seconds; None where not known.

    Bytes are those of tensors at the peak, measured on the first process.
    """
    rows, plan = rows_of(run, "train"), run.read_json("plan")
    (speed,) = rows_of(run, "speed")
    rates = [speed.get(f"{end}_samples_per_second") for end in ("most", "least")]
    memory, batch = plan["memory"], plan["effective_batch"]
    return {
        "losses": [row["loss"] for row in rows],
        "planned": {name: plan[name] for name in PLANNED},
        "step_seconds": statistics.median(batch / row["samples_per_second"] for row in rows[1:]),
        "estimated_seconds": [rate and batch / rate for rate in rates],
        "peak_bytes": max(row["peak_memory_bytes"] for row in rows),
        "predicted_bytes": memory and sum(memory["parts"].values()),
    }

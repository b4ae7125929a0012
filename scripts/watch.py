"""make watch: a table that follows the running runs, until Ctrl-C; without a terminal it is printed once."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lib.errors import run_main
from lib.plan.types import Memory
from lib.runs import metrics
from lib.runs.directory import RunDir, Status
from lib.runs.index import objects_of, run_names, status_of
from lib.units import aligned, bytes_text, columns

INTERVAL_SECONDS = 2.0
_RECENT = 20  # rows of training that the speed is measured over
_HEADS = ("state", "model", "step", "loss", "metric", "samples/s", "memory", "time left", "run")
_BUDGETS = {"epochs": "NUM_EPOCHS", "steps": "MAX_STEPS", "seconds": "MAX_SECONDS"}
_COLUMNS = {"NUM_EPOCHS": "epoch", "MAX_STEPS": "step", "MAX_SECONDS": "seconds"}


class Watcher:
    """Runs below a folder that are running, or were at an earlier look."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen = folder, set[str]()
        self._ended = set[tuple[str, int]]()  # before the first look; with the times of their directories

    def lines(self) -> list[str]:
        """Read the runs and return a table."""
        cells = []
        for name, changed_ns in sorted({*run_names(self._folder)} - self._ended):
            run = RunDir(self._folder / name)
            status, _ = status_of(run)
            if status.state == "running" or name in self._seen:
                self._seen.add(name)
                cells.append(row_of(run, status))
            else:
                self._ended.add((name, changed_ns))
        return aligned(columns([_HEADS, *cells])) if cells else [f"No run in {self._folder} is running."]


def row_of(run: RunDir, status: Status) -> tuple[str, ...]:
    """Return the cells of one run; empty where its files do not tell yet."""
    rows, (parts, _) = metrics.tail(run.metrics), objects_of(run, "values", "plan")
    trained = [row for row in rows if row.get("kind") == "train"][-_RECENT:]
    last: Mapping[str, Any] = trained[-1] if trained else {"step": status.step}
    shown = next((row for row in reversed(rows) if row.get("kind") == "eval"), last)
    metric = metrics.preferred(shown, parts["values"].get("BEST_METRIC"))
    steps, left = progress(parts["values"], trained)
    numbers = [last.get("loss"), shown.get(metric), last.get("samples_per_second")]
    loss, value, speed = ("" if number is None else metrics.format_value("", number) for number in numbers)
    is_running = status.state == "running"
    memory = memory_text(last, parts["plan"]) if is_running else ""
    time_left = str(timedelta(seconds=round(left))) if is_running and left is not None else ""
    step, metric = f"{last['step']}/{steps}" if steps else str(last["step"]), f"{metric} {value}".strip()
    return status.state, run.model, step, loss, metric, speed, memory, time_left, run.name


def progress(
    values: Mapping[str, Any], trained: Sequence[Mapping[str, Any]]
) -> tuple[int | None, float | None]:
    """Return the steps of the whole run, and the seconds left at the speed of these rows; None if unknown."""
    symbol = _BUDGETS.get(values.get("BUDGET", ""), "")
    if not trained or not values.get(symbol):
        return None, None
    budget, column, first, last = values[symbol], _COLUMNS[symbol], trained[0], trained[-1]
    steps = None if column == "seconds" else round(budget * last["step"] / last[column])
    gained, seconds = last[column] - first[column], last["seconds"] - first["seconds"]
    return steps, max(0.0, budget - last[column]) * seconds / gained if gained > 0 else None


def memory_text(last: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    """Format the peak of the last row of training, or else what the plan predicts for each device."""
    if metrics.PEAK in last:
        return bytes_text(last[metrics.PEAK])
    return f"plan {bytes_text(Memory(**plan['memory']).need_bytes)}" if plan.get("memory") else ""


def main() -> int:
    """Show the table until Ctrl-C, or once."""
    parser = argparse.ArgumentParser(prog="watch", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of runs")
    watcher, console = Watcher(parser.parse_args().runs), Console()
    if not console.is_terminal or console.is_dumb_terminal:
        print("\n".join(watcher.lines()))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(Text("\n".join(watcher.lines()), no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(INTERVAL_SECONDS)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main, is_listing=True))

"""CPU time of what grows with the rows, samples, runs and points of a user, at a tenth of a size and at it.

python -m scripts.growth [--write docs/benchmarks/growth.md]
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lib import atomic
from lib.data.sampler import epoch_order, sample_stream
from lib.errors import run_main
from lib.reports.run_report import write_report
from lib.reports.series import read_series
from lib.runs import index, metrics
from lib.runs.directory import resolve_run
from lib.sweeps.experiment import Experiment, read_experiment
from lib.sweeps.result_table import table
from lib.sweeps.runner import Result, resolved_runs
from lib.units import aligned, columns
from scripts.runs_speed import make_runs

ROOT = Path(__file__).resolve().parents[1]
ROWS, SAMPLES, RUNS, POINTS, RESOLVED, REPORTED = 1_000_000, 10_000_000, 10_000, 1_000, 100, 100_000
ROUNDS = 3  # the fastest counts
HEAD = """# Growth

```sh
python -m scripts.growth --write docs/benchmarks/growth.md
```

CPU seconds, the fastest of {rounds} calls, at a tenth of a size and at the size. A linear cost has a ratio
of 10, sorting an order of n samples one of {sorting:.1f}. What fits into a cache at a tenth of the size
costs less there, and the ratio is higher. Measured on {machine}.

"""

Row = tuple[str, int, float, float]
Costs = list[tuple[str, Callable[[], object]]]


def write_rows(path: Path, count: int) -> None:
    """Write `count` rows of training, as a run does."""
    path.unlink(missing_ok=True)
    writer = metrics.MetricsWriter(path)
    for step in range(1, count + 1):
        writer.write({"kind": "train", "step": step, "epoch": step / 100, "loss": 1 / step, "seconds": step})
        if step % metrics.BATCH_ROWS == 0:
            writer.flush()
    writer.close()


def of_rows(count: int, folder: Path) -> Costs:
    """Costs of a file of `count` rows."""
    path = folder / "rows.jsonl"
    return [
        ("write rows of metrics", lambda: write_rows(path, count)),
        ("read their curves", lambda: read_series(path)),
        ("resume from the last step", lambda: metrics.truncate_after(path, count)),
    ]


def of_samples(count: int, folder: Path) -> Costs:  # noqa: ARG001
    """Costs of `count` samples."""

    def order() -> None:
        epoch_order.cache_clear()
        epoch_order(seed=1, epoch=0, size=count)

    def seek() -> None:
        epoch_order.cache_clear()
        sample_stream(start=7 * count + 3, count=64, seed=1, size=count)

    return [("order of an epoch of samples", order), ("seek to a step of epoch 7", seek)]


def of_runs(count: int, folder: Path) -> Costs:
    """Costs of a folder of `count` runs."""
    make_runs(folder, "lenet5", count)

    def rebuild() -> None:
        for file in folder.glob(".*"):
            if file.is_file():
                file.unlink()
        index.read_runs(folder)

    return [("index of runs, rebuilt", rebuild), ("index of runs, read", lambda: index.read_runs(folder))]


def sweep_of(points: int, folder: Path) -> Path:
    """Write an experiment file of `points` points with three seeds each."""
    file, rates = folder / "growth.yaml", [f"{1e-4 * (1 + number / 1e6):.12g}" for number in range(points)]
    axes = "".join(f"    - {rate}\n" for rate in rates)
    file.write_text(f"config: lenet5\naxes:\n  LEARNING_RATE:\n{axes}seeds: [1, 2, 3]\n")
    return file


def results_of(experiment: Experiment) -> list[Result]:
    """Results for all runs, of which no two are alike."""
    return [
        Result(
            number=number,
            identity=f"{place:08x}",
            settings=settings,
            metrics={"loss": 1 + math.sin(place), "accuracy": 0.5},
            reason="",
        )
        for place, (number, settings) in enumerate(experiment.runs())
    ]


def of_points(count: int, folder: Path) -> Costs:
    """Costs of a sweep of `count` points."""
    file = sweep_of(count, folder)
    experiment = read_experiment(file)
    results = results_of(experiment)
    return [
        ("points of a sweep, read", lambda: list(read_experiment(file).runs())),
        ("points of a sweep, table", lambda: table(experiment, results)),
    ]


def of_resolved(count: int, folder: Path) -> Costs:
    """Costs of the configurations of a sweep of `count` points."""
    experiment = read_experiment(sweep_of(count, folder))
    return [("points of a sweep, configured", lambda: resolved_runs(experiment, root=ROOT))]


def of_reported(count: int, folder: Path) -> Costs:
    """Costs of the page about a run of `count` rows, without what its checkpoint shows."""
    make_runs(folder, "lenet5", 1)
    run = resolve_run(folder)
    write_rows(run.metrics, count)
    return [("report of a run", lambda: write_report(run, {"problem": "it has no checkpoint"}, run.report))]


SIZES = (
    (of_rows, ROWS),
    (of_samples, SAMPLES),
    (of_runs, RUNS),
    (of_points, POINTS),
    (of_resolved, RESOLVED),
    (of_reported, REPORTED),
)


def fastest(call: Callable[[], object], *, rounds: int) -> float:
    """Return the CPU seconds of the fastest of `rounds` calls."""
    seconds = []
    for _ in range(rounds):
        gc.collect()
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds)


def measured(shrink: int = 1, rounds: int = ROUNDS) -> list[Row]:
    """Return cost, size, and CPU seconds at a tenth of the size and at it. shrink: divides all sizes."""
    found = []
    for case, size in SIZES:
        seconds = dict[str, list[float]]()
        for count in (size // shrink // 10, size // shrink):
            with tempfile.TemporaryDirectory() as made:
                for name, call in case(count, Path(made)):
                    seconds.setdefault(name, []).append(fastest(call, rounds=rounds))
        found += [(name, size // shrink, low, high) for name, (low, high) in seconds.items()]
    return found


def cells_of(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of a table, with its head."""
    head = ["cost", "n", "at n / 10, s", "at n, s", "ratio"]
    return [head, *([name, f"{n:,}", f"{a:.4f}", f"{b:.4f}", f"{b / a:.1f}"] for name, n, a, b in rows)]


def page(rows: Sequence[Row], machine: str) -> str:
    """Format the page."""
    lines = [f"| {' | '.join(row)} |" for row in cells_of(rows)]
    lines.insert(1, "|---|---:|---:|---:|---:|")
    sorting = 10 * math.log(SAMPLES) / math.log(SAMPLES / 10)
    return HEAD.format(rounds=ROUNDS, sorting=sorting, machine=machine) + "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    options = parser.parse_args()
    rows = measured()
    print("\n".join(aligned(columns(cells_of(rows)))))
    if options.write is not None:
        atomic.write_text(options.write, page(rows, options.machine))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))

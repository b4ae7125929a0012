"""make runs: a table of all runs. make tag RUN= TAG=: words to find one by. scripts/idle.sh: is one used?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from lib import units
from lib.errors import run_main
from lib.runs.directory import RunDir, resolve_run
from lib.runs.index import Row, read_runs, run_names, select, sort

LIMIT = 50


def main() -> int:
    """Print the runs that the command line selects, or change the tags of one."""
    parser = argparse.ArgumentParser(prog="runs", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of runs")
    parser.add_argument("--where", default="", help='conditions such as "model=resnet18 lr>0.001"')
    parser.add_argument("--sort", default="", help="key to sort by, best or largest first; -KEY reverses")
    limit = partial(units.whole_number, variable="LIMIT", least=0)
    parser.add_argument("--limit", type=limit, default=LIMIT, help="number of runs to show; 0 for all")
    parser.add_argument("--json", action="store_true", help="print a JSON list with all values")
    parser.add_argument("--tag", default=None, help="add these tags to RUN; -TAG removes one")
    parser.add_argument("--idle", action="store_true", help="only refuse where a process trains in a run")
    parser.add_argument(
        "run", metavar="RUN", nargs="?", default="", help="the run to tag; default: the newest"
    )
    options = parser.parse_args()
    if options.idle:
        for folder in (options.runs, Path("runs"), Path("build")):  # what make removes, or their environment
            for name, _ in run_names(folder):
                (run := RunDir(folder / name)).lock()
                run.release()
        return 0
    if options.tag is not None:
        run = resolve_run(options.runs, options.run)
        print(f"{run.path}: {' '.join(run.tag(options.tag.split())) or 'no tags'}")
        return 0
    everything = read_runs(options.runs)
    rows = select(everything, options.where)
    rows = sort(rows, options.sort) if options.sort else rows
    shown = rows[: options.limit or None]
    if options.json:
        print(json.dumps([row.to_json() for row in shown], indent=1))
        return 0
    for line in units.aligned(columns(shown)):
        print(line)
    print(f"{len(shown)} of {len(everything)} runs" + (f", {len(rows)} selected" if options.where else ""))
    return 0


def columns(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the columns of the table, each with its head; those that are empty for all runs are left out."""
    heads = ("state", "model", "data", "batch", "best", "best at step", "time", "began (UTC)", "run", "tags")
    cells = [
        (
            f"{row.state} early" if row.state == "done" and row.reason else row.state,
            row.model,
            row.data,
            str(row.effective_batch or ""),
            "" if row.best is None else f"{row.metric} {row.best:.4g}",
            "" if row.best_step is None else f"{row.best_step}/{'?' if row.state == 'unknown' else row.step}",
            "" if row.seconds is None else str(timedelta(seconds=round(row.seconds))),
            row.began[:16],
            row.run,
            " ".join(row.tags),
            ", ".join(row.damaged),
        )
        for row in rows
    ]
    return units.columns([(*heads, "damaged"), *cells])


if __name__ == "__main__":
    raise SystemExit(run_main(main, is_listing=True))

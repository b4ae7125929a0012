"""make plots: pictures of a run from its metrics.jsonl."""

from __future__ import annotations

import argparse
from pathlib import Path

from lib.errors import ToolkitError, run_main
from lib.runs import metrics
from lib.runs.directory import RunDir, resolve_run


def main() -> int:
    parser = argparse.ArgumentParser(prog="plots", description=__doc__)
    parser.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="path, name or its beginning; newest"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are")
    arguments = parser.parse_args()
    run = resolve_run(arguments.runs, arguments.run)
    rows = metrics.read(run.metrics)
    if not rows:
        raise ToolkitError(f"{run.metrics} has no rows yet")

    from lib.runs.plots import write_plots  # matplotlib takes half a second: not before the run is found

    for path in write_plots(rows, run.plots, title=_title(run), say=print):
        print(path)
    return 0


def _title(run: RunDir) -> str:
    """Model, data and run; embedded data are called synthetic."""
    data = run.read_json("data")
    try:
        synthetic, name = " (synthetic)" if data["synthetic"] else "", data["name"]
    except KeyError as error:
        raise ToolkitError(
            f"data.json of {run.path} is of another version", why=f"{error} is missing"
        ) from error
    return f"{run.model} on {name}{synthetic}, run {run.name}"


if __name__ == "__main__":
    raise SystemExit(run_main(main))

"""make compare: a table of some runs and the differences between them, and a page with their curves."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lib.errors import ConfigError, run_main
from lib.reports.comparison import MOST_RUNS, configuration_differences, plan_differences, sections
from lib.reports.exhibits import Table
from lib.reports.page import write_page
from lib.runs.directory import RunDir, resolve_run
from lib.runs.index import read_row, read_runs, select
from lib.units import aligned
from scripts.runs import columns


def main() -> int:
    """Print the comparison and write its page."""
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of runs")
    parser.add_argument("--where", default="", help='conditions such as "model=resnet18 lr>0.001"')
    parser.add_argument("--out", type=Path, help="page to write; default: compare.html in the folder of runs")
    parser.add_argument("names", metavar="RUNS", nargs="?", default="", help="runs, separated by spaces")
    options = parser.parse_args()
    runs = selected(options.runs, options.names, options.where)
    rows = [read_row(run, f"{run.model}/{run.name}") for run in runs]
    table = columns(rows)
    names = [row.run for row in rows]
    if len({run.model for run in runs}) == 1:
        names = [run.name for run in runs]
    print("\n".join(aligned(table)))
    for title, found in (
        ("configuration", configuration_differences(runs)),
        ("plan", plan_differences(runs)),
    ):
        print(f"\nDifferences of the {title}{':' if found else ': none'}")
        if found:
            print("\n".join(aligned(list(zip(("", *names), *found, strict=True)))))
    head, *cells = zip(*table, strict=True)
    path = options.out or options.runs / "compare.html"
    write_page(
        path,
        title=f"{len(runs)} runs compared",
        summary=options.where or " · ".join(names),
        sections=sections(runs, names, Table(title="Selected runs", head=head, rows=tuple(cells))),
    )
    print(f"\nComparison: {path}")
    return 0


def selected(folder: Path, names: str, where: str) -> Sequence[RunDir]:
    """Return the runs that are named, and those that meet `where`. Raises ConfigError for too few or many."""
    found = [resolve_run(folder, name) for name in names.split()]
    if where:
        found += [RunDir(folder / row.run) for row in select(read_runs(folder), where)]
    runs = list({run.path.resolve(): run for run in found}.values())
    if not 2 <= len(runs) <= MOST_RUNS:
        requested = f'RUNS="{names}"' + (f' WHERE="{where}"' if where else "")
        raise ConfigError(
            f"{requested} selects {len(runs)} run{'s' * (len(runs) != 1)}",
            why=f"a comparison is of 2 to {MOST_RUNS}",
            todo='name them as RUNS="a b", or select them with WHERE=; make runs lists them',
        )
    return runs


if __name__ == "__main__":
    raise SystemExit(run_main(main))

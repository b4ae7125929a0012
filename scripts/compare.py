"""make compare: a table of some runs and the differences between them, and a page with their curves."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path

from lib.atomic import check_writable
from lib.errors import ConfigError, run_main
from lib.plan.show import named_decisions
from lib.plan.types import Plan
from lib.reports.page import Section, as_text, charts, section, table, write_page
from lib.reports.run_report import option
from lib.reports.series import LINES, read_series
from lib.runs.directory import RunDir, resolve_run
from lib.runs.identity import stored_digests
from lib.runs.index import objects_of, read_row, read_runs, select, stored
from lib.units import counted
from scripts.runs import columns

MOST_RUNS = 24  # with more lines no chart can be read
MOST_OPTIONS = 3  # in a legend
_AXES = {"step": "optimizer step", "samples": "samples seen", "seconds": "seconds of training"}


def main() -> int:
    """Print the comparison and write its page."""
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="the folder of runs")
    parser.add_argument("--where", default="", help='conditions such as "model=resnet18 lr>0.001"')
    parser.add_argument("--out", type=Path, help="page to write; default: compare.html in the folder of runs")
    parser.add_argument("names", metavar="RUNS", nargs="?", default="", help="runs, separated by spaces")
    options = parser.parse_args()
    path = options.out or options.runs / "compare.html"
    check_writable(path, "OUT", log=print, suffixes=[".html"])
    runs = selected(options.runs, options.names, options.where)
    rows = [read_row(run, os.path.relpath(run.path, options.runs)) for run in runs]
    of_one_model = len({run.model for run in runs}) == 1
    names = [run.name for run in runs] if of_one_model else [row.run for row in rows]
    different = differences(runs, names)
    legends = legends_of(names, different[0])
    head, *cells = zip(*columns(rows), strict=True)
    first = section("Runs", table("Selected runs", head, cells))
    print(as_text([first, *different]))
    write_page(
        path,
        title=f"{len(runs)} runs compared",
        summary=options.where or " · ".join(names),
        sections=[first, curves(runs, legends), *different],
    )
    print(f"Comparison: {path}")
    return 0


def selected(folder: Path, names: str, where: str) -> Sequence[RunDir]:
    """Return the runs that are named, and those that meet `where`. Raises ConfigError for too few or many."""
    found = [resolve_run(folder, name) for name in names.split()]
    if where:
        found += [RunDir(folder / row.run) for row in select(read_runs(folder), where)]
    runs = list({run.path.resolve(): run for run in found}.values())
    if not 2 <= len(runs) <= MOST_RUNS:
        given = {"RUNS": names, "WHERE": where}
        requested = " ".join(f'{name}="{value}"' for name, value in given.items() if value)
        raise ConfigError(
            f"{requested or 'make compare without RUNS='} selects {counted(len(runs), 'run')}",
            why=f"a comparison is of 2 to {MOST_RUNS}",
            todo='name them as RUNS="a b", or select them with WHERE=; make runs lists them',
        )
    return runs


def differences(runs: Sequence[RunDir], names: Sequence[str]) -> list[Section]:
    """Return the options, decisions and code that differ. Raises ToolkitError for a damaged run."""
    values = [run.read_json("values").items() for run in runs]
    options = [dict(starmap(option, each)) for each in values]
    decisions = [
        {name: value for name, value, _ in named_decisions(stored(run, "plan", Plan.from_json))}
        for run in runs
    ]
    found = []
    for title, what, contents in (
        ("configuration", "option", options),
        ("plan", "decision", decisions),
        ("code", "part", [_code(run) for run in runs]),
    ):
        known = dict.fromkeys(name for content in contents for name in content)
        rows = [(name, *(content.get(name, "-") for content in contents)) for name in known]
        rows = [row for row in rows if len({*row[1:]}) > 1]
        none, different = "" if rows else "There is none.", table(title.capitalize(), (what, *names), rows)
        found.append(section(f"Differences of the {title}", none, different))
    return found


def _code(run: RunDir) -> dict[str, str]:
    """Return the first digits of the hashes of its plug-ins and of its commit, those that `run` stored."""
    facts, _ = objects_of(run, "plugins", "env")
    found = {**stored_digests(facts["plugins"]), "git commit": facts["env"].get("git_commit") or ""}
    # Of a run that resumed with other code, those of all.
    return {
        part: "+".join(each[:8] for each in digest.split("+")) for part, digest in found.items() if digest
    }


def legends_of(names: Sequence[str], options: Section) -> list[str]:
    """Return a legend for each run: its values of the options that differ.

    Where these are too many, or the same for several runs, it begins with what differs in the names.
    """
    rows = [row for block in options.blocks for row in block["rows"]]
    shown = [
        [f"{row[0].removeprefix('CONFIG_')}={value}" for value in row[1:]] for row in rows[:MOST_OPTIONS]
    ]
    given = [" ".join(each) for each in zip(*shown, strict=True)]
    if len(rows) <= MOST_OPTIONS and len({*given}) == len(names):
        return given
    words = [re.split("[-/]", name) for name in names]
    if len({*map(len, words)}) == 1:
        different = [{*column} for column in zip(*words, strict=True)]
        words = [
            [word for word, known in zip(each, different, strict=True) if len(known) > 1] for each in words
        ]
    # The folder of a run of a sweep has the same identity as its name.
    short = ["-".join(dict.fromkeys(each)) for each in words]
    more = " ..." * (len(rows) > MOST_OPTIONS)
    return [
        f"{name} {values}{more}".rstrip()
        for name, values in zip(short, given or [""] * len(short), strict=True)
    ]


def curves(runs: Sequence[RunDir], names: Sequence[str]) -> Section:
    """Return a chart for each column and kind of row, evaluations first, with a line for each run.

    names: of the runs in legends. Raises ToolkitError for a damaged run.
    """
    notes = ["Evaluations first. Smoothing is over the points that the page holds."]
    flop = [stored(run, "data", lambda data: data.get("flop_per_sample")) for run in runs]
    unknown = ", ".join(name for name, each in zip(names, flop, strict=True) if each is None)
    if unknown:
        notes.append(f"There is no axis of compute: the operations of {unknown} are not recorded.")
    axes = _AXES if unknown else {**_AXES, "flop": "floating-point operations, forward and backward"}
    lines = []
    for number, (run, name, each) in enumerate(zip(runs, names, flop, strict=True)):
        batch = stored(run, "plan", Plan.from_json).effective_batch
        factors = {"samples": batch} if each is None else {"samples": batch, "flop": batch * each}
        for series in read_series(run.metrics, ended=run.status().state == "done"):
            line = series.to_json(name=name, style=number, factors=factors)
            lines.append((f"{series.column}, {LINES[series.kind]}", line))
    return Section("Curves", notes, charts(sorted(lines, key=lambda line: str(line[1]["kind"])), axes))


if __name__ == "__main__":
    raise SystemExit(run_main(main))

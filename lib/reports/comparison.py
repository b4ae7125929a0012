"""Comparison of runs: differences of their configurations and plans, and overlaid curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lib.errors import ToolkitError
from lib.plan.show import named_decisions
from lib.reports.charts import Chart
from lib.reports.exhibits import Table
from lib.reports.page import Section
from lib.reports.run_report import read_plan, stored_findings, text_of
from lib.reports.series import LINES, read_series
from lib.runs.directory import RunDir

MOST_RUNS = 24  # with more lines no chart can be read

Differences = tuple[tuple[str, ...], ...]  # rows: name, and its text in each run


def configuration_differences(runs: Sequence[RunDir]) -> Differences:
    """Return the options that differ. Raises ToolkitError for a damaged run."""
    return _differences(
        runs, lambda run: {f"CONFIG_{name}": v for name, v in run.read_json("values").items()}
    )


def plan_differences(runs: Sequence[RunDir]) -> Differences:
    """Return the decisions that differ, without their reasons. Raises ToolkitError for a damaged run."""
    return _differences(runs, _decisions)


def _decisions(run: RunDir) -> Mapping[str, Any]:
    plan, why = read_plan(run)
    if plan is None:
        raise ToolkitError(why)
    return {name: value for name, value, _ in named_decisions(plan)}


def _differences(runs: Sequence[RunDir], read: Callable[[RunDir], Mapping[str, Any]]) -> Differences:
    contents = [read(run) for run in runs]
    names = dict.fromkeys(name for content in contents for name in content)
    rows = [(name, *(text_of(content.get(name)) for content in contents)) for name in names]
    return tuple(row for row in rows if len(set(row[1:])) > 1)


def sections(runs: Sequence[RunDir], names: Sequence[str], table: Table) -> list[Section]:
    """Return the sections of the page. names: of the runs in legends. Raises ToolkitError."""
    curves, notes = overlaid(runs, names)
    parts = (
        ("Configuration", "option", configuration_differences(runs)),
        ("Plan", "decision", plan_differences(runs)),
    )
    return [
        Section("Runs", [], [table]),
        Section("Curves", notes, curves),
        *(
            Section(
                f"Differences of the {title.lower()}",
                [] if rows else ["There is none."],
                [Table(title=title, head=(what, *names), rows=rows)] if rows else [],
            )
            for title, what, rows in parts
        ),
    ]


def overlaid(runs: Sequence[RunDir], names: Sequence[str]) -> tuple[list[Chart], list[str]]:
    """Return a chart for each column and kind of row with a line for each run, and notes on the axes."""
    axes = {"step": "optimizer step", "samples": "samples seen", "seconds": "seconds of training"}
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    known = [findings.flop_per_sample if (findings := stored_findings(run)) else None for run in runs]
    notes = ["Evaluations first. Smoothing is over the points that the page holds."]
    if None in known:
        without = ", ".join(name for name, flop in zip(names, known, strict=True) if flop is None)
        notes.append(f"There is no axis of compute: make report has not counted the operations of {without}.")
    else:
        axes["flop"] = "floating-point operations, forward and backward"
    for number, (run, name, flop) in enumerate(zip(runs, names, known, strict=True)):
        batch = int(run.read_json("plan")["effective_batch"])
        factors = {"samples": batch} if flop is None else {"samples": batch, "flop": batch * flop}
        for series in read_series(run.metrics):
            line = series.to_json(name=name, style=number, factors=factors)
            lines.setdefault((series.column, series.kind), []).append(line)
    charts: list[Chart] = [
        {
            "title": f"{column.replace('_', ' ')}, {LINES[kind]}",
            "note": "",
            "y": column.replace("_", " "),
            "axes": axes,
            "lines": found,
            "controls": True,
        }
        for (column, kind), found in sorted(lines.items(), key=lambda item: item[0][1])
    ]
    return charts, notes

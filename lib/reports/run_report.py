"""The report of one run: sections made of the files in its directory, and findings about its checkpoints.

Findings are what needs a checkpoint and the data, a dictionary that JSON can hold. Each key may be missing:

    steps            of the checkpoints that there were
    step, problem    of the checkpoint that was loaded; or why none was
    naive_loss       training loss of a uniform guess
    memory           block: the traced memory of a step; None where it was not traced
    exhibits         blocks: what the task shows
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import TemplateError

from lib import atomic
from lib.errors import ToolkitError, os_errors
from lib.kconf.resolve import is_given
from lib.plan.show import named_decisions
from lib.plan.types import Plan
from lib.reports.page import Block, Section, charts, curve, render, section, table, write_page
from lib.reports.series import LINES, MOST_POINTS, Series, read_series
from lib.runs import metrics
from lib.runs.directory import RunDir
from lib.runs.index import facts_of, status_of, stored
from lib.runs.metrics import higher_is_better
from lib.units import bytes_text, seconds_text, value_text

Findings: TypeAlias = Mapping[str, Any]

_VERSION = 3  # of the stored findings
_BASELINES = ("N-gram baseline", "Constant baseline")  # as tasks log them
_AXES = {"step": "optimizer step", "seconds": "seconds of training"}
_CURVES = (
    f"At most {MOST_POINTS:,} points a line: the lowest and the highest of equal stretches. Smoothing is "
    "over those points. All rows are in metrics.jsonl of the run directory."
)
_NOT_MEASURED = "Not measured: the device does not count its peak, or the run is of an older version."
_MOST_FACTS = 25  # that are shown without a request: a table of data may have hundreds of columns
_GROWTH = "growth of the resident memory, with libraries and what the allocator keeps"


def stored_findings(run: RunDir) -> Findings | None:
    """Return the stored findings; None unless they hold for the checkpoints of now, and can be shown."""
    try:
        content = json.loads(run.findings.read_bytes())
        is_valid = content.pop("version") == _VERSION and content["steps"] == run.checkpoint_steps
        shown = section("", *filter(None, [content.get("memory")]))
        render(title="", summary="", sections=[shown, _model(content)] if is_valid else [])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, TemplateError):
        return None  # the file is a copy, and is made again
    return content if is_valid else None


def store_findings(run: RunDir, findings: Findings) -> None:
    """Store findings in the run directory. Raises ToolkitError if that fails."""
    with os_errors("write"):
        atomic.write_text(run.findings, json.dumps({"version": _VERSION, **findings}) + "\n")


def write_report(run: RunDir, findings: Findings, path: Path, *, more: Sequence[Section] = ()) -> None:
    """Write the report of a run, with `more` sections at its end.

    Raises ToolkitError if a file of it is damaged, or it cannot be written.
    """
    status, _ = status_of(run)
    state = f"{status.state}: {status.reason}" if status.reason else status.state
    began, seconds = datetime.fromtimestamp(run.began, UTC), status.metrics.get("seconds")
    when = [f"began {began:%Y-%m-%d %H:%M} UTC"] * (run.began > 0)
    when += [] if seconds is None else [f"{seconds_text(seconds)} of training"]
    write_page(
        path,
        title=_title(run),
        summary=" · ".join([state, f"step {status.step:,}", *when, str(run.path), *run.tags()]),
        sections=[*sections(run, findings), *more],
    )


def run_note(run: RunDir) -> str:
    """Return what a run trains, its state and how long ago it began."""
    age = time.time() - run.began
    ago = f"{age // 86400:.0f} days" if age > 2 * 86400 else seconds_text(max(1.0, age))
    return ", ".join([_title(run), status_of(run)[0].state, *[f"began {ago} ago"] * (run.began > 0)])


def _title(run: RunDir) -> str:
    data = _read(run, "data")
    return f"{run.model} on {data.get('name', 'unknown data')}{' (synthetic)' * bool(data.get('synthetic'))}"


def sections(run: RunDir, findings: Findings) -> list[Section]:
    """Return the sections of the report, the result first. Raises ToolkitError for damaged metrics."""
    series = read_series(run.metrics, ended=run.status().state == "done")
    lines = [
        (each.column, each.to_json(name=LINES[each.kind], style=int(each.kind == "eval")))
        for each in series
        if each.column != metrics.PEAK  # under Memory
    ]
    plan, why, decisions = None, "", list[tuple[str, ...]]()
    try:
        plan = stored(run, "plan", Plan.from_json)
        decisions += named_decisions(plan)
    except ToolkitError as error:
        why = f"The plan cannot be shown: {error}"
    parts = (("Software", "env"), ("Hardware", "hardware"), ("Data", "data"))
    known = ((title, ("fact", "value"), facts(_read(run, name))) for title, name in parts)
    return [
        _result(run, series, findings),
        section("Curves", _CURVES, *charts(lines, _AXES)),
        section("Plan", why, table("Decisions", ("decision", "value", "why"), decisions)),
        _memory(plan, series, findings),
        _throughput(run, plan, series),
        _configuration(run),
        section("Environment", *(table(*each, folded=len(each[2]) > _MOST_FACTS) for each in known)),
        _model(findings),
    ]


def facts(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of what is known of a machine or its data, in words."""
    found = []
    for path, value in facts_of(content):
        texts = (_fact(path, one) for one in (value if isinstance(value, list) else [value]))
        if text := ", ".join(filter(None, texts)):
            found.append((path.removesuffix("_bytes").replace("_", " "), text))
    return found


def _fact(path: str, value: object) -> str:
    if path.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    return f"{value:.6g}" if isinstance(value, float) else value_text(value, "")


def option(name: str, value: object) -> tuple[str, str]:
    """Return an option as a report names it, and its value; a dash where it has none."""
    return f"CONFIG_{name}", value_text(value, words="ny")


def _result(run: RunDir, series: Sequence[Series], findings: Findings) -> Section:
    part, rows = run.status().facts.get("part"), []
    for each in series:
        if each.kind == "eval":
            best = (max if higher_is_better(each.column) else min)(each.values)
            step = each.steps[each.values.index(best)]
            rows.append((each.column.replace("_", " "), f"{each.values[-1]:.5g}", f"{best:.5g}", f"{step:,}"))
    loss = findings.get("naive_loss")
    baselines = [] if loss is None else [("uniform guess", f"training loss {loss:.4f}")]
    baselines += [(name, text) for name in _BASELINES for text in _logged(run, f"{name}: ")[-1:]]
    neither = "its task has no loss of a uniform guess" if "step" in findings else "no checkpoint was read"
    unknown = f"No baseline is known: the run has logged none, and {neither}."
    return section(
        "Result",
        f"Evaluated on the {part}." if part else "",
        "" if rows else "There is no evaluation yet.",
        "" if baselines else unknown,
        table("Evaluations", ("figure", "last", "best", "best at step"), rows),
        table("Baselines", ("baseline", "figures"), baselines),
    )


def _memory(plan: Plan | None, series: Sequence[Series], findings: Findings) -> Section:
    sizes, charts, note = list[tuple[str, int]](), list[Block](), _NOT_MEASURED
    if memory := plan and plan.memory:
        sizes = sorted(memory.parts.items(), key=lambda part: -part[1])
        sizes.append(("gaps and reserve", memory.gaps_bytes + memory.reserve_bytes))
        sizes += [("all of these, predicted", memory.need_bytes), ("usable", memory.usable_bytes)]
        sizes.append(("peak of tensors, predicted", memory.peak_bytes))
    rows = [(name, bytes_text(size)) for name, size in sizes]
    traced, measured = findings.get("memory"), [each for each in series if each.column == metrics.PEAK]
    if plan and measured:
        (steps, values), peak = (measured[0].steps, measured[0].values), max(measured[0].values)
        what = _GROWTH if plan.device == "cpu" else "tensors, by the device's allocator"
        note = f"Measured by rank 0 whenever it logs: {what}."
        rows.append(("peak, measured", bytes_text(round(peak))))
        lines = {"measured so far": [(at, size / 1e6) for at, size in zip(steps, values, strict=True)]}
        if memory:
            rows.append(("measured / predicted peak", f"{peak / memory.peak_bytes:.2f}"))
            lines["predicted peak"] = [(at, memory.peak_bytes / 1e6) for at in (steps[0], steps[-1])]
        charts.append(curve("Peak memory over the run, in MB", lines, x="optimizer step"))
        if traced:
            across = [traced["lines"][0]["x"][end] for end in (0, -1)]
            level = {"name": "measured peak", "style": 1, "x": across, "value": [peak / 1e6] * 2}
            traced = {**traced, "lines": [*traced["lines"], level]}
    charts += [traced] if traced else []
    within = "Memory within a step is traced without a device: a run does not record it." if traced else ""
    none = "" if sizes else "The plan has no prediction of memory."
    return section("Memory", none, note, within, table("Peak", ("part", "size"), rows), *charts)


def _throughput(run: RunDir, plan: Plan | None, series: Sequence[Series]) -> Section:
    rates = [each.values for each in series if each.column == "samples_per_second"]
    if not rates or plan is None:
        return section("Throughput", "No throughput is recorded yet.")
    rate = statistics.median(rates[0][len(rates[0]) // 2 :])
    seconds = seconds_text(plan.effective_batch / rate) if rate else "unknown"
    rows = [("samples per second", metrics.format_value("", rate)), ("time of an optimizer step", seconds)]
    speed = [row for row in metrics.tail(run.metrics) if row.get("kind") == "speed"][-1:]
    rows += [
        (f"whole run: {name.replace('_', ' ')}", metrics.format_value(name, value))
        for name, value in (speed[0].items() if speed else ())
        if name not in ("kind", "step")
    ]
    last = "The end of a run adds how long it waits for data, and on a GPU of the catalogue its utilization."
    median = "Medians of the second half of the rows, training only."
    return section("Throughput", median, "" if speed else last, table("Speed", ("figure", "value"), rows))


def _configuration(run: RunDir) -> Section:
    origins, head = _read(run, "origins"), ("option", "value", "origin")
    values = _read(run, "values").items()
    rows = [(*option(*each), str(origins.get(each[0], "unknown"))) for each in values]
    return section(
        "Configuration",
        table("Requested", head, [row for row in rows if is_given(row[2])]),
        table("Defaults", head, [row for row in rows if not is_given(row[2])], folded=True),
    )


def _model(findings: Findings) -> Section:
    if findings.get("step") is None:
        return section("Model", f"The model is not shown: {findings['problem']}")
    exhibits = findings["exhibits"] or ["Its task has nothing more to show."]
    return section("Model", f"By the checkpoint of step {findings['step']:,}.", *exhibits)


def _read(run: RunDir, name: str) -> dict[str, Any]:
    try:
        return run.read_json(name)
    except ToolkitError as error:
        return {"not readable": str(error)}  # shown in place of its content


def _logged(run: RunDir, label: str) -> list[str]:
    """Return what the run has logged after `label`, oldest first."""
    if not run.log.exists():
        return []
    with os_errors("read"):
        lines = run.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.partition(label)[2] for line in lines if label in line]

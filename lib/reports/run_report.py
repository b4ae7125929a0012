"""The report of one run: sections made of the files in its directory, and findings about its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import ToolkitError, os_errors
from lib.kconf.resolve import is_given
from lib.plan.gpus import find_gpu
from lib.plan.roofline import FLOP_SHARES, peak_flop_per_second
from lib.plan.show import named_decisions
from lib.plan.types import Plan
from lib.reports.page import Block, Section, charts, table, write_page
from lib.reports.series import LINES, MOST_POINTS, Series, read_series
from lib.runs.directory import RunDir
from lib.runs.metrics import higher_is_better
from lib.units import bytes_text, seconds_text

_VERSION = 2  # of the stored findings
_AXES = {"step": "optimizer step", "seconds": "seconds of training"}
_CURVES = (
    f"At most {MOST_POINTS:,} points a line: the lowest and the highest of equal stretches. Smoothing is "
    "over those points. All rows are in metrics.jsonl of the run directory."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Facts for which a report needs a checkpoint and the data.

    steps: of the checkpoints that there were. step: of the one that was loaded, None for none.
    problem: why none was. naive_loss: of a uniform guess. flop_per_sample: of training, None if unknown.
    memory: the traced memory of a step, None where it was not traced. exhibits: what the task shows.
    """

    steps: Sequence[int]
    step: int | None = None
    problem: str = ""
    naive_loss: float | None = None
    flop_per_sample: float | None = None
    memory: Block | None = None
    exhibits: Sequence[Block] = ()


def stored_findings(run: RunDir) -> Findings | None:
    """Return the stored findings; None where there are none about the checkpoints of now."""
    try:
        content = json.loads(run.findings.read_bytes())
        if content.pop("version") == _VERSION and content["steps"] == run.checkpoint_steps:
            return Findings(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # the file is a copy, and is made again
    return None


def store_findings(run: RunDir, findings: Findings) -> None:
    """Store findings in the run directory. Raises ToolkitError if that fails."""
    with os_errors("write"):
        content = {"version": _VERSION, **dataclasses.asdict(findings)}
        atomic.write_text(run.findings, json.dumps(content) + "\n")


def read_plan(run: RunDir) -> Plan:
    """Return the stored plan. Raises ToolkitError if it cannot be read."""
    try:
        return Plan.from_json(run.read_json("plan"))
    except (KeyError, TypeError, ValueError) as error:
        raise ToolkitError(f"plan.json of {run.path} is of another version", why=str(error)) from error


def text_of(value: object) -> str:
    """Return the value of an option as a report shows it; a dash where it has none."""
    return "-" if value is None else {True: "y", False: "n"}[value] if isinstance(value, bool) else str(value)


def write_report(run: RunDir, findings: Findings, path: Path) -> None:
    """Write the report of a run. Raises ToolkitError if its metrics are damaged, or it cannot be written."""
    status, data = run.status(), _read(run, "data")
    synthetic = " (synthetic)" if data.get("synthetic") else ""
    state = f"{status.state}: {status.reason}" if status.reason else status.state
    write_page(
        path,
        title=f"{run.model} on {data.get('name', 'unknown data')}{synthetic}",
        summary=" · ".join([state, f"step {status.step:,}", str(run.path), *run.tags()]),
        sections=sections(run, findings),
    )


def sections(run: RunDir, findings: Findings) -> list[Section]:
    """Return the sections of the report, the result first. Raises ToolkitError for damaged metrics."""
    series = read_series(run.metrics)
    lines = [
        (each.column, each.to_json(name=LINES[each.kind], style=int(each.kind == "eval"))) for each in series
    ]
    plan, why = None, list[str]()
    try:
        plan = read_plan(run)
    except ToolkitError as error:
        why.append(f"The plan cannot be shown: {error}")
    parts = (("Software", "env"), ("Hardware", "hardware"), ("Data", "data"))
    facts = [table(title, ("fact", "value"), _flat(_read(run, name))) for title, name in parts]
    decisions = [table("Decisions", ("decision", "value", "why"), named_decisions(plan))] if plan else []
    return [
        _result(run, series, findings),
        Section("Curves", [_CURVES], charts(lines, _AXES)),
        Section("Plan", why, decisions),
        _memory(run, plan, findings),
        _throughput(run, plan, series, findings),
        Section("Configuration", [], _configuration(run)),
        Section("Environment", [], facts),
        _model(findings),
    ]


def _result(run: RunDir, series: Sequence[Series], findings: Findings) -> Section:
    facts, rows = run.status().facts, []
    for each in series:
        if each.kind == "eval":
            best = (max if higher_is_better(each.column) else min)(each.values)
            step = each.steps[each.values.index(best)]
            rows.append((each.column.replace("_", " "), f"{each.values[-1]:.5g}", f"{best:.5g}", f"{step:,}"))
    baselines = [("N-gram baseline", text) for text in _logged(run, "N-gram baseline: ")[-1:]]
    if findings.naive_loss is not None:
        baselines.insert(0, ("uniform guess", f"training loss {findings.naive_loss:.4f}"))
    notes = [f"Evaluated on the {facts['part']}."] if "part" in facts else []
    notes += [] if rows else ["There is no evaluation yet."]
    notes += (
        [] if baselines else ["No baseline is known: the run has logged none, and no checkpoint was read."]
    )
    tables = [
        table("Evaluations", ("figure", "last", "best", "step"), rows),
        table("Baselines", ("baseline", "figures"), baselines),
    ]
    return Section("Result", notes, [each for each in tables if each["rows"]])


def _memory(run: RunDir, plan: Plan | None, findings: Findings) -> Section:
    notes, blocks = [], list[Block]()
    if plan is not None and plan.memory is not None:
        memory = plan.memory
        sizes = sorted(memory.parts.items(), key=lambda part: -part[1])
        sizes += [("peak of tensors, predicted", memory.peak_bytes), ("usable", memory.usable_bytes)]
        sizes.append(("gaps and reserve", memory.gaps_bytes + memory.reserve_bytes))
        rows = [(name, bytes_text(size)) for name, size in sizes]
        blocks.append(table("Prediction at the peak", ("part", "size"), rows))
    else:
        notes.append("The plan has no prediction of memory.")
    measured = _logged(run, "Memory: ")
    notes.append(
        f"Measured: {measured[-1]}."
        if measured
        else "Not measured: the run has logged no peak of its tensors. On a CPU it does not measure one."
    )
    if findings.memory is not None:
        notes.append("A run does not record its memory within a step. The curve is traced without a device.")
        blocks.append(findings.memory)
    return Section("Memory", notes, blocks)


def _throughput(run: RunDir, plan: Plan | None, series: Sequence[Series], findings: Findings) -> Section:
    rates = [each.values for each in series if each.column == "samples_per_second"]
    if not rates or plan is None:
        return Section("Throughput", ["No throughput is recorded yet."], [])
    rate = statistics.median(rates[0][len(rates[0]) // 2 :])
    seconds = seconds_text(plan.effective_batch / rate) if rate else "unknown"
    rows = [("samples per second", f"{rate:.4g}"), ("time of an optimizer step", seconds)]
    notes = ["Medians of the second half of the rows, training only."]
    devices = _read(run, "hardware").get("devices") or [{}]
    gpu = find_gpu(str(devices[0].get("name", "")))
    if gpu is None:
        notes.append("There is no estimate to compare with: the device is not in the catalogue of GPUs.")
    elif findings.flop_per_sample is None:
        notes.append("Utilisation is not known: no checkpoint was read, and so no operations were counted.")
    if findings.flop_per_sample is not None:
        reached = rate * findings.flop_per_sample
        rows.append(("arithmetic, forward and backward", f"{reached / 1e9:,.4g} GFLOP/s"))
        if gpu is not None:
            peak = peak_flop_per_second(gpu, precision=plan.precision) * plan.layout.devices
            low, high = (f"{share:.0%}" for share in FLOP_SHARES)
            rows.append((f"peak of {plan.layout.devices} {gpu.name}", f"{peak / 1e9:,.0f} GFLOP/s"))
            rows.append(("utilisation", f"{reached / peak:.1%} of the peak; the estimate is {low} to {high}"))
    return Section("Throughput", notes, [table("Speed", ("figure", "value"), rows)])


def _configuration(run: RunDir) -> list[Block]:
    origins, head = _read(run, "origins"), ("option", "value", "origin")
    rows = [
        (f"CONFIG_{name}", text_of(value), str(origins.get(name, "unknown")))
        for name, value in _read(run, "values").items()
    ]
    return [
        table("Requested", head, [row for row in rows if is_given(row[2])]),
        table("Defaults", head, [row for row in rows if not is_given(row[2])], folded=True),
    ]


def _model(findings: Findings) -> Section:
    if findings.step is None:
        return Section("Model", [f"The model is not shown: {findings.problem}"], [])
    notes = [f"By the checkpoint of step {findings.step:,}."]
    notes += [] if findings.exhibits else ["Its task has nothing more to show."]
    return Section("Model", notes, findings.exhibits)


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(number): one for number, one in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}".replace("_", " "), str(value)


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

"""make report: the page of a run. What needs a checkpoint is found out once for each and stored."""

from __future__ import annotations

from pathlib import Path

from lib.errors import ToolkitError
from lib.reports.run_report import Findings, store_findings, stored_findings, write_report
from lib.runs.directory import RunDir, resolve_run
from train.signals import importing


def report(name: str, *, root: Path, runs: Path, out: Path | None) -> int:
    """Write the report of run `name` to `out`, or into its directory. Torch is imported only where needed."""
    run = resolve_run(runs, name)
    findings = stored_findings(run) or _find(run, root)
    path = out or run.report
    write_report(run, findings, path)
    print(f"Report: {path}")
    return 0


def _find(run: RunDir, root: Path) -> Findings:
    """Find out and store what the checkpoints show; where they cannot be read, return why."""
    if not (steps := run.checkpoint_steps):
        return Findings(steps=steps, problem="the run has no checkpoint")
    with importing():
        from train.findings import find
    try:
        findings = find(run, root=root, steps=steps)
    except ToolkitError as error:
        print(f"The report does not show the model: {error}")
        return Findings(steps=steps, problem=str(error))
    try:
        store_findings(run, findings)
    except ToolkitError as error:  # the run may be somebody else's
        print(f"What the checkpoints show is not kept for the next report: {error}")
    return findings

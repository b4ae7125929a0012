"""make report: the page of a run. What needs a checkpoint is found out once for each and stored."""

from __future__ import annotations

from pathlib import Path

from lib.errors import ToolkitError
from lib.reports.run_report import store_findings, stored_findings, write_report
from lib.runs.directory import resolve_run
from train.signals import importing


def report(name: str, *, root: Path, runs: Path, out: Path | None) -> int:
    """Write the report of run `name` to `out`, or into its directory. Torch is imported only where needed."""
    run = resolve_run(runs, name)
    findings = stored_findings(run)
    if findings is None:
        with importing():
            from train.findings import find
        try:
            findings = find(run, root=root)
            store_findings(run, findings)
        except ToolkitError as error:
            # Without write permission the next report finds out again.
            print(f"The findings are not kept: {error}" if findings else f"The model is not shown: {error}")
            findings = findings or {"problem": str(error)}
    path = out or run.report
    write_report(run, findings, path)
    print(f"Report: {path}")
    return 0

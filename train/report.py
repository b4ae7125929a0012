"""make report: the page of a run. What needs a checkpoint is found out once for each and stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lib.atomic import check_writable
from lib.errors import ToolkitError
from lib.reports.page import Section
from lib.reports.run_report import run_note, store_findings, stored_findings, write_report
from lib.runs.directory import RunDir, resolve_run
from lib.scaling import PLAN
from train.signals import importing


def report(name: str, *, root: Path, runs: Path, out: Path | None) -> int:
    """Write the report of run `name` to `out`, or into its directory. Torch is imported only where needed.

    The folder of a scaling sweep in place of a name has a report, too.
    """
    if out is not None:
        check_writable(out, "OUT", log=print, suffixes=[".html"])
    if name and (Path(name) / PLAN).is_file():
        with importing():
            from lib.scaling.experiments import PAGE, ScalingExperiments
        path = out or Path(name) / PAGE
        ScalingExperiments.of_sweep(Path(name)).write_page(path)
        print(f"Report: {path}")
        return 0
    run = resolve_run(runs, name)
    if not name:
        print(f"Newest run: {run_note(run)}; RUN= names another (make runs lists them)")
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
    write_report(run, findings, path, more=_sweep_of(run))
    print(f"Report: {path}")
    return 0


def _sweep_of(run: RunDir) -> Sequence[Section]:
    """Return the sections of the scaling sweep that made the run; none for other runs."""
    _, _, _, folder, *_ = *run.path.resolve().parents, *[Path()] * 4  # SWEEP/runs/NAME/MODEL/RUN
    if not (folder / PLAN).is_file():
        return []
    with importing():
        from lib.scaling.experiments import ScalingExperiments
    try:
        return ScalingExperiments.of_sweep(folder).sections()
    except ToolkitError as error:  # it may lack a run, or its corpus
        return [Section("Scaling", [f"The laws of the sweep in {folder} are not shown: {error}"], [])]

"""Training of the runs of an experiment, each once.

A run is known by its identity: one that is there already is kept, whichever file asked for it. A failed run
is reported, and the others are trained.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from lib import atomic, kconf
from lib.config import config_from_values
from lib.errors import ConfigError, ToolkitError, foremost
from lib.runs.directory import RunDir, Status
from lib.runs.identity import changed, has_former_identity, identity, plugin_digests, stored_digests, trains
from lib.runs.index import objects_of, read_runs
from lib.sweeps.concurrency import Concurrency
from lib.sweeps.experiment import Experiment, Setting
from lib.sweeps.subprocess_run import Children, runs_of
from lib.units import counted

RESULT = "result.json"
ALL_DEFAULTS = "alldefconfig"
_NO_PLACE = re.compile(r"^(command line|the configuration:\d+): ")
Log: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One configuration to train. number: index of its point."""

    number: int
    settings: Setting
    resolved: kconf.Resolved
    side: str = ""  # "A " or "B " in the log of a comparison

    @property
    def identity(self) -> str:
        """Identity of the configuration, as in the names of run directories."""
        return identity(self.resolved.in_effect)

    @property
    def code(self) -> Mapping[str, str]:
        """Hashes of the code of its plug-ins, by their kind."""
        config = config_from_values(self.resolved.values)
        return plugin_digests(config.model, config.task, config.dataset)

    @property
    def point(self) -> str:
        """Identity of the configuration whatever its seed."""
        return identity({**self.resolved.in_effect, "SEED": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Metrics of the last evaluation of a run, or the reason for none; costs, if this sweep trained it.

    code: hashes of its plug-ins' code, by their kind; empty if unknown.
    part: of the data set that was evaluated; "" if unknown.
    """

    number: int
    identity: str
    settings: Setting
    metrics: dict[str, float]
    reason: str
    seconds_cpu: float | None = None
    peak_memory_mb: float | None = None
    code: dict[str, str] = field(default_factory=dict)
    part: str = ""


def resolved_runs(experiment: Experiment, *, root: Path) -> list[Run]:
    """Resolve all runs before any is trained, and print their notices.

    Raises ConfigError where one cannot be configured.
    """
    from lib.kconf.diagnostics import in_notation

    try:
        base = compose_text(root, experiment.config)
    except ConfigError as error:
        what = f"{experiment.places['config', None]}: {error.what}"
        raise ConfigError(what, why=error.why, todo=error.todo, findings=error.findings) from error
    runs, findings = dict[str, Run](), dict[str, set[int]]()
    for number, settings in experiment.runs():
        try:
            run = Run(number=number, settings=settings, resolved=_resolved(experiment, settings, base, root))
        except ConfigError as error:
            named = [name for name in re.findall(r"CONFIG_(\w+)", str(error)) if name in settings]
            place = experiment.place(named[0], settings[named[0]]) if named else experiment.name
            for finding in error.findings or (f"{place}: {error}",):
                text = in_notation(finding, equals=": ", yes="true", no="false")
                findings.setdefault(text, set()).add(number)
            continue
        # Two equal runs would share a directory, and the table would count them as two.
        if (same := runs.setdefault(run.identity, run)) is not run:
            finding = f"{experiment.name}: trains the same as point {same.number + 1}"
            findings.setdefault(finding, set()).add(number)
    if findings:
        refused, count = len(set(itertools.chain(*findings.values()))), len(experiment.points)
        raise ConfigError(
            f"{refused} of {counted(count, 'point')} of {experiment.name} cannot be configured",
            todo="nothing was trained",
            findings=foremost(
                [_with_points(text, numbers, count) for text, numbers in findings.items()], "faults"
            ),
        )
    for notice in dict.fromkeys(notice for run in runs.values() for notice in run.resolved.notices):
        _report(in_notation(placed(notice, experiment.name), equals=": ", yes="true", no="false"))
    return list(runs.values())


@functools.cache  # once, though a search resolves its points one by one
def _report(notice: str) -> None:
    from lib.kconf.project import report_notices

    report_notices([notice])


def placed(notice: str, place: str) -> str:
    """Return a notice on a configuration of `compose_text` or on overrides with a `place` of the user's."""
    return _NO_PLACE.sub(f"{place}: ", notice)


def _resolved(experiment: Experiment, settings: Setting, base: str, root: Path) -> kconf.Resolved:
    resolved = kconf.load_written(
        base,
        root=root,
        overrides={f"CONFIG_{name}": value for name, value in settings.items()},
        places={f"CONFIG_{name}": experiment.place(name, value) for name, value in settings.items()},
    )
    config_from_values(resolved.values)
    return resolved


def _with_points(finding: str, numbers: set[int], count: int) -> str:
    """Append the points that a finding concerns, unless it concerns all."""
    points = ", ".join(str(number + 1) for number in sorted(numbers))
    return finding if len(numbers) == count else f"{finding} (point{'s' * (len(numbers) > 1)} {points})"


def compose_text(root: Path, spec: str) -> str:
    """Return the full text of NAME+FRAGMENT+... or ALL_DEFAULTS, and print notices. Raises ConfigError."""
    from lib.kconf.defconfig import compose
    from lib.kconf.project import report_notices
    from lib.kconf.tree import load_own_tree
    from lib.kconf.write import full_text

    tree = load_own_tree(root)
    if spec != ALL_DEFAULTS:
        report_notices(compose(tree, spec)[1])
    return full_text(tree)


def train_all(
    runs: Sequence[Run], *, root: Path, out: Path, concurrency: Concurrency, log: Log, later: int = 0
) -> list[Result]:
    """Train the runs that have no result below `out`, as many at a time as `concurrency` allows.

    later: number of runs that follow these, for the remaining time that is logged after each run.
    Raises Suspended after a signal: finished runs are kept, and the same command resumes the stopped ones.
    """
    for run in runs:
        _ = run.code  # hashed now, once: results are compared with the code that the command began with
    missing = {run.identity: run.point for run in runs if known_result(run, out) is None}
    with Children() as children:

        def result(run: Run) -> Result | None:
            with concurrency.slot():
                began = time.monotonic()
                found = _result(run, children, root=root, out=out, concurrency=concurrency, log=log)
                point = missing.pop(run.identity, None) if found is not None else None
                if point is not None and found is not None and found.seconds_cpu is not None:  # trained now
                    concurrency.took.append((point, time.monotonic() - began))
                    left = [*missing.values(), *[None] * later]
                    if left and not children.stopped_by:
                        log(time_left(concurrency.took, left=left, workers=concurrency.workers))
                return found

        found = children.map(result, runs, workers=concurrency.max_workers)
        results = [one for one in found if one is not None]
    children.check(todo=f"{len(results)} of {len(runs)} runs are done, and the same command resumes the rest")
    return results


def time_left(took: Sequence[tuple[str, float]], *, left: Sequence[str | None], workers: int) -> str:
    """Format the remaining time of runs of the points `left`: None for points that are not known yet.

    took: point and seconds of each run so far. One takes as long as those of its point, or else as all.
    """
    own = [[seconds for known, seconds in took if known == point] for point in left]
    each = [statistics.fmean(seconds or [seconds for _, seconds in took]) for seconds in own]
    seconds = round(max(sum(each) / workers, *each))
    return f"{counted(len(left), 'run')} left, about {timedelta(seconds=seconds)}"


def write_results(out: Path, results: Sequence[Result]) -> None:
    """Write results.jsonl, one line per run."""
    lines = "".join(json.dumps(asdict(result)) + "\n" for result in results)
    atomic.write_text(out / "results.jsonl", lines)


def _result(
    run: Run, children: Children, *, root: Path, out: Path, concurrency: Concurrency, log: Log
) -> Result | None:
    """Return the result of a run, trained now unless it is known; None where it was stopped."""
    place = run_folder(run, out)
    name = f"{run.side}{run.identity} {format_settings(run.settings)}"
    if (known := known_result(run, out)) is not None:
        log(f"{name}: already there")
        return known
    try:
        there = runs_of(place, run.resolved)
    except ToolkitError as error:
        log(f"{name}: {error}")
        return _outcome(run, None, reason=str(error))  # temporary, so it is not written
    file, former = place / RESULT, _stored_result(run, out)
    if former is not None or not file.exists():  # else it reports a failure
        done = (each for each in there if each.status().state == "done" and not _changed(each, run))
        if (finished := next(done, None)) is not None:
            log(f"{name}: done; the sweep that started it had ended")
            return _written(file, _outcome(run, finished))
    if former is not None:
        log(f"{name}: trained again, as the code of its {changed(former.code, run.code)} has changed")
    text, begun = run.resolved.text, next((each for each in there if each.status().state != "done"), None)
    if begun is not None and (parts := _changed(begun, run)):
        log(f"{name}: {begun.path} is not resumed, as the code of its {parts} has changed")
        text = kconf.load_written(text, root=root, overrides={"CONFIG_RESUME_NEVER": "y"}).text
    file.unlink(missing_ok=True)
    child = children.train(place, text, root=root)
    if child.stopped:
        if child.reason:
            log(f"{name}: {child.reason}")
        return None
    cost = {"seconds_cpu": child.seconds_cpu, "peak_memory_mb": child.peak_memory_mb}
    result = _written(file, _outcome(run, child.run, reason=child.reason, **cost))
    log(f"{name}: {child.reason or 'done'}, {child.seconds_cpu:.0f} CPU seconds")
    if parts := changed(result.code, run.code):
        what = f"{name}: warning: the code of its {parts} is not the one that this command began with"
        log(f"{what}; give the same command again, to compare runs of the same code")
    if not child.reason and (line := concurrency.record_peak(child.peak_memory_mb * 1e6)):
        log(line)
    return result


def _outcome(run: Run, trained: RunDir | None, *, reason: str = "", **cost: float) -> Result:
    status = Status(state="unknown") if trained is None else trained.status()
    return Result(
        number=run.number,
        identity=run.identity,
        settings=run.settings,
        metrics=status.metrics,
        reason=reason,
        code={} if trained is None else _code_of(trained),
        part=str(status.facts.get("part", "")),
        **cost,
    )


def _code_of(run: RunDir) -> dict[str, str]:
    return stored_digests(objects_of(run, "plugins")[0]["plugins"])


def _changed(trained: RunDir, run: Run) -> str:
    """Name the kinds of plug-ins whose code is not that by which `trained` was trained; "" if none."""
    return changed(_code_of(trained), run.code)


def _written(file: Path, result: Result) -> Result:
    atomic.write_text(file, json.dumps(asdict(result), indent=1) + "\n")
    return result


def known_result(run: Run, out: Path) -> Result | None:
    """Return the result below `out` of an earlier training that did not fail, by the code of today."""
    known = _stored_result(run, out)
    return None if known is None or changed(known.code, run.code) else known


def _stored_result(run: Run, out: Path) -> Result | None:
    """Return the result of an earlier training below `out` that did not fail, with the point of `run`."""
    try:
        stored = json.loads((run_folder(run, out) / RESULT).read_text(encoding="utf-8"))
        known = Result(**{**stored, "number": run.number, "settings": run.settings})
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return None if known.reason else known


def adopt(runs: Sequence[Run], *, out: Path, folder: Path, log: Log) -> None:
    """Give `runs` without a result below `out` that of an equal run in `folder`; log how many have one.

    Runs that were trained below `out` are left to `train_all`.
    """
    missing, places = {run.identity: run for run in runs if known_result(run, out) is None}, set[str]()
    unused = set[str]()
    for row in read_runs(folder) if missing else ():
        run = missing.get(row.identity)
        if run is None or row.state != "done":
            continue
        place = run_folder(run, out)
        if place.resolve() in (folder / row.run).resolve().parents:
            continue
        if parts := _changed(RunDir(folder / row.run), run):
            unused.add(f"{row.run}: not used, as the code of its {parts} has changed")
            continue
        place.mkdir(parents=True, exist_ok=True)
        _written(place / RESULT, _outcome(run, RunDir(folder / row.run)))
        del missing[run.identity]
        places.add("/".join(row.run.split("/")[:-3]) or "make train")
    if there := len(runs) - len(missing):
        some = f", some from {', '.join(sorted(places))}" if places else ""
        log(f"{there} of {counted(len(runs), 'run')} {'is' if there == 1 else 'are'} there{some}")
    for line in foremost(sorted(unused), "runs"):
        log(line)


def run_folder(run: Run, out: Path) -> Path:
    """Return the folder of `run` below `out`, existing or not, also one with a name of an older version."""
    folder = out / run.identity
    if folder.exists():
        return folder
    former = (known.path.parents[1] for known in _former_runs(out) if trains(known, run.resolved))
    return next(former, folder)


@functools.cache  # nothing creates new ones
def _former_runs(out: Path) -> tuple[RunDir, ...]:
    """Return the runs below `out` that an older version named."""
    runs = (RunDir(path.parent) for path in sorted(out.glob("*/*/*/config")))
    return tuple(run for run in runs if has_former_identity(run))


def format_settings(settings: Setting) -> str:
    """Format settings as NAME=value words."""
    return " ".join(f"{name}={value}" for name, value in settings.items())

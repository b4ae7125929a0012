"""Train every run of an experiment, none twice, and put what came out in a table.

A run is known by its identity: what is there already is kept, whatever file asked for it.
One that fails is told, and the others go on.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lib import atomic, kconf
from lib.config import config_from_values
from lib.errors import ConfigError, ToolkitError
from lib.runs.directory import RunDir
from lib.runs.identity import has_former_identity, identity, trains
from lib.sweeps.concurrency import Crew
from lib.sweeps.experiment import Experiment, Setting
from lib.sweeps.subprocess_run import Children, left_over

RESULT = "result.json"
ALL_DEFAULTS = "alldefconfig"
_NOT_METRICS = ("seconds", "samples", "bytes", "chars", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One configuration to be trained."""

    number: int  # of the point that it belongs to
    settings: Setting
    resolved: kconf.Resolved

    @property
    def identity(self) -> str:
        return identity(self.resolved.in_effect)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a run: metrics of its last evaluation, or the reason why there is none.

    What it cost is None where another sweep than that which tells of it began it.
    """

    number: int
    identity: str
    settings: Setting
    metrics: dict[str, float]
    reason: str
    seconds_cpu: float | None
    peak_memory_mb: float | None


def resolved_runs(experiment: Experiment, *, root: Path) -> list[Run]:
    """The runs, checked one and all before anything is written. Raises ConfigError for what cannot be."""
    base = compose_text(root, experiment.config)
    runs, findings = dict[str, Run](), dict[str, list[int]]()
    for number, settings in experiment.runs():
        try:
            run = Run(number=number, settings=settings, resolved=_resolved(experiment, settings, base, root))
        except ConfigError as error:
            for finding in error.findings or (f"{experiment.name}: {error}",):
                findings.setdefault(finding, []).append(number)
            continue
        # Trained at once they would meet in one directory; in the table they would pass for two.
        if (same := runs.setdefault(run.identity, run)) is not run:
            finding = f"{experiment.name}: trains the same as point {same.number + 1}"
            findings.setdefault(finding, []).append(number)
    if findings:
        refused = len(set(itertools.chain(*findings.values())))
        told = tuple(_finding(text, set(numbers), experiment) for text, numbers in findings.items())
        what = f"{refused} of {len(experiment.points)} points of {experiment.name} cannot be configured"
        raise ConfigError(what, todo="nothing was trained", findings=told)
    return list(runs.values())


def _resolved(experiment: Experiment, settings: Setting, base: str, root: Path) -> kconf.Resolved:
    found = kconf.load_written(
        base,
        root=root,
        overrides={f"CONFIG_{name}": value for name, value in settings.items()},
        places={f"CONFIG_{name}": experiment.place(name, value) for name, value in settings.items()},
    )
    config_from_values(found.values)
    return found


def _finding(text: str, numbers: set[int], experiment: Experiment) -> str:
    """With the points that it is about, if not with all of them."""
    if len(numbers) == len(experiment.points):
        return text
    points = ", ".join(str(number + 1) for number in sorted(numbers))
    return f"{text} (point{'s' if len(numbers) > 1 else ''} {points})"


def compose_text(root: Path, spec: str) -> str:
    """The configuration NAME+FRAGMENT+..., or ALL_DEFAULTS, in full; tells the notices about it. Raises
    ConfigError."""
    from lib.kconf.defconfig import compose
    from lib.kconf.project import tell
    from lib.kconf.tree import load_own_tree
    from lib.kconf.write import full_text

    tree = load_own_tree(root)
    if spec != ALL_DEFAULTS:
        tell(compose(tree, spec)[1])
    return full_text(tree)


def train_all(
    runs: Sequence[Run], *, root: Path, out: Path, crew: Crew, say: Callable[[str], None]
) -> list[Result]:
    """Train what is not there yet, as many at a time as `crew` says, each on one thread.

    Raises Suspended where a signal stopped it: what is done is kept, what was stopped goes on next time.
    """
    with Children() as children:

        def result(run: Run) -> Result | None:
            with crew.place():
                return _result(run, children, root=root, out=out, crew=crew, say=say)

        found = children.each(result, runs, workers=crew.most)
    results = [one for one in found if one is not None]
    children.check(todo=f"{len(results)} of {len(runs)} runs are there, and the same command goes on")
    return results


def write_results(out: Path, results: Sequence[Result]) -> None:
    """As results.jsonl, a line each."""
    lines = "".join(json.dumps(asdict(result)) + "\n" for result in results)
    atomic.write_text(out / "results.jsonl", lines)


def _result(
    run: Run, children: Children, *, root: Path, out: Path, crew: Crew, say: Callable[[str], None]
) -> Result | None:
    """What became of a run, None where it was stopped."""
    place = place_of(run, out)
    name = f"{run.identity} {told(run.settings)}"
    if (known := known_result(run, out)) is not None:
        say(f"{name}: already there")
        return known
    try:
        left = left_over(place, run.resolved)
    except ToolkitError as error:
        say(f"{name}: {error}")
        return _outcome(run, None, reason=str(error))  # for now only, and not kept
    kept = place / RESULT
    if left is not None and not kept.exists():  # one that is there tells of a failure
        result = _outcome(run, left)
        _keep(kept, result)
        say(f"{name}: done, though the sweep that began it was gone")
        return result
    kept.unlink(missing_ok=True)
    child = children.train(place, run.resolved.text, root=root)
    if child.stopped:
        if child.reason:
            say(f"{name}: {child.reason}")
        return None
    cost = {"seconds_cpu": child.seconds_cpu, "peak_memory_mb": child.peak_memory_mb}
    result = _outcome(run, child.run, reason=child.reason, **cost)
    _keep(kept, result)
    say(f"{name}: {child.reason or 'done'}, {child.seconds_cpu:.0f} s of processor")
    if not child.reason and (line := crew.learn(child.peak_memory_mb * 1e6)):
        say(line)
    return result


def _outcome(
    run: Run,
    trained: RunDir | None,
    *,
    reason: str = "",
    seconds_cpu: float | None = None,
    peak_memory_mb: float | None = None,
) -> Result:
    facts = trained.status().facts if trained is not None else {}
    return Result(
        number=run.number,
        identity=run.identity,
        settings=run.settings,
        metrics={name: value for name, value in facts.items() if isinstance(value, int | float)},
        reason=reason,
        seconds_cpu=seconds_cpu,
        peak_memory_mb=peak_memory_mb,
    )


def _keep(file: Path, result: Result) -> None:
    atomic.write_text(file, json.dumps(asdict(result), indent=1) + "\n")


def known_result(run: Run, out: Path) -> Result | None:
    """What is there and went well. The point that it was for may have been another one."""
    try:
        found = json.loads((place_of(run, out) / RESULT).read_text(encoding="utf-8"))
        known = Result(**{**found, "number": run.number, "settings": run.settings})
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return None if known.reason else known


def place_of(run: Run, out: Path) -> Path:
    """The directory of `run` below `out`, made or not; also one that an older tree named."""
    place = out / run.identity
    if place.exists():
        return place
    former = (known.path.parents[1] for known in _former_runs(out) if trains(known, run.resolved))
    return next(former, place)


@functools.cache  # no process makes new ones
def _former_runs(out: Path) -> tuple[RunDir, ...]:
    """The runs below `out` that an older tree named."""
    runs = (RunDir(path.parent) for path in sorted(out.glob("*/*/*/config")))
    return tuple(run for run in runs if has_former_identity(run))


def table(experiment: Experiment, results: Sequence[Result]) -> list[str]:
    """A line for each point: mean and deviation over its seeds of what its evaluation told."""
    names = list(
        dict.fromkeys(name for result in results for name in result.metrics if name not in _NOT_METRICS)
    )
    rows = [["point", "seeds", *names]]
    for number, point in enumerate(experiment.points):
        done = [result for result in results if result.number == number and not result.reason]
        row = [told(point) or "as configured", f"{len(done)}/{len(experiment.seeds)}"]
        row += [_spread([one.metrics[name] for one in done if name in one.metrics]) for name in names]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.fmean(values):.4f} +- {statistics.stdev(values):.4f}"


def told(settings: Setting) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())

"""Train every run of an experiment, none twice, and put what came out in a table.

A run is known by the hash of its whole resolved configuration: what is there already is kept, whatever file
asked for it. One that fails is told, and the others go on.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from lib import atomic, kconf
from lib.child_run import train_apart
from lib.config import config_from_values, identity
from lib.errors import ConfigError
from lib.studies.experiment import Experiment, Setting

RESULT = "result.json"
_NOT_METRICS = ("seconds", "samples", "bytes", "chars", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One configuration to be trained."""

    number: int  # of the point that it belongs to
    settings: Setting
    configuration: str
    identity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a run: metrics of its last evaluation, or the reason why there is none."""

    number: int
    identity: str
    settings: Setting
    metrics: dict[str, float]
    reason: str
    seconds_cpu: float
    peak_memory_mb: float


def resolved_runs(experiment: Experiment, *, root: Path, scratch: Path) -> list[Run]:
    """The runs, checked one and all before the first is trained. Raises ConfigError for what cannot be."""
    base, runs, findings = scratch / "base", dict[str, Run](), list[str]()
    text = compose_text(root, experiment.config)
    scratch.mkdir(parents=True, exist_ok=True)
    base.write_text(text, encoding="utf-8")
    for number, settings in experiment.runs():
        overrides = {f"CONFIG_{name}": value for name, value in settings.items()}
        try:
            resolved = kconf.load(root=root, config_file=base, overrides=overrides)
            config_from_values(resolved.values)
        except ConfigError as error:
            findings += [
                f"{experiment.name}, point {number + 1}: {one}" for one in error.findings or (str(error),)
            ]
            continue
        run = Run(
            number=number,
            settings=settings,
            configuration=resolved.text,
            identity=identity(resolved.values),
        )
        # Trained at once they would meet in one directory; in the table they would pass for two.
        if (same := runs.setdefault(run.identity, run)) is not run:
            findings.append(
                f"{experiment.name}, point {number + 1}: trains the same as point {same.number + 1}"
            )
    if findings:
        unique = tuple(dict.fromkeys(findings))
        raise ConfigError(f"{len(unique)} runs of {experiment.name} cannot be configured", findings=unique)
    return list(runs.values())


def compose_text(root: Path, spec: str) -> str:
    """The configuration NAME+FRAGMENT+... in full."""
    from lib.kconf.defconfig import compose
    from lib.kconf.tree import load_own_tree
    from lib.kconf.write import full_text

    tree = load_own_tree(root)
    compose(tree, spec)
    return full_text(tree, made_from=())


def train_all(
    runs: Sequence[Run], *, root: Path, out: Path, workers: int, say: Callable[[str], None]
) -> list[Result]:
    """Train what is not there yet, several at a time, each on one thread."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda run: _result(run, root=root, out=out, say=say), runs))


def write_results(out: Path, results: Sequence[Result]) -> None:
    """As results.jsonl, a line each."""
    lines = "".join(json.dumps(asdict(result)) + "\n" for result in results)
    atomic.write_text(out / "results.jsonl", lines)


def _result(run: Run, *, root: Path, out: Path, say: Callable[[str], None]) -> Result:
    place = out / run.identity
    name = f"{run.identity} {told(run.settings)}"
    known = _known(place / RESULT, run)
    if known is not None:
        say(f"{name}: already there")
        return known
    child = train_apart(place, run.configuration, root=root)
    metrics: dict[str, float] = {}
    if child.run is not None:
        facts = child.run.status().facts
        metrics = {name: value for name, value in facts.items() if isinstance(value, int | float)}
    result = Result(
        number=run.number,
        identity=run.identity,
        settings=run.settings,
        metrics=metrics,
        reason=child.reason,
        seconds_cpu=child.seconds_cpu,
        peak_memory_mb=child.peak_memory_mb,
    )
    atomic.write_text(place / RESULT, json.dumps(asdict(result), indent=1) + "\n")
    say(f"{name}: {child.reason or 'done'}, {child.seconds_cpu:.0f} s of processor")
    return result


def _known(file: Path, run: Run) -> Result | None:
    """What is there and went well. The point that it was for may have been another one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        known = Result(**{**found, "number": run.number, "settings": run.settings})
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return None if known.reason else known


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

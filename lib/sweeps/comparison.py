"""Comparison of two configurations that are trained with the same seeds.

A record beside the runs holds, for each two configurations, which seeds were judged, after how many pairs and
by which metric. A seed is judged once: each further test of the same runs would raise the error probability.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import ConfigError, ToolkitError, os_errors
from lib.runs.directory import RunDir
from lib.runs.identity import identity
from lib.runs.metrics import higher_is_better, preferred
from lib.sweeps.concurrency import Concurrency
from lib.sweeps.runner import Log, Run, known_result, train_all
from lib.sweeps.verdict import LEVEL, Verdict, judge, planned_looks, power

SIDES = ("A", "B")
SHARES = ("accuracy", "exact_accuracy")  # metrics that are a share of the evaluation samples
_NORMAL_95 = 1.96
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The runs of one seed: those of A and of B."""

    a: Run
    b: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pairs with ascending seeds to train and to judge, and what was judged before.

    out: folder of the runs and of the record. runs: folder of other runs, which are used where they are done.
    """

    pairs: Sequence[Pair]
    out: Path
    runs: Path

    @property
    def record(self) -> Path:
        """The record of these two configurations, in either order and with any seeds."""
        pair = self.pairs[0]
        names = sorted(identity({**run.resolved.in_effect, "SEED": 0}) for run in (pair.a, pair.b))
        return self.out / f"{'-'.join(names)}.json"

    def judged(self) -> list[dict[str, Any]]:
        """Return the entries of the record. Raises ToolkitError where it is damaged."""
        try:
            with os_errors("read"):
                return list(json.loads(self.record.read_bytes())) if self.record.exists() else []
        except (ValueError, TypeError) as error:
            todo = "restore it; without it nobody knows which tests were made"
            raise ToolkitError(f"{self.record} is damaged", why=str(error), todo=todo) from error

    def known(self, run: Run) -> Metrics | None:
        """Return the metrics of `run` if it is trained: below `out`, or as a run of make train."""
        if (result := known_result(run, self.out)) is not None:
            return result.metrics
        for folder in self.runs.glob(f"*/*-{run.identity}*"):
            status = RunDir(folder).status()
            if status.state == "done":
                facts = status.facts.items()
                return {name: value for name, value in facts if isinstance(value, int | float)}
        return None

    def judge(
        self,
        requested: Sequence[int],
        *,
        metric: str,
        maximize: bool | None = None,
        root: Path,
        concurrency: Concurrency,
        log: Log,
    ) -> Verdict:
        """Train and judge after each number of pairs in `requested`, up to a verdict; log what was found.

        metric: "" for that of the record, or else the preferred one. maximize: None where its name tells.
        Raises ConfigError where seeds were judged otherwise before, ToolkitError where a run fails.
        """
        record = self.judged()
        entry = self._entry(record, requested, metric)
        first, looks = entry["first_seed"], entry["looks"]
        for other in record:
            if other is not entry and other["metric"]:
                log(f"compared before, with an error probability of its own: {_described(other)}")
        log(announcement(looks, requested, first))
        for look in requested:
            results = self._train(look, root=root, concurrency=concurrency, log=log)
            differences, chosen = metric_differences(results, entry["metric"] or metric)
            upwards = higher_is_better(chosen) if maximize is None else maximize
            verdict = judge(differences, looks, higher_is_better=upwards)
            entry |= {"metric": chosen, "answer": verdict.word}
            atomic.write_text(self.record, json.dumps(record, indent=1) + "\n")
            for line in report(verdict, chosen, results):
                log(line)
            if verdict.word != "not shown":
                return verdict
        log(f"  more power: judge more pairs, of fresh seeds, with FIRST_SEED={first + requested[-1]}")
        return verdict

    def _train(
        self, count: int, *, root: Path, concurrency: Concurrency, log: Log
    ) -> list[tuple[Metrics, Metrics]]:
        """Train what is missing of the first pairs, and return the metrics of A and B of each."""
        pairs = self.pairs[:count]
        missing = [run for pair in pairs for run in (pair.a, pair.b) if self.known(run) is None]
        if missing:
            log(concurrency.choose([run.resolved for run in missing], runs=len(missing)))
            results = train_all(missing, root=root, out=self.out, concurrency=concurrency, log=log)
            if failed := [one for one in results if one.reason]:
                names = (f"{SIDES[one.number]} with seed {one.settings['SEED']}" for one in failed)
                why = "; ".join(f"{name}: {one.reason}" for name, one in zip(names, failed, strict=True))
                raise ToolkitError(f"{len(failed)} of {len(missing)} runs failed", why=why)
        return [(self.known(pair.a) or {}, self.known(pair.b) or {}) for pair in pairs]

    def _entry(self, record: list[dict[str, Any]], requested: Sequence[int], metric: str) -> dict[str, Any]:
        """Return the entry of this command, which is added to the record and stored if it is a new one."""
        first = int(self.pairs[0].a.settings["SEED"])
        command = {"first_seed": first, "requested": list(requested)}
        same = next((entry for entry in record if command.items() <= entry.items()), None)
        for entry in record:
            begins, ends = entry["first_seed"], entry["first_seed"] + entry["requested"][-1]
            again = entry is same and metric in ("", entry["metric"])
            if entry["metric"] and not again and first < ends and begins < first + requested[-1]:
                raise ConfigError(
                    f"this comparison was made with {_described(entry)}",
                    why=f"another test of the same seeds would raise its error probability of {LEVEL:.0%}",
                    todo=f"repeat that command, or compare fresh seeds with FIRST_SEED={ends} or larger",
                )
        if same is None:
            trained = sum(None not in (self.known(pair.a), self.known(pair.b)) for pair in self.pairs)
            looks = planned_looks(requested, reused=trained)
            same = {**command, "looks": list(looks), "metric": "", "answer": ""}
            record.append(same)
            self.out.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.record, json.dumps(record, indent=1) + "\n")
        return same


def parse_looks(text: str, variable: str) -> list[int]:
    """Parse numbers of pairs after which to judge. Raises ConfigError unless they ascend from at least 2."""
    looks = [whole_number(word, variable) for word in text.replace(",", " ").split()]
    planned_looks(looks)
    return looks


def whole_number(text: str, variable: str) -> int:
    """Parse a variable of make. Raises ConfigError for anything but a whole number from 1."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ConfigError(f"{variable}={text} is not a whole number from 1")
    return int(text)


def metric_differences(results: Sequence[tuple[Metrics, Metrics]], requested: str) -> tuple[list[float], str]:
    """Return B - A of each pair, and the metric. Raises ConfigError where a run has no such metric."""
    common = set.intersection(*(set(metrics) for pair in results for metrics in pair))
    metric = requested or preferred(common)
    if metric not in common:
        raise ConfigError(
            f"METRIC={metric} is not a result of all runs", todo=f"choose one of {', '.join(sorted(common))}"
        )
    return [b[metric] - a[metric] for a, b in results], metric


def announcement(looks: Sequence[int], requested: Sequence[int], first: int) -> str:
    """Return the seeds, and which differences these looks can see, in one line."""
    seen = ", ".join(f"{effect:g} sd with {power(effect, tuple(looks)):.0%}" for effect in (2.0, 1.0))
    spent = sorted(set(looks) - set(requested))
    note = f"; {' and '.join(map(str, spent))} count as looks, since those pairs exist" if spent else ""
    seeds = f"seeds {first} to {first + looks[-1] - 1}, judged after {_listed(requested)} pairs{note}"
    return f"{seeds}; power: a mean difference of {seen}"


def report(verdict: Verdict, metric: str, results: Sequence[tuple[Metrics, Metrics]]) -> list[str]:
    """Return the lines of a verdict; `results` are the metrics of A and B of each pair."""
    a, b = ([pair[side][metric] for pair in results] for side in (0, 1))
    means = [sum(values) / len(values) for values in (a, b)]
    interval = f"{verdict.low:+.4g} to {verdict.high:+.4g} ({1 - verdict.level:.1%} confidence)"
    word = "a difference is not shown" if verdict.word == "not shown" else f"B is {verdict.word}"
    lines = [
        f"after {verdict.pairs} pairs: {word}",
        f"  {metric}: A {means[0]:.4f}, B {means[1]:.4f}; difference {verdict.mean:+.4g}, {interval}",
        f"  over seeds: sd of differences {verdict.sd:.3g}, p = {verdict.p:.3g}; level {verdict.level:.3g}",
    ]
    count = min((pair[side].get("samples", 0) for pair in results for side in (0, 1)), default=0)
    if metric in SHARES and count:
        error = _NORMAL_95 * math.sqrt(sum(mean * (1 - mean) for mean in means) / count)
        lines.append(f"  over samples: +- {error:.2g} at most, from {count:.0f} evaluation samples")
    return lines


def _described(entry: Mapping[str, Any]) -> str:
    seeds = f"seeds {entry['first_seed']} to {entry['first_seed'] + entry['requested'][-1] - 1}"
    return f"{seeds} by {entry['metric']}, judged after {_listed(entry['requested'])} pairs"


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))

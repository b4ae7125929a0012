"""Comparison of two configurations that are trained with the same seeds.

A record beside the runs holds, for each two configurations, which seeds were judged, after how many pairs and
by which metric. A seed is judged once: each further test of the same runs would raise the error probability.
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import ConfigError, ToolkitError
from lib.kconf import values_from_json
from lib.runs.index import read_runs
from lib.runs.metrics import NOT_METRICS, higher_is_better, preferred
from lib.sweeps.concurrency import Concurrency
from lib.sweeps.result_table import check_same_data
from lib.sweeps.runner import Log, Run, adopt, known_result, train_all
from lib.sweeps.verdict import LEVEL, Verdict, judge, planned_looks, power
from lib.units import whole_number

SHARES = ("accuracy", "exact_accuracy")  # metrics that are a share of the evaluation samples
MOST_PAIRS = 200  # which see a difference of a quarter of a standard deviation
_NORMAL_95 = 1.96
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pairs of runs of A and B, with ascending seeds, to train and to judge.

    out: folder of the runs and of the record. runs: folder of all runs; those that are done are used.
    """

    pairs: Sequence[tuple[Run, Run]]
    out: Path
    runs: Path
    root: Path
    concurrency: Concurrency
    log: Log

    @property
    def record(self) -> Path:
        """The record of these two configurations, in either order and with any seeds."""
        names = sorted(run.point for run in self.pairs[0])
        return self.out / f"{'_'.join(names)}.json"  # which is no name of a run

    def judged(self) -> list[dict[str, Any]]:
        """Return the entries of the record. Raises ToolkitError where it is damaged."""
        try:
            return list(json.loads(self.record.read_bytes())) if self.record.exists() else []
        except (ValueError, TypeError) as error:
            todo = "restore it; nothing else says which tests were made"
            raise ToolkitError(f"{self.record} is damaged", why=str(error), todo=todo) from error

    def known(self, run: Run) -> Metrics | None:
        """Return the metrics of `run` if it is trained."""
        return result.metrics if (result := known_result(run, self.out)) is not None else None

    def judge(self, requested: Sequence[int], metric: str, *, maximize: bool | None = None) -> None:
        """Train and judge after each number of pairs in `requested`, up to a verdict; log what is found.

        metric: "" for that of the record, or else the preferred one. maximize: None where its name tells.
        Raises ConfigError where seeds were judged otherwise before, ToolkitError where a run fails.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        with self.record.with_suffix(".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                what = "another command is making this comparison"
                raise ConfigError(what, why=f"it has {file.name}", todo="wait for it") from error
            self._judge(requested, metric, maximize=maximize)

    def _judge(self, requested: Sequence[int], metric: str, *, maximize: bool | None) -> None:
        record = self.judged()
        all_runs = [run for pair in self.pairs for run in pair]
        adopt(all_runs, out=self.out, folder=self.runs, log=self.log)
        entry = self._entry(record, requested, metric)
        for other in record:
            if other is not entry and other["metric"]:
                self.log(f"compared before, with an error probability of its own: {described(other)}")
        self.log(announcement(entry))
        if metric and not entry["metric"]:  # a name that no run has is an error: after one pair at the latest
            if found := self._earlier_metrics():
                metric_differences([(metrics, metrics) for metrics in found], metric)
            self._train(1)
            metric_differences(self._results(1), metric)
        for look in requested:
            self._train(look)
            results = self._results(look)
            differences, chosen = metric_differences(results, entry["metric"] or metric)
            known = (known_result(run, self.out) for pair in self.pairs[:look] for run in pair)
            check_same_data([result for result in known if result is not None], chosen)
            upwards = higher_is_better(chosen) if maximize is None else maximize
            verdict = judge(
                differences, entry["looks"], higher_is_better=upwards, all_equal=are_equal(results)
            )
            entry |= {"metric": chosen, "answer": verdict.word}
            self._store(record)
            self.log("\n".join(report(verdict, chosen, results)))
            if verdict.word != "not shown":
                return
        self.log(f"  for more power, judge more pairs of fresh seeds: FIRST_SEED={_end(entry)}")

    def _earlier_metrics(self) -> list[Metrics]:
        """Return the metrics of the runs of A and B that are done, with whatever seeds."""
        points = [{**run.resolved.values, "SEED": 0} for run in self.pairs[0]]
        rows = [row for row in read_runs(self.runs) if row.state == "done"]
        found = [row.metrics for row in rows if {**values_from_json(row.values), "SEED": 0} in points]
        return [*found, *(known for pair in self.pairs for run in pair if (known := self.known(run)))]

    def _results(self, count: int) -> list[tuple[Metrics, Metrics]]:
        found = [(self.known(a), self.known(b)) for a, b in self.pairs[:count]]
        results = [(a, b) for a, b in found if a is not None and b is not None]
        if len(results) < len(found):  # _train raises an error for any other reason
            why = "the code of a plug-in has changed since it began"
            raise ToolkitError("the comparison ends", why=why, todo="give the same command again")
        return results

    def _train(self, count: int) -> None:
        named = [
            replace(run, side=side)
            for pair in self.pairs[:count]
            for side, run in zip(("A ", "B "), pair, strict=True)
        ]
        missing = [run for run in named if self.known(run) is None]
        if not missing:
            return
        self.log(self.concurrency.choose([run.resolved for run in missing], runs=len(missing)))
        results = train_all(missing, root=self.root, out=self.out, concurrency=self.concurrency, log=self.log)
        if failed := [one for one in results if one.reason]:
            reasons = (f"{'AB'[one.number]} with seed {one.settings['SEED']}: {one.reason}" for one in failed)
            raise ToolkitError(f"{len(failed)} of {len(missing)} runs failed", why="; ".join(reasons))

    def _entry(self, record: list[dict[str, Any]], requested: Sequence[int], metric: str) -> dict[str, Any]:
        """Return the entry of this command, which is added to the record and stored if it is a new one."""
        first = int(self.pairs[0][0].settings["SEED"])
        command = {"first_seed": first, "requested": list(requested)}
        same = next((entry for entry in record if command.items() <= entry.items()), None)
        for entry in record:
            again = entry is same and metric in ("", entry["metric"])
            overlaps = first < _end(entry) and entry["first_seed"] < _end(command)
            if entry["metric"] and overlaps and not again:
                fresh = f"fresh seeds with FIRST_SEED={_end(entry)} or larger"
                raise ConfigError(
                    f"this comparison was made with {described(entry)}",
                    why=f"another test of the same seeds would raise its error probability of {LEVEL:.0%}",
                    todo=f"repeat that command, or compare {fresh}",
                )
        if same is None:
            trained = sum(self.known(a) is not None and self.known(b) is not None for a, b in self.pairs)
            looks = list(planned_looks(requested, reused=trained))
            same = {**command, "looks": looks, "metric": "", "answer": ""}
            record.append(same)
            self._store(record)
        return same

    def _store(self, record: list[dict[str, Any]]) -> None:
        atomic.write_text(self.record, json.dumps(record, indent=1) + "\n")


def parse_looks(text: str, variable: str) -> list[int]:
    """Parse numbers of pairs after which to judge. Raises ConfigError unless they ascend from at least 2."""
    looks = [whole_number(word, variable) for word in text.replace(",", " ").split()]
    planned_looks(looks)
    if looks[-1] > MOST_PAIRS:
        raise ConfigError(f"{variable}={text} are more than {MOST_PAIRS} pairs", todo="judge fewer")
    return looks


def metric_differences(results: Sequence[tuple[Metrics, Metrics]], requested: str) -> tuple[list[float], str]:
    """Return B - A of each pair, and the metric. Raises ConfigError where a run has no such metric."""
    common = set.intersection(*(set(metrics) - NOT_METRICS for pair in results for metrics in pair))
    metric = requested or preferred(common)
    if metric not in common:
        todo = f"choose one of {', '.join(sorted(common))}"
        raise ConfigError(f"METRIC={metric} is not a result of all runs", todo=todo)
    return [b[metric] - a[metric] for a, b in results], metric


def are_equal(results: Sequence[tuple[Metrics, Metrics]]) -> bool:
    """Return True where no metric differs in any pair, the loss included."""
    sides = ([{name: side[name] for name in side if name not in NOT_METRICS} for side in p] for p in results)
    return all(a == b for a, b in sides)


def announcement(entry: Mapping[str, Any]) -> str:
    """Return the seeds, and which differences these looks can see, in one line."""
    looks = tuple(entry["looks"])
    seen = " and ".join(f"{power(effect, looks):.0%} for {effect:g} sd" for effect in (2.0, 1.0))
    spent = ", ".join(str(look) for look in looks if look not in entry["requested"])
    note = f" ({spent} count as looks, since those pairs exist)" if spent else ""
    return f"{described(entry)}{note}; power by size of the mean difference, in sd of the differences: {seen}"


def described(entry: Mapping[str, Any]) -> str:
    """Format the seeds, the metric if it is known, and the requested looks of an entry of the record."""
    by = f" by {entry['metric']}" if entry["metric"] else ""
    looks = " and ".join(map(str, entry["requested"]))
    return f"seeds {entry['first_seed']} to {_end(entry) - 1}{by}, judged after {looks} pairs"


def _end(entry: Mapping[str, Any]) -> int:
    return int(entry["first_seed"] + entry["requested"][-1])


def report(verdict: Verdict, metric: str, results: Sequence[tuple[Metrics, Metrics]]) -> list[str]:
    """Return the lines of a verdict; `results` are the metrics of A and B of each pair."""
    means = [sum(pair[side][metric] for pair in results) / len(results) for side in (0, 1)]
    interval = f"{verdict.low:+.4g} to {verdict.high:+.4g} ({1 - verdict.level:.1%} confidence)"
    if not verdict.sd and verdict.word != "identical":
        interval = "the same in all pairs, so no confidence interval is known"
    word = "a difference is not shown" if verdict.word == "not shown" else f"B is {verdict.word}"
    lines = [
        f"after {verdict.pairs} pairs: {word}",
        f"  {metric}: A {means[0]:.4f}, B {means[1]:.4f}; difference {verdict.mean:+.4g}, {interval}",
        f"  over seeds: sd of differences {verdict.sd:.3g}, p = {verdict.p:.3g}; level {verdict.level:.3g}",
    ]
    count = min((pair[side].get("samples", 0) for pair in results for side in (0, 1)), default=0)
    if metric not in SHARES or not count:
        return [*lines, f"  over samples: the error of the evaluation set is not known for {metric}"]
    error = _NORMAL_95 * math.sqrt(sum(mean * (1 - mean) for mean in means) / count)
    return [*lines, f"  over samples: +- {error:.2g} at most, from {count:.0f} evaluation samples"]

"""make ab A=... B=... SEEDS=5: train two configurations with the same seeds and judge their difference."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lib import atomic, kconf
from lib.config import config_from_values
from lib.errors import ConfigError, ToolkitError, run_main
from lib.runs.directory import RunDir
from lib.runs.identity import identity
from lib.runs.metrics import PREFERRED, higher_is_better
from lib.sweeps.concurrency import Concurrency, predict_host_memory
from lib.sweeps.runner import Run, compose_text, known_result, train_all
from lib.sweeps.verdict import LEVEL, Verdict, judge, planned_looks, power

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("A", "B")
LOOKS_FILE = "looks.json"
SHARES = ("accuracy", "exact_accuracy")  # metrics that are a share of the evaluation samples
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The runs of one seed: those of A and of B."""

    a: Run
    b: Run


def main() -> int:
    """Train the pairs of the command line up to each look, and print the verdict."""
    parser = argparse.ArgumentParser(prog="ab", description=__doc__)
    parser.add_argument("--a", required=True, help="NAME+FRAGMENT+...: the configuration to compare with")
    parser.add_argument("--b", required=True, help="NAME+FRAGMENT+...: the configuration that may be better")
    parser.add_argument("--seeds", default="5", help="numbers of pairs after which to judge, such as 3 5 8")
    parser.add_argument("--first-seed", default="1", help="seed of the first pair")
    parser.add_argument("--metric", default="", help="result to compare; default: accuracy, or else loss")
    parser.add_argument("--jobs", default=None, help="runs at a time; default: as many as fit")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "ab", help="folder of the runs")
    options = parser.parse_args()
    looks = [_whole(word, "SEEDS") for word in options.seeds.replace(",", " ").split()]
    first = _whole(options.first_seed, "FIRST_SEED")
    jobs = None if options.jobs is None else _whole(options.jobs, "JOBS")
    planned_looks(looks)
    pairs = make_pairs(options.a, options.b, range(first, first + looks[-1]))
    out = options.out.absolute()
    concurrency = Concurrency(jobs, partial(predict_host_memory, root=ROOT, log=_log))
    looks_file = out / f"{pairs[0].a.identity}-{pairs[0].b.identity}" / LOOKS_FILE
    planned = fixed_looks(looks_file, looks, reused=_reused(pairs, out))
    print(announcement(planned, looks))
    for look in looks:
        results = train_pairs(pairs[:look], out=out, concurrency=concurrency)
        differences, metric = metric_differences(results, options.metric)
        verdict = judge(differences, planned, higher_is_better=higher_is_better(metric))
        for line in report(verdict, metric, results):
            print(line)
        if verdict.word != "not shown":
            break
    return 0


def make_pairs(a: str, b: str, seeds: Sequence[int]) -> list[Pair]:
    """Resolve both configurations with each seed.

    Raises ConfigError where one cannot be configured, and where the two train the same.
    """
    texts = [compose_text(ROOT, spec) for spec in (a, b)]
    pairs = []
    for seed in seeds:
        runs = []
        for number, text in enumerate(texts):
            resolved = kconf.load_written(text, root=ROOT, overrides={"CONFIG_SEED": str(seed)})
            config_from_values(resolved.values)
            runs.append(Run(number=number, settings={"SEED": str(seed)}, resolved=resolved))
        if runs[0].identity == runs[1].identity:
            todo = "what differs between them changes no number of a training run"
            raise ConfigError(
                f"A={a} and B={b} are the same run", why=f"both are {runs[0].identity}", todo=todo
            )
        pairs.append(Pair(a=runs[0], b=runs[1]))
    return pairs


def fixed_looks(file: Path, requested: Sequence[int], *, reused: int) -> tuple[int, ...]:
    """Return the looks of this comparison, which its first command has fixed in `file`.

    reused: pairs that existed before. Raises ConfigError where other looks are requested later: an error
    probability that is spent cannot be spent again.
    """
    if not file.exists():
        looks = planned_looks(requested, reused=reused)
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps({"requested": list(requested), "looks": list(looks)}) + "\n")
        return looks
    stored = json.loads(file.read_text(encoding="utf-8"))
    if stored["requested"] != list(requested):
        before = " ".join(map(str, stored["requested"]))
        raise ConfigError(
            f'this comparison was begun with SEEDS="{before}"',
            why=f"its looks share an error probability of {LEVEL:.0%}, and more of them would raise it",
            todo=f"compare other seeds, with FIRST_SEED={max(stored['requested']) + 1} or larger",
        )
    return tuple(stored["looks"])


def _reused(pairs: Sequence[Pair], out: Path) -> int:
    """Return how many of the first pairs are trained."""
    for number, pair in enumerate(pairs):
        if _known(pair.a, out) is None or _known(pair.b, out) is None:
            return number
    return len(pairs)


def _known(run: Run, out: Path) -> Mapping[str, float] | None:
    """Return the metrics of `run` if it is trained: below `out`, or as a run of make train."""
    if (result := known_result(run, out)) is not None:
        return result.metrics
    for folder in (ROOT / "runs").glob(f"*/*-{identity(run.resolved.in_effect)}*"):
        status = RunDir(folder).status()
        if status.state == "done":
            return {name: value for name, value in status.facts.items() if isinstance(value, int | float)}
    return None


def train_pairs(
    pairs: Sequence[Pair], *, out: Path, concurrency: Concurrency
) -> list[tuple[Mapping[str, float], ...]]:
    """Train what is missing, and return the metrics of A and B of each pair.

    Raises ToolkitError where a run fails.
    """
    missing = [run for pair in pairs for run in (pair.a, pair.b) if _known(run, out) is None]
    if missing:
        _log(concurrency.choose([run.resolved for run in missing], runs=len(missing)))
        failed = [
            result
            for result in train_all(missing, root=ROOT, out=out, concurrency=concurrency, log=_log)
            if result.reason
        ]
        if failed:
            why = "; ".join(
                f"{SIDES[one.number]} with seed {one.settings['SEED']}: {one.reason}" for one in failed
            )
            raise ToolkitError(f"{len(failed)} of {len(missing)} runs failed", why=why)
    return [tuple(_known(run, out) or {} for run in (pair.a, pair.b)) for pair in pairs]


def metric_differences(
    results: Sequence[tuple[Mapping[str, float], ...]], requested: str
) -> tuple[list[float], str]:
    """Return B - A of each pair, and the metric. Raises ConfigError where a run has no such metric."""
    common = set.intersection(*(set(metrics) for pair in results for metrics in pair))
    metric = requested or next((name for name in PREFERRED if name in common), "")
    if metric not in common:
        raise ConfigError(
            f"METRIC={metric} is not a result of all runs", todo=f"choose one of {', '.join(sorted(common))}"
        )
    return [b[metric] - a[metric] for a, b in results], metric


def announcement(looks: Sequence[int], requested: Sequence[int]) -> str:
    """Return what these looks can see, in one line."""
    last = looks[-1]
    seen = ", ".join(f"{effect:g} sd with {power(effect, tuple(looks)):.0%}" for effect in (2.0, 1.0))
    spent = sorted(set(looks) - set(requested))
    note = f"; {' and '.join(map(str, spent))} count as looks, since those pairs exist" if spent else ""
    return f"{last} pairs, judged after {' '.join(map(str, requested))}{note}: a difference of {seen} power"


def report(verdict: Verdict, metric: str, results: Sequence[tuple[Mapping[str, float], ...]]) -> list[str]:
    """Return the lines of a verdict; `results` are the metrics of A and B of each pair."""
    means = [sum(pair[side][metric] for pair in results) / len(results) for side in (0, 1)]
    interval = f"{verdict.low:+.4g} to {verdict.high:+.4g} ({1 - verdict.level:.1%} confidence)"
    lines = [
        f"after {verdict.pairs} pairs: B is {verdict.word}"
        if verdict.word != "not shown"
        else f"after {verdict.pairs} pairs: a difference is not shown",
        f"  {metric}: A {means[0]:.4f}, B {means[1]:.4f}; difference {verdict.mean:+.4g}, {interval}",
        f"  over seeds: sd of differences {verdict.sd:.3g}, p = {verdict.p:.3g}; level {verdict.level:.3g}",
    ]
    count = min((pair[side].get("samples", 0) for pair in results for side in (0, 1)), default=0)
    if metric in SHARES and count:
        error = _NORMAL_95 * math.sqrt(sum(mean * (1 - mean) for mean in means) / count)
        lines.append(
            f"  over samples: {count:.0f} evaluation samples know the difference to +- {error:.2g} at most"
        )
    return lines


def _whole(text: str, name: str) -> int:
    """Parse a variable of make. Raises ConfigError for anything but a whole number from 1."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ConfigError(f"{name}={text} is not a whole number from 1")
    return int(text)


def _log(text: str) -> None:
    print(f"{text}\n", end="", flush=True)


if __name__ == "__main__":
    raise SystemExit(run_main(main))

"""Error rates of the verdicts of `make ab`, and their power, from simulated differences.

False verdicts must be at most MAX_FALSE for differences that are normal, heavy-tailed, mostly zero or coarse.
Zeros alone count as what `judge` says of them: not shown, or a verdict that is false.
The power is that of normal differences; `make ab` prints the same. With --runs, the differences are those of
real runs that differ in their seeds only: random disjoint splits of them into two sides of PAIRS runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lib.errors import ConfigError, ToolkitError, run_main
from lib.runs.index import Row, read_runs
from lib.runs.metrics import PREFERRED
from lib.sweeps.verdict import LEVEL, judge, nominal_level, p_values, power

LOOKS = ((3,), (5,), (8,), (12,), (3, 5, 8), (3, 5, 8, 12), (3, 5, 8, 12, 18, 27, 40))
EFFECTS = (0.5, 1.0, 2.0)  # standard deviations
MAX_FALSE = 0.053
TRIALS = 20_000
PAIRS, SPLITS, MAX_FALSE_REAL = 5, 1000, 0.07
Draw = Callable[[np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]
DRAWS: dict[str, Draw] = {
    "normal": lambda random, size: random.standard_normal(size),
    "t with 3 degrees of freedom": lambda random, size: random.standard_t(3, size),
    "70 % zeros": lambda random, size: random.standard_normal(size) * (random.random(size) < 0.3),
    "-1 or 1": lambda random, size: random.choice((-1.0, 1.0), size),
    "-1, 0 or 1": lambda random, size: random.choice((-1.0, 0.0, 1.0), size),
    "whole, sd 1": lambda random, size: np.round(random.standard_normal(size)),
    "whole, sd 3": lambda random, size: np.round(3 * random.standard_normal(size)),
    "whole, sd 10": lambda random, size: np.round(10 * random.standard_normal(size)),
}


def false_verdicts(name: str, looks: Sequence[int], *, trials: int = TRIALS) -> float:
    """Return the share of trials with a verdict at any look where the differences are symmetric about 0."""
    random = np.random.default_rng((3, list(DRAWS).index(name), *looks))
    differences = DRAWS[name](random, (trials, looks[-1]))
    return float(np.logical_or.reduce([_has_verdict(differences[:, :look], looks) for look in looks]).mean())


def _has_verdict(differences: npt.NDArray[np.float64], looks: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return for each row whether `judge` ends there: by its p value, or by what it says of zeros alone."""
    zeros = judge([0.0] * differences.shape[1], looks, higher_is_better=True)
    found = p_values(differences) <= nominal_level(tuple(looks))
    return np.where(differences.any(axis=1), found, zeros.word != "not shown")


def real_false_verdicts(values: Sequence[float], *, splits: int = SPLITS) -> float:
    """Return the share of random disjoint splits of equal runs, PAIRS on each side, with a verdict."""
    random = np.random.default_rng(4)
    drawn = np.array([random.permutation(values)[: 2 * PAIRS] for _ in range(splits)])
    return float((p_values(drawn[:, PAIRS:] - drawn[:, :PAIRS]) <= LEVEL).mean())


def judge_runs(rows: Sequence[Row]) -> float:
    """Print the share of false verdicts for each metric of equal runs, and return the largest.

    Raises ConfigError where runs differ in more than their seeds, or are too few.
    """
    if len({repr(sorted({**row.values, "SEED": 0}.items())) for row in rows}) != 1 or len(rows) < 4 * PAIRS:
        todo = f"name a folder with {4 * PAIRS} or more done runs of one configuration"
        raise ConfigError(f"{len(rows)} runs are too few, or differ in more than their seeds", todo=todo)
    shares = {}
    for metric in (name for name in PREFERRED if all(name in row.metrics for row in rows)):
        values = [row.metrics[metric] for row in rows]
        shares[metric] = real_false_verdicts(values)
        spread = f"{np.mean(values):.4f} +- {np.std(values, ddof=1):.4f}"
        print(f"{len(rows)} runs, {metric} {spread}: {shares[metric]:.1%} of {SPLITS} splits have a verdict")
    return max(shares.values())


def main() -> int:
    """Print both tables in Markdown. Raises ToolkitError where a share of false verdicts is too large."""
    parser = argparse.ArgumentParser(prog="ab_power", description=__doc__)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--runs", type=Path, default=None, help="folder of runs with different seeds")
    options = parser.parse_args()
    if options.runs is not None:
        done = [row for row in read_runs(options.runs) if row.state == "done"]
        return refuse(judge_runs(done), MAX_FALSE_REAL)
    trials = options.trials
    shares = {name: [false_verdicts(name, looks, trials=trials) for looks in LOOKS] for name in DRAWS}
    powers = {f"{effect:g}": [power(effect, looks) for looks in LOOKS] for effect in EFFECTS}
    for title, digits, rows in ((f"differences, {trials} trials", 1, shares), ("mean in sd", 0, powers)):
        print(f"| {title} | {' | '.join(' '.join(map(str, looks)) for looks in LOOKS)} |")
        print("|---" * (1 + len(LOOKS)) + "|")
        for name, row in rows.items():
            print(f"| {name} | {' | '.join(f'{share:.{digits}%}' for share in row)} |")
        print()
    return refuse(max(map(max, shares.values())), MAX_FALSE)


def refuse(worst: float, most: float) -> int:
    """Return 0. Raises ToolkitError where the share of false verdicts is larger than `most`."""
    if worst > most:
        raise ToolkitError(f"{worst:.2%} false verdicts are more than {most:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))

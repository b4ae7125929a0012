"""Three laws of how a loss falls with size and data, their fits and the doubt in them.

power       y = A N^-alpha, of perplexity or loss
floor       L = E + A N^-alpha, at one amount of data
chinchilla  L = E + A N^-alpha + B D^-beta
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from lib.scaling.least_squares import Floats, Problem, predict, solve

LawName: TypeAlias = Literal["power", "floor", "chinchilla"]

STARTS, BOOTSTRAPS = 300, 1000
_DEEPEST_FLOOR = 1e-3  # of the lowest loss: a floor that low is none
_VARIABLES: dict[LawName, int] = {"power": 1, "floor": 1, "chinchilla": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One trained model. parameters: without embeddings. loss: in nats, or what else is to be fitted."""

    parameters: float
    tokens: float
    loss: float
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A fitted law. Absent terms are None.

    at_bound: the floor ended where it may not go further, so that the points know of none.
    reached:  share of the starts that came within 0.1 % of the best objective.
    """

    name: LawName
    floor: float | None
    size_factor: float
    size_power: float
    data_factor: float | None
    data_power: float | None
    objective: float
    reached: float
    at_bound: bool

    def loss(self, *, parameters: float, tokens: float) -> float:
        """What the law says of a model of that size after so many tokens."""
        total: float = self.size_factor * parameters**-self.size_power
        if self.data_factor is not None and self.data_power is not None:
            total += self.data_factor * tokens**-self.data_power
        return total + (self.floor or 0.0)

    def figures(self) -> dict[str, float]:
        """The parameters that the law has, by the names of the literature."""
        named = {
            "E": self.floor,
            "A": self.size_factor,
            "alpha": self.size_power,
            "B": self.data_factor,
            "beta": self.data_power,
        }
        return {name: value for name, value in named.items() if value is not None}

    def optimal_parameters(self, flops: float) -> float:
        """The size of least loss at a budget of 6 N D operations; only of a Chinchilla law."""
        assert self.data_factor is not None and self.data_power is not None
        alpha, beta = self.size_power, self.data_power
        ratio: float = (alpha * self.size_factor / (beta * self.data_factor)) ** (1 / (alpha + beta))
        size: float = ratio * (flops / 6) ** (beta / (alpha + beta))
        return size


def fit(points: Sequence[Point], *, name: LawName, starts: int = STARTS, seed: int = 0) -> Law:
    """The best of many local optima. A fit says nothing of itself: `bootstrap`, and lib.scaling.judge."""
    problem = _problem(points, name)
    parameters, objectives = solve(problem, _starts(problem, starts, seed), np.ones((1, len(points))))
    best = int(objectives.argmin())
    reached = float((objectives <= objectives[best] * 1.001 + 1e-15).mean())
    return _law(problem, points, name, parameters[best], objective=float(objectives[best]), reached=reached)


def bootstrap(points: Sequence[Point], law: Law, *, samples: int = BOOTSTRAPS, seed: int = 0) -> list[Law]:
    """The law fitted to `samples` draws with replacement of cells, which are points of one size and data.

    Each fit starts at `law`, and beside it, and the better one counts.
    """
    problem = _problem(points, law.name)
    cells = np.unique([(point.parameters, point.tokens) for point in points], axis=0, return_inverse=True)
    numbers = cells[1].ravel()
    random = np.random.default_rng(seed)
    count = len(cells[0])
    draws = random.integers(count, size=(samples, count))
    weights = np.stack([np.bincount(row, minlength=count)[numbers] for row in draws]).astype(float)
    around = np.tile(_parameters(problem, points, law), (samples, 1))
    first, second = (
        solve(problem, start, weights)
        for start in (around, around + random.normal(0, 0.2, size=around.shape))
    )
    better = (second[1] < first[1])[:, None]
    found = np.where(better, second[0], first[0])
    objectives = np.minimum(first[1], second[1])
    return [
        _law(problem, points, law.name, row, objective=float(objective), reached=1.0)
        for row, objective in zip(found, objectives, strict=True)
    ]


def interval(values: Sequence[float], *, level: float) -> tuple[float, float]:
    """The middle share `level` of bootstrapped values."""
    low, high = np.quantile(np.asarray(values), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def intervals(laws: Sequence[Law], *, level: float) -> Mapping[str, tuple[float, float]]:
    """Of every figure of bootstrapped laws of one name."""
    figures = [law.figures() for law in laws]
    return {name: interval([each[name] for each in figures], level=level) for name in figures[0]}


def _problem(points: Sequence[Point], name: LawName) -> Problem:
    columns = [[point.parameters for point in points], [point.tokens for point in points]]
    log_x = np.log(np.asarray(columns[: _VARIABLES[name]], dtype=float))
    log_y = np.log(np.asarray([point.loss for point in points], dtype=float))
    return Problem(
        log_x=log_x - log_x.mean(axis=1, keepdims=True),
        log_y=log_y,
        has_floor=name != "power",
        lowest_floor=float(log_y.min() + np.log(_DEEPEST_FLOOR)),
        highest_floor=float(log_y.min()),
    )


def _starts(problem: Problem, count: int, seed: int) -> Floats:
    """Floors between nothing and the lowest loss, what remains shared among the terms, powers up to 1.5."""
    random = np.random.default_rng(seed)
    variables = len(problem.log_x)
    lowest, middle = np.exp(problem.log_y.min()), np.exp(np.median(problem.log_y))
    floor = lowest * random.uniform(0.05, 0.999, (count, 1)) * problem.has_floor
    shares = random.dirichlet(np.ones(variables), count)
    constants = np.log(np.maximum((middle - floor) * shares, 1e-6 * middle))
    powers = random.uniform(0.02, 1.5, (count, variables))
    if not problem.has_floor:
        return np.hstack((constants, powers))
    return np.hstack((np.log(floor), constants, powers))


def _centres(points: Sequence[Point], variables: int) -> Floats:
    columns = [[point.parameters for point in points], [point.tokens for point in points]]
    centres: Floats = np.log(np.asarray(columns[:variables], dtype=float)).mean(axis=1)
    return centres


def _law(
    problem: Problem,
    points: Sequence[Point],
    name: LawName,
    parameters: Floats,
    *,
    objective: float,
    reached: float,
) -> Law:
    variables = len(problem.log_x)
    powers = parameters[problem.terms :]
    constants = parameters[problem.has_floor : problem.terms] + powers * _centres(points, variables)
    log_floor = float(parameters[0]) if problem.has_floor else None
    two = variables == 2
    return Law(
        name=name,
        floor=None if log_floor is None else float(np.exp(log_floor)),
        size_factor=float(np.exp(constants[0])),
        size_power=float(powers[0]),
        data_factor=float(np.exp(constants[1])) if two else None,
        data_power=float(powers[1]) if two else None,
        objective=objective,
        reached=reached,
        at_bound=log_floor is not None
        and not problem.lowest_floor + 1e-6 < log_floor < problem.highest_floor - 1e-6,
    )


def _parameters(problem: Problem, points: Sequence[Point], law: Law) -> Floats:
    """The inverse of `_law`."""
    powers = [power for power in (law.size_power, law.data_power) if power is not None]
    factors = [factor for factor in (law.size_factor, law.data_factor) if factor is not None]
    constants = np.log(factors) - np.asarray(powers) * _centres(points, len(powers))
    floor = [] if law.floor is None else [np.log(law.floor)]
    assert len(problem.log_x) == len(powers)
    return np.concatenate((floor, constants, powers))


def log_residuals(points: Sequence[Point], law: Law) -> Floats:
    """log of the loss over what the law says, (points,)."""
    problem = _problem(points, law.name)
    residuals: Floats = problem.log_y - predict(problem, _parameters(problem, points, law)[None])[0]
    return residuals

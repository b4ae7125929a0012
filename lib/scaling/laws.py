"""Three scaling laws of loss by model size N and training tokens D, their fits and bootstrap intervals.

power       y = A N^-alpha, of perplexity or loss
floor       L = E + A N^-alpha, at one amount of data
chinchilla  L = E + A N^-alpha + B D^-beta (Hoffmann et al. 2022)

Fits are robust and made many at a time: batched Levenberg-Marquardt on a Huber loss of the logarithm. Array
dimensions: S starts or bootstrap samples, P points, J terms (the floor, without a power, first), V terms with
a variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
LawName: TypeAlias = Literal["power", "floor", "chinchilla"]

STARTS, BOOTSTRAPS = 300, 1000
HUBER_DELTA = 1e-3  # in log y: Hoffmann et al. 2022
_MAX_STEPS = 400
_CONVERGED = 1e-13  # relative to the objective
_PATIENCE = 12  # steps in a row without a gain
_MAX_POWER = 8.0
_MIN_FLOOR = 1e-3  # relative to the lowest loss: a fitted floor that low means that there is none
_VARIABLES: dict[LawName, int] = {"power": 1, "floor": 1, "chinchilla": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One trained model. parameters: without embeddings. loss: in nats, or another quantity to fit."""

    parameters: float
    tokens: float
    loss: float
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A fitted law; terms that it does not have are None.

    at_bound: the floor ended at its bound, so the points do not determine it.
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
        """Return the predicted loss of a model of that size after that many tokens."""
        total: float = self.size_factor * parameters**-self.size_power
        if self.data_factor is not None and self.data_power is not None:
            total += self.data_factor * tokens**-self.data_power
        return total + (self.floor or 0.0)

    def figures(self) -> dict[str, float]:
        """Return the parameters that the law has, by their names in the literature."""
        named = {
            "E": self.floor,
            "A": self.size_factor,
            "alpha": self.size_power,
            "B": self.data_factor,
            "beta": self.data_power,
        }
        return {name: value for name, value in named.items() if value is not None}

    def optimal_parameters(self, flops: float) -> float:
        """Return the compute-optimal size for a budget of 6 N D FLOPs. Only for a Chinchilla law."""
        assert self.data_factor is not None and self.data_power is not None
        alpha, beta = self.size_power, self.data_power
        ratio: float = (alpha * self.size_factor / (beta * self.data_factor)) ** (1 / (alpha + beta))
        size: float = ratio * (flops / 6) ** (beta / (alpha + beta))
        return size


def fit(points: Sequence[Point], *, name: LawName, starts: int = STARTS, seed: int = 0) -> Law:
    """Return the best of many local optima. For its uncertainty see `bootstrap` and lib.scaling.judge."""
    problem = _problem(points, name)
    parameters, objectives = _solve(problem, _starts(problem, starts, seed), np.ones((1, len(points))))
    best = int(objectives.argmin())
    reached = float((objectives <= objectives[best] * 1.001 + 1e-15).mean())
    return _law(problem, name, parameters[best], objective=float(objectives[best]), reached=reached)


def bootstrap(points: Sequence[Point], law: Law, *, samples: int = BOOTSTRAPS, seed: int = 0) -> list[Law]:
    """Fit the law to `samples` draws with replacement of cells (points of equal size and data).

    Each fit starts at `law` and at a perturbation of it; the better one counts.
    """
    problem = _problem(points, law.name)
    cells = np.unique([(point.parameters, point.tokens) for point in points], axis=0, return_inverse=True)
    numbers = cells[1].ravel()
    random = np.random.default_rng(seed)
    count = len(cells[0])
    draws = random.integers(count, size=(samples, count))
    weights = np.stack([np.bincount(row, minlength=count)[numbers] for row in draws]).astype(float)
    around = np.tile(_parameters(problem, law), (samples, 1))
    first, second = (
        _solve(problem, start, weights)
        for start in (around, around + random.normal(0, 0.2, size=around.shape))
    )
    better = (second[1] < first[1])[:, None]
    objectives = np.minimum(first[1], second[1])
    return [
        _law(problem, law.name, row, objective=float(objective), reached=1.0)
        for row, objective in zip(np.where(better, second[0], first[0]), objectives, strict=True)
    ]


def interval(values: Sequence[float], *, level: float) -> tuple[float, float]:
    """Return the central interval that holds the share `level` of bootstrapped values."""
    low, high = np.quantile(np.asarray(values), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def intervals(laws: Sequence[Law], *, level: float) -> Mapping[str, tuple[float, float]]:
    """Return the interval of every figure of bootstrapped laws of one name."""
    figures = [law.figures() for law in laws]
    return {name: interval([each[name] for each in figures], level=level) for name in figures[0]}


def log_residuals(points: Sequence[Point], law: Law) -> Floats:
    """Return the log of the loss over the law's prediction, (points,)."""
    problem = _problem(points, law.name)
    residuals: Floats = problem.log_y - _log_terms(problem, _parameters(problem, law)[None])[0][0]
    return residuals


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Points to fit by a sum of powers: log y = log(sum_j exp(constant_j - power_j x_j)) over terms j.

    log_x: (V, P), centred: `means` (V,) are subtracted. log_y: (P,). has_floor: the first term has no
    variable. min_floor, max_floor: bounds of the log of the floor.
    """

    log_x: Floats
    means: Floats
    log_y: Floats
    has_floor: bool
    min_floor: float
    max_floor: float

    @property
    def terms(self) -> int:
        """Number of terms, floor included."""
        return len(self.log_x) + self.has_floor


def _problem(points: Sequence[Point], name: LawName) -> _Problem:
    columns = [[point.parameters for point in points], [point.tokens for point in points]]
    log_x = np.log(np.asarray(columns[: _VARIABLES[name]], dtype=float))
    log_y = np.log(np.asarray([point.loss for point in points], dtype=float))
    means = log_x.mean(axis=1, keepdims=True)
    return _Problem(
        log_x=log_x - means,
        means=means[:, 0],
        log_y=log_y,
        has_floor=name != "power",
        min_floor=float(log_y.min() + np.log(_MIN_FLOOR)),
        max_floor=float(log_y.min()),
    )


def _starts(problem: _Problem, count: int, seed: int) -> Floats:
    """Draw irreducible losses below the lowest loss, shares of the rest for the terms, powers up to 1.5."""
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


def _law(problem: _Problem, name: LawName, parameters: Floats, *, objective: float, reached: float) -> Law:
    powers = parameters[problem.terms :]
    constants = parameters[problem.has_floor : problem.terms] + powers * problem.means
    log_floor = float(parameters[0]) if problem.has_floor else None
    has_data = len(powers) == 2
    return Law(
        name=name,
        floor=None if log_floor is None else float(np.exp(log_floor)),
        size_factor=float(np.exp(constants[0])),
        size_power=float(powers[0]),
        data_factor=float(np.exp(constants[1])) if has_data else None,
        data_power=float(powers[1]) if has_data else None,
        objective=objective,
        reached=reached,
        at_bound=log_floor is not None
        and not problem.min_floor + 1e-6 < log_floor < problem.max_floor - 1e-6,
    )


def _parameters(problem: _Problem, law: Law) -> Floats:
    """Invert `_law`."""
    powers = [power for power in (law.size_power, law.data_power) if power is not None]
    factors = [factor for factor in (law.size_factor, law.data_factor) if factor is not None]
    constants = np.log(factors) - np.asarray(powers) * problem.means
    return np.concatenate(([] if law.floor is None else [np.log(law.floor)], constants, powers))


def _solve(problem: _Problem, starts: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return local optima from `starts` (S, J + V) and their objectives (S,); weights of points: (S or 1, P).

    Parameters are ordered constants (floor first), powers. The objective is the weighted sum of Huber losses
    (a mean would stop early).
    """
    parameters = _clip(problem, starts.copy())
    weights = np.broadcast_to(weights, (len(starts), problem.log_y.size))
    damping, idle = np.full(len(starts), 1e-2), np.zeros(len(starts), int)
    residual, jacobian = _residual(problem, parameters)
    objective = _huber(residual, weights)
    for _ in range(_MAX_STEPS):
        active = np.flatnonzero(idle < _PATIENCE)
        if not active.size:
            break
        step = _step(residual[active], jacobian[active], weights[active], damping[active])
        trial = _clip(problem, parameters[active] + step)
        trial_residual, trial_jacobian = _residual(problem, trial)
        trial_objective = _huber(trial_residual, weights[active])
        better = trial_objective < objective[active]
        gained = objective[active] - trial_objective > _CONVERGED * objective[active]
        idle[active] = np.where(gained, 0, idle[active] + 1)
        damping[active] = np.clip(np.where(better, damping[active] / 3, damping[active] * 4), 1e-12, 1e12)
        kept = active[better]
        parameters[kept], objective[kept] = trial[better], trial_objective[better]
        residual[kept], jacobian[kept] = trial_residual[better], trial_jacobian[better]
    return parameters, objective


def _log_terms(problem: _Problem, parameters: Floats) -> tuple[Floats, Floats]:
    """Return log y (S, P) and the share of each term in y (S, P, J)."""
    terms = np.repeat(parameters[:, None, : problem.terms], problem.log_y.size, axis=1)
    powers = parameters[:, None, problem.terms :]
    terms[:, :, problem.has_floor :] -= powers * problem.log_x.T
    largest = terms.max(axis=2, keepdims=True)
    shares = np.exp(terms - largest)
    whole = shares.sum(axis=2, keepdims=True)
    return (np.log(whole) + largest)[:, :, 0], shares / whole


def _residual(problem: _Problem, parameters: Floats) -> tuple[Floats, Floats]:
    """Return log y - model (S, P) and the Jacobian of the model (S, P, J + V)."""
    predicted, shares = _log_terms(problem, parameters)
    by_powers = -shares[:, :, problem.has_floor :] * problem.log_x.T
    return problem.log_y - predicted, np.concatenate((shares, by_powers), axis=2)


def _huber(residual: Floats, weights: Floats) -> Floats:
    size = np.abs(residual)
    inside = np.minimum(size, HUBER_DELTA)
    total: Floats = (weights * (inside * (size - inside / 2))).sum(axis=1)
    return total


def _step(residual: Floats, jacobian: Floats, weights: Floats, damping: Floats) -> Floats:
    """Return the damped Gauss-Newton step, with points beyond the Huber limit weighted down."""
    robust = weights * np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residual), HUBER_DELTA))
    weighted = jacobian * robust[:, :, None]
    curvature = np.einsum("spi,spj->sij", weighted, jacobian)
    gradient = np.einsum("spi,sp->si", weighted, residual)
    diagonal = np.einsum("sii->si", curvature)
    # A parameter that no point determines still needs a finite step.
    damped = damping[:, None] * np.maximum(diagonal, 1e-12 * diagonal.max(axis=1, keepdims=True) + 1e-30)
    curvature[:, np.arange(jacobian.shape[2]), np.arange(jacobian.shape[2])] += damped + 1e-30
    step: Floats = np.linalg.solve(curvature, gradient[:, :, None])[:, :, 0]
    return np.clip(step, -2.0, 2.0)


def _clip(problem: _Problem, parameters: Floats) -> Floats:
    powers = parameters[:, problem.terms :]
    np.clip(powers, -_MAX_POWER, _MAX_POWER, out=powers)
    if problem.has_floor:
        floor = parameters[:, 0]
        np.clip(floor, problem.min_floor, problem.max_floor, out=floor)
    return parameters

"""Robust fits of sums of powers, many at a time: batched Levenberg-Marquardt on a Huber loss.

The model of log y at a point is log(sum of exp(constant_j - power_j x_j)) over its terms j; a term without
a variable, the floor, has no power. Rows of every array are starts or bootstrap samples, S; P points, J
terms, V the terms with a variable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

HUBER_DELTA = 1e-3  # in log y: Hoffmann et al. 2022
_MOST_STEPS = 400
_CONVERGED = 1e-13  # of the objective, relative
_PATIENCE = 12  # steps in a row that gained nothing
_LARGEST_POWER = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Points to be fitted.

    log_x: (V, P), each row with mean 0. log_y: (P,). has_floor: whether the first term has no variable.
    lowest_floor, highest_floor: of its logarithm; a fit that ends there has found none.
    """

    log_x: Floats
    log_y: Floats
    has_floor: bool
    lowest_floor: float
    highest_floor: float

    @property
    def terms(self) -> int:
        return len(self.log_x) + self.has_floor

    @property
    def size(self) -> int:
        """Parameters: a constant for each term, a power for each variable."""
        return self.terms + len(self.log_x)


def solve(problem: Problem, starts: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Local optima from `starts` (S, size), with `weights` (S or 1, P) of points, and their objectives (S,).

    Parameters are in the order constants (floor first), powers. The objective is the weighted sum of
    Huber losses; the mean would stop early.
    """
    parameters = _inside(problem, starts.copy())
    weights = np.broadcast_to(weights, (len(starts), problem.log_y.size))
    damping, idle = np.full(len(starts), 1e-2), np.zeros(len(starts), int)
    residual, slopes = _residual(problem, parameters)
    objective = _huber(residual, weights)
    for _ in range(_MOST_STEPS):
        live = np.flatnonzero(idle < _PATIENCE)
        if not live.size:
            break
        step = _step(residual[live], slopes[live], weights[live], damping[live])
        trial = _inside(problem, parameters[live] + step)
        trial_residual, trial_slopes = _residual(problem, trial)
        trial_objective = _huber(trial_residual, weights[live])
        better = trial_objective < objective[live]
        gained = objective[live] - trial_objective > _CONVERGED * objective[live]
        idle[live] = np.where(gained, 0, idle[live] + 1)
        damping[live] = np.clip(np.where(better, damping[live] / 3, damping[live] * 4), 1e-12, 1e12)
        kept = live[better]
        parameters[kept], objective[kept] = trial[better], trial_objective[better]
        residual[kept], slopes[kept] = trial_residual[better], trial_slopes[better]
    return parameters, objective


def predict(problem: Problem, parameters: Floats) -> Floats:
    """log y at the points, (S, P)."""
    return _log_terms(problem, parameters)[0]


def _log_terms(problem: Problem, parameters: Floats) -> tuple[Floats, Floats]:
    """log y (S, P), and the share that each term has in y (S, P, J)."""
    terms = np.repeat(parameters[:, None, : problem.terms], problem.log_y.size, axis=1)
    powers = parameters[:, None, problem.terms :]
    terms[:, :, problem.has_floor :] -= powers * problem.log_x.T
    largest = terms.max(axis=2, keepdims=True)
    shares = np.exp(terms - largest)
    whole = shares.sum(axis=2, keepdims=True)
    return (np.log(whole) + largest)[:, :, 0], shares / whole


def _residual(problem: Problem, parameters: Floats) -> tuple[Floats, Floats]:
    """log y - model (S, P), and the derivatives of the model (S, P, size)."""
    predicted, shares = _log_terms(problem, parameters)
    of_powers = -shares[:, :, problem.has_floor :] * problem.log_x.T
    return problem.log_y - predicted, np.concatenate((shares, of_powers), axis=2)


def _huber(residual: Floats, weights: Floats) -> Floats:
    size = np.abs(residual)
    inside = np.minimum(size, HUBER_DELTA)
    total: Floats = (weights * (inside * (size - inside / 2))).sum(axis=1)
    return total


def _step(residual: Floats, slopes: Floats, weights: Floats, damping: Floats) -> Floats:
    """Of damped Gauss-Newton, a point counting the less the further it is beyond the Huber limit."""
    counted = weights * np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residual), HUBER_DELTA))
    weighted = slopes * counted[:, :, None]
    curvature = np.einsum("spi,spj->sij", weighted, slopes)
    downhill = np.einsum("spi,sp->si", weighted, residual)
    diagonal = np.einsum("sii->si", curvature)
    # What no point tells anything of still needs a finite step.
    damped = damping[:, None] * np.maximum(diagonal, 1e-12 * diagonal.max(axis=1, keepdims=True) + 1e-30)
    curvature[:, np.arange(slopes.shape[2]), np.arange(slopes.shape[2])] += damped + 1e-30
    step: Floats = np.linalg.solve(curvature, downhill[:, :, None])[:, :, 0]
    return np.clip(step, -2.0, 2.0)


def _inside(problem: Problem, parameters: Floats) -> Floats:
    powers = parameters[:, problem.terms :]
    np.clip(powers, -_LARGEST_POWER, _LARGEST_POWER, out=powers)
    if problem.has_floor:
        floor = parameters[:, 0]
        np.clip(floor, problem.lowest_floor, problem.highest_floor, out=floor)
    return parameters

"""Robust fits of sums of powers, many at a time: batched Levenberg-Marquardt on a Huber loss.

The model of log y is log(sum_j exp(constant_j - power_j x_j)) over terms j; the floor term has no power.
Array dimensions: S starts or bootstrap samples, P points, J terms, V terms with a variable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

HUBER_DELTA = 1e-3  # in log y: Hoffmann et al. 2022
_MAX_STEPS = 400
_CONVERGED = 1e-13  # relative to the objective
_PATIENCE = 12  # steps in a row without a gain
_MAX_POWER = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Points to fit.

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


def solve(problem: Problem, starts: Floats, weights: Floats) -> tuple[Floats, Floats]:
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


def predict(problem: Problem, parameters: Floats) -> Floats:
    """Return log y at the points, (S, P)."""
    return _log_terms(problem, parameters)[0]


def _log_terms(problem: Problem, parameters: Floats) -> tuple[Floats, Floats]:
    """Return log y (S, P) and the share of each term in y (S, P, J)."""
    terms = np.repeat(parameters[:, None, : problem.terms], problem.log_y.size, axis=1)
    powers = parameters[:, None, problem.terms :]
    terms[:, :, problem.has_floor :] -= powers * problem.log_x.T
    largest = terms.max(axis=2, keepdims=True)
    shares = np.exp(terms - largest)
    whole = shares.sum(axis=2, keepdims=True)
    return (np.log(whole) + largest)[:, :, 0], shares / whole


def _residual(problem: Problem, parameters: Floats) -> tuple[Floats, Floats]:
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


def _clip(problem: Problem, parameters: Floats) -> Floats:
    powers = parameters[:, problem.terms :]
    np.clip(powers, -_MAX_POWER, _MAX_POWER, out=powers)
    if problem.has_floor:
        floor = parameters[:, 0]
        np.clip(floor, problem.min_floor, problem.max_floor, out=floor)
    return parameters

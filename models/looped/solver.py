"""Fixed points h = f(h), iterated until each independent unit has converged.

A converged unit is frozen, so that a sample does not depend on its batch, nor a causal state on later
tokens. Shapes: B samples, T tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lib.memory.simulation import simulated
from lib.nn.precision import full_precision, without_autocast

Step = Callable[[Tensor], Tensor]
# What converges as one: a token independent of others, the tokens up to each position, or a whole sample.
Unit = Literal["token", "prefix", "sample"]

HISTORY = 5  # previous states that Anderson mixing uses
GROWTH_LIMIT = 2.0  # of the residual over its minimum, at which Anderson mixing restarts
# In a simulation without data: as many iterations as fill the history, after which memory is constant.
SHAPES_ITERATIONS = HISTORY + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """Options of the solver. step_size: 1 is undamped. tolerance: of |f(h) - h| / |f(h)| over a unit."""

    method: Literal["damped", "anderson"]
    step_size: float
    tolerance: float
    max_iterations: int
    unit: Unit


class Solution(NamedTuple):
    """Solution of a batch. state: (B, T, D); the others per unit: (B, T), or (B, 1) for whole samples."""

    state: Tensor
    residual: Tensor  # at the last iteration
    iterations: Tensor  # evaluations of f until convergence, or all of them


def solve(step: Step, start: Tensor, options: SolverOptions, *, min_iterations: int = 1) -> Solution:
    """Iterate from `start`, at least `min_iterations` and at most `options.max_iterations` times."""
    anderson = options.method == "anderson"
    mixer = AndersonMixer(options.step_size, start, options.unit) if anderson else None
    state = start
    converged = residual = iterations = None
    limit = max(min_iterations, options.max_iterations)
    has_values = not (start.is_meta or simulated())
    if not (has_values or torch.is_grad_enabled()):
        limit = min(limit, SHAPES_ITERATIONS)
    for number in range(1, limit + 1):
        image = step(state)
        residual_now = relative_residual(image.detach(), state.detach(), options.unit)
        if converged is None or residual is None or iterations is None:
            converged = torch.zeros_like(residual_now, dtype=torch.bool)
            residual, iterations = residual_now, torch.zeros_like(residual_now, dtype=torch.int64)
        residual = residual_now.where(~converged, residual)
        iterations = iterations + (~converged).long()
        if mixer is not None:
            image = mixer(state, image, residual_now)
        elif options.step_size != 1:
            image = torch.lerp(state, image, options.step_size)
        state = image.where(~converged[..., None], state)
        if number >= min_iterations:
            converged = converged | (residual <= options.tolerance)
            if has_values and bool(converged.all()):
                break
    assert residual is not None and iterations is not None
    return Solution(state, residual, iterations)


def relative_residual(image: Tensor, state: Tensor, unit: Unit) -> Tensor:
    """Return |image - state| / |image| of each unit: (B, T), or (B, 1) for whole samples."""
    moved_BT = _square(image - state).sum(dim=2)
    size_BT = _square(image).sum(dim=2)
    if unit == "sample":
        moved_BT, size_BT = moved_BT.sum(dim=1, keepdim=True), size_BT.sum(dim=1, keepdim=True)
    ratio = (moved_BT / size_BT.clamp(min=torch.finfo(size_BT.dtype).tiny)).sqrt()
    # A token has not converged while those before it have not.
    return ratio.cummax(dim=1).values if unit == "prefix" else ratio


def _square(x: Tensor) -> Tensor:
    return x.real**2 + x.imag**2 if x.is_complex() else x**2


class AndersonMixer:
    """Anderson mixing of the last states (Anderson 1965) for each sample, or each token of a causal model.

    A unit whose residual grows to GROWTH_LIMIT times its minimum drops its history and takes a damped step.
    """

    def __init__(self, step_size: float, start: Tensor, unit: Unit) -> None:
        self.step_size, self.unit = step_size, unit
        self.states: list[Tensor] = []  # each (G, E): groups, elements
        self.moves: list[Tensor] = []
        self.kept: list[Tensor] = []  # bool (G,): the group still uses that state
        self.best = torch.full((), torch.inf, dtype=start.real.dtype, device=start.device)

    def __call__(self, state: Tensor, image: Tensor, residual: Tensor) -> Tensor:
        diverges = residual > GROWTH_LIMIT * self.best
        self.best = torch.where(diverges, residual, torch.minimum(residual, self.best))
        fresh = diverges.flatten()
        self.kept = [kept & ~fresh for kept in self.kept]
        self._remember(self._grouped(state), self._grouped(image - state))
        with without_autocast(state):  # the linear solver requires single precision or better
            return self._mixed().to(state.dtype).view_as(state)

    def _grouped(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.flatten(1) if self.unit == "sample" else x_BTD.flatten(0, 1)

    def _remember(self, state_GE: Tensor, move_GE: Tensor) -> None:
        self.states = [*self.states[-HISTORY:], state_GE]
        self.moves = [*self.moves[-HISTORY:], move_GE]
        self.kept = [*self.kept[-HISTORY:], torch.ones_like(state_GE[:, 0].real, dtype=torch.bool)]

    def _mixed(self) -> Tensor:
        kept_GM = torch.stack(self.kept, dim=1)
        states_GME, moves_GME = (
            full_precision(torch.stack(each, dim=1)) for each in (self.states, self.moves)
        )
        moves_GME = moves_GME * kept_GM[..., None]
        products_GMM = moves_GME.conj() @ moves_GME.transpose(1, 2)
        trace_G = products_GMM.diagonal(dim1=1, dim2=2).real.sum(dim=1)
        products_GMM = products_GMM / trace_G.clamp(min=torch.finfo(trace_G.dtype).tiny)[:, None, None]
        ridge = 1e-5 if trace_G.dtype == torch.float32 else 1e-10
        # A dropped state gets an equation of its own and no weight.
        diagonal_GM = torch.where(kept_GM, ridge, 1.0).to(products_GMM.dtype)
        ones_GM = kept_GM.to(products_GMM.dtype)
        # solve_ex does not raise for non-finite values, which the loop reports as a diverged loss.
        alpha_GM, _ = torch.linalg.solve_ex(products_GMM + torch.diag_embed(diagonal_GM), ones_GM)
        alpha_GM = alpha_GM / alpha_GM.sum(dim=1, keepdim=True)
        return (alpha_GM[..., None] * (states_GME + self.step_size * moves_GME)).sum(dim=1)  # type: ignore[no-any-return]

"""Fixed points h = f(h), iterated until each part that stands for itself has settled.

What has settled stays as it is, so that a sample's state does not depend on those that it is batched with,
and a causal state not on tokens that come later. Shapes: B samples, T tokens, D channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lib.memory.simulation import simulated

Step = Callable[[Tensor], Tensor]
# What settles as one: a token whose state touches no other, the tokens up to each one's place, a sample.
Unit = Literal["token", "prefix", "sample"]

HISTORY = 5  # earlier states that Anderson's method mixes
GROWTH_LIMIT = 2.0  # of the residual over its best, at which Anderson's method begins anew
# Where shapes alone are gone through: as many as fill the history, for what comes then needs no more memory.
SHAPES_ITERATIONS = HISTORY + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverOptions:
    """method: how; step_size: 1 is undamped. tolerance: |f(h) - h| / |f(h)| at which a unit has settled."""

    method: Literal["damped", "anderson"]
    step_size: float
    tolerance: float
    max_iterations: int
    unit: Unit


class Solution(NamedTuple):
    """state: (B, T, D). The others are of each unit: (B, T), or (B, 1) where it is the sample."""

    state: Tensor
    residual: Tensor  # at the last iteration
    iterations: Tensor  # evaluations of f until it had settled, or all of them


def solve(step: Step, start: Tensor, options: SolverOptions, *, min_iterations: int = 1) -> Solution:
    """Iterate from `start`, at least `min_iterations` and at most `options.max_iterations` times."""
    state, mixer = start, _mixer(options, start)
    settled = residual = iterations = None
    most = max(min_iterations, options.max_iterations)
    known = not (start.is_meta or simulated())
    if not (known or torch.is_grad_enabled()):
        most = min(most, SHAPES_ITERATIONS)
    for number in range(1, most + 1):
        image = step(state)
        residual_now = relative_residual(image.detach(), state.detach(), options.unit)
        if settled is None or residual is None or iterations is None:
            settled = torch.zeros_like(residual_now, dtype=torch.bool)
            residual, iterations = residual_now, torch.zeros_like(residual_now, dtype=torch.int64)
        residual = residual_now.where(~settled, residual)
        iterations = iterations + (~settled).long()
        state = mixer(state, image, residual_now).where(~settled[..., None], state)
        if number >= min_iterations:
            settled = settled | (residual <= options.tolerance)
            if known and bool(settled.all()):
                break
    assert residual is not None and iterations is not None
    return Solution(state, residual, iterations)


def relative_residual(image: Tensor, state: Tensor, unit: Unit) -> Tensor:
    """|image - state| / |image| over each unit: (B, T), or (B, 1) for a whole sample."""
    moved_BT = _square(image - state).sum(dim=2)
    size_BT = _square(image).sum(dim=2)
    if unit == "sample":
        moved_BT, size_BT = moved_BT.sum(dim=1, keepdim=True), size_BT.sum(dim=1, keepdim=True)
    ratio = (moved_BT / size_BT.clamp(min=torch.finfo(size_BT.dtype).tiny)).sqrt()
    # A token that looks settled while those before it still move is not.
    return ratio.cummax(dim=1).values if unit == "prefix" else ratio


def _square(x: Tensor) -> Tensor:
    return x.real**2 + x.imag**2 if x.is_complex() else x**2


class _Damped:
    """h + step_size * (f(h) - h)."""

    def __init__(self, step_size: float) -> None:
        self.step_size = step_size

    def __call__(self, state: Tensor, image: Tensor, residual: Tensor) -> Tensor:  # noqa: ARG002
        return image if self.step_size == 1 else torch.lerp(state, image, self.step_size)


class AndersonMixer:
    """The mixture of the last states and their images whose residual is least (Anderson 1965), guarded.

    Each sample, or in a causal model each token, is mixed by itself. One whose residual has grown to
    GROWTH_LIMIT times its best forgets its history and takes a damped step.
    """

    def __init__(self, step_size: float, start: Tensor, unit: Unit) -> None:
        self.step_size, self.unit = step_size, unit
        self.damped = _Damped(step_size)
        self.states: list[Tensor] = []  # each (G, E): groups, elements
        self.moves: list[Tensor] = []
        self.kept: list[Tensor] = []  # whether a group still counts that state, (G,)
        self.best = torch.full((), torch.inf, dtype=start.real.dtype, device=start.device)

    def __call__(self, state: Tensor, image: Tensor, residual: Tensor) -> Tensor:
        diverges = residual > GROWTH_LIMIT * self.best
        self.best = torch.where(diverges, residual, torch.minimum(residual, self.best))
        fresh = diverges.flatten()
        self.kept = [kept & ~fresh for kept in self.kept]
        self._remember(self._grouped(state), self._grouped(image - state))
        return self._mixture().view_as(state)

    def _grouped(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.flatten(1) if self.unit == "sample" else x_BTD.flatten(0, 1)

    def _remember(self, state_GE: Tensor, move_GE: Tensor) -> None:
        self.states = [*self.states[-HISTORY:], state_GE]
        self.moves = [*self.moves[-HISTORY:], move_GE]
        self.kept = [*self.kept[-HISTORY:], torch.ones_like(state_GE[:, 0].real, dtype=torch.bool)]

    def _mixture(self) -> Tensor:
        """In single precision at the least: nothing solves the few equations of a group in less."""
        device = self.states[0].device.type
        available = torch.amp.is_autocast_available(device)  # "meta" has none
        with torch.autocast(device, enabled=False) if available else contextlib.nullcontext():
            return self._mixed().to(self.states[0].dtype)

    def _mixed(self) -> Tensor:
        kept_GM = torch.stack(self.kept, dim=1)
        states_GME, moves_GME = (_single(torch.stack(each, dim=1)) for each in (self.states, self.moves))
        moves_GME = moves_GME * kept_GM[..., None]
        products_GMM = moves_GME.conj() @ moves_GME.transpose(1, 2)
        trace_G = products_GMM.diagonal(dim1=1, dim2=2).real.sum(dim=1)
        products_GMM = products_GMM / trace_G.clamp(min=torch.finfo(trace_G.dtype).tiny)[:, None, None]
        ridge = 1e-5 if trace_G.dtype == torch.float32 else 1e-10
        # A state that is forgotten has an equation of its own, and no say.
        diagonal_GM = torch.where(kept_GM, ridge, 1.0).to(products_GMM.dtype)
        ones_GM = kept_GM.to(products_GMM.dtype)
        # Without a check: moves that are not finite give a loss that is none, and that is told by the loop.
        alpha_GM, _ = torch.linalg.solve_ex(products_GMM + torch.diag_embed(diagonal_GM), ones_GM)
        alpha_GM = alpha_GM / alpha_GM.sum(dim=1, keepdim=True)
        return (alpha_GM[..., None] * (states_GME + self.step_size * moves_GME)).sum(dim=1)  # type: ignore[no-any-return]


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _mixer(options: SolverOptions, start: Tensor) -> _Damped | AndersonMixer:
    if options.method == "damped":
        return _Damped(options.step_size)
    return AndersonMixer(options.step_size, start, options.unit)

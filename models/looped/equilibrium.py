"""The fixed point of a block as a differentiable function of its source, with six gradient estimators.

The fixed point is found without a graph. Estimators of the gradient of the weights:

    ep           Equilibrium propagation: the states converge again under a small force along the gradient of
                 the loss, and the change of dE/d(weights) is the gradient. Needs an energy. Exact up to a
                 power of the force (`stencil`).
    ep_vf        The change of the states, for a block without an energy (Scellier et al. 2018). Biased: it
                 uses the Jacobian in place of its transpose.
    ep_adjoint   ep_vf with the Jacobian corrected (Scurria et al. 2026). Exact up to a power of the force.
    implicit     Implicit differentiation (Bai et al. 2019): solves a linear system.
    bptt         Backpropagation through every iteration; memory is proportional to their number.
    one_step     The last iteration alone. Biased.

Forces are scaled to a root mean square of `beta` for each unit of a solution (`solver.Unit`), and the
gradient is scaled back, so the estimate does not depend on the scale of the loss or on the rest of the
batch. Shapes: B samples, T tokens, D channels.
"""

from __future__ import annotations

import cmath
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lib.nn.precision import without_autocast
from models.looped.blocks import EnergyBlock, Options, PlainBlock, Source, Weights
from models.looped.solver import Solution, SolverOptions, Step, Unit, solve

HALF_TOLERANCE = 1e-2  # to converge to in half precision, before single precision continues


class Point(NamedTuple):
    """One point of a stencil of d/db F(b) at b = 0: sum of a_k F(b z_k) / b."""

    at: complex  # z
    coefficient: complex  # a


def stencil(nudge: str, count: int) -> tuple[Point, ...]:
    """Return the stencil of a nudge; for a real F the real part of the sum counts. count: N of "holomorphic".

    Errors: one_sided O(b) (Scellier and Bengio 2017), symmetric O(b^2) (Laborieux et al. 2021), four_point
    O(b^4), holomorphic O(b^N) with N points on a circle in the complex plane (Laborieux and Zenke 2022).
    """
    if nudge in _REAL_STENCILS:
        return _REAL_STENCILS[nudge]
    points = [Point(1, 1 / count)]
    for place in range(1, (count + 1) // 2):  # above the real axis, for their conjugates as well
        at = cmath.exp(2j * cmath.pi * place / count)
        points.append(Point(at, 2 / (at * count)))
    return (*points, Point(-1, -1 / count)) if count % 2 == 0 else tuple(points)


_REAL_STENCILS = {
    "one_sided": (Point(1, 1), Point(0, -1)),
    "symmetric": (Point(1, 1 / 2), Point(-1, -1 / 2)),
    "four_point": (Point(1, 2 / 3), Point(-1, -2 / 3), Point(2, -1 / 12), Point(-2, 1 / 12)),
}


class Equilibrium(nn.Module):
    """A block that is iterated to its fixed point."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.block = PlainBlock(options) if options.block == "plain" else EnergyBlock(options)
        self.solution: Solution | None = None  # of the last forward pass, without a graph
        self.forced: list[Tensor] = []  # residuals under the forces of the last gradient
        self.options = options
        unit: Unit = "prefix" if options.causal else "sample"  # by which tokens interact
        self.solver = SolverOptions(
            method=options.solver,  # type: ignore[arg-type]
            step_size=options.step_size,
            tolerance=options.tolerance,
            max_iterations=options.max_iterations,
            unit="token" if options.block == "energy_cross" else unit,
        )

    def forward(self, x_BTD: Tensor, allowed: Tensor | None) -> Tensor:
        """(B, T, D) source -> (B, T, D) activation of the fixed point."""
        block, options = self.block, self.options
        x_BTD = x_BTD.to(next(block.parameters()).dtype)
        if torch.is_grad_enabled():
            self.forced.clear()
        if options.gradient == "bptt" and torch.is_grad_enabled():
            with without_autocast(x_BTD):
                source = block.source(x_BTD, allowed)
                solution = solve(lambda h: block.step(h, source), x_BTD, self.solver)
                self._keep(solution)
                return block.activate(solution.state)
        with torch.no_grad():
            self._keep(solution := self._converge(x_BTD, allowed))
        with without_autocast(x_BTD):
            return self._attached(solution.state, x_BTD, allowed)

    def _keep(self, solution: Solution) -> None:
        self.solution = Solution(*(part.detach() for part in solution))

    def _converge(self, x_BTD: Tensor, allowed: Tensor | None) -> Solution:
        block, options, start, before = self.block, self.solver, x_BTD, None
        if not x_BTD.is_meta and torch.is_autocast_enabled(x_BTD.device.type):
            source = block.source(x_BTD, allowed)
            coarse = dataclasses.replace(options, tolerance=HALF_TOLERANCE)
            before = solve(lambda h: block.step(h, source), start, coarse)
            start = before.state.to(x_BTD.dtype)
        with without_autocast(x_BTD):
            source = block.source(x_BTD, allowed)
            solution = solve(lambda h: block.step(h, source), start, options)
        if before is None:
            return solution
        return solution._replace(iterations=solution.iterations + before.iterations)

    def _attached(self, state: Tensor, x_BTD: Tensor, allowed: Tensor | None) -> Tensor:
        """Return the activation of `state` with the chosen gradient estimator attached."""
        block, options = self.block, self.options
        if not torch.is_grad_enabled():
            return block.activate(state)
        if options.gradient == "ep":
            assert isinstance(block, EnergyBlock), "equilibrium propagation needs an energy"
            return _Propagated.apply(  # type: ignore[no-any-return, no-untyped-call]
                self, state, x_BTD, allowed, *block.weights
            )
        source = block.source(x_BTD, allowed)
        image = block.step(state, source)
        if options.gradient != "one_step":
            fixed = Source(*(part.detach() if part is not None else None for part in source))  # type: ignore[arg-type]
            correct = _CORRECTIONS[options.gradient]
            image = _Corrected.apply(image, lambda c: correct(lambda h: block.step(h, fixed), state, c, self))  # type: ignore[no-untyped-call]
        return block.activate(image)


def contrast(
    rest: Equilibrium,
    weights: Weights,
    state: Tensor,
    x_BTD: Tensor,
    allowed: Tensor | None,
    *,
    gradient_BTD: Tensor,
    share: Tensor,
) -> tuple[Weights, Tensor]:
    """Return the gradients of a loss by the weights and by x, by equilibrium propagation.

    rest: holds an energy block. gradient_BTD: the gradient of the loss by the activation. share: broadcast to
    (B, T, 1), from `root_mean_square`; the force is along -gradient / share.
    """
    assert isinstance(rest.block, EnergyBlock)
    options, form = rest.options, rest.block.form
    sums: list[Tensor] = []
    per_share = torch.where(share > 0, options.beta / share, 0.0)
    for group in _groups(options):
        count = len(group)
        dtype = x_BTD.dtype
        if any(isinstance(point.at, complex) for point in group):
            dtype = dtype.to_complex()
        own = Weights(*(weight.to(dtype) for weight in weights))
        mask = allowed.repeat(count, 1, 1, 1) if allowed is not None and allowed.dim() == 4 else allowed
        source = form.source(own, _repeated(x_BTD.to(dtype), count), mask)
        reached = _repeated(state.to(dtype), count)
        if group[0].at != 0:
            size = torch.stack([-point.at * per_share for point in group])
            free_step = partial(rest.block.form_step, form, own)
            reached = _nudged(_pushed(free_step, source, size, gradient_BTD), reached, rest)
        shares = torch.cat([point.coefficient / options.beta * share for point in group])
        gradient, x_gradient = form.gradient(own, reached, source, shares)
        parts = [*gradient, x_gradient.view(count, *x_BTD.shape).sum(dim=0) if count > 1 else x_gradient]
        parts = [part.real if part.is_complex() else part for part in parts]
        sums = [one.add_(other) for one, other in zip(sums, parts, strict=True)] if sums else parts
    return Weights(*sums[:-1]), sums[-1]


def _pushed(
    step: Callable[[Tensor, Source], Tensor], source: Source, size: Tensor, gradient_BTD: Tensor
) -> Step:
    """Add forces of `size` (points, B, T, 1) along the gradient to `step`; recomputed to save memory."""
    return lambda h_BTD: step(h_BTD, source) + (size * gradient_BTD).flatten(0, 1)


def _repeated(x_BTD: Tensor, count: int) -> Tensor:
    return x_BTD if count == 1 else x_BTD.repeat(count, 1, 1)


def _groups(options: Options) -> list[list[Point]]:
    """Group the forces that form one batch. The zero force needs no iterations."""
    all_points = stencil(options.nudge, options.nudge_points)
    if not options.together:
        return [[point] for point in all_points]
    parts = [[point for point in all_points if (point.at != 0) == moved] for moved in (True, False)]
    return [part for part in parts if part]


class _Propagated(torch.autograd.Function):
    """Activation of the fixed point with equilibrium propagation as its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rest: Equilibrium,
        state: Tensor,
        x_BTD: Tensor,
        allowed: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        assert isinstance(rest.block, EnergyBlock)
        ctx.rest = rest
        ctx.save_for_backward(state, x_BTD, allowed, *weights)
        return rest.block.form.activate(Weights(*weights), state)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        state, x_BTD, allowed, *weights = ctx.saved_tensors
        with without_autocast(x_BTD):
            gradient_BTD = gradient_BTD.to(x_BTD.dtype)
            share = root_mean_square(gradient_BTD, ctx.rest.solver.unit)
            found, x_gradient = contrast(
                ctx.rest, Weights(*weights), state, x_BTD, allowed, gradient_BTD=gradient_BTD, share=share
            )
        return None, None, x_gradient, None, *found


class _Corrected(torch.autograd.Function):
    """Identity with a corrected gradient."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, correct: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.correct = correct
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        with without_autocast(gradient_BTD):
            return ctx.correct(gradient_BTD), None


def root_mean_square(gradient_BTD: Tensor, unit: Unit) -> Tensor:
    """Return the root mean square of each token ("token"), (B, T, 1), or each sample, (B, 1, 1)."""
    over = (2,) if unit == "token" else (1, 2)
    # Divided by the largest first, because a scaled loss may overflow or underflow when squared.
    largest = gradient_BTD.abs().amax(dim=over, keepdim=True)
    return largest * (gradient_BTD / largest.where(largest > 0, 1)).square().mean(over, keepdim=True).sqrt()


def _nudged(step: Step, start: Tensor, rest: Equilibrium) -> Tensor:
    # Half of the iterations suffice under a force, for the states start near the end.
    fewest = rest.options.nudged_iterations
    solver = dataclasses.replace(rest.solver, max_iterations=max(fewest, rest.solver.max_iterations // 2))
    solution = solve(step, start, solver, min_iterations=fewest)
    rest.forced.append(solution.residual)
    return solution.state


def _by_implicit_differentiation(
    step: Step, state: Tensor, gradient_BTD: Tensor, rest: Equilibrium
) -> Tensor:
    """Solve u = J' u + gradient."""
    with torch.enable_grad():
        leaf = state.detach().requires_grad_()
        image = step(leaf)

    def pulled(u_BTD: Tensor) -> Tensor:
        return torch.autograd.grad(image, leaf, u_BTD, retain_graph=True)[0] + gradient_BTD

    return solve(pulled, gradient_BTD, dataclasses.replace(rest.solver, unit="sample")).state


def _by_vector_field(step: Step, state: Tensor, gradient_BTD: Tensor, rest: Equilibrium) -> Tensor:
    """Estimate (I - J)^-1 gradient from the states under a force."""
    options = rest.options
    share = root_mean_square(gradient_BTD, rest.solver.unit)
    direction = gradient_BTD * torch.where(share > 0, options.beta / share, 0.0)
    result = torch.zeros_like(state)
    for at, coefficient in stencil(options.nudge, options.nudge_points):
        reached = state
        if at != 0:
            reached = _nudged(lambda h, force=at * direction: step(h) - force, state, rest)  # type: ignore[misc]
        result = result - coefficient * reached
    return result * share / options.beta


def _by_adjoint_correction(step: Step, state: Tensor, gradient_BTD: Tensor, rest: Equilibrium) -> Tensor:
    """Estimate (I - J')^-1 gradient from the states under a force, with J replaced by J' to first order."""
    pull, push = jacobian_products(step, state)

    def corrected(h_BTD: Tensor) -> Tensor:
        moved = h_BTD - state
        return step(h_BTD) + pull(moved) - push(moved)

    return _by_vector_field(corrected, state, gradient_BTD, rest)


def jacobian_products(step: Step, state: Tensor) -> tuple[Step, Step]:
    """Return v -> J' v and v -> J v."""
    with torch.enable_grad():
        leaf = state.detach().requires_grad_()
        image = step(leaf)
        # J' v is linear in v, and its transpose is the product with J.
        by = torch.zeros_like(image).requires_grad_()
        (pulled,) = torch.autograd.grad(image, leaf, by, create_graph=True)

    def pull(v: Tensor) -> Tensor:
        return torch.autograd.grad(image, leaf, v, retain_graph=True)[0]

    def push(v: Tensor) -> Tensor:
        return torch.autograd.grad(pulled, by, v, retain_graph=True)[0]

    return pull, push


_CORRECTIONS = {
    "ep_vf": _by_vector_field,
    "ep_adjoint": _by_adjoint_correction,
    "implicit": _by_implicit_differentiation,
}

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
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lib.nn.precision import without_autocast
from models.looped.blocks import EnergyBlock, EnergyForm, FormStep, PlainBlock, Source, Weights
from models.looped.solver import Solution, SolverOptions, Step, Unit, solve

Estimator: TypeAlias = Literal["ep", "ep_vf", "ep_adjoint", "implicit", "bptt", "one_step"]
HALF_TOLERANCE = 1e-2  # to converge to in half precision, before single precision continues
Nudge: TypeAlias = Literal["one_sided", "symmetric", "four_point", "holomorphic"]


class Point(NamedTuple):
    """One point of a stencil of d/db F(b) at b = 0: sum of a_k F(b z_k) / b."""

    at: complex  # z
    coefficient: complex  # a


def stencil(nudge: Nudge, count: int) -> tuple[Point, ...]:
    """Return the stencil of a nudge; for a real F the real part of the sum counts. count: N of "holomorphic".

    Errors: one_sided O(b) (Scellier and Bengio 2017), symmetric O(b^2) (Laborieux et al. 2021), four_point
    O(b^4), holomorphic O(b^N) with N points on a circle in the complex plane (Laborieux and Zenke 2022).
    """
    match nudge:
        case "one_sided":
            return Point(1, 1), Point(0, -1)
        case "symmetric":
            return Point(1, 1 / 2), Point(-1, -1 / 2)
        case "four_point":
            return Point(1, 2 / 3), Point(-1, -2 / 3), Point(2, -1 / 12), Point(-2, 1 / 12)
        case "holomorphic":
            points = [Point(1, 1 / count)]
            for place in range(1, (count + 1) // 2):  # above the real axis, for their conjugates as well
                at = cmath.exp(2j * cmath.pi * place / count)
                points.append(Point(at, 2 / (at * count)))
            return (*points, Point(-1, -1 / count)) if count % 2 == 0 else tuple(points)


@dataclass(frozen=True, slots=True, kw_only=True)
class EquilibriumOptions:
    """Options of the gradient.

    beta: root mean square of the force on the states. nudged_iterations: minimum under a force. together:
    states under all forces converge in one larger batch. watch: called with the residuals under a force.
    """

    estimator: Estimator
    nudge: Nudge
    nudge_points: int
    beta: float
    nudged_iterations: int
    together: bool
    solver: SolverOptions
    watch: Callable[[Tensor], None] = lambda _: None


class Equilibrium(nn.Module):
    """A block that is iterated to its fixed point."""

    def __init__(self, block: EnergyBlock | PlainBlock, options: EquilibriumOptions) -> None:
        super().__init__()
        self.block = block
        self.solution: Solution | None = None  # of the last forward pass, without a graph
        self.forced: list[Tensor] = []  # residuals under the forces of the last gradient
        self.options = dataclasses.replace(options, watch=self.forced.append)

    def forward(self, x_BTD: Tensor, allowed: Tensor | None) -> Tensor:
        """(B, T, D) source -> (B, T, D) activation of the fixed point."""
        block, options = self.block, self.options
        x_BTD = x_BTD.to(next(block.parameters()).dtype)
        if torch.is_grad_enabled():
            self.forced.clear()
        if options.estimator == "bptt" and torch.is_grad_enabled():
            with without_autocast(x_BTD):
                source = block.source(x_BTD, allowed)
                solution = solve(lambda h: block.step(h, source), x_BTD, options.solver)
                self._keep(solution)
                return block.activate(solution.state)
        with torch.no_grad():
            self._keep(solution := self._converge(x_BTD, allowed))
        with without_autocast(x_BTD):
            return self._attached(solution.state, x_BTD, allowed)

    def _keep(self, solution: Solution) -> None:
        self.solution = Solution(*(part.detach() for part in solution))

    def _converge(self, x_BTD: Tensor, allowed: Tensor | None) -> Solution:
        block, options, start, before = self.block, self.options.solver, x_BTD, None
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
        if options.estimator == "ep":
            assert isinstance(block, EnergyBlock), "equilibrium propagation needs an energy"
            return _Propagated.apply(  # type: ignore[no-any-return, no-untyped-call]
                options, block.form, block.form_step, state, x_BTD, allowed, *block.weights
            )
        source = block.source(x_BTD, allowed)
        image = block.step(state, source)
        if options.estimator != "one_step":
            fixed = Source(*(part.detach() if part is not None else None for part in source))  # type: ignore[arg-type]
            correct = _CORRECTIONS[options.estimator]
            image = _Corrected.apply(
                image, lambda c: correct(lambda h: block.step(h, fixed), state, c, options)
            )  # type: ignore[no-untyped-call]
        return block.activate(image)


def contrast(
    options: EquilibriumOptions,
    form: EnergyForm,
    weights: Weights,
    state: Tensor,
    x_BTD: Tensor,
    allowed: Tensor | None,
    *,
    gradient_BTD: Tensor,
    share: Tensor,
    form_step: FormStep = EnergyForm.step,
) -> tuple[Weights, Tensor]:
    """Return the gradients of a loss by the weights and by x, by equilibrium propagation.

    gradient_BTD: the gradient of the loss by the activation. share: broadcast to (B, T, 1), from
    `root_mean_square`; the force is along -gradient / share. form_step: the step of the form, or its compiled
    version.
    """
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
            free_step = partial(form_step, form, own)
            reached = _nudged(_pushed(free_step, source, size, gradient_BTD), reached, options)
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


def _groups(options: EquilibriumOptions) -> list[list[Point]]:
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
        options: EquilibriumOptions,
        form: EnergyForm,
        form_step: FormStep,
        state: Tensor,
        x_BTD: Tensor,
        allowed: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.options, ctx.form, ctx.form_step = options, form, form_step
        ctx.save_for_backward(state, x_BTD, allowed, *weights)
        return form.activate(Weights(*weights), state)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        state, x_BTD, allowed, *weights = ctx.saved_tensors
        with without_autocast(x_BTD):
            gradient_BTD = gradient_BTD.to(x_BTD.dtype)
            share = root_mean_square(gradient_BTD, ctx.options.solver.unit)
            found, x_gradient = contrast(
                ctx.options, ctx.form, Weights(*weights), state, x_BTD, allowed,
                gradient_BTD=gradient_BTD, share=share, form_step=ctx.form_step,
            )  # fmt: skip
        return None, None, None, None, x_gradient, None, *found


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


def _nudged(step: Step, start: Tensor, options: EquilibriumOptions) -> Tensor:
    # Half of the iterations suffice under a force, for the states start near the end.
    limit = max(options.nudged_iterations, options.solver.max_iterations // 2)
    solver = dataclasses.replace(options.solver, max_iterations=limit)
    solution = solve(step, start, solver, min_iterations=options.nudged_iterations)
    options.watch(solution.residual)
    return solution.state


def _by_implicit_differentiation(
    step: Step, state: Tensor, gradient_BTD: Tensor, options: EquilibriumOptions
) -> Tensor:
    """Solve u = J' u + gradient."""
    with torch.enable_grad():
        leaf = state.detach().requires_grad_()
        image = step(leaf)

    def pulled(u_BTD: Tensor) -> Tensor:
        return torch.autograd.grad(image, leaf, u_BTD, retain_graph=True)[0] + gradient_BTD

    return solve(pulled, gradient_BTD, dataclasses.replace(options.solver, unit="sample")).state


def _by_vector_field(step: Step, state: Tensor, gradient_BTD: Tensor, options: EquilibriumOptions) -> Tensor:
    """Estimate (I - J)^-1 gradient from the states under a force."""
    share = root_mean_square(gradient_BTD, options.solver.unit)
    direction = gradient_BTD * torch.where(share > 0, options.beta / share, 0.0)
    result = torch.zeros_like(state)
    for at, coefficient in stencil(options.nudge, options.nudge_points):
        reached = state
        if at != 0:
            reached = _nudged(lambda h, force=at * direction: step(h) - force, state, options)  # type: ignore[misc]
        result = result - coefficient * reached
    return result * share / options.beta


def _by_adjoint_correction(
    step: Step, state: Tensor, gradient_BTD: Tensor, options: EquilibriumOptions
) -> Tensor:
    """Estimate (I - J')^-1 gradient from the states under a force, with J replaced by J' to first order."""
    pull, push = jacobian_products(step, state)

    def corrected(h_BTD: Tensor) -> Tensor:
        moved = h_BTD - state
        return step(h_BTD) + pull(moved) - push(moved)

    return _by_vector_field(corrected, state, gradient_BTD, options)


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

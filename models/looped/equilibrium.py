"""A block at rest, as a function of its source that can be differentiated, and the ways of doing so.

The state is found without a graph. How the gradient of the loss gets from the state at rest to the weights:

    ep           Equilibrium propagation: the states settle again under a small force along the gradient, and
                 the difference that it makes to dE/d(weights) is the gradient. Needs an energy. Exact up to
                 a power of the force (`nudging`), for any loss: the force is what the loss says at rest.
    ep_vf        The same difference of states where there is no energy (Scellier et al. 2018). Biased: it
                 takes the Jacobian for its transpose, however small the force.
    ep_adjoint   ep_vf with the Jacobian at rest put right (Scurria et al. 2026). Exact up to a power.
    implicit     Implicit differentiation (Bai et al. 2019): a linear system instead of a second settling.
    bptt         Backpropagation through every iteration. Memory in proportion to their number.
    one_step     The last iteration alone. Biased.

Forces are scaled to `beta` in the root mean square for each unit of a solution (`solver.Unit`), and the
gradient is scaled back: the estimate does not depend on the scale of the loss, the size of the batch or
what else is in it. Shapes: B samples, T tokens, D channels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from models.looped.energy import EnergyBlock, EnergyForm, FormStep, Source, Weights
from models.looped.nudging import Nudge, Point, points
from models.looped.plain import PlainBlock
from models.looped.solver import Solution, SolverOptions, Step, Unit, solve

Estimator: TypeAlias = Literal["ep", "ep_vf", "ep_adjoint", "implicit", "bptt", "one_step"]
HALF_TOLERANCE = 1e-2  # what half precision is trusted with, before single precision goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class EquilibriumOptions:
    """beta: root mean square of the force on the states. nudged_iterations: fewest under a force.

    together: forces on an energy settle side by side in one larger batch. watch: is told the residuals of
    states under a force.
    """

    estimator: Estimator
    nudge: Nudge
    nudge_points: int
    beta: float
    nudged_iterations: int
    together: bool
    solver: SolverOptions
    watch: Callable[[Tensor], None] = lambda _: None

    @property
    def nudged_solver(self) -> SolverOptions:
        """States under a force begin next to where they end: half of the iterations are enough."""
        most = max(self.nudged_iterations, self.solver.max_iterations // 2)
        return dataclasses.replace(self.solver, max_iterations=most)


class Equilibrium(nn.Module):
    """A block and its state at rest."""

    def __init__(self, block: EnergyBlock | PlainBlock, options: EquilibriumOptions) -> None:
        super().__init__()
        self.block = block
        self.solution: Solution | None = None  # of the last call, without a graph
        self.forced: list[Tensor] = []  # residuals under the forces of the last gradient
        self.options = dataclasses.replace(options, watch=self.forced.append)

    def forward(self, x_BTD: Tensor, allowed: Tensor | None) -> Tensor:
        """(B, T, D) source -> (B, T, D) activation of the state at rest."""
        block, options = self.block, self.options
        x_BTD = x_BTD.to(next(block.parameters()).dtype)
        if torch.is_grad_enabled():
            self.forced.clear()
        if options.estimator == "bptt" and torch.is_grad_enabled():
            with _full_precision(x_BTD):
                source = block.source(x_BTD, allowed)
                solution = solve(lambda h: block.step(h, source), x_BTD, options.solver)
                self._keep(solution)
                return block.activate(solution.state)
        with torch.no_grad():
            self._keep(solution := self._settle(x_BTD, allowed))
        with _full_precision(x_BTD):
            return self._attached(solution.state, x_BTD, allowed)

    def _keep(self, solution: Solution) -> None:
        self.solution = Solution(*(part.detach() for part in solution))

    def _settle(self, x_BTD: Tensor, allowed: Tensor | None) -> Solution:
        block, options, start, before = self.block, self.options.solver, x_BTD, None
        if not x_BTD.is_meta and torch.is_autocast_enabled(x_BTD.device.type):
            source = block.source(x_BTD, allowed)
            coarse = dataclasses.replace(options, tolerance=HALF_TOLERANCE)
            before = solve(lambda h: block.step(h, source), start, coarse)
            start = before.state.to(x_BTD.dtype)
        with _full_precision(x_BTD):
            source = block.source(x_BTD, allowed)
            solution = solve(lambda h: block.step(h, source), start, options)
        if before is None:
            return solution
        return solution._replace(iterations=solution.iterations + before.iterations)

    def _attached(self, state: Tensor, x_BTD: Tensor, allowed: Tensor | None) -> Tensor:
        """The activation of `state`, with the chosen gradient."""
        block, options = self.block, self.options
        if not torch.is_grad_enabled():
            return block.activate(state)
        if options.estimator == "ep":
            assert isinstance(block, EnergyBlock), "equilibrium propagation needs an energy"
            how = options, block.form, block.form_step
            return _Propagated.apply(*how, state, x_BTD, allowed, *block.weights)  # type: ignore[no-any-return, no-untyped-call]
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
    """The derivative of dE/d(weights) and dE/dx at rest by the size of a force, times `share`.

    The force is along -gradient / share. If that is the gradient of a loss by the activation, what is
    returned is its gradient by the weights and by x. share: broadcast to (B, T, 1), from
    `root_mean_square`. form_step: that of the form, or the same compiled. Nothing differentiates
    automatically.
    """
    found: list[Tensor] = []
    per_share = torch.where(share > 0, options.beta / share, 0.0)
    for group in _groups(options):
        count = len(group)
        dtype = x_BTD.dtype
        if any(isinstance(point.at, complex) for point in group):
            dtype = dtype.to_complex()
        own = Weights(*(weight.to(dtype) for weight in weights))
        sees = allowed.repeat(count, 1, 1, 1) if allowed is not None and allowed.dim() == 4 else allowed
        source = form.source(own, _repeated(x_BTD.to(dtype), count), sees)
        reached = _repeated(state.to(dtype), count)
        if group[0].at != 0:
            size = torch.stack([-point.at * per_share for point in group])
            at_rest = partial(form_step, form, own)
            reached = _nudged(_pushed(at_rest, source, size, gradient_BTD), reached, options)
        shares = torch.cat([point.coefficient / options.beta * share for point in group])
        gradient, x_gradient = form.gradient(own, reached, source, shares)
        parts = [*gradient, x_gradient.view(count, *x_BTD.shape).sum(dim=0) if count > 1 else x_gradient]
        parts = [part.real if part.is_complex() else part for part in parts]
        found = parts if not found else [one.add_(other) for one, other in zip(found, parts, strict=True)]
    return Weights(*found[:-1]), found[-1]


def _pushed(
    step: Callable[[Tensor, Source], Tensor], source: Source, size: Tensor, gradient_BTD: Tensor
) -> Step:
    """`step` under forces of `size` (points, B, T, 1) along the gradient, which are made anew each time: kept
    ones would take memory."""
    return lambda h_BTD: step(h_BTD, source) + (size * gradient_BTD).flatten(0, 1)


def _repeated(x_BTD: Tensor, count: int) -> Tensor:
    return x_BTD if count == 1 else x_BTD.repeat(count, 1, 1)


def _groups(options: EquilibriumOptions) -> list[list[Point]]:
    """The forces that settle side by side, as one batch. No force is rest as it was found."""
    stencil = points(options.nudge, options.nudge_points)
    if not options.together:
        return [[point] for point in stencil]
    parts = [[point for point in stencil if (point.at != 0) == moved] for moved in (True, False)]
    return [part for part in parts if part]


class _Propagated(torch.autograd.Function):
    """The activation at rest, with equilibrium propagation for its gradient."""

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
        with _full_precision(x_BTD):
            gradient_BTD = gradient_BTD.to(x_BTD.dtype)
            share = root_mean_square(gradient_BTD, ctx.options.solver.unit)
            found, x_gradient = contrast(
                ctx.options, ctx.form, Weights(*weights), state, x_BTD, allowed,
                gradient_BTD=gradient_BTD, share=share, form_step=ctx.form_step,
            )  # fmt: skip
        return None, None, None, None, x_gradient, None, *found


class _Corrected(torch.autograd.Function):
    """The same state, with a gradient that is corrected on its way back."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, correct: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.correct = correct
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        with _full_precision(gradient_BTD):
            return ctx.correct(gradient_BTD), None


def root_mean_square(gradient_BTD: Tensor, unit: Unit) -> Tensor:
    """Of each token ("token"), (B, T, 1), or each sample, (B, 1, 1)."""
    over = (2,) if unit == "token" else (1, 2)
    # By the largest first: what a scaled loss makes of it may be too large or too small to be squared.
    largest = gradient_BTD.abs().amax(dim=over, keepdim=True)
    return largest * (gradient_BTD / largest.where(largest > 0, 1)).square().mean(over, keepdim=True).sqrt()


def _nudged(step: Step, start: Tensor, options: EquilibriumOptions) -> Tensor:
    solution = solve(step, start, options.nudged_solver, min_iterations=options.nudged_iterations)
    options.watch(solution.residual)
    return solution.state


def _by_implicit_differentiation(
    step: Step, state: Tensor, gradient_BTD: Tensor, options: EquilibriumOptions
) -> Tensor:
    """u with u = J' u + gradient."""
    pull = transposed_product(step, state)
    solver = dataclasses.replace(options.solver, unit="sample")
    return solve(lambda u: pull(u) + gradient_BTD, gradient_BTD, solver).state


def _by_vector_field(step: Step, state: Tensor, gradient_BTD: Tensor, options: EquilibriumOptions) -> Tensor:
    """(I - J)^-1 gradient, by the states that a force leads to."""
    share = root_mean_square(gradient_BTD, options.solver.unit)
    direction = gradient_BTD * torch.where(share > 0, options.beta / share, 0.0)
    result = torch.zeros_like(state)
    for at, coefficient in points(options.nudge, options.nudge_points):
        reached = state
        if at != 0:
            reached = _nudged(lambda h, force=at * direction: step(h) - force, state, options)  # type: ignore[misc]
        result = result - coefficient * reached
    return result * share / options.beta


def _by_adjoint_correction(
    step: Step, state: Tensor, gradient_BTD: Tensor, options: EquilibriumOptions
) -> Tensor:
    """(I - J')^-1 gradient, by the states that a force leads to where J is replaced by J' to first order."""
    pull, push = jacobian_products(step, state)

    def corrected(h_BTD: Tensor) -> Tensor:
        moved = h_BTD - state
        return step(h_BTD) + pull(moved) - push(moved)

    return _by_vector_field(corrected, state, gradient_BTD, options)


def transposed_product(step: Step, state: Tensor) -> Step:
    """v -> J' v, J being the Jacobian of `step` at `state`."""
    with torch.enable_grad():
        leaf = state.detach().requires_grad_()
        image = step(leaf)
    return lambda v: torch.autograd.grad(image, leaf, v, retain_graph=True)[0]


def jacobian_products(step: Step, state: Tensor) -> tuple[Step, Step]:
    """v -> J' v and v -> J v."""
    with torch.enable_grad():
        leaf = state.detach().requires_grad_()
        image = step(leaf)
        # Linear in what it is pulled by, so that its transpose is the product with J itself.
        by = torch.zeros_like(image).requires_grad_()
        (pulled,) = torch.autograd.grad(image, leaf, by, create_graph=True)

    def pull(v: Tensor) -> Tensor:
        return torch.autograd.grad(image, leaf, v, retain_graph=True)[0]

    def push(v: Tensor) -> Tensor:
        return torch.autograd.grad(pulled, by, v, retain_graph=True)[0]

    return pull, push


def _full_precision(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """The differences of states are small: half precision would lose them."""
    if like.is_meta:  # only measured
        return contextlib.nullcontext()
    return torch.autocast(like.device.type, enabled=False)


_CORRECTIONS = {
    "ep_vf": _by_vector_field,
    "ep_adjoint": _by_adjoint_correction,
    "implicit": _by_implicit_differentiation,
}

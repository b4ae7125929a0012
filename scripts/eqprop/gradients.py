"""Experiment 1: error of every gradient estimator against the exact gradient, with two controls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from models.looped.blocks import EnergyBlock
from models.looped.equilibrium import contrast, root_mean_square
from models.looped.model import SOURCE_SCALE, LoopedTransformer
from scripts.eqprop.report import Report
from scripts.eqprop.setting import (
    REFERENCE,
    TIGHT,
    Setting,
    agreement,
    batch_of,
    convergence,
    core_gradient,
    loss_of,
    model_of,
    spectral_radius,
)

BETAS = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0001)
PLAIN_BETAS = (0.01, 0.001)
NUDGES = {"one_sided": 1, "symmetric": 2, "four_point": 4}  # order of the error in beta
ROWS = 16
DIRECTIONS = 3
CONTROL_LIMIT = 1e-3
SLOPE_BETAS = (0.1, 0.01)  # between which the order is measured
LOSS_BETA = 0.1  # relative to the gradient of a sample's loss
COLUMNS = (
    "block", "gradient", "beta", "dtype", "cosine", "relative_error", "norm_ratio", "iterations", "residual",
    "forced", "unsettled", "control",
)  # fmt: skip


def run(setting: Setting) -> Report:
    """Measure the error of every estimator for three kinds of blocks."""
    report = Report("1", "Is the gradient right?", setting, COLUMNS)
    options = report.config.model_options
    shape = f"d={options['width']} heads={options['heads']} hidden={options['hidden']}"
    report.note(f"{shape}, one block, {ROWS} samples, at the initial weights; errors are against implicit")
    report.note("differentiation in float64 at a tolerance of 1e-13, over all weights but the head's.")
    for block in ("energy_cross", "energy_self", "plain"):
        _block(block, report)
    _verdict(report)
    return report


def _block(block: str, report: Report) -> None:
    config, data = report.config, report.data
    step = {"step_size": 1.0 if block == "energy_cross" else 0.9}
    exact_model = model_of(config, data, seed=1, block=block, layers=1, **REFERENCE, **step).double()
    inputs, targets = batch_of(data, rows=ROWS, dtype=torch.float64)
    exact = core_gradient(exact_model, inputs, targets)
    rho = spectral_radius(exact_model, inputs)
    worst = differences(exact_model, exact, inputs, targets)
    report.note(
        f"{block}: spectral radius at rest {rho:.3f}; exact gradient against differences of the loss along "
        f"{DIRECTIONS} directions: {worst:.1e}"
    )
    report.facts[f"differences {block}"] = worst
    if block != "plain":
        own = {"block": block, "layers": 1, **step, "gradient": "ep", "nudge": "symmetric", "beta": LOSS_BETA}
        model = model_of(config, data, seed=1, **own, **TIGHT).double()
        error = error_with_unit_share(exact_model, model, inputs, targets)
        report.facts[f"force of the loss {block}"] = error
    for estimator, beta, dtype in _estimators(block, report.setting.quick):
        changes: dict[str, Any] = {"block": block, "layers": 1, **step, **estimator, "beta": beta or 0.01}
        if dtype == torch.float64:
            changes |= TIGHT
        model = model_of(config, data, seed=1, **changes).to(dtype)
        found = core_gradient(model, inputs, targets)
        precision = str(dtype).removeprefix("torch.")
        name = " ".join(estimator.values()) if estimator["gradient"] == "ep" else estimator["gradient"]
        row = {"block": block, "gradient": name, "beta": beta, "dtype": precision}
        row |= agreement(found, exact) | convergence(model)
        if estimator["gradient"] == "ep":
            row["control"] = without_force(model, inputs, targets)
        report.row(row)


def _estimators(block: str, quick: bool) -> Iterator[tuple[dict[str, str], float | None, torch.dtype]]:
    dtypes = (torch.float64, torch.float32)
    betas = BETAS[::2] if quick else BETAS
    if block == "plain":
        found = [{"gradient": gradient, "nudge": "symmetric"} for gradient in ("ep_vf", "ep_adjoint")]
        yield from itertools.product(found, PLAIN_BETAS, dtypes)
    else:
        for nudge in NUDGES:
            yield from itertools.product([{"gradient": "ep", "nudge": nudge}], betas, dtypes)
    for gradient in ("implicit", "one_step"):
        yield from (({"gradient": gradient, "nudge": "symmetric"}, None, dtype) for dtype in dtypes)


def differences(model: LoopedTransformer, gradient: Tensor, inputs: Tensor, targets: Tensor) -> float:
    """Return the worst relative error of `gradient` against central differences in random directions."""
    core = [p for name, p in model.named_parameters() if not name.startswith("head")]
    start = torch.nn.utils.parameters_to_vector(core).detach()
    worst, size = 0.0, 1e-5
    for seed in range(DIRECTIONS):
        random = torch.Generator().manual_seed(seed)
        direction = torch.randn(len(start), generator=random, dtype=start.dtype)
        losses = []
        for sign in (1, -1):
            torch.nn.utils.vector_to_parameters(start + sign * size * direction, core)
            with torch.no_grad():
                losses.append(loss_of(model, inputs, targets))
        slope = float(losses[0] - losses[1]) / (2 * size)
        expected = float(gradient @ direction)
        worst = max(worst, abs(slope - expected) / abs(expected))
    torch.nn.utils.vector_to_parameters(start, core)
    return worst


def without_force(model: LoopedTransformer, inputs: Tensor, targets: Tensor) -> float:
    """Return |estimate without a force| / |estimate|: the share that comes from unconverged states."""
    none, whole = (contrast_estimate(model, inputs, targets, forced=forced) for forced in (0.0, 1.0))
    return float(none.norm()) / float(whole.norm())


def error_with_unit_share(
    exact: LoopedTransformer, model: LoopedTransformer, inputs: Tensor, targets: Tensor
) -> float:
    """Return the relative error for the block's weights if the force is beta times the gradient of the loss.

    This is beta as in the literature. exact: holds the exact gradient.
    """
    [rest] = exact.equilibria()
    expected = torch.cat([weight.grad.flatten() for weight in rest.block.weights])  # type: ignore[union-attr]
    ones = torch.ones(len(inputs), 1, 1, dtype=expected.dtype)
    found = contrast_estimate(model, inputs, targets, share=ones)
    return agreement(found, expected)["relative_error"]


def contrast_estimate(
    model: LoopedTransformer,
    inputs: Tensor,
    targets: Tensor,
    *,
    forced: float = 1.0,
    share: Tensor | None = None,
) -> Tensor:
    """Return the estimate for the block's weights, flattened, with the force scaled by `forced`.

    share: divisor of the force and factor of the estimate; None: as in training.
    """
    [rest] = model.equilibria()
    assert isinstance(rest.block, EnergyBlock)
    inputs = inputs.to(rest.block.gain.dtype) if inputs.is_floating_point() else inputs
    x_BTD = (SOURCE_SCALE * model.embedding(inputs)).detach()
    allowed = model.allowed(inputs)
    activity = rest(x_BTD, allowed).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(model.read(activity, inputs), targets, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, activity)
    if share is None:
        share = root_mean_square(gradient, rest.solver.unit)
    assert rest.solution is not None
    with torch.no_grad():
        parts, _ = contrast(
            rest, rest.block.weights, rest.solution.state, x_BTD, allowed,
            gradient_BTD=forced * gradient, share=share,
        )  # fmt: skip
    return torch.cat([part.flatten() for part in parts])


def _verdict(report: Report) -> None:
    """Judge the table by the bars."""
    for block in ("energy_cross", "energy_self"):
        _verdicts_of_energy(block, report)
    void = [row for row in report.rows if row.get("control", 0.0) > CONTROL_LIMIT]
    for row in void:
        named = f"{row['block']} {row['gradient']} beta {row['beta']} {row['dtype']}"
        report.note(f"void: {named}: without a force {row['control']:.1e} of it is still there")
    biased = _found(report, "relative_error", block="plain", gradient="ep_vf", dtype="float64")
    report.verdict(
        min(biased) > 0.05 and max(biased) / min(biased) < 1.01,
        f"the vector field's estimate is biased at any beta: {min(biased):.3f} to {max(biased):.3f}",
    )
    more, less = _found(report, "relative_error", gradient="ep_adjoint", dtype="float64")
    power = math.log(more / less) / math.log(PLAIN_BETAS[0] / PLAIN_BETAS[1])
    report.verdict(
        less <= 1e-4 and abs(power - 2) <= 0.1,
        f"with its adjoint correction the error is {less:.1e} at beta {PLAIN_BETAS[1]} (bar 1e-4) and falls "
        f"with beta to the power {power:.2f} (bar 2, to 0.1)",
    )
    worst = max(value for name, value in report.facts.items() if name.startswith("differences"))
    report.verdict(worst <= 1e-5, f"the reference agrees with differences of the loss to {worst:.1e}")


def _verdicts_of_energy(block: str, report: Report) -> None:
    error = report.facts[f"force of the loss {block}"]
    report.verdict(
        error <= 1e-5,
        f"{block} float64, symmetric, a force of {LOSS_BETA} of the gradient of the loss: relative error "
        f"{error:.1e} (bar 1e-5)",
    )
    powers = []
    for nudge in NUDGES:
        own = {"block": block, "gradient": f"ep {nudge}", "dtype": "float64"}
        more, less = (_found(report, "relative_error", **own, beta=beta)[0] for beta in SLOPE_BETAS)
        powers.append(math.log(more / less) / math.log(SLOPE_BETAS[0] / SLOPE_BETAS[1]))
    report.verdict(
        all(abs(power - bar) <= 0.1 for power, bar in zip(powers, NUDGES.values(), strict=True)),
        f"{block} float64: with one, two and four forces the error falls with beta to the power "
        f"{powers[0]:.2f}, {powers[1]:.2f} and {powers[2]:.2f} (bars 1, 2 and 4, to 0.1)",
    )
    row = {"block": block, "gradient": "ep symmetric", "dtype": "float32"}
    [error], [control] = (_found(report, c, **row, beta=0.01) for c in ("relative_error", "control"))
    report.verdict(
        error <= 1e-3 and control <= CONTROL_LIMIT,
        f"{block} float32, symmetric at beta 0.01: relative error {error:.1e} (bar 1e-3), without "
        f"a force {control:.1e} of it (bar {CONTROL_LIMIT:g})",
    )


def _found(report: Report, column: str, **wanted: Any) -> list[float]:
    rows = [row for row in report.rows if all(row[name] == value for name, value in wanted.items())]
    return [row[column] for row in rows]

"""Experiment 1: is the gradient right? Every estimator against the exact gradient, with two controls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lib.config import Config
from models.looped.energy import EnergyBlock
from models.looped.equilibrium import contrast, root_mean_square
from models.looped.model import SOURCE_SCALE, LoopedTransformer
from scripts.eqprop.report import Report
from scripts.eqprop.subject import (
    REFERENCE,
    TIGHT,
    Agreement,
    Setting,
    batch_of,
    core_gradient,
    equilibria,
    loss_of,
    model_of,
    settling,
    shape_of,
    spectral_radius,
)
from train.subject import Subject

BETAS = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0001)
NUDGES = ("one_sided", "symmetric", "four_point")
ROWS = 16
DIRECTIONS = 3
CONTROL_LIMIT = 1e-3
COLUMNS = (
    "block", "gradient", "beta", "dtype", "cosine", "relative_error", "norm_ratio", "iterations", "residual",
    "unsettled", "control",
)  # fmt: skip


def run(setting: Setting) -> Report:
    config = setting.config()
    subject = setting.subject(config)
    report = Report("1", "Is the gradient right?", setting, subject, COLUMNS)
    report.note(
        f"{shape_of(config)}, one block, {ROWS} samples, at the initial weights; errors are against implicit"
    )
    report.note("differentiation in float64 at a tolerance of 1e-13, over all weights but the head's.")
    for block in ("energy_cross", "energy_self", "plain"):
        _block(block, config, subject, report)
    _verdict(report)
    return report


def _block(block: str, config: Config, subject: Subject, report: Report) -> None:
    step = {"step_size": 1.0 if block == "energy_cross" else 0.9}
    exact_model = model_of(config, subject, seed=1, block=block, layers=1, **REFERENCE, **step).double()
    inputs, targets = batch_of(subject, rows=ROWS, dtype=torch.float64)
    exact = core_gradient(exact_model, inputs, targets)
    rho = spectral_radius(exact_model, inputs)
    worst = differences(exact_model, exact, inputs, targets)
    report.note(
        f"{block}: spectral radius at rest {rho:.3f}; exact gradient against differences of the loss along "
        f"{DIRECTIONS} directions: {worst:.1e}"
    )
    report.facts[f"differences {block}"] = worst
    for way, beta, dtype in _ways(block, report.setting.quick):
        changes: dict[str, Any] = {"block": block, "layers": 1, **step, **way, "beta": beta or 0.01}
        if dtype == torch.float64:
            changes |= TIGHT
        model = model_of(config, subject, seed=1, **changes).to(dtype)
        found = core_gradient(model, inputs.to(dtype), targets)
        row = {
            "block": block,
            "gradient": _name(way),
            "beta": beta,
            "dtype": str(dtype).removeprefix("torch."),
        }
        row |= asdict(Agreement.between(found, exact)) | settling(model)
        if way["gradient"] == "ep":
            row["control"] = without_force(model, inputs.to(dtype), targets)
        report.row(row)


def _ways(block: str, quick: bool) -> Iterator[tuple[dict[str, str], float | None, torch.dtype]]:
    dtypes = (torch.float64, torch.float32)
    betas = BETAS[::2] if quick else BETAS
    if block == "plain":
        ways = [{"gradient": "ep_vf", "nudge": "symmetric"}, {"gradient": "ep_adjoint", "nudge": "symmetric"}]
        yield from itertools.product(ways, (0.01, 0.001), dtypes)
    else:
        for nudge in NUDGES:
            yield from itertools.product([{"gradient": "ep", "nudge": nudge}], betas, dtypes)
    for gradient in ("implicit", "one_step"):
        yield from (({"gradient": gradient, "nudge": "symmetric"}, None, dtype) for dtype in dtypes)


def _name(way: dict[str, str]) -> str:
    return f"{way['gradient']} {way['nudge']}" if way["gradient"] == "ep" else way["gradient"]


def differences(model: LoopedTransformer, gradient: Tensor, inputs: Tensor, targets: Tensor) -> float:
    """The worst relative error of `gradient` against central differences along random directions."""
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
    """|estimate without a force| / |estimate|: the share that is what had not settled, and no gradient."""
    [rest] = equilibria(model)
    assert isinstance(rest.block, EnergyBlock)
    x_BTD = (SOURCE_SCALE * model.embedding(inputs)).detach()
    activity = rest(x_BTD, None).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(model.read(activity, inputs), targets, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, activity)
    share = root_mean_square(gradient, rest.options.solver.unit)
    sizes = []
    assert rest.solution is not None
    for forced in (0.0, 1.0):
        with torch.no_grad():
            parts, _ = contrast(
                rest.options, rest.block.form, rest.block.weights, rest.solution.state, x_BTD, None,
                gradient_BTD=forced * gradient, share=share,
            )  # fmt: skip
        sizes.append(float(torch.cat([part.flatten() for part in parts]).norm()))
    return sizes[0] / sizes[1]


def _verdict(report: Report) -> None:
    """What a reader may take from the table, by bars that are said."""

    def least(column: str, **wanted: Any) -> list[float]:
        rows = [row for row in report.rows if all(row[name] == value for name, value in wanted.items())]
        return [row[column] for row in rows]

    for block in ("energy_cross", "energy_self"):
        own = {"block": block, "gradient": "ep symmetric", "beta": 0.01}
        for dtype, bar in (("float64", 5e-5), ("float32", 1e-3)):
            [error], [control] = (least(c, **own, dtype=dtype) for c in ("relative_error", "control"))
            right = error <= bar and control <= CONTROL_LIMIT
            report.verdict(
                right,
                f"{block} {dtype}, symmetric at beta 0.01: relative error {error:.1e} (bar {bar:g}), without "
                f"a force {control:.1e} of it (bar {CONTROL_LIMIT:g})",
            )
    void = [row for row in report.rows if row.get("control", 0.0) > CONTROL_LIMIT]
    for row in void:
        report.note(
            f"void: {row['block']} {row['gradient']} beta {row['beta']} {row['dtype']}: without a force "
            f"{row['control']:.1e} of it is still there"
        )
    biased = least("relative_error", block="plain", gradient="ep_vf", dtype="float64")
    report.verdict(
        min(biased) > 0.05 and max(biased) / min(biased) < 1.01,
        f"the vector field's estimate is biased at any beta: {min(biased):.3f} to {max(biased):.3f}",
    )
    worst = max(value for name, value in report.facts.items() if name.startswith("differences"))
    report.verdict(worst <= 1e-5, f"the reference agrees with differences of the loss to {worst:.1e}")

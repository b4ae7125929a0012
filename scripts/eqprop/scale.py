"""Experiment 3: what size costs. And the scaling laws: what is a law among it, and what is not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lib.config import Config
from models.looped.model import LoopedTransformer
from scripts.eqprop.cost import fixed, peak_bytes, step_seconds
from scripts.eqprop.report import Report
from scripts.eqprop.subject import (
    REFERENCE,
    Agreement,
    Setting,
    batch_of,
    core_gradient,
    in_precision,
    model_of,
    settling,
)
from scripts.eqprop.training import train_once
from train.training_data import Subject

WIDTHS = (32, 64, 128, 256, 512)  # up to the configured one
LAW_WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
FEWEST_WIDTHS = 6  # for a law of two parameters and a variance
WIDE = 128  # from which a gradient may take less
ROWS = 64
ITERATIONS = (5, 10, 20, 50)
BETAS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
COLUMNS = (
    "width", "layers", "gradient", "ms_fixed", "over_bptt", "ms_settled", "over_bptt_settled", "peak_mib",
    "iterations", "accuracy",
)  # fmt: skip
LAW_COLUMNS = ("width", "block", "iterations", "unsettled", "best_beta", "best_error", "peak_mib")


def run(setting: Setting) -> Report:
    config = setting.config()
    subject = setting.subject(config)
    report = Report("3", "What does size cost?", setting, subject, COLUMNS)
    report.note(f"{ROWS} samples, processor time of one thread's gradient (median); fixed: 20 iterations in")
    report.note("every phase; settled: as many as the tolerance wants. At the initial weights.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for width in widths(WIDTHS, config, quick=setting.quick):
        _cost(width, config, subject, report)
    torch.set_num_threads(threads)
    for layers in (1, 2) if setting.quick else (1, 2, 3, 4):
        trained = train_once(setting, seed=1, symbols={"LOOPED_LAYERS": str(layers)})
        own = {
            "width": config.model_options["width"],
            "layers": layers,
            "gradient": config.model_options["gradient"],
            "accuracy": trained.accuracy,
        }
        report.row(own | {"iterations": trained.last["iterations"]})
    _verdicts(report)
    return report


def _verdicts(report: Report) -> None:
    for row in report.rows:
        if row["gradient"] != "ep" or "over_bptt" not in row:
            continue
        wide = row["width"] >= WIDE
        bar = 1.3 if wide else 1.5
        report.verdict(
            row["over_bptt"] <= bar,
            f"width {row['width']}: a gradient by equilibrium propagation takes {row['over_bptt']:.2f} of "
            f"the time of backpropagation through as many iterations (bar {bar})",
        )
        if wide:
            report.verdict(
                row["over_bptt_settled"] <= 1.0,
                f"width {row['width']}: and {row['over_bptt_settled']:.2f} of it to the tolerance (bar 1)",
            )


def widths(known: Sequence[int], config: Config, *, quick: bool) -> list[int]:
    """Those up to the configured one, and at least two."""
    most = max(int(config.model_options["width"]), known[1])  # type: ignore[arg-type]
    found = [width for width in known if width <= most]
    return found[:2] if quick else found


def sized(width: int) -> dict[str, int]:
    return {"width": width, "hidden": 4 * width}


def _cost(width: int, config: Config, subject: Subject, report: Report) -> None:
    gradients = ("bptt", "ep", "implicit", "one_step")
    models = [
        fixed(config, subject, iterations=20, gradient=gradient, **sized(width)) for gradient in gradients
    ]
    settled = [model_of(config, subject, seed=1, gradient=gradient, **sized(width)) for gradient in gradients]
    seconds = step_seconds(models, subject, rows=ROWS)
    free_seconds = step_seconds(settled, subject, rows=ROWS)
    for gradient, model, free, own, free_own in zip(
        gradients, models, settled, seconds, free_seconds, strict=True
    ):
        report.row(
            {
                "width": width, "layers": 1, "gradient": gradient, "ms_fixed": 1000 * own,
                "over_bptt": own / seconds[0], "ms_settled": 1000 * free_own,
                "over_bptt_settled": free_own / free_seconds[0],
                "peak_mib": peak_bytes(model, subject, rows=ROWS) / 2**20,
                "iterations": settling(free)["iterations"],
            }
        )  # fmt: skip


def laws(setting: Setting) -> Report:
    config = setting.config()
    subject = setting.subject(config)
    report = Report("scaling_laws", "What grows with what?", setting, subject, LAW_COLUMNS)
    report.note(f"At the initial weights, {ROWS} samples, matrices within the bound of the configuration.")
    found = widths(LAW_WIDTHS, config, quick=setting.quick)
    for block in ("energy_cross", "energy_self", "plain"):
        counts = [_at_width(width, block, config, subject, report) for width in found]
        _law_of_iterations(block, found, counts, report)
    _law_of_memory(config, subject, report)
    return report


def _at_width(width: int, block: str, config: Config, subject: Subject, report: Report) -> float:
    """A row of the table; the mean number of iterations to the tolerance."""
    changes: dict[str, Any] = {"block": block, **sized(width), "max_iterations": 500}
    changes["step_size"] = 1.0 if block == "energy_cross" else 0.9
    gradient = "implicit" if block == "plain" else "ep"
    model = model_of(config, subject, seed=1, **changes, gradient=gradient)
    inputs, _ = batch_of(subject, rows=ROWS)
    with torch.no_grad():
        model(inputs)
    row: dict[str, Any] = {"width": width, "block": block, **settling(model)}
    if block != "plain":
        row["best_beta"], row["best_error"] = _best_beta(changes, config, subject)
        row["peak_mib"] = peak_bytes(model, subject, rows=ROWS) / 2**20
    report.row(row)
    return float(row["iterations"])


def _best_beta(changes: dict[str, Any], config: Config, subject: Subject) -> tuple[float, float]:
    """Which beta has the smallest error in single precision, and that error."""
    inputs, targets = batch_of(subject, rows=8, dtype=torch.float64)
    reference = model_of(config, subject, seed=1, **{**changes, **REFERENCE}).double()
    exact = core_gradient(reference, inputs, targets)
    errors = []
    for beta in BETAS:
        model = model_of(config, subject, seed=1, **changes, gradient="ep", beta=beta)
        found = core_gradient(model, in_precision(inputs, torch.float32), targets)
        errors.append((Agreement.between(found, exact).relative_error, beta))
    error, beta = min(errors)
    return beta, error


def _law_of_iterations(block: str, sizes: Sequence[int], counts: Sequence[float], report: Report) -> None:
    change = max(counts) / min(counts) - 1
    if len(sizes) < FEWEST_WIDTHS:
        report.note(f"{block}: {len(sizes)} widths are too few for a law; iterations differ by {change:.0%}")
        return
    criteria = information_criteria(sizes, counts)
    told = ", ".join(f"{name} {value:.1f}" for name, value in criteria.items())
    best = min(criteria, key=lambda name: criteria[name])
    report.facts |= {f"AICc {block} {name}": value for name, value in criteria.items()}
    report.note(f"{block}: iterations differ by {change:.0%} over the widths; AICc: {told}; least: {best}")
    logarithm = criteria["logarithm"] + 2 < criteria["constant"]
    report.verdict(
        logarithm, f"{block}: T ~ log d describes it better than a constant (hypothesis of document 000)"
    )


def information_criteria(sizes: Sequence[int], values: Sequence[float]) -> dict[str, float]:
    """Akaike's criterion, corrected for few values: a constant, a line in log size, or a power of size.

    Smaller is better.
    """
    log_sizes, found = np.log(np.array(sizes, float)), np.array(values, float)
    residuals = {"constant": found - found.mean()}
    residuals["logarithm"] = found - np.polyval(np.polyfit(log_sizes, found, 1), log_sizes)
    residuals["power"] = found - np.exp(np.polyval(np.polyfit(log_sizes, np.log(found), 1), log_sizes))
    # A fit through all points but for rounding would be infinitely good: counts are known to a hundredth.
    squares = {name: max(float(np.mean(own**2)), 1e-4) for name, own in residuals.items()}
    free = {"constant": 2, "logarithm": 3, "power": 3}  # with the variance
    count = len(values)
    penalty = {name: 2 * k + 2 * k * (k + 1) / (count - k - 1) for name, k in free.items()}
    return {name: count * math.log(squares[name]) + penalty[name] for name in residuals}


def _law_of_memory(config: Config, subject: Subject, report: Report) -> None:
    """Bytes against the number of iterations."""
    peaks: dict[str, list[int]] = {}
    for gradient in ("ep", "implicit", "bptt"):
        models: list[LoopedTransformer] = [
            fixed(config, subject, iterations=count, gradient=gradient) for count in ITERATIONS
        ]
        peaks[gradient] = [peak_bytes(model, subject, rows=ROWS) for model in models]
        told = ", ".join(
            f"{count}: {peak / 2**20:.2f}" for count, peak in zip(ITERATIONS, peaks[gradient], strict=True)
        )
        report.note(f"peak MiB of {gradient} by iterations: {told}")
        report.series += [
            {"gradient": gradient, "iterations": count, "peak_bytes": peak}
            for count, peak in zip(ITERATIONS, peaks[gradient], strict=True)
        ]
    alone = peak_bytes(fixed(config, subject, iterations=5), subject, rows=ROWS, train=False)
    report.verdict(
        len(set(peaks["ep"])) == 1,
        "memory of equilibrium propagation does not depend on iterations, to the byte",
    )
    report.verdict(
        peaks["ep"][0] <= 1.25 * alone, f"it is {peaks['ep'][0] / alone:.2f} of that of inference (bar 1.25)"
    )
    slope = statistics.linear_regression(ITERATIONS, peaks["bptt"])
    fit = statistics.correlation(ITERATIONS, peaks["bptt"]) ** 2
    report.verdict(
        fit > 0.999,
        f"that of backpropagation grows by {slope.slope / 2**20:.3f} MiB an iteration (R^2 {fit:.5f})",
    )

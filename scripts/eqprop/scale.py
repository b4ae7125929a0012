"""Experiment 3: time and memory of a gradient by model size, and the scaling laws among them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lib.config import Config
from lib.memory.live import LiveBytes
from models.looped.model import LoopedTransformer
from scripts.eqprop.report import Report
from scripts.eqprop.setting import (
    REFERENCE,
    Agreement,
    Setting,
    batch_of,
    convergence,
    core_gradient,
    in_precision,
    loss_of,
    model_of,
)
from scripts.eqprop.training import train_once
from train.training_data import TrainingData

WIDTHS = (32, 64, 128, 256, 512)  # up to the configured one
LAW_WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
MIN_WIDTHS = 6  # for a law of two parameters and a variance
WIDE = 128  # widths from here on have a stricter bar
ROWS = 64
REPEATS = 5
NEVER_SETTLES = 1e-30  # tolerance at which all iterations are made
ITERATIONS = (5, 10, 20, 50)
BETAS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
COLUMNS = (
    "width", "layers", "gradient", "ms_fixed", "over_bptt", "ms_settled", "over_bptt_settled", "peak_mib",
    "iterations", "accuracy",
)  # fmt: skip
LAW_COLUMNS = ("width", "block", "iterations", "unsettled", "best_beta", "best_error", "peak_mib")


def run(setting: Setting) -> Report:
    """Measure time, memory and iterations of a gradient by width, and accuracy by number of layers."""
    config = setting.config()
    data = setting.data(config)
    report = Report("3", "What does size cost?", setting, data, COLUMNS)
    report.note(f"{ROWS} samples, processor time of one thread's gradient (median); fixed: 20 iterations in")
    report.note("every phase; settled: as many as the tolerance wants. At the initial weights.")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for width in widths(WIDTHS, config, quick=setting.quick):
        _cost(width, config, data, report)
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
    """Return the widths up to the configured one, at least two."""
    widest = max(int(config.model_options["width"]), known[1])  # type: ignore[arg-type]
    chosen = [width for width in known if width <= widest]
    return chosen[:2] if quick else chosen


def sized(width: int) -> dict[str, int]:
    """Return the options of a model of that width."""
    return {"width": width, "hidden": 4 * width}


def _cost(width: int, config: Config, data: TrainingData, report: Report) -> None:
    gradients = ("bptt", "ep", "implicit", "one_step")
    models = [fixed(config, data, iterations=20, gradient=gradient, **sized(width)) for gradient in gradients]
    settled = [model_of(config, data, seed=1, gradient=gradient, **sized(width)) for gradient in gradients]
    seconds = step_seconds(models, data, rows=ROWS)
    free_seconds = step_seconds(settled, data, rows=ROWS)
    for gradient, model, free, own, free_own in zip(
        gradients, models, settled, seconds, free_seconds, strict=True
    ):
        report.row(
            {
                "width": width, "layers": 1, "gradient": gradient, "ms_fixed": 1000 * own,
                "over_bptt": own / seconds[0], "ms_settled": 1000 * free_own,
                "over_bptt_settled": free_own / free_seconds[0],
                "peak_mib": peak_bytes(model, data, rows=ROWS) / 2**20,
                "iterations": convergence(free)["iterations"],
            }
        )  # fmt: skip


def laws(setting: Setting) -> Report:
    """Fit iterations by width and memory by iterations, at the initial weights."""
    config = setting.config()
    data = setting.data(config)
    report = Report("scaling_laws", "What grows with what?", setting, data, LAW_COLUMNS)
    report.note(f"At the initial weights, {ROWS} samples, matrices within the bound of the configuration.")
    found = widths(LAW_WIDTHS, config, quick=setting.quick)
    for block in ("energy_cross", "energy_self", "plain"):
        counts = [_at_width(width, block, config, data, report) for width in found]
        _law_of_iterations(block, found, counts, report)
    _law_of_memory(config, data, report)
    return report


def _at_width(width: int, block: str, config: Config, data: TrainingData, report: Report) -> float:
    """Add a row to the table and return the mean number of iterations to the tolerance."""
    changes: dict[str, Any] = {"block": block, **sized(width), "max_iterations": 500}
    changes["step_size"] = 1.0 if block == "energy_cross" else 0.9
    gradient = "implicit" if block == "plain" else "ep"
    model = model_of(config, data, seed=1, **changes, gradient=gradient)
    inputs, _ = batch_of(data, rows=ROWS)
    with torch.no_grad():
        model(inputs)
    row: dict[str, Any] = {"width": width, "block": block, **convergence(model)}
    if block != "plain":
        row["best_beta"], row["best_error"] = _best_beta(changes, config, data)
        row["peak_mib"] = peak_bytes(model, data, rows=ROWS) / 2**20
    report.row(row)
    return float(row["iterations"])


def _best_beta(changes: dict[str, Any], config: Config, data: TrainingData) -> tuple[float, float]:
    """Return the beta with the smallest error in single precision, and that error."""
    inputs, targets = batch_of(data, rows=8, dtype=torch.float64)
    reference = model_of(config, data, seed=1, **{**changes, **REFERENCE}).double()
    exact = core_gradient(reference, inputs, targets)
    errors = []
    for beta in BETAS:
        model = model_of(config, data, seed=1, **changes, gradient="ep", beta=beta)
        found = core_gradient(model, in_precision(inputs, torch.float32), targets)
        errors.append((Agreement.between(found, exact).relative_error, beta))
    error, beta = min(errors)
    return beta, error


def _law_of_iterations(block: str, sizes: Sequence[int], counts: Sequence[float], report: Report) -> None:
    change = max(counts) / min(counts) - 1
    if len(sizes) < MIN_WIDTHS:
        report.note(f"{block}: {len(sizes)} widths are too few for a law; iterations differ by {change:.0%}")
        return
    criteria = information_criteria(sizes, counts)
    listed = ", ".join(f"{name} {value:.1f}" for name, value in criteria.items())
    best = min(criteria, key=lambda name: criteria[name])
    report.facts |= {f"AICc {block} {name}": value for name, value in criteria.items()}
    report.note(f"{block}: iterations differ by {change:.0%} over the widths; AICc: {listed}; least: {best}")
    logarithm = criteria["logarithm"] + 2 < criteria["constant"]
    report.verdict(logarithm, f"{block}: T ~ log d describes it better than a constant (the hypothesis)")


def information_criteria(sizes: Sequence[int], values: Sequence[float]) -> dict[str, float]:
    """Return the corrected Akaike criterion (AICc) of a constant, a line in log size and a power of size."""
    log_sizes, found = np.log(np.array(sizes, float)), np.array(values, float)
    residuals = {"constant": found - found.mean()}
    residuals["logarithm"] = found - np.polyval(np.polyfit(log_sizes, found, 1), log_sizes)
    residuals["power"] = found - np.exp(np.polyval(np.polyfit(log_sizes, np.log(found), 1), log_sizes))
    # Counts are known to a hundredth: a fit through all points must not be infinitely good.
    squares = {name: max(float(np.mean(own**2)), 1e-4) for name, own in residuals.items()}
    free = {"constant": 2, "logarithm": 3, "power": 3}  # with the variance
    count = len(values)
    penalty = {name: 2 * k + 2 * k * (k + 1) / (count - k - 1) for name, k in free.items()}
    return {name: count * math.log(squares[name]) + penalty[name] for name in residuals}


def _law_of_memory(config: Config, data: TrainingData, report: Report) -> None:
    """Report peak memory against the number of iterations."""
    peaks: dict[str, list[int]] = {}
    for gradient in ("ep", "implicit", "bptt"):
        models = [fixed(config, data, iterations=count, gradient=gradient) for count in ITERATIONS]
        peaks[gradient] = [peak_bytes(model, data, rows=ROWS) for model in models]
        pairs = list(zip(ITERATIONS, peaks[gradient], strict=True))
        listed = ", ".join(f"{count}: {peak / 2**20:.2f}" for count, peak in pairs)
        report.note(f"peak MiB of {gradient} by iterations: {listed}")
        report.series += [{"gradient": gradient, "iterations": n, "peak_bytes": peak} for n, peak in pairs]
    alone = peak_bytes(fixed(config, data, iterations=5), data, rows=ROWS, train=False)
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


def step_seconds(models: Sequence[LoopedTransformer], data: TrainingData, *, rows: int) -> list[float]:
    """Return the median CPU time of a gradient of each model over REPEATS interleaved rounds.

    CPU time, because wall time would depend on other programs.
    """
    inputs, targets = batch_of(data, rows=rows)
    seconds: list[list[float]] = [[] for _ in models]
    for round_number in range(REPEATS + 1):
        for model, times in zip(models, seconds, strict=True):
            started = time.process_time()
            loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
            if round_number:  # the first round warms up
                times.append(time.process_time() - started)
    return [statistics.median(times) for times in seconds]


def peak_bytes(model: LoopedTransformer, data: TrainingData, *, rows: int, train: bool = True) -> int:
    """Return the peak bytes of tensors besides the weights during a gradient, or an evaluation."""
    inputs, targets = batch_of(data, rows=rows)
    with LiveBytes() as live, torch.set_grad_enabled(train):
        loss = loss_of(model, inputs, targets)
        if train:
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
    model.zero_grad(set_to_none=True)
    return live.trace().peak_bytes  # type: ignore[no-any-return]


def fixed(config: Config, data: TrainingData, *, iterations: int, **changes: Any) -> LoopedTransformer:
    """Build a model that makes exactly `iterations` in every phase, free or nudged."""
    options = {"tolerance": NEVER_SETTLES, "max_iterations": iterations, "nudged_iterations": iterations}
    return model_of(config, data, seed=1, **{**options, **changes})

"""Experiment 4: iterations by difficulty of a sample, and accuracy with few iterations."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lib.errors import Diverged
from models.looped.model import LoopedTransformer
from scripts.eqprop.report import Report
from scripts.eqprop.setting import Setting, batch_of, with_options
from scripts.eqprop.training import trained_model

ROWS = 1000
MAX_ITERATIONS = 300
BUDGETS = (1, 2, 3, 5, 8, 12, 20, 50)
SIGNIFICANCE = 0.05
COLUMNS = ("way", "samples", "q05", "q50", "q95", "most", "unsettled", "spearman", "p")
# The comparison is a deep equilibrium model: an ordinary layer trained by implicit differentiation.
METHODS = {  # options of the gradient and of the block, and LOOPED_STEP_SIZE
    "ep, keys from input": ("LOOPED_GRADIENT_EP", "LOOPED_BLOCK_ENERGY_CROSS", "1.0"),
    "ep, keys from states": ("LOOPED_GRADIENT_EP", "LOOPED_BLOCK_ENERGY_SELF", "0.9"),
    "plain, implicit": ("LOOPED_GRADIENT_IMPLICIT", "LOOPED_BLOCK_PLAIN", "0.9"),
}


def run(setting: Setting) -> Report:
    """Correlate iterations with margins for three methods."""
    report = Report("4", "Do hard samples take more iterations?", setting, COLUMNS)
    data = report.data
    for way, (gradient, block, step_size) in METHODS.items():
        symbols = {gradient: "y", block: "y", "LOOPED_STEP_SIZE": step_size}
        try:
            config, model = trained_model(setting, seed=1, symbols=symbols)
        except Diverged as error:  # the other methods still run
            report.note(f"{way}: not measured, for {error}")
            continue
        inputs, targets = batch_of(data, rows=min(ROWS, data.dataset.test.size))
        patient = with_options(model, config, data, max_iterations=MAX_ITERATIONS, tolerance=1e-5)
        iterations, margins, unsettled = per_sample(patient, inputs, targets)
        correlation, p = spearman(iterations, margins)
        quantiles = np.quantile(iterations, (0.05, 0.5, 0.95, 1.0))
        report.row(
            {"way": way, "samples": len(iterations), "unsettled": unsettled, "spearman": correlation, "p": p}
            | dict(zip(("q05", "q50", "q95", "most"), map(float, quantiles), strict=True))
        )
        report.series += [{"way": way, "iterations": int(count)} for count in iterations]
        accuracies = {}
        for budget in BUDGETS:
            hasty = with_options(model, config, data, max_iterations=budget)
            with torch.no_grad():
                accuracies[budget] = float((hasty(inputs).argmax(dim=1) == targets).double().mean())
        report.series += [{"way": way, "budget": k, "accuracy": v} for k, v in accuracies.items()]
        listed = ", ".join(f"{k}: {v:.4f}" for k, v in accuracies.items())
        report.note(f"{way}, accuracy by most iterations: {listed}")
        text = f"{way}: a smaller margin means more iterations (Spearman {correlation:+.3f}, p {p:.2g})"
        if unsettled > 0.01:
            text += f"; {unsettled:.1%} never settled, so that the count is cut off"
        report.verdict(p < SIGNIFICANCE and correlation < 0, text)
    return report


@torch.no_grad()
def per_sample(
    model: LoopedTransformer, inputs: Tensor, targets: Tensor
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
    """Return the iterations of each sample's slowest token, its margin, and the share that did not converge.

    Padding does not count.
    """
    logits = model(inputs)
    own = logits.gather(1, targets[:, None])[:, 0]
    others = logits.scatter(1, targets[:, None], -torch.inf).amax(dim=1)
    solutions = model.solutions()
    counts = torch.ones_like(solutions[0].iterations)
    if model.pad is not None and counts.shape[1] > 1:  # and not of whole samples
        counts = (inputs != model.pad).long()
    iterations = torch.stack([(counts * one.iterations).amax(dim=1) for one in solutions]).sum(dim=0)
    residual = torch.stack([(counts * one.residual).amax(dim=1) for one in solutions]).amax(dim=0)
    unsettled = float((residual > 1e-5).double().mean())
    return iterations.double().numpy(), (own - others).double().numpy(), unsettled


def spearman(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the rank correlation and its p-value in the normal approximation."""
    ranks = [ranks_of(values) for values in (one, other)]
    if min(float(np.std(own)) for own in ranks) == 0:
        return 0.0, 1.0  # constant values
    correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
    return correlation, math.erfc(abs(correlation) * math.sqrt((len(one) - 1) / 2))


def ranks_of(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ranks in ascending order; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: npt.NDArray[np.float64] = ends - (counts - 1) / 2
    return means[inverse]

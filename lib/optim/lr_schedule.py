"""Learning-rate schedules over the fraction of the budget that is spent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal


def batch_factor(
    scaling: Literal["none", "sqrt", "linear"], *, effective_batch: int, base_batch: int | None
) -> float:
    """Return the factor on learning rates chosen for `base_batch` when a step takes k times as many samples.

    none: 1. sqrt: sqrt(k), Malladi et al. 2022, for Adam. linear: k, Goyal et al. 2017, for SGD.
    """
    if scaling == "none":
        return 1.0
    assert base_batch is not None
    ratio = effective_batch / base_batch
    return ratio if scaling == "linear" else math.sqrt(ratio)


def warmup_fraction(
    unit: Literal["percent", "steps", "samples"],
    amount: int,
    *,
    total_steps: int | None,
    effective_batch: int,
) -> float:
    """Return the share of the budget that is warmup: 1 or more if the run ends before.

    total_steps: of the budget; None for a budget in seconds, which supports only a percentage.
    """
    if unit == "percent":
        return amount / 100
    assert total_steps is not None, "Kconfig has no such unit for a budget of seconds"
    steps = amount if unit == "steps" else amount / effective_batch
    return steps / total_steps


def learning_rate_factor(
    progress: float,
    *,
    schedule: Literal["constant", "cosine", "step", "one_cycle"],
    warmup_fraction: float,
    warmup_start: float,
    min_ratio: float | None,
    step_fractions: Sequence[float],
    gamma: float | None,
) -> float:
    """Return the factor on the peak learning rate at `progress`: rise(p) * fall(p), in [0, 1].

    progress: (s + 0.5) / total steps for the step after s others, its middle, or seconds spent /
    total seconds. Above 1 (a budget of seconds is overrun by part of a step) it counts as 1, where the
    factor may be 0. With w = warmup_fraction and q = (p - w) / (1 - w):

    rise(p) = r + (1 - r) * s(p / w) for p < w, else 1; r = warmup_start, s(x) = x, or
    (1 - cos(pi x)) / 2 in one_cycle.
    fall(p) = min_ratio + (1 - min_ratio) * (1 + cos(pi q)) / 2 for p > w (cosine, one_cycle);
    gamma ** (number of step_fractions <= p) (step); else 1.

    min_ratio and gamma are None if the schedule does not use them. If w >= 1 there is no fall.
    """
    assert progress >= 0 and warmup_fraction >= 0
    progress = min(progress, 1.0)
    rise = 1.0
    if progress < warmup_fraction:
        climbed = progress / warmup_fraction
        if schedule == "one_cycle":
            climbed = (1 - math.cos(math.pi * climbed)) / 2
        rise = warmup_start + (1 - warmup_start) * climbed
    fall = 1.0
    if schedule == "step":
        assert gamma is not None
        fall = math.prod([gamma for fraction in step_fractions if fraction <= progress])
    elif schedule != "constant" and progress > warmup_fraction:
        assert min_ratio is not None
        spent = (progress - warmup_fraction) / (1 - warmup_fraction)
        fall = min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * spent)) / 2
    return rise * fall

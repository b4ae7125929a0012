"""The verdicts of the experiments, by figures that a test makes up: none of them always holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.eqprop import adaptive, gradients, scale, training
from scripts.eqprop.report import Report
from scripts.eqprop.setting import Setting
from tests.models.looped.small import batch, looped
from tests.scripts.eqprop.test_eqprop import Small, resolved


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Small(resolved=resolved(), quick=True, out=tmp_path, log=lambda _: None)


class Noted(Report):
    """A report of what a test says was found."""

    def __init__(self, number: str, setting: Setting) -> None:
        super().__init__(number, "?", setting, ("way", "seed", "accuracy"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ep", "implicit", "frozen", "held"),
    [
        ([0.96, 0.95, 0.94], [0.96, 0.96, 0.96], [0.80, 0.85, 0.90], [True, True, True]),
        ([0.94, 0.95, 0.95], [0.95, 0.96, 0.97], [0.80, 0.85, 0.90], [False, False, False]),
        ([0.99, 0.99, 0.99], [0.97, 0.98, 0.97], [0.89, 0.89, 0.90], [True, False, False]),
        ([0.99, 0.99, np.nan], [0.99, 0.99, 0.99], [0.80, 0.80, 0.80], [False, False, False]),
    ],
)
def test_what_is_held_to_the_bars(
    ep: list[float], implicit: list[float], frozen: list[float], held: list[bool], setting: Setting
) -> None:
    report = Noted("2", setting)
    training._verdicts(report, {"ep": ep, "implicit": implicit, "frozen core": frozen})
    assert [passed for passed, _ in report.passed] == held
    assert all("(3 seeds)" in text and "a look" not in text for _, text in report.passed)


@pytest.mark.slow
def test_time_is_held_to_the_bar_of_its_width(setting: Setting) -> None:
    report = Noted("3", setting)
    for width, fixed, settled in ((32, 1.4, 9.0), (32, 1.6, 1.0), (128, 1.4, 1.1), (128, 1.2, 0.9)):
        own = {"width": width, "over_bptt": fixed, "over_bptt_settled": settled}
        report.rows += [{"gradient": "ep", **own}, {"gradient": "implicit", **own}]
    report.rows.append({"width": 128, "gradient": "ep", "accuracy": 0.5})
    scale._verdicts(report)
    assert [passed for passed, _ in report.passed] == [True, False, False, False, True, True]


def gradients_found(setting: Setting, **changes: float) -> Report:
    """What experiment 1 finds where all is well, with changes."""
    error = {"one_sided": 0.0, "symmetric": 0.0, "four_point": 0.0, "single": 1e-5, "control": 0.0}
    error |= {"loss": 1e-6, "adjoint": 1e-6, "power": 2.0, "differences": 1e-7, "vf": 0.2} | changes
    report = Noted("1", setting)
    for block in ("energy_cross", "energy_self"):
        report.facts |= {
            f"force of the loss {block}": error["loss"],
            f"differences {block}": error["differences"],
        }
        for nudge, power in gradients.NUDGES.items():
            own = {"block": block, "gradient": f"ep {nudge}"}
            for beta in gradients.SLOPE_BETAS:
                exact = {"dtype": "float64", "beta": beta, "relative_error": beta ** (power + error[nudge])}
                report.rows.append({**own, **exact, "control": 0.0})
        single = {"dtype": "float32", "beta": 0.01, "relative_error": error["single"]}
        report.rows.append(
            {"block": block, "gradient": "ep symmetric", **single, "control": error["control"]}
        )
    for gradient, errors in (
        ("ep_vf", (0.2, error["vf"])),
        ("ep_adjoint", (error["adjoint"] * 10 ** error["power"], error["adjoint"])),
    ):
        for each in errors:
            own = {"block": "plain", "gradient": gradient, "dtype": "float64", "beta": 0.01}
            report.rows.append({**own, "relative_error": each})
    gradients._verdict(report)
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"loss": 1.1e-5}, [0, 3]),
        ({"four_point": -0.2}, [1, 4]),
        ({"one_sided": 0.2}, [1, 4]),
        ({"single": 2e-3}, [2, 5]),
        ({"control": 2e-3}, [2, 5]),
        ({"vf": 0.3}, [6]),
        ({"adjoint": 2e-4}, [7]),
        ({"power": 1.8}, [7]),
        ({"differences": 2e-5}, [8]),
    ],
)
def test_gradients_are_held_to_the_bars(
    changes: dict[str, float], failing: list[int], setting: Setting
) -> None:
    report = gradients_found(setting, **changes)
    assert [number for number, (passed, _) in enumerate(report.passed) if not passed] == failing
    assert sum(line.startswith("void: ") for line in report.lines) == (2 if "control" in changes else 0)


@pytest.mark.slow
def test_a_law_must_beat_a_constant(setting: Setting) -> None:
    sizes, report = [32, 48, 64, 96, 128, 192, 256], Noted("scaling_laws", setting)
    random = np.random.default_rng(1).normal(scale=0.2, size=7)
    for counts in (5 * np.log(sizes) + random, 20 + random):
        scale._law_of_iterations("plain", sizes, list(counts), report)
    assert [passed for passed, _ in report.passed] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ep", "bptt", "held"),
    [
        ([100, 100, 100, 100], [50, 100, 200, 500], [True, True, True]),
        ([130, 130, 130, 130], [50, 100, 200, 500], [True, False, True]),
        ([100, 100, 100, 101], [50, 100, 100, 100], [False, True, False]),
    ],
)
def test_memory_is_held_to_the_bars(
    ep: list[int], bptt: list[int], held: list[bool], setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([*ep, 1, 1, 1, 1, *bptt, 100])
    monkeypatch.setattr(scale, "fixed", lambda *_, **__: None)
    monkeypatch.setattr(scale, "peak_bytes", lambda *_, **__: next(peaks))
    report = Noted("scaling_laws", setting)
    scale._law_of_memory(report)
    assert [passed for passed, _ in report.passed] == held


def test_iterations_are_counted_for_each_sample() -> None:
    model, (inputs, targets) = looped(step_size=0.9), batch(dtype=torch.float32)
    inputs[2] *= 30  # settles at another pace
    counts, margins, unsettled = adaptive.per_sample(model, inputs, targets)
    alone: list[Any] = [adaptive.per_sample(model, inputs[row, None], targets[row, None]) for row in range(3)]
    assert counts.tolist() == [one[0].item() for one in alone] and len(set(counts.tolist())) > 1
    assert margins == pytest.approx([one[1].item() for one in alone], abs=1e-5) and unsettled == 0

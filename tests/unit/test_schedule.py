"""Learning-rate schedules: ends, direction, no jumps where there should be none."""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.schedule import FIRST_RATIO, batch_factor, learning_rate_factor
from tests.puzzles import puzzle_subject, small_trm_config
from tests.training import MemoryRecord, small_job, small_plan

NAMES = ("constant", "cosine", "step", "one_cycle")
GRID = [i / 1000 for i in range(1001)]


def factor(progress: float, schedule: Any, **changes: Any) -> float:
    asked: dict[str, Any] = {
        "warmup_fraction": 0.2, "min_ratio": 0.1, "step_fractions": (0.5, 0.75), "gamma": 0.3
    }  # fmt: skip
    if schedule not in ("cosine", "one_cycle"):
        asked["min_ratio"] = None
    if schedule != "step":
        asked |= {"step_fractions": (), "gamma": None}
    return learning_rate_factor(progress, schedule=schedule, **asked | changes)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_step_is_small_but_a_step_and_the_warm_up_ends_at_the_peak(name: str) -> None:
    assert factor(0.0, name) == FIRST_RATIO > 0
    assert factor(0.2, name) == 1.0
    assert factor(0.2 - 1e-9, name) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_without_warm_up_the_peak_comes_first(name: str) -> None:
    assert factor(0.0, name, warmup_fraction=0.0) == 1.0


@pytest.mark.parametrize(
    ("name", "end"), [("constant", 1.0), ("cosine", 0.1), ("step", 0.09), ("one_cycle", 0.1)]
)
def test_the_end(name: str, end: float) -> None:
    assert factor(1.0, name) == pytest.approx(end, abs=1e-15)
    assert factor(1.01, name) == factor(1.0, name), "a budget of seconds may be overrun"


@pytest.mark.parametrize("name", NAMES)
def test_it_rises_in_the_warm_up_and_never_after_it(name: str) -> None:
    rise = [factor(p, name) for p in GRID if p <= 0.2]
    fall = [factor(p, name) for p in GRID if p >= 0.2]
    assert all(a < b for a, b in itertools.pairwise(rise))
    assert all(a >= b for a, b in itertools.pairwise(fall))


@pytest.mark.parametrize("name", ["constant", "cosine", "one_cycle"])
def test_it_has_no_jumps(name: str) -> None:
    values = [factor(p, name) for p in GRID]
    assert max(abs(a - b) for a, b in itertools.pairwise(values)) < 0.01


def test_step_jumps_at_its_fractions_and_nowhere_else() -> None:
    assert factor(0.5 - 1e-12, "step") == 1.0
    assert factor(0.5, "step") == pytest.approx(0.3)
    assert factor(0.75 - 1e-12, "step") == pytest.approx(0.3)
    assert factor(0.75, "step") == pytest.approx(0.09)
    assert len({factor(p, "step") for p in GRID if p >= 0.2}) == 3


def test_shapes_half_way() -> None:
    assert factor(0.6, "cosine") == pytest.approx(0.1 + 0.9 / 2)
    assert factor(0.4, "cosine") == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert factor(0.05, "cosine") == pytest.approx(FIRST_RATIO + (1 - FIRST_RATIO) * 0.25), "a straight line"
    quarter = (1 - math.cos(math.pi / 4)) / 2
    assert factor(0.05, "one_cycle") == pytest.approx(FIRST_RATIO + (1 - FIRST_RATIO) * quarter), "a cosine"


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 0.9), st.sampled_from(NAMES))
def test_before_the_end_it_is_above_0_and_at_most_1(progress: float, warmup: float, name: str) -> None:
    changes = {"min_ratio": 1e-9} if name in ("cosine", "one_cycle") else {}
    assert 0 < factor(progress, name, warmup_fraction=warmup, **changes) <= 1


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_rates_follow_the_batch_as_asked(scaling: Literal["none", "sqrt", "linear"], factor: float) -> None:
    base = None if scaling == "none" else 192
    assert batch_factor(scaling, effective_batch=768, base_batch=base) == factor
    assert batch_factor(scaling, effective_batch=192, base_batch=base) == 1.0


def test_every_rate_of_a_job_is_scaled_and_the_run_says_so() -> None:
    settings: dict[str, Any] = {"optimizer": "adam_atan2", "sign_learning_rate": 0.2, "weight_decay": 0.5}
    settings["learning_rate"] = 0.1
    record = MemoryRecord()
    config = small_trm_config(**settings, lr_scaling="sqrt", lr_base_batch=3)
    job = small_job(config, small_plan(6, 6), puzzle_subject(config), record=record)
    assert [group["peak_lr"] for group in job.optimizer.param_groups] == [0.2, 0.4]
    told = "Learning rate 0.2: 0.1 for 3 samples, scaled (sqrt) to 12; decay in a step 0.1"
    assert told in record.said
    plain = small_trm_config(**settings)
    job = small_job(plain, small_plan(6, 6), puzzle_subject(plain))
    assert [group["peak_lr"] for group in job.optimizer.param_groups] == [0.1, 0.2]

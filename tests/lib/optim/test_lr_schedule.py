"""Learning-rate schedules: ends, direction, no jumps where there should be none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib import kconf
from lib.config import Config, config_from_values
from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.optim.lr_schedule import batch_factor, learning_rate_factor, warmup_fraction
from tests.support.training import CPU, MemoryRecord, random_data, small_config, small_job, small_plan
from train import commands, loop
from train.build import make_job
from train.job import Progress, warm_up_text
from train.planning import run_plan as orders
from train.planning.run_plan import RunRequest
from train.training_data import TrainingData

FIRST_RATIO = 0.01
NAMES = ("constant", "cosine", "step", "one_cycle")
ROOT = Path(__file__).resolve().parents[3]
GRID = [i / 1000 for i in range(1001)]


def data_of(config: Config) -> TrainingData:
    return random_data(config, shape=(1, 28, 28), train_size=48, test_size=10)


def factor(progress: float, schedule: Any, **changes: Any) -> float:
    requested: dict[str, Any] = {
        "warmup_fraction": 0.2, "warmup_start": FIRST_RATIO,
        "min_ratio": 0.1, "step_fractions": (0.5, 0.75), "gamma": 0.3,
    }  # fmt: skip
    if schedule not in ("cosine", "one_cycle"):
        requested["min_ratio"] = None
    if schedule != "step":
        requested |= {"step_fractions": (), "gamma": None}
    return learning_rate_factor(progress, schedule=schedule, **requested | changes)


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


@pytest.mark.slow
def test_every_rate_of_a_job_is_scaled_and_the_run_says_so() -> None:
    settings: dict[str, Any] = {"learning_rate": 0.1, "weight_decay": 0.5}
    record = MemoryRecord()
    config = small_config(**settings, lr_scaling="sqrt", lr_base_batch=3)
    job = small_job(config, small_plan(6, 6), data_of(config), record=record)
    assert [group["peak_lr"] for group in job.optimizer.param_groups] == [0.2, 0.2]
    told = "Learning rate 0.2: 0.1 for 3 samples, scaled (sqrt) to 12; decay in a step 0.1"
    assert told in record.said
    plain = small_config(**settings)
    job = small_job(plain, small_plan(6, 6), data_of(plain))
    assert [group["peak_lr"] for group in job.optimizer.param_groups] == [0.1, 0.1]


def test_a_warm_up_in_steps_or_samples_is_a_share_of_the_run() -> None:
    run = {"total_steps": 700, "effective_batch": 48}
    assert warmup_fraction("percent", 3, **run) == 0.03
    assert warmup_fraction("steps", 21, **run) == warmup_fraction("samples", 21 * 48, **run) == 21 / 700
    assert warmup_fraction("samples", 21 * 48, total_steps=700, effective_batch=96) == 10.5 / 700
    assert warmup_fraction("percent", 3, total_steps=None, effective_batch=48) == 0.03
    with pytest.raises(AssertionError, match="a budget of seconds"):
        warmup_fraction("steps", 3, total_steps=None, effective_batch=48)


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_up_that_is_longer_than_the_run_only_rises(name: str) -> None:
    rates = [factor(p, name, warmup_fraction=4.0, step_fractions=(), gamma=1.0) for p in GRID]
    assert all(a < b for a, b in itertools.pairwise(rates)) and rates[-1] < 0.3


def steps_to_peak(unit: str, amount: int, *, batch: int) -> int:
    """How many steps of a run of 40 are below the peak."""
    config = small_config(max_steps=40, warmup_unit=unit, **{f"warmup_{unit}": amount})
    job = small_job(config, small_plan(batch), data_of(config))
    return sum(loop.rate_factor(job, Progress(step=step)) < 1 for step in range(40))


@pytest.mark.slow
def test_samples_keep_their_meaning_when_the_batch_changes_and_steps_do_not() -> None:
    assert [steps_to_peak("samples", 48, batch=batch) for batch in (4, 8)] == [12, 6]
    assert [steps_to_peak("steps", 12, batch=batch) for batch in (4, 8)] == [12, 12]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"warmup_pct": 5}, "2 of 40 steps, 5 % of the budget"),
        ({"warmup_pct": 3}, "1 of 40 steps, 3 % of the budget"),
        ({"warmup_unit": "steps", "warmup_steps": 39}, "39 of 40 steps"),
        ({"warmup_unit": "samples", "warmup_samples": 90}, "7 of 40 steps, 90 samples in batches of 12"),
        ({"warmup_pct": 30, "max_steps": 2}, "1 of 2 steps, 30 % of the budget"),
        ({"warmup_pct": 1}, "0 of 40 steps, 1 % of the budget"),
        ({"warmup_pct": 5, "budget": "seconds", "max_seconds": 60}, "3 of 60 seconds, 5 % of the budget"),
        ({"warmup_unit": "steps", "warmup_steps": 0}, ""),
    ],
)
def test_a_run_says_how_long_its_warm_up_is(changes: Mapping[str, Any], told: str) -> None:
    config, record = small_config(**{"max_steps": 40} | changes), MemoryRecord()
    parts = config, small_plan(6, 6), data_of(config)
    make_job(*parts, hardware=CPU, backend=Backend("cpu"), record=record, whole_run=True)
    assert [line for line in record.said if "Warm-up" in line] == [f"Warm-up: {told}"] * bool(told)


@pytest.mark.parametrize(
    ("unit", "amount", "told"),
    [
        ("steps", 40, "CONFIG_WARMUP_STEPS=40 is a warm-up of 40 of 40 steps: the run ends before"),
        (
            "samples",
            999,
            "CONFIG_WARMUP_SAMPLES=999 is a warm-up of 83 of 40 steps, 999 samples in batches of 12",
        ),
    ],
)
def test_a_warm_up_that_is_longer_than_the_run_is_refused(unit: str, amount: int, told: str) -> None:
    config = small_config(max_steps=40, warmup_unit=unit, **{f"warmup_{unit}": amount})
    parts = config, small_plan(6, 6), data_of(config)
    with pytest.raises(ConfigError, match=told):
        make_job(*parts, hardware=CPU, backend=Backend("cpu"), record=MemoryRecord(), whole_run=True)
    make_job(*parts, hardware=CPU, backend=Backend("cpu"), record=MemoryRecord())  # an evaluation goes on
    with pytest.raises(ConfigError, match=told):
        warm_up_text(config, train_size=48, effective_batch=12)


def test_a_run_with_a_warm_up_without_an_end_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(max_steps=40, warmup_unit="steps", warmup_steps=40)
    monkeypatch.setattr(orders, "apply_hyperparams", lambda *_, **__: small_plan(6, 6))
    monkeypatch.setattr(commands, "open_to_train", lambda *_, **__: data_of(config))
    monkeypatch.setattr(commands, "create_run", lambda _: pytest.fail("there is a run directory"))
    request = RunRequest(
        resolved=kconf.Resolved(values={}, in_effect={}, origins={}, given={}, text="", minimal=""),
        config=config,
        root=ROOT,
        runs=ROOT / "runs",
        started=0.0,
    )
    with pytest.raises(ConfigError, match="CONFIG_WARMUP_STEPS=40 is a warm-up of 40 of 40 steps"):
        commands._plan_and_train(request)


def shipped(name: str) -> Any:
    return config_from_values(
        kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides={}).values
    )


def job_of_steps(total: int, warmup_steps: int, **changes: Any) -> Any:
    requested = {
        "warmup_unit": "steps",
        "warmup_steps": warmup_steps,
        "max_steps": total,
        "schedule": "constant",
    }
    config = small_config(**requested | changes)
    return small_job(config, small_plan(6), data_of(config))


@pytest.mark.slow
def test_a_warm_up_from_0_has_a_step_over_the_steps_of_it() -> None:
    job = job_of_steps(65_104, 2000, warmup_start_ratio=0.0)
    for step in (1, 2, 1000, 1999, 2000, 2001, 65_104):
        found = loop.rate_factor(job, Progress(step=step - 1))
        assert found == pytest.approx(min(1.0, step / 2000), rel=1e-12)
    assert loop.rate_factor(job, Progress()) == pytest.approx(0.0005)
    fall = job_of_steps(100, 10, warmup_start_ratio=0.0, schedule="cosine", lr_min_ratio=0.0)
    factors = [loop.rate_factor(fall, Progress(step=step)) for step in range(100)]
    assert factors[9] == 1.0 == max(factors) and min(factors) > 0
    assert factors[:10] == sorted(factors[:10]) and factors[9:] == sorted(factors[9:], reverse=True)


@pytest.mark.slow
def test_other_warm_ups_begin_where_they_did() -> None:
    paths = [path for path in (ROOT / "defconfigs").iterdir() if path.is_file()]
    starts = {path: shipped(path.name).lr_schedule.warmup_start_ratio for path in paths}
    others = {path for path in paths if "CONFIG_WARMUP_START_RATIO=" in path.read_text()}
    assert len(paths) > 10 and {path for path, start in starts.items() if start != 0.01} == others
    job = job_of_steps(65_104, 2000)
    for step in (0, 1, 1999, 2000):
        before = min(1.0, 0.01 + (1 - 0.01) * (((step + 0.5) / 65_104) / (2000 / 65_104)))
        assert loop.rate_factor(job, Progress(step=step)) == before, "to the bit"


def test_a_budget_of_seconds_has_no_warm_up_from_0() -> None:
    config = small_config(budget="seconds", max_seconds=60, warmup_pct=5, warmup_start_ratio=0.0)
    with pytest.raises(ConfigError, match=r"^CONFIG_WARMUP_START_RATIO=0 cannot be used with a budget of"):
        warm_up_text(config, train_size=40, effective_batch=4)


def test_the_unit_of_a_warm_up_is_chosen_and_not_for_seconds(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("CONFIG_MODEL_LENET5=y\n")

    def requested(**symbols: str) -> Any:
        overrides = {f"CONFIG_{name}": value for name, value in symbols.items()}
        return config_from_values(
            kconf.load(root=ROOT, config_file=tmp_path / "config", overrides=overrides).values
        )

    plain = requested()
    found = plain.lr_schedule
    assert (found.warmup_unit, found.warmup_pct) == ("percent", 5)
    assert (found.warmup_steps, found.warmup_samples) == (None, None)
    steps = requested(WARMUP_UNIT_STEPS="y", WARMUP_STEPS="2000")
    assert (steps.lr_schedule.warmup_unit, steps.lr_schedule.warmup_pct, steps.lr_schedule.warmup_steps) == (
        "steps",
        None,
        2000,
    )
    samples = requested(WARMUP_UNIT_SAMPLES="y", WARMUP_SAMPLES="1536000")
    assert (samples.lr_schedule.warmup_unit, samples.lr_schedule.warmup_samples) == ("samples", 1536000)
    with pytest.raises(ConfigError) as error:
        requested(WARMUP_UNIT_STEPS="y", BUDGET_SECONDS="y")
    assert "BUDGET_SECONDS" in " ".join(error.value.findings)

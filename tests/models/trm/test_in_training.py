"""The Tiny Recursive Model among the optimizers, schedules and checks of any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib import kconf
from lib.config import config_from_values
from tests.contract.test_static_graph import job_of, report_of
from tests.models.trm.puzzles import puzzle_data, small_trm_config
from tests.support.training import MemoryRecord, small_job, small_plan

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_what_follows_the_sign_is_not_averaged() -> None:
    config = small_trm_config(ema=True, ema_decay=0.5, optimizer="adam_atan2", sign_learning_rate=0.1)
    job = small_job(config, small_plan(4), puzzle_data(config))
    assert job.ema is not None
    assert set(job.ema.state_dict()) == set(dict(job.model.named_parameters())) - {"puzzle"}


@pytest.mark.slow
def test_every_rate_of_a_job_is_scaled_and_the_run_says_so() -> None:
    settings: dict[str, Any] = {"optimizer": "adam_atan2", "sign_learning_rate": 0.2, "weight_decay": 0.5}
    settings["learning_rate"] = 0.1
    record = MemoryRecord()
    config = small_trm_config(**settings, lr_scaling="sqrt", lr_base_batch=3)
    job = small_job(config, small_plan(6, 6), puzzle_data(config), record=record)
    assert [group["peak_lr"] for group in job.optimizer.param_groups] == [0.2, 0.4]
    told = "Learning rate 0.2: 0.1 for 3 samples, scaled (sqrt) to 12; decay in a step 0.1"
    assert told in record.said
    plain = small_trm_config(**settings)
    job = small_job(plain, small_plan(6, 6), puzzle_data(plain))
    assert [group["peak_lr"] for group in job.optimizer.param_groups] == [0.1, 0.2]


def test_the_published_run_warms_up_from_0() -> None:
    file = ROOT / "defconfigs" / "trm-sudoku-extreme"
    assert (
        config_from_values(kconf.load(root=ROOT, config_file=file).values).lr_schedule.warmup_start_ratio == 0
    )


@pytest.mark.slow
def test_adam_atan2_keeps_what_changes_in_tensors() -> None:
    assert report_of(job_of("trm-sudoku-extreme")).constants == 1

"""How full the memory was, and what a run advises the next start to take."""

from __future__ import annotations

from typing import Any

import pytest

from lib.plan.fitting import advised_micro_batch
from tests.support.configs import load_hardware
from tests.support.fake_backend import FakeBackend
from tests.support.training import MemoryRecord, random_data, small_config, small_job, small_plan
from train.signals import Stopped
from train.summary import report_memory

GPU = load_hardware("rtx3090")
TOTAL_BYTES = GPU.devices[0].total_bytes


@pytest.mark.parametrize(
    ("filled", "norm_batch", "expected"),
    [
        (0.95, 0, 32),  # half
        (0.90, 0, 32),  # three quarters: 48 is no divisor of 512
        (0.85, 0, 32),
        (0.80, 0, 64),
        (0.60, 0, 64),
        (0.59, 0, 64),  # there is room for 76, and 128 is the next divisor
        (0.37, 0, 128),
        (0.02, 0, 512),  # no more than the share of a step
        (0.95, 64, 64),  # batches of normalisation stay whole
        (0.37, 128, 128),
    ],
)
def test_a_micro_batch_follows_the_memory(filled: float, norm_batch: int, expected: int) -> None:
    assert advised_micro_batch(64, share=512, norm_batch=norm_batch, filled=filled) == expected


def test_what_is_too_full_is_never_raised_and_one_sample_stays() -> None:
    assert advised_micro_batch(1, share=8, norm_batch=0, filled=0.99) == 1
    assert advised_micro_batch(8, share=8, norm_batch=0, filled=0.1) == 8
    full, roomy = (
        advised_micro_batch(3, share=12, norm_batch=0, filled=filled, target=0.95) for filled in (0.7, 0.59)
    )
    assert (full, roomy) == (3, 4), "a high target raises nothing that has little room"


class Filled(FakeBackend):
    """A device whose memory was as full as that."""

    share = 0.0

    def peak_memory_bytes(self) -> int | None:
        return round(self.share * TOTAL_BYTES) if self.share else None


def told(share: float, *, stopped: bool = False, rank: int = 0, **changes: Any) -> list[str]:
    config = small_config(**{"hyper_param": "manual", "auto_method": None} | changes)
    data = random_data(config, shape=(1, 28, 28), train_size=64)
    backend = Filled(rank=rank, world=2)
    backend.share = share
    record = MemoryRecord()
    job = small_job(config, small_plan(8, 8, world=2), data, backend=backend, record=record)
    try:
        with report_memory(job, GPU):
            if stopped:
                raise Stopped(15, 3)
    except Stopped:
        assert stopped
    return [line for line in record.said if line.startswith("Memory: ")]


def test_a_run_says_what_would_use_its_memory_better() -> None:
    (line,) = told(0.3)
    assert "(30%); 16 at a time instead of 8 would use it better at the next start" in line
    assert line.endswith("CONFIG_HYPER_PARAM_MANUAL=y CONFIG_BATCH_SIZE=16 CONFIG_TARGET_EFFECTIVE_BATCH=32")
    assert told(0.3, stopped=True) == [line]
    assert told(0.7) == [told(0.7)[0].partition(";")[0]], "as it should be"
    assert told(0.3, rank=1) == told(0.0) == [], "another rank, and a device that does not count"


def test_a_prediction_stands_beside_what_was_taken() -> None:
    predicting = {"hyper_param": "auto", "auto_method": "predict"}
    (line,) = told(0.3, **predicting)
    assert line.endswith("(30%); predicted: nothing"), "the plan of this test has no memory"
    (policy,) = told(0.3, **predicting, elastic_target_util=75)
    assert "16 at a time" in policy

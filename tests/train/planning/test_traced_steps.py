"""A trace runs one micro-batch, and says what running all of them would."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

import pytest

from lib.memory.live import LiveBytes
from lib.plan.fitting import StepSettings, plan_of
from tests.support.examples import examples
from tests.support.training import CPU, CPU_TRIAL, data_of, small_config
from train.planning import traced_steps
from train.planning.memory_estimate import MemoryTrace, trace_memory

pytestmark = pytest.mark.slow

TRIAL = CPU_TRIAL
# Those of the plug-ins that learn from images, too.
IMAGE_MODELS = [name for name, example in examples().items() if not hasattr(example, "data")]
OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in IMAGE_MODELS]


def traced(config: Any, step: StepSettings, *, run_all: bool = False) -> tuple[MemoryTrace, int]:
    """Return the trace of `step`, and how many micro-batches were run for it."""
    run, training = list[None](), traced_steps._MicroBatches._training

    def counted(self: Any, *arguments: Any) -> Any:  # a mock would keep the batch
        run.append(None)
        return training(self, *arguments)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(traced_steps._MicroBatches, "_training", counted))
        if run_all:  # as where a carry is left behind
            stack.enter_context(mock.patch.object(LiveBytes, "kept_since", return_value=None))
        found = trace_memory(config, plan_of(step), data_of(config), hardware=CPU)
    return found, len(run)


@pytest.mark.parametrize(
    ("device", "precision", "accumulates"),
    [
        ("cpu", "fp32", False),
        ("cuda", "bf16", True),
        pytest.param("cpu", "fp32", True, marks=pytest.mark.long),
        pytest.param("cuda", "bf16", False, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("model", ["lenet5", "resnet18", "gpt2", "resnet_bk", *OTHERS])
def test_one_micro_batch_says_what_all_take(
    model: str, device: Any, precision: Any, accumulates: bool
) -> None:
    config = small_config(model, optimizer="adamw", data_placement="stream", grad_clip=1.0)
    norm_batch = 4 if model == "resnet18" else 0
    step = dataclasses.replace(
        TRIAL, norm_batch=norm_batch, device=device, precision=precision, accumulates=accumulates
    )
    found, ran = traced(config, step)
    assert ran == 1 or model in IMAGE_MODELS, "models of plug-ins may leave more than gradients behind"
    assert (found, 2 * (1 + accumulates)) == traced(config, step, run_all=True)


@pytest.mark.parametrize("several_devices", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("gpt2", {"grad_checkpoint": "blocks"}),
        ("gpt2", {"grad_checkpoint": "all", "ema": True, "ema_decay": 0.99}),
        ("resnet18", {"grad_checkpoint": "blocks", "freeze": "stem"}),
        ("gpt2", {"optimizer": "muon", "muon_learning_rate": 0.02}),
        ("gpt2", {"data_placement": "resident"}),
    ],
)
def test_so_it_does_whatever_else_is_done(model: str, changes: dict[str, Any], several_devices: bool) -> None:
    config = small_config(model, **{"optimizer": "sgd", "data_placement": "stream", **changes})
    step = dataclasses.replace(TRIAL, device="cuda", precision="bf16", several_devices=several_devices)
    found, ran = traced(config, step)
    assert ran == 1
    assert found == traced(config, step, run_all=True)[0]


def test_with_dropout_the_second_micro_batch_is_run() -> None:
    """Its masks take the place of those of the first."""
    config = small_config("gpt2", optimizer="adamw", data_placement="stream")
    config = config.replace(model_options={**config.model_options, "dropout": 0.1})
    found, ran = traced(config, TRIAL)
    assert ran == 2
    assert found == traced(config, TRIAL, run_all=True)[0]

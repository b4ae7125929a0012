"""Processes of one run: `ddp_worker DIRECTORY NAME WORLD [KIND MODEL...]`, DIRECTORY/NAME/RANK.pt is of each.

More parts NAME WORLD [KIND MODEL...] may follow, each after a "/": a model of several is simulated once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import ArrayPart, Column, Dataset, Spec, TableSpec
from lib.devices.base import Backend
from lib.distributed.fsdp import gathered
from lib.nn.dropout import Dropout
from lib.plan.types import SHARDS_WEIGHTS, Plan, Strategy, rank_shares
from tests.e2e.ranks import endings
from tests.support.chats import random_chats
from tests.support.examples import examples, merged
from tests.support.labels import random_table, random_tags
from tests.support.simulated import make_training_data
from tests.support.tokens import BLOCK, VOCAB, text_data
from tests.support.training import (
    ADAPTERS,
    Clock,
    MemoryRecord,
    Timed,
    clone,
    random_data,
    small_config,
    small_job,
    small_plan,
)
from train.job import Progress
from train.loop import train
from train.signals import Stopped
from train.tasks.base import Forward, Sums, Task
from train.training_data import TrainingData, built

Outcome: TypeAlias = dict[str, Any]

EFFECTIVE, TRAIN_SIZE = 23, 46  # two steps to an epoch, and unequal shares
TEST_SIZE = 37  # divided by no number of processes
STEPS = 3
SMOOTHED = {"label_smoothing": 0.1}
# Normalisation of few values amplifies rounding, at the usual learning rate of these tests to above 1e-12.
AUGMENTED = {
    "augment": "shift",
    "augment_pad": 1,
    "augment_flip_vertical": True,
    "augment_contrast": 0.3,
    "augment_erase_pct": 40,
    "augment_mixup_alpha": 0.8,
    "augment_cutmix_alpha": 1.0,
}
AVERAGED = {"ema": True, "ema_decay": 0.5, "learning_rate": 0.005}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how a process cuts its share of a step."""

    settings: dict[str, Any]
    model: str = "lenet5"
    norm_batch: int = 0
    effective: int = EFFECTIVE
    micro_batch: int = 4
    padded: bool = False  # as where programs are compiled for one shape
    dropout: float = 0.0
    counted: bool = False  # the loss is a sum over what only the device knows
    signalled: bool = False  # the last process gets a signal in its second step
    layout: dict[str, Any] = field(default_factory=dict)  # of several processes, whose other devices are one
    strategy: Strategy = "ddp"  # of several processes without `layout`
    scalars: bool = False  # a weight has no dimensions, which fully_shard refuses
    side: int = 0  # of images, where it is not the least that the model takes


CASES = {
    # Groups of four: two values would be normalised to plus and minus one, which blows rounding up.
    "ghost": Case(model="resnet18", norm_batch=4, effective=28, settings={**AVERAGED, **SMOOTHED}),
    "padded ghost": Case(
        model="resnet18",
        norm_batch=4,
        effective=28,
        micro_batch=8,
        padded=True,
        settings=AVERAGED,
    ),
    # In fp32 these steps of AdamW make rounding a difference of some thousandths in the loss.
    "ghost of large images": Case(
        model="resnet18",
        norm_batch=8,
        effective=56,
        micro_batch=8,
        side=32,
        settings={"optimizer": "adamw", "momentum": 0.0, "learning_rate": 0.03},
    ),
    "frozen ghost": Case(
        model="resnet18",
        norm_batch=4,
        effective=28,
        settings={**AVERAGED, "grad_clip": 0.05, "freeze": "stem stages.0 stages.2", "layer_decay": 0.5},
    ),
    "adapters": Case(
        micro_batch=5, padded=True, settings={**AVERAGED, **SMOOTHED, **ADAPTERS, "grad_clip": 0.05}
    ),
    "padded": Case(micro_batch=5, padded=True, settings={"grad_clip": 0.05, **SMOOTHED}),
    "ragged": Case(micro_batch=5, settings={}),
    "counted": Case(micro_batch=5, counted=True, settings={"grad_clip": 0.05}),
    "metrics": Case(
        micro_batch=5,
        settings={
            "class_weights": "1,2,3,4,5,6,7,8,9,0.5",
            "metrics": "top5_accuracy,macro_f1,calibration_error,roc_auc,average_precision",
            "best_metric": "roc_auc",
        },
    ),
    "augmented": Case(
        micro_batch=5,
        settings={**AUGMENTED, **SMOOTHED, "class_weights": "1,2,3,4,5,6,7,8,9,0.5", "grad_clip": 0.05},
    ),
    "augmented ghost": Case(
        model="resnet18",
        norm_batch=4,
        effective=28,
        micro_batch=8,
        padded=True,
        settings={
            **AVERAGED,
            **AUGMENTED,
            "augment": "resized_crop",
            "augment_crop_pct": 25,
            "augment_crop_ratio": 1.5,
            "augment_flip_horizontal": True,
            "augment_hue": 0.2,
            "augment_saturation": 0.5,
        },
    ),
    "early stop": Case(
        settings={"max_steps": 12, "eval_interval_steps": 1, "early_stop_evals": 3, "early_stop_delta": 100.0}
    ),
    "several labels": Case(
        model="mlp",
        settings={
            "task": "multilabel",
            "task_options": {},
            "class_weights": "balanced",
            "metrics": "roc_auc,average_precision",
        },
    ),
    "tags": Case(model="gpt2", settings={"task": "tag"}),
    "chats": Case(model="gpt2", micro_batch=3, settings={"task": "chat", "best_metric": "exact_match"}),
    "packed chats": Case(model="gpt2", settings={"task": "chat"}, side=1),  # of a row
    "plain batch norm": Case(model="resnet18", effective=70, settings={}),  # never a row alone
    "clocks": Case(settings={"max_steps": 12, "checkpoint_seconds": 10, "eval_interval_steps": 100}),
    "seconds": Case(
        settings={"budget": "seconds", "max_seconds": 30, "schedule": "cosine", "lr_min_ratio": 0.0}
    ),
    "signal": Case(signalled=True, settings={"eval_interval_steps": 100}),
    **{name: Case(**case) for name, case in merged("DISTRIBUTED").items()},
}


class Watched(Timed):
    """Remembers which samples it was shown; every process has a clock of another speed."""

    def __init__(self, task: Task, case: Case, clock: Clock, *, rank: int, signal_at: int) -> None:
        super().__init__(task, clock, step=1.1 + rank, evaluation=0.3, signal_at=signal_at)
        self.case, self.seen, self.checked = case, list[str](), list[str]()
        self.averaged = list[bool]()

    def training(self, forward: Forward, batch: Batch) -> Sums:
        self.seen += names(batch.inputs)
        if isinstance(forward, DistributedDataParallel):
            self.averaged.append(forward.require_backward_grad_sync)
        sums = super().training(forward, batch)
        if not self.case.counted:
            return sums
        mask_N = batch.targets < 6
        loss_N = nn.functional.cross_entropy(forward(batch.inputs), batch.targets, reduction="none")
        return Sums((loss_N * mask_N).sum(), mask_N.sum(), {})

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        assert batch.weights is not None
        self.checked += names(batch.inputs[batch.weights > 0])
        return super().evaluation(forward, batch)


def names(images: Tensor) -> list[str]:
    """Random images are told apart by their pixels."""
    return [hashlib.sha256(image.numpy().tobytes()).hexdigest()[:12] for image in images]


def plan_of(case: Case, world: int) -> Plan:
    share = rank_shares(case.effective, world=world, unit=case.norm_batch or 1)[0]
    whole, rest = divmod(share, case.micro_batch)
    sizes = [case.micro_batch] * whole + [rest] * (rest > 0)
    changes = {**case.layout} if world > 1 else {}
    if world > 1 and not case.layout:
        changes |= {"strategy": case.strategy, "shard": world if case.strategy in SHARDS_WEIGHTS else 1}
    if case.padded:  # also where a share has fewer
        changes["micro_batch"] = case.micro_batch
    return small_plan(
        *sizes,
        world=world,
        norm_batch=case.norm_batch,
        effective_batch=case.effective,
        compile=case.padded,
        **changes,
    )


def outcome(case: Case, backend: Backend) -> Outcome:
    """What one process has at the end of its run."""
    config, data = config_of(case), data_of(case)
    world = backend.world
    plan, record, stopped = plan_of(case, world), MemoryRecord(), 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lib.nn.compile.compiled_forward", lambda _, wrapped, **__: wrapped)  # takes minutes
        clock, last = Clock(patched), backend.rank == backend.world - 1
        if case.layout and world > 1:
            second = torch.device("cpu", 0)  # a copy to it is one to autograd
            patched.setattr(backend, "_others", [second] * (plan.layout.devices_per_process - 1))
            examples()[case.model].second_device(patched, second)
        signal_at = plan.accumulation if case.signalled and last else -1

        def watched(task: Task) -> Task:
            return Watched(task, case, clock, rank=backend.rank, signal_at=signal_at)

        if case.dropout and "dropout" not in config.model_options:
            patched.setattr("train.build.built", functools.partial(with_dropout, rate=case.dropout))
        job = small_job(config, plan, data, backend=backend, record=record, task=watched)
        progress, result = Progress(), dict[str, float]()
        try:
            result = train(job, progress)
        except Stopped as error:
            stopped = error.step
    assert isinstance(job.task, Watched)
    return {
        "model": clone(gathered(job.model.state_dict())),
        "ema": clone(gathered(job.ema.state_dict())) if job.ema is not None else {},
        "result": result,
        "carry": record.states[progress.step]["carry"] or {},
        "losses": [row["loss"] for row in record.of_kind("train")],
        "step": progress.step,
        "stopped": stopped,
        "saved": record.saved,
        "averaged": job.task.averaged,
        "seen": job.task.seen,
        "checked": job.task.checked,
    }


def config_of(case: Case) -> Config:
    settings: dict[str, Any] = {"max_steps": STEPS} | case.settings
    example = examples().get(case.model)
    if example is not None and hasattr(example, "data"):
        found: Config = example.config(**settings)
        return found
    settings = {"augment": "none", "norm_batch": case.norm_batch or None} | settings
    config = small_config(case.model, **settings)
    if case.dropout and "dropout" in config.model_options:
        config = config.replace(model_options={**config.model_options, "dropout": case.dropout})
    return config


def data_of(case: Case) -> TrainingData:
    """What `case` trains on; a model is simulated once, for all cases that build the same one."""
    config = config_of(case)
    key = repr(
        (
            config.model,
            config.task,
            sorted(config.model_options.items()),
            config.grad_checkpoint,
            config.seed,
            case.side,
        )
    )
    if key not in _DATA:
        example = examples().get(case.model)
        if example is not None and hasattr(example, "data"):
            _DATA[key] = example.data(config, train=TRAIN_SIZE, test=TEST_SIZE)
        else:
            _DATA[key] = _noise(config, case.side)
    return _DATA[key]


_DATA: dict[str, TrainingData] = {}


def with_dropout(config: Config, spec: Spec, *, rate: float) -> nn.Module:
    """A residual network with dropout before its classifier, for both are in no model here."""
    model = built(config, spec)
    model.classifier = nn.Sequential(Dropout(rate, site=0), model.get_submodule("classifier"))
    return model


def _noise(config: Config, side: int) -> TrainingData:
    if config.task == "tag":
        return random_tags(config, train=TRAIN_SIZE, test=TEST_SIZE)
    if config.task == "chat":
        return random_chats(config, train=TRAIN_SIZE, test=TEST_SIZE, packed=bool(side))
    if config.task == "multilabel":
        return random_table(config, train=TRAIN_SIZE, test=TEST_SIZE)
    if config.model == "mlp":
        random = np.random.default_rng(0)
        parts = [
            ArrayPart(*(random.standard_normal((size, width), np.float32) for width in (5, 2)))
            for size in (TRAIN_SIZE, TEST_SIZE)
        ]
        columns, targets = (tuple(Column(name=each) for each in names) for names in ("abcde", "xy"))
        spec = TableSpec(name="noise", columns=columns, targets=targets)
        return make_training_data(config, Dataset(spec=spec, train=parts[0], test=parts[1], source="noise"))
    if config.block_size is not None:
        tokens = np.random.default_rng(0).integers(0, VOCAB, (TRAIN_SIZE * BLOCK + 1), dtype=np.uint8)
        return text_data(config, train=tokens)
    # A last stage of 2x2 in ResNet-50: with fewer values in a group, 50 normalisations amplify rounding.
    shape = {"resnet18": (3, 8, 8), "resnet50": (3, 16, 16)}.get(config.model, (1, 28, 28))
    shape = (3, side, side) if side else shape
    return random_data(config, shape=shape, train_size=TRAIN_SIZE, test_size=TEST_SIZE)


def outcomes(cases: Mapping[str, Case], world: int, directory: Path) -> list[dict[str, Outcome]]:
    """What each of `world` processes has at the end of each case. Raises RuntimeError if one fails."""

    for case in cases.values():
        data_of(case)  # which the processes are forked with

    def work(backend: Backend) -> None:
        found = {name: outcome(case, backend) for name, case in cases.items()}
        torch.save(found, directory / f"{backend.rank}.pt")

    if any(endings(world, work)):
        raise RuntimeError(f"one of {world} processes failed")
    return [torch.load(directory / f"{rank}.pt") for rank in range(world)]


def main() -> None:
    """With `pairwise` or `sharded` and models for such combinations of them instead of CASES."""
    directory, *words = sys.argv[1:]
    from tests.e2e import device_combinations  # which has its cases from here

    parts = [list(part) for is_part, part in itertools.groupby(words, lambda word: word != "/") if is_part]
    for name, world, *which in parts:
        cases = getattr(device_combinations, which[0])(which[1:]) if which else CASES
        (folder := Path(directory, name)).mkdir()
        outcomes(cases, int(world), folder)


if __name__ == "__main__":
    main()

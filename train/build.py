"""From a configuration to a job that is ready to run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from lib.config import Config
from lib.data import (
    ArrayPart,
    Delivery,
    EvalLoader,
    ImageSpec,
    TrainLoader,
    choose_placement,
)
from lib.data.precompute import bytes_ahead
from lib.data.types import Part
from lib.devices.backend import configure_numerics, configure_threads
from lib.devices.base import Backend
from lib.devices.probe import main_memory
from lib.errors import ConfigError
from lib.memory.simulation import lay_out, simulated
from lib.nn.activation_offload import offloading
from lib.nn.batch_norm import configure_norm
from lib.nn.compile import compiled_forward
from lib.nn.dropout import dropouts
from lib.optim.adam_atan2 import sign_parameters
from lib.optim.ema import Ema, decay_for, horizon
from lib.optim.factory import make_optimizer
from lib.optim.lr_schedule import batch_factor
from lib.plan.types import ON_XLA, OWN_MEMORY, SHARDS_WEIGHTS, Hardware, ModelFacts, Plan
from train.budget import Budget, budget_of, warm_up_of, warm_up_text
from train.contract import check_channels_last
from train.initial_weights import load_weights
from train.job import Job
from train.record import Record
from train.tasks.base import Carries
from train.tasks.opening import make_task
from train.training_data import Subject, built

MOST_OF_A_RUN = 1 / 3  # that averaged weights should reach back over


def make_job(
    config: Config,
    plan: Plan,
    subject: Subject,
    *,
    hardware: Hardware,
    backend: Backend,
    record: Record,
    weights: Path | None = None,
    dtype: torch.dtype = torch.float32,
    whole_run: bool = False,
) -> Job:
    """Build model, optimizer and loaders on the backend's device, as the plan says.

    weights: a safetensors file to start from; None for random ones.
    dtype: of weights and images; float64 for checks of exactness.
    whole_run: the job is going to be trained to its end: what AUGMENT_AHEAD and a warm-up are for.
    Raises ConfigError where `weights` cannot be read or are not the model's, or a warm-up has no end.
    """
    if not simulated():
        configure_numerics(plan.precision, deterministic=config.deterministic)
        backend.configure_products(plan.precision)
        configure_threads(plan.device, cpu_count=hardware.cpu_count, world=plan.world)
    assert len(backend.devices) == plan.layout.devices_per_process, f"{plan.strategy}: {backend.devices}"
    model = built(config, subject.dataset.spec)
    if weights is not None:
        load_weights(model, weights, name=config.model, say=record.say)
    configure_norm(model, norm_batch=plan.norm_batch, momentum=config.norm_momentum)
    model, wrapped = _placed(model, plan, backend, subject.facts, dtype)
    _say_rate(config, plan, record.say)
    prepared = None if subject.prepared is None else subject.prepared.load(plan, backend, dtype)
    task = make_task(config, subject.dataset.spec, prepared=prepared)
    budget = budget_of(config, train_size=subject.dataset.train.size, effective_batch=plan.effective_batch)
    delivery = _delivery(config, plan, subject, hardware, backend, record.say, dtype)
    ahead = epochs_ahead(config, plan, subject.dataset.train, say=record.say) if whole_run else 0
    if whole_run:
        _say_warm_up(config, plan, subject.dataset.train, record.say)
    _say_average(config, plan, budget, record.say)
    return Job(
        config=config,
        plan=plan,
        backend=backend,
        task=task,
        model=model,
        wrapped=wrapped,
        forward=compiled_forward(model, wrapped) if plan.compile else wrapped,
        keeping=_keeping(config, plan, model),
        dropouts=dropouts(model),
        optimizer=optimizer_of(config, plan, model),
        scaler=backend.loss_scaler(plan.precision),
        ema=_ema(config, plan, model),
        carry=task.carry if isinstance(task, Carries) else None,
        train_loader=_train_loader(config, subject, delivery, epochs_ahead=ahead),
        eval_loader=EvalLoader(subject.dataset.test, subject.dataset.spec, delivery),
        budget=budget,
        warmup_fraction=warm_up_of(config, budget, effective_batch=plan.effective_batch),
        record=record,
    )


def _placed(
    model: torch.nn.Module, plan: Plan, backend: Backend, facts: ModelFacts, dtype: torch.dtype
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model on its device, and the module whose backward pass averages gradients."""
    if plan.strategy in SHARDS_WEIGHTS:
        model = model.to(dtype=dtype)  # the whole of it need not fit on the device
        return model, backend.shard(model, plan.layout)
    layout = torch.channels_last if plan.channels_last else torch.contiguous_format
    if simulated():
        lay_out(model, layout)
    else:
        if plan.channels_last and plan.device == "cpu":
            check_channels_last(model)
        model = model.to(backend.device, dtype)
        model = model.to(memory_format=layout)  # type: ignore[call-overload]  # missing in torch's stubs
    return model, backend.wrap(model, share_buffers=plan.norm_batch == 0 and facts.has_batchnorm)


def optimizer_of(config: Config, plan: Plan, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The configured update rule for `model`, which is on its device, with rates for the plan's batch."""
    factor = _batch_factor(config, plan)

    def scaled(rate: float | None) -> float | None:
        return None if rate is None else rate * factor

    return make_optimizer(
        model,
        name=config.optimizer,
        learning_rate=config.learning_rate * factor,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        nesterov=config.nesterov,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        muon_learning_rate=scaled(config.muon_learning_rate),
        sign_learning_rate=scaled(config.sign_learning_rate),
        product_dtype=torch.bfloat16 if plan.precision == "bf16" else None,
        share_out=plan.strategy == "zero1",
    )


def _batch_factor(config: Config, plan: Plan) -> float:
    return batch_factor(
        config.lr_scaling, effective_batch=plan.effective_batch, base_batch=config.lr_base_batch
    )


def _say_rate(config: Config, plan: Plan, say: Callable[[str], None]) -> None:
    """What LR_SCALING makes of the learning rate, and of the decay in a step that goes with it."""
    if config.lr_scaling == "none":
        return
    rate = config.learning_rate * _batch_factor(config, plan)
    say(
        f"Learning rate {rate:.4g}: {config.learning_rate:g} for {config.lr_base_batch} samples, scaled "
        f"({config.lr_scaling}) to {plan.effective_batch}; decay in a step {rate * config.weight_decay:.3g}"
    )


def _keeping(config: Config, plan: Plan, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    if config.activation_offload and plan.device in OWN_MEMORY:
        return offloading(model)
    return contextlib.nullcontext()


def _ema(config: Config, plan: Plan, model: torch.nn.Module) -> Ema | None:
    if not config.ema:
        return None
    return Ema(model, decay=_decay(config, plan), leave_out=sign_parameters(model))


def _decay(config: Config, plan: Plan) -> float:
    assert config.ema_decay is not None
    return decay_for(config.ema_decay, effective_batch=plan.effective_batch, base_batch=config.ema_base_batch)


def _say_warm_up(config: Config, plan: Plan, part: Part, say: Callable[[str], None]) -> None:
    if line := warm_up_text(config, train_size=part.size, effective_batch=plan.effective_batch):
        say(line)


def _say_average(config: Config, plan: Plan, budget: Budget, say: Callable[[str], None]) -> None:
    """How far back the averaged weights reach, and whether that is too far for so short a run."""
    if not config.ema:
        return
    decay = _decay(config, plan)
    steps, base = horizon(decay), config.ema_base_batch
    scaled = f"{config.ema_decay:g} for {base} samples, scaled to {plan.effective_batch}; " if base else ""
    say(
        f"Average of the weights: decay {decay:.6g}; {scaled}it reaches back about {steps:,.1f} steps, "
        f"{steps * plan.effective_batch:,.0f} samples"
    )
    if budget.total_steps is not None and steps > budget.total_steps * MOST_OF_A_RUN:
        say(
            f"That is more than a third of the {budget.total_steps} steps: weights of the beginning weigh on "
            "the average to the end; lower CONFIG_EMA_DECAY"
        )


def placement_of(
    config: Config, subject: Subject, hardware: Hardware, *, world: int
) -> tuple[Literal["resident", "stream"], str]:
    """Where the data of each of `world` ranks are kept, and why."""
    if config.augment_ahead:
        return "stream", "puzzles are changed ahead, in main memory"
    if hardware.kind in ON_XLA and config.data_placement == "auto":
        return "stream", "XLA would have all that is resident as an input of its programs"
    free_bytes = min(device.free_bytes for device in hardware.devices[:world])
    if hardware.kind == "cpu":  # one memory for all processes
        free_bytes //= world
    parts = subject.dataset.train, subject.dataset.test
    return choose_placement(config.data_placement, parts=parts, free_bytes=free_bytes)


def _delivery(
    config: Config,
    plan: Plan,
    subject: Subject,
    hardware: Hardware,
    backend: Backend,
    say: Callable[[str], None],
    dtype: torch.dtype,
) -> Delivery:
    dataset = subject.dataset
    placement, reason = placement_of(config, subject, hardware, world=plan.layout.devices)
    part = f"; training on {dataset.train.size}" if config.data_limit or config.holdout else ""
    say(f"Data: {dataset.source}{part}; {placement}: {reason}")
    for line in dataset.skipped:
        say(f"Skipped: {line}")
    return Delivery(
        device=backend.device,
        dtype=dtype,
        channels_last=plan.channels_last,
        placement="shapes" if simulated() else placement,
        num_workers=config.num_workers or max(1, hardware.cpu_count // plan.world),
        prefetch=config.prefetch or 1,
    )


def _train_loader(config: Config, subject: Subject, delivery: Delivery, *, epochs_ahead: int) -> TrainLoader:
    spec, pad = subject.dataset.spec, config.augment_pad or 0
    if config.augment_pad == 0 and isinstance(spec, ImageSpec):
        pad = max(1, min(spec.height, spec.width) // 8)
    return TrainLoader(
        subject.dataset.train,
        spec,
        delivery,
        seed=config.seed,
        augment=config.augment or "none",
        pad=pad,
        fixed=config.trm_augment_fixed or 0,
        epochs_ahead=epochs_ahead,
    )


def epochs_ahead(config: Config, plan: Plan, part: Part, *, say: Callable[[str], None]) -> int:
    """Return how many epochs of puzzles are changed ahead. Raises ConfigError without room for them."""
    if not config.augment_ahead:
        return 0
    budget = budget_of(config, train_size=part.size, effective_batch=plan.effective_batch)
    assert isinstance(part, ArrayPart) and budget.total_steps is not None
    epochs = math.ceil(budget.total_steps * plan.effective_batch / part.size)
    size = bytes_ahead(part, epochs=epochs)
    _check_room(size * plan.world)
    say(f"Puzzles of {epochs} epochs are changed ahead: {size / 1e6:.1f} MB for each process")
    return epochs


def _check_room(wanted_bytes: int) -> None:
    free_bytes = main_memory("main memory").free_bytes
    if wanted_bytes > free_bytes / 4:
        raise ConfigError(
            f"CONFIG_AUGMENT_AHEAD=y takes {wanted_bytes / 1e9:.1f} GB of main memory",
            why=f"that is more than a quarter of the {free_bytes / 1e9:.1f} GB that are free",
            todo="set CONFIG_AUGMENT_AHEAD=n: the same samples are then made on the fly",
        )

"""Build a job from a configuration and its plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from lib.config import Config
from lib.data import ArrayPart, EvalLoader, ImageSpec, LoaderConfig, TrainLoader, choose_placement
from lib.data.augment import Kind, augmented_bytes
from lib.data.sampler import HasLengths
from lib.data.types import Part
from lib.devices.backend import check_channels_last, configure_numerics, configure_threads
from lib.devices.base import Backend
from lib.devices.probe import main_memory
from lib.errors import ConfigError, foremost
from lib.memory.simulation import simulated
from lib.nn.batch_norm import configure_norm
from lib.nn.dropout import dropouts, with_sites
from lib.nn.model_code import load_model
from lib.optim.factory import depths, make_optimizer
from lib.optim.lr_schedule import batch_factor
from lib.plan.types import OWN_MEMORY, SHARDS_WEIGHTS, STATIC_SHAPES, Hardware, ModelFacts, Plan
from train.job import Budget, Job, budget_of, warm_up_of, warm_up_text
from train.record import Record
from train.tasks.base import Carries, Forward, Task, image_operations, make_task
from train.training_data import TrainingData, built

if TYPE_CHECKING:
    from lib.optim.ema import Ema
    from lib.runs.weight_files import WeightFiles
    from train.pipeline import Pipeline

Log: TypeAlias = Callable[[str], object]

_MAX_EMA_HORIZON = 1 / 3  # of a run; beyond it a warning is logged


def make_job(
    config: Config,
    plan: Plan,
    data: TrainingData,
    *,
    hardware: Hardware,
    backend: Backend,
    record: Record,
    weights: WeightFiles | None = None,
    dtype: torch.dtype = torch.float32,
    whole_run: bool = False,
) -> Job:
    """Build model, optimizer and loaders on the backend's device, as the plan says.

    weights: to start from; None for random ones.
    dtype: of weights and images; float64 for checks of exactness.
    whole_run: the job is trained to the end of its budget, which AUGMENT_AHEAD and warmup depend on; only
        then are weights computed from samples, where the model's file does that.
    Raises ConfigError where `weights` cannot be read or do not fit, or warmup is longer than the run.
    """
    if not simulated():
        configure_numerics(plan.precision, deterministic=config.deterministic)
        backend.configure_products(plan.precision)
        configure_threads(plan.device, cpu_count=hardware.cpu_count, world=plan.world)
    model, adapters = _new_model(config, data, weights, backend, record.log, whole_run=whole_run)
    configure_norm(model, norm_batch=plan.norm_batch, momentum=config.norm_momentum)
    prepared = None if data.prepared is None else data.prepared.load(plan, backend, dtype)
    task = make_task(config, data.dataset.spec, prepared=prepared, train=data.dataset.train)
    model, wrapped, pipeline = _placed(model, config, plan, backend, data.facts, dtype, task)
    _log_rates(config, plan, model, record.log)
    batch = {"train_size": data.dataset.train.size, "effective_batch": plan.effective_batch}
    loader_config = _loader_config(config, plan, data, hardware, backend, record.log, dtype)
    ahead = epochs_ahead(config, plan, data.dataset.train, log=record.log) if whole_run else 0
    if whole_run:
        _log_course(config, plan, data, record.log)
    return Job(
        config=config,
        plan=plan,
        backend=backend,
        task=task,
        model=model,
        wrapped=wrapped,
        forward=_forward(plan, model, wrapped),
        cuda_graph_forward=_cuda_graph_forward(plan, wrapped),
        keeping=_keeping(config, plan, model),
        reseeds=bool(data.facts.inexact),
        dropouts=with_sites(dropouts(model), backend.device),
        optimizer=optimizer_of(config, plan, model),
        scaler=backend.loss_scaler(plan.precision),
        ema=_ema(config, plan, model, budget := budget_of(config, **batch), record.log),
        carry=task.carry if isinstance(task, Carries) else None,
        train_loader=_train_loader(config, data, loader_config, epochs_ahead=ahead),
        eval_loader=EvalLoader(data.dataset.test, data.dataset.spec, loader_config),
        budget=budget,
        warmup_fraction=warm_up_of(config, budget, effective_batch=plan.effective_batch),
        record=record,
        pipeline=pipeline,
        adapters=adapters,
    )


def _new_model(
    config: Config,
    data: TrainingData,
    weights: WeightFiles | None,
    backend: Backend,
    log: Log,
    *,
    whole_run: bool,
) -> tuple[nn.Module, dict[str, Any] | None]:
    """Return the model with its first weights, and what adapters belong to (`train.adapters.settle`)."""
    model = built(config, data.dataset.spec)
    if weights is not None:
        from train.initial_weights import load_weights

        load_weights(model, weights, config, log=log)
    elif whole_run and not simulated() and hasattr(load_model(config.model), "initialise_from_samples"):
        from train.initial_weights import initialise_from_samples

        initialise_from_samples(model, config, data.dataset, backend, log=log)
    elif not simulated() and config.model_options.get("dir"):
        from train.adapters import without_files
        from train.initial_weights import reset_head

        new = reset_head(model, config) if config.weights.reset_head else ""
        if whole_run:
            log(without_files(config) or f"Weights: {getattr(model, 'build_note', 'random ones')}{new}")
    if config.weights.adapt == "full":
        return model, None
    from train import adapters

    log(adapters.format_trained(model, config))
    return model, adapters.settle(model, config, backend.device, contents=not simulated())


def _placed(
    model: nn.Module,
    config: Config,
    plan: Plan,
    backend: Backend,
    facts: ModelFacts,
    dtype: torch.dtype | None,
    task: Task,
) -> tuple[nn.Module, nn.Module, Pipeline | None]:
    """Return the model on its device, the module whose backward pass averages gradients, and the stage."""
    assert len(backend.devices) == plan.layout.devices_per_process, f"{plan.strategy}: {backend.devices}"
    if plan.strategy == "pipeline":
        from train.pipeline import Pipeline

        model = model.to(dtype=dtype)
        options: dict[str, Any] = {"stages": plan.shard, "seed": config.seed, "precision": plan.precision}
        return model, model, Pipeline(model, backend, **options)
    if config.weights.adapt != "full" and dtype == torch.float32:
        from train.adapters import halve

        dtype = None if halve(model, config, plan.precision) else dtype
    if plan.strategy in SHARDS_WEIGHTS:
        model = model.to(dtype=dtype) if dtype else model  # unsharded it need not fit on the device
        return model, backend.shard(model, plan.layout), None
    layout = torch.channels_last if plan.channels_last else torch.contiguous_format
    if not simulated():
        if plan.channels_last and plan.device == "cpu":
            check_channels_last(model)
        model = model.to(backend.device, dtype)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]  # missing in torch's stubs
    whole = model
    if "loss" in plan.compile_parts:
        from train.tasks.loss_in_model import LossInModel

        whole = LossInModel(model, task)
    return model, backend.wrap(whole, share_buffers=plan.norm_batch == 0 and facts.has_batchnorm), None


def optimizer_of(config: Config, plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    """Return the configured optimizer of `model`, which is on its device, scaled to the plan's batch."""
    factor, optim = _batch_factor(config, plan), config.optim

    def scaled(rate: float | None) -> float | None:
        return None if rate is None else rate * factor

    return make_optimizer(
        model,
        name=config.optimizer,
        learning_rate=optim.learning_rate * factor,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        nesterov=optim.nesterov,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_eps=optim.adam_eps,
        adam_8bit=config.adam_8bit,
        layer_decay=optim.layer_decay,
        muon_learning_rate=scaled(optim.muon_learning_rate),
        sign_learning_rate=scaled(optim.sign_learning_rate),
        product_dtype=torch.bfloat16 if plan.precision == "bf16" else None,
        shard_state=plan.strategy == "zero1",
        compiler=_compiler(plan),
    )


def _batch_factor(config: Config, plan: Plan) -> float:
    optim = config.optim
    return batch_factor(
        optim.lr_scaling, effective_batch=plan.effective_batch, base_batch=optim.lr_base_batch
    )


def _log_course(config: Config, plan: Plan, data: TrainingData, log: Log) -> None:
    """Log the warmup, and the padding of texts that could be cut."""
    dataset = data.dataset
    if line := warm_up_text(config, train_size=dataset.train.size, effective_batch=plan.effective_batch):
        log(line)
    if isinstance(dataset.spec, HasLengths):
        from train.padding import format_padding

        log(format_padding(dataset, plan, seed=config.seed))


def _log_rates(config: Config, plan: Plan, model: nn.Module, log: Log) -> None:
    """Log what is frozen, layer decay, and a scaled learning rate with the weight decay of a step."""
    optim = config.optim
    if config.weights.freeze:
        sizes = [weight.numel() * (not weight.requires_grad) for weight in model.parameters()]
        log(f"Frozen: {sum(map(bool, sizes))} of {len(sizes)} weights, {sum(sizes):,} parameters")
    if optim.layer_decay != 1:
        last = max(depths(model).values())
        lowest = f"{optim.layer_decay**last:.3g} of the learning rate at the lowest"
        log(f"Layer-wise decay {optim.layer_decay:g} over {last + 1} depths: {lowest}")
    if optim.lr_scaling == "none":
        return
    rate = optim.learning_rate * _batch_factor(config, plan)
    log(
        f"Learning rate {rate:.4g}: {optim.learning_rate:g} for {optim.lr_base_batch} samples, scaled "
        f"({optim.lr_scaling}) to {plan.effective_batch}; decay in a step {rate * optim.weight_decay:.3g}"
    )


# What one device without these options never uses is imported where the option is found to be set.
def _compiler(plan: Plan) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return the compiler of the optimizer's update, None where that is not compiled."""
    if "update" not in plan.compile_parts:
        return None
    from lib.nn.compile import compiled

    return compiled


def _forward(plan: Plan, model: nn.Module, wrapped: nn.Module) -> Forward:
    if not plan.compile:
        return wrapped
    from lib.nn.compile import compiled_forward

    return compiled_forward(model, wrapped, by_block="blocks" in plan.compile_parts)


def _cuda_graph_forward(plan: Plan, wrapped: nn.Module) -> Forward | None:
    if not plan.cuda_graphs:
        return None
    from lib.nn.compile import cuda_graph_forward

    return cuda_graph_forward(wrapped)


def _keeping(config: Config, plan: Plan, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    if not config.activation_offload or plan.device not in OWN_MEMORY:
        return contextlib.nullcontext()
    from lib.nn.activation_offload import Offloading

    return Offloading(model)


def _ema(config: Config, plan: Plan, model: nn.Module, budget: Budget, log: Log) -> Ema | None:
    """Return the average of the weights, and log its horizon, with a warning where it is long for the run."""
    if not config.optim.ema:
        return None
    from lib.optim.adam_atan2 import sign_parameters
    from lib.optim.ema import Ema, decay_for, horizon

    given, base = config.optim.ema_decay, config.optim.ema_base_batch
    assert given is not None
    decay = decay_for(given, effective_batch=plan.effective_batch, base_batch=base)
    steps = horizon(decay)
    scaled = f"{given:g} for {base} samples, scaled to {plan.effective_batch}; " if base else ""
    log(
        f"Average of the weights: decay {decay:.6g}; {scaled}it reaches back about {steps:,.1f} steps, "
        f"{steps * plan.effective_batch:,.0f} samples"
    )
    if budget.total_steps is not None and steps > budget.total_steps * _MAX_EMA_HORIZON:
        log(
            f"The average spans more than a third of the {budget.total_steps} steps: the first weights still "
            "count at the end; lower CONFIG_EMA_DECAY"
        )
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    return Ema(model, decay=decay, leave_out=[*sign_parameters(model), *frozen])


def placement_of(
    config: Config, data: TrainingData, hardware: Hardware, *, world: int
) -> tuple[Literal["resident", "stream"], str]:
    """Return where the data of each of `world` ranks are kept, and the reason."""
    if config.augment_ahead:
        return "stream", "puzzles are augmented ahead, in main memory"
    if hardware.kind in STATIC_SHAPES and config.data_placement == "auto":
        return "stream", "resident data would be an input of every compiled program"
    free_bytes = min(device.free_bytes for device in hardware.devices[:world])
    if hardware.kind == "cpu":  # one memory for all processes
        free_bytes //= world
    parts = data.dataset.train, data.dataset.test
    return choose_placement(config.data_placement, parts=parts, free_bytes=free_bytes)


def _loader_config(
    config: Config,
    plan: Plan,
    data: TrainingData,
    hardware: Hardware,
    backend: Backend,
    log: Log,
    dtype: torch.dtype,
) -> LoaderConfig:
    dataset = data.dataset
    placement, reason = placement_of(config, data, hardware, world=plan.layout.devices)
    part = f"; training on {dataset.train.size}" if config.data_limit or config.holdout else ""
    log(f"Data: {dataset.source}{part}; {placement}: {reason}")
    for line in foremost(dataset.skipped, "files, all of which data.json names"):
        log(f"Skipped: {line}")
    lengths = 0
    if isinstance(dataset.spec, HasLengths) and not simulated():  # memory is planned for whole rows
        from train.padding import lengths_of

        lengths = lengths_of(plan)
    return LoaderConfig(
        device=backend.device,
        dtype=dtype,
        channels_last=plan.channels_last,
        placement="shapes" if simulated() else placement,
        num_workers=config.num_workers or max(1, hardware.cpu_count // plan.world),
        prefetch=config.prefetch or 1,
        lengths=lengths,
    )


def _train_loader(
    config: Config, data: TrainingData, loader_config: LoaderConfig, *, epochs_ahead: int
) -> TrainLoader:
    spec, pad = data.dataset.spec, config.augment_pad or 0
    if config.augment_pad == 0 and isinstance(spec, ImageSpec):
        pad = max(1, min(spec.height, spec.width) // 8)
    kind: Kind = "none" if config.augment is None or config.augment == "resized_crop" else config.augment
    return TrainLoader(
        data.dataset.train,
        spec,
        loader_config,
        seed=config.seed,
        augment=kind,
        pad=pad,
        fixed=config.trm_augment_fixed or 0,
        epochs_ahead=epochs_ahead,
        operations=image_operations(config, spec),
    )


def check_run(config: Config, plan: Plan, data: TrainingData) -> None:
    """Check, before there is a run directory, what would fail in training only. Raises ConfigError."""
    if config.weights.adapt != "full":
        from train.adapters import check_files

        check_files(config)
    warm_up_text(config, train_size=data.dataset.train.size, effective_batch=plan.effective_batch)
    epochs_ahead(config, plan, data.dataset.train, log=lambda _: None)
    if plan.channels_last and plan.device == "cpu":
        with torch.device("meta"):
            check_channels_last(built(config, data.dataset.spec))


def epochs_ahead(config: Config, plan: Plan, part: Part, *, log: Log) -> int:
    """Return how many epochs of puzzles are augmented ahead. Raises ConfigError without memory for them."""
    if not config.augment_ahead:
        return 0
    budget = budget_of(config, train_size=part.size, effective_batch=plan.effective_batch)
    assert isinstance(part, ArrayPart) and budget.total_steps is not None
    epochs = math.ceil(budget.total_steps * plan.effective_batch / part.size)
    size = augmented_bytes(part, epochs=epochs)
    wanted_bytes, free_bytes = size * plan.world, main_memory("main memory").free_bytes
    if wanted_bytes > free_bytes / 4:
        raise ConfigError(
            f"CONFIG_AUGMENT_AHEAD=y takes {wanted_bytes / 1e9:.1f} GB of main memory",
            why=f"that is more than a quarter of the {free_bytes / 1e9:.1f} GB that are free",
            todo="set CONFIG_AUGMENT_AHEAD=n: the same samples are then made on the fly",
        )
    log(f"Puzzles of {epochs} epochs are augmented ahead: {size / 1e6:.1f} MB for each process")
    return epochs

"""Training job, its budget, its progress and its evaluation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lib.config import Config
from lib.data.loader import EvalLoader, TrainLoader
from lib.devices.base import Backend
from lib.distributed.fsdp import local, reshard
from lib.errors import CheckpointError, ConfigError, Diverged
from lib.nn.dropout import Dropout
from lib.nn.precision import full_precision
from lib.optim.lr_schedule import warmup_fraction
from lib.plan.tables import FREE_MEMORY_MARGIN
from lib.plan.types import COLLECTIVE_FORWARD, PARTS_OF_STATE, SHARDS_WEIGHTS, Plan
from lib.units import bytes_text
from train.record import Record
from train.signals import Agreement
from train.tasks.base import Carry, Forward, Sums, Task, Totals, check_sums, report_of, score_of

if TYPE_CHECKING:
    from lib.optim.ema import Ema
    from train.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Budget of a run; exactly one of the two limits is set."""

    total_steps: int | None
    total_seconds: float | None

    def fraction(self, *, step: float, seconds: float) -> float:
        """Return the share of the budget spent after `step` steps (may be fractional), in [0, 1]."""
        if self.total_steps is not None:
            return min(1.0, step / self.total_steps)
        assert self.total_seconds is not None
        return min(1.0, seconds / self.total_seconds)

    def spent(self, *, step: int, seconds: float) -> bool:
        """Return True if a run that has made `step` steps in `seconds` of training is over."""
        return step > 0 and self.fraction(step=step, seconds=seconds) == 1


def budget_of(config: Config, *, train_size: int, effective_batch: int) -> Budget:
    """Return the budget; epochs become the nearest whole number of optimizer steps, at least one."""
    if config.budget == "seconds":
        assert config.max_seconds is not None
        return Budget(total_steps=None, total_seconds=float(config.max_seconds))
    if config.budget == "steps":
        return Budget(total_steps=config.max_steps, total_seconds=None)
    assert config.num_epochs is not None
    steps = round(config.num_epochs * train_size / effective_batch)
    return Budget(total_steps=max(1, steps), total_seconds=None)


def warm_up_of(config: Config, budget: Budget, *, effective_batch: int) -> float:
    """Return the share of `budget` that is warmup; 1 or more if the run ends before."""
    return warmup_fraction(
        config.lr_schedule.warmup_unit,
        _amount(config),
        total_steps=budget.total_steps,
        effective_batch=effective_batch,
    )


def warm_up_text(config: Config, *, train_size: int, effective_batch: int) -> str:
    """Format the length of warmup, in steps below the peak unless the budget is in seconds; "" for none.

    Raises ConfigError if the run ends before the learning rate reaches its peak.
    """
    budget = budget_of(config, train_size=train_size, effective_batch=effective_batch)
    share, amount = warm_up_of(config, budget, effective_batch=effective_batch), _amount(config)
    total, unit = (budget.total_steps, "steps") if budget.total_steps else (budget.total_seconds, "seconds")
    assert total is not None
    # The rate of a step is that of its middle (learning_rate_factor).
    rising = math.ceil(share * total - 0.5) if unit == "steps" else share * total
    risen = f"{rising:,.1f}".removesuffix(".0")
    given = {
        "percent": f", {amount} % of the budget",
        "steps": "",
        "samples": f", {amount:,} samples in batches of {effective_batch:,}",
    }
    length = f"{risen} of {total:,.0f} {unit}{given[config.lr_schedule.warmup_unit]}"
    if share >= 1:
        raise ConfigError(
            f"CONFIG_WARMUP_{config.lr_schedule.warmup_unit.upper()}={amount} is a warm-up of {length}",
            why="the run ends before the learning rate reaches its peak",
            todo="lower it, or make the run longer",
        )
    if amount and config.budget == "seconds" and config.lr_schedule.warmup_start_ratio == 0:
        raise ConfigError(
            "CONFIG_WARMUP_START_RATIO=0 cannot be used with a budget of seconds",
            why="the first step would have a learning rate of 0",
            todo="set it above 0, or give the budget in steps or epochs",
        )
    return f"Warm-up: {length}" if amount else ""


def _amount(config: Config) -> int:
    """The length of warmup, in its unit."""
    amounts = {
        "percent": config.lr_schedule.warmup_pct,
        "steps": config.lr_schedule.warmup_steps,
        "samples": config.lr_schedule.warmup_samples,
    }
    amount = amounts[config.lr_schedule.warmup_unit]
    assert amount is not None, f"no warmup in {config.lr_schedule.warmup_unit}"
    return amount


@dataclass(slots=True, kw_only=True)
class Job:
    """Model, optimizer, data and plan of a run, ready to train."""

    config: Config
    plan: Plan  # replaced by one with a smaller micro-batch after running out of memory
    backend: Backend
    task: Task
    model: nn.Module  # holds the weights
    wrapped: nn.Module  # the model, averaging gradients over ranks
    forward: Forward  # the wrapped model, perhaps compiled, perhaps with the loss in it
    cuda_graph_forward: Forward | None  # the same for training by CUDA graphs
    keeping: AbstractContextManager[Any]  # for training forward passes: activation offloading
    reseeds: bool  # torch's generator, for layers that draw from it
    dropouts: tuple[Dropout, ...]  # modules of the model
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: Ema | None
    carry: Carry | None  # state of samples that stay for several steps
    train_loader: TrainLoader
    eval_loader: EvalLoader
    budget: Budget
    warmup_fraction: float  # of the budget
    record: Record
    pipeline: Pipeline | None = None  # this rank's stage of the model
    shard_directory: Path | None = None  # where every rank writes its shard; None: rank 0 writes all
    saves_beside: bool = False  # checkpoints are asynchronous because of their size
    adapters: dict[str, Any] | None = None  # what adapters belong to (`train.adapters`); None without any

    def saved_weights(self) -> dict[str, Any]:
        """Return the weights that a checkpoint holds; with adapters without those that are frozen."""
        state = self.model.state_dict()
        if self.adapters is None:
            return state
        named = self.model.named_parameters(remove_duplicate=False)
        frozen = {name for name, weight in named if not weight.requires_grad}
        return {name: weight for name, weight in state.items() if name not in frozen}

    def check_base(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError where the adapters in `state` were trained on other weights."""
        known, own = state.get("adapters") or {}, self.adapters or {}
        if differ := [name for name in {**known, **own} if known.get(name) != own.get(name)]:
            raise CheckpointError(
                "the adapters of the checkpoint belong to other weights",
                why=f"{', '.join(differ)} of the frozen ones differ",
                todo="give back what CONFIG_INITIAL_WEIGHTS, or the directory of the model, had",
            )


def checkpoint_format(job: Job, *, free_bytes: int) -> tuple[bool, str]:
    """Return True if checkpoints are sharded, and the format with its reason; "" where no state is sharded.

    free_bytes: of main memory on the node of rank 0.
    """
    requested, plan = job.config.checkpoints.checkpoint_format, job.plan
    in_parts = plan.strategy in PARTS_OF_STATE
    if requested == "sharded":
        alone = "" if in_parts else ": one shard, for every process has all state"
        return True, f"sharded, as requested{alone}"
    if not in_parts:
        return False, ""
    need_bytes, usable_bytes = state_bytes(job), _usable_bytes(job, free_bytes)
    fits = need_bytes <= usable_bytes
    why = f"{bytes_text(need_bytes)} of state, {bytes_text(usable_bytes)} of main memory usable by rank 0"
    if requested == "full":
        return False, f"full, as requested; {why}{'' if fits else ': it does not fit'}"
    return not fits, f"{'full' if fits else 'sharded'}; {why}"


def saves_beside(job: Job, *, free_bytes: int, is_sharded: bool) -> tuple[bool, str]:
    """Return True if checkpoints are asynchronous because of their size, and the reason; "" for small ones.

    free_bytes: of main memory on the node of rank 0, which must hold a copy of the state, and another where
    it is gathered.
    """
    checkpoints, need_bytes = job.config.checkpoints, state_bytes(job)
    if not 0 < (checkpoints.checkpoint_async_mb or 0) * 10**6 < need_bytes:
        return False, ""
    copies = 2 if job.plan.strategy in PARTS_OF_STATE and not is_sharded else 1
    usable_bytes = _usable_bytes(job, free_bytes)
    fits = copies * need_bytes <= usable_bytes
    how = "written beside training" if fits else "training waits for them: no main memory for a copy"
    why = f"{bytes_text(need_bytes)} of state, {bytes_text(usable_bytes)} usable"
    return fits, f"{how}; {why}"


def state_bytes(job: Job) -> int:
    """Return the bytes of saved weights, averages and optimizer state, over all shards."""
    weights = [each for each in job.model.parameters() if job.adapters is None or each.requires_grad]
    return _bytes_of(weights) + round(
        sum(
            (_moments(group) + job.config.optim.ema) * _bytes_of(group["params"])
            for group in job.optimizer.param_groups
        )
    )


def _usable_bytes(job: Job, free_bytes: int) -> int:
    plan = job.plan
    if plan.device == "cpu" and plan.memory is not None:  # the same memory
        free_bytes = max(0, free_bytes - plan.memory.need_bytes * job.backend.local_world)
    return round(free_bytes * FREE_MEMORY_MARGIN)


def _moments(group: dict[str, Any]) -> float:
    """Return the numbers that an optimizer keeps for each number of the weights of `group`."""
    if "decoupled" in group:
        from lib.optim.adam_8bit import SHARE

        return 2 * SHARE
    if "betas" in group:  # the rules of Adam, but for weights that are updated by the sign
        return 0 if group.get("sign") else 2
    return 1 if group["momentum"] else 0  # SGD, and Muon's matrices


def _bytes_of(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


@dataclass(slots=True)
class Progress:
    """Progress of a run: with the weights and the optimizer all that a checkpoint needs.

    (And a carry, where samples stay.) Data order, augmentation and learning rate are functions of the step.
    """

    step: int = 0  # optimizer steps made
    seconds: float = 0.0  # training time, without evaluation and saving
    best: float = -math.inf  # best task.score of an evaluation so far
    evaluation_pending: bool = False  # a signal interrupted the evaluation of this step
    best_to_beat: float = -math.inf  # score of the last evaluation that was better by EARLY_STOP_DELTA
    stale_evals: int = 0  # evaluations since


@contextlib.contextmanager
def evaluated_weights(job: Job) -> Iterator[None]:
    """Use the averaged weights, if there are any, within the context."""
    job.model.eval()
    try:
        with job.ema.averaged() if job.ema is not None else contextlib.nullcontext():
            job.backend.mark_step()  # keeps the swap of weights out of the graph of a batch
            yield
    finally:
        job.model.train()
        job.backend.mark_step()
        if job.plan.strategy in SHARDS_WEIGHTS:
            reshard(job.model)


def evaluate(job: Job) -> dict[str, float]:
    """Return means over the evaluation part; every sample counts exactly once on any number of ranks."""
    totals = Totals()
    for sums in evaluation_sums(job):
        totals.add(sums)
    return report_of(job.task, totals, job.backend, job.config)


def judge(job: Job, progress: Progress, figures: Mapping[str, float]) -> bool:
    """Count an evaluation; return True if it is the best so far, by CONFIG_BEST_METRIC or else the task.

    nan is never better.
    """
    score = score_of(job.task, figures, job.config)
    progress.stale_evals += 1
    if score > progress.best_to_beat + job.config.evaluation.early_stop_delta:
        progress.best_to_beat, progress.stale_evals = score, 0
    better = score > progress.best
    if better:
        progress.best = score
    return better


def is_over(job: Job, progress: Progress) -> bool:
    """Return True if the budget is spent or the run stops early."""
    spent = job.budget.spent(step=progress.step, seconds=progress.seconds)
    return spent or bool(early_stop(job, progress))


def early_stop(job: Job, progress: Progress) -> str:
    """Return the reason why the run ends before its budget is spent; "" if it does not."""
    evaluation, stale = job.config.evaluation, progress.stale_evals
    spent = job.budget.spent(step=progress.step, seconds=progress.seconds)
    if spent or not 0 < evaluation.early_stop_evals <= stale:
        return ""
    by = f" by more than {evaluation.early_stop_delta:g}" if evaluation.early_stop_delta else ""
    better = f"no better {evaluation.best_metric or 'score'}{by} in {stale} evaluations"
    return f"stopped early at step {progress.step}: {better}"


@dataclass(frozen=True, slots=True)
class Due:
    """Work that is due after a step."""

    log: bool
    evaluation: bool
    save: bool


def due_after(job: Job, step: int, agreed: Agreement, *, last: bool) -> Due:
    """Decide what is due after `step` steps, by what all ranks agree on. last: of the run.

    Saving and evaluating imply a log row: its loss is checked before anything is saved.
    """
    config = job.config
    every, epochs = config.eval_interval_steps, (math.floor(epoch_of(job, each)) for each in (step - 1, step))
    evaluation = last or (step % every == 0 if every else len({*epochs}) > 1)
    interval, seconds = config.checkpoints.checkpoint_interval_steps, config.checkpoints.checkpoint_seconds
    by_steps = interval and step % interval == 0
    by_time = seconds and agreed.unsaved >= seconds
    save = bool(last or agreed.signal or by_steps or by_time)
    by_interval = step % config.log_interval_steps == 0 and agreed.unlogged >= config.log_seconds
    log = save or evaluation or by_interval
    return Due(log=log, evaluation=evaluation, save=save)


def epoch_of(job: Job, step: int) -> float:
    """Return the epochs that `step` steps have seen."""
    return step * job.plan.effective_batch / job.train_loader.size


def check_finite(job: Job, row: Mapping[str, float], *, weights: bool, first: bool) -> None:
    """Raise Diverged if the loss, the `first` that is known, or `weights` to be saved are not finite."""
    finite = math.isfinite(row["loss"])
    if finite and weights:
        own = [parameter for parameter in job.model.parameters() if not parameter.is_meta]
        norms = torch._foreach_norm([local(parameter.detach()) for parameter in own])
        finite = bool(torch.stack(norms).isfinite().all())
        if job.plan.strategy in COLLECTIVE_FORWARD:  # each rank has seen only its shard
            finite = not job.backend.all_reduce_max((float(not finite),))[0]
    if not finite:
        what = "a weight is not finite" if math.isfinite(row["loss"]) else f"the loss is {row['loss']}"
        why, todo = "training has diverged", "lower CONFIG_LEARNING_RATE or set CONFIG_GRAD_CLIP"
        if first and not math.isfinite(row["loss"]):
            why, todo = f"{why}, or none was finite", f"look at the data and the forward pass, or {todo}"
        todo += "; checkpoints of earlier steps are kept"
        raise Diverged(f"{what} at step {row['step']:.0f}", why=why, todo=todo)


@torch.no_grad()
def evaluation_sums(job: Job) -> Generator[Sums, None, None]:
    """Evaluate this rank's part, yielding sums batch by batch."""
    plan, backend = job.plan, job.backend
    with evaluated_weights(job):
        replica, replicas = plan.layout.replica_of(backend.rank), plan.layout.replicas
        batches = job.eval_loader.batches(rank=replica, world=replicas, batch_size=plan.micro_batch)
        if job.pipeline is not None:
            yield from job.pipeline.evaluate(batches, job.task)
        for batch in batches:
            with backend.autocast(plan.precision):
                sums = job.task.evaluation(job.forward, batch)
            check_sums(sums, job.config)
            backend.mark_step()
            yield sums


@torch.no_grad()
def evaluation_outputs(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs in fp32 and targets of all evaluation samples, in their order, with evaluated weights."""
    with evaluated_weights(job):
        for batch in job.eval_loader.batches(rank=0, world=1, batch_size=job.plan.micro_batch):
            with job.backend.autocast(job.plan.precision):
                outputs_N = full_precision(job.forward(batch.inputs))
            assert batch.weights is not None
            yield outputs_N[batch.weights > 0], batch.targets[batch.weights > 0]

"""The training loop: accumulate, reduce, step, log, evaluate, save, stop.

It is independent of the task (`train/tasks/base.py`), of devices (`lib/devices/base.py`) and of files
(`train/record.py`). Each optimizer step sees exactly `plan.effective_batch` samples, whatever the micro-batch
and the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.devices.backend import is_out_of_memory
from lib.devices.base import send
from lib.distributed.fsdp import (
    clip_gradients,
    gather_full,
    load_optimizer_state,
    local,
    optimizer_state,
    shard_of,
    to_local,
)
from lib.errors import CheckpointError, OutOfMemory
from lib.nn.batch_norm import commit_statistics, discard_statistics, weigh_groups
from lib.nn.dropout import key_samples
from lib.optim.lr_schedule import learning_rate_factor
from lib.plan import with_smaller_micro_batch
from lib.plan.types import COLLECTIVE_FORWARD, Plan
from train.job import (
    Job,
    Progress,
    check_finite,
    due_after,
    early_stop,
    epoch_of,
    evaluate,
    evaluation_sums,
    is_over,
    judge,
)
from train.record import AsyncCheckpointer
from train.signals import Agreement, Stopped, StopRequest
from train.tasks.base import Sums, Totals, check_sums, report_of

_RENAMED = {"owes_evaluation": "evaluation_pending"}  # fields of Progress in older checkpoints


def train(job: Job, progress: Progress) -> dict[str, float]:
    """Train `job` from `progress` to the end of its budget or to a request to stop.

    Returns the last evaluation. Raises Diverged if the loss is not finite, OutOfMemory if no smaller
    micro-batch can be used; Stopped, after saving, on SIGINT and SIGTERM; CompileError.
    """
    if job.plan.compile:
        job.record.log("The first step is compiled, which takes seconds to minutes")
    logged, logged_at = Totals(), _counters(job, progress)
    evaluation: dict[str, float] = {}
    asynchronous = job.saves_beside or job.config.checkpoints.checkpoint_async
    saver = AsyncCheckpointer(job.record, asynchronous=asynchronous, sharded=job.shard_directory)
    with StopRequest(announce=job.backend.world == 1) as stop, saver:
        agreed, stop.saved_step = Agreement(job.backend, stop, seconds=progress.seconds), progress.step
        if progress.evaluation_pending:
            evaluation, better = assess(job, progress, stop, saver)
            _save(job, progress, saver, best=better)  # else the row would be written again after a kill
        last = is_over(job, progress)
        agreed.restart(counts=False)
        while not last:
            for sums in optimizer_step(job, progress):
                logged.add(sums)
            progress.step += 1
            saver.check()
            progress.seconds = agreed.take()
            last = job.budget.spent(step=progress.step, seconds=progress.seconds)
            due = due_after(job, progress.step, agreed, last=last)
            fraction = job.budget.fraction(step=progress.step, seconds=progress.seconds)
            job.record.progress(progress.step, fraction)
            stopping = agreed.signal
            if due.log:
                means = logged.means(job.backend)  # waits for the device, which counts as training time
                progress.seconds = agreed.settle()
                row = _train_row(job, progress, means, since=logged_at)
                first = not logged_at["step"]
                logged, logged_at = Totals(), _counters(job, progress)
                check_finite(job, row, weights=due.save or due.evaluation, first=first)
            better = False
            if due.evaluation:
                evaluation, better = assess(job, progress, stop, saver)
            ends_early = bool(early_stop(job, progress))
            if due.save or better or ends_early:
                _save(job, progress, saver, best=better)
                agreed.saved()
                stop.saved_step = progress.step
            last = last or ends_early
            if stopping and not last:
                raise Stopped(int(stopping), progress.step)
            agreed.restart(counts=not due.log)
    # A run that was killed after its last checkpoint has only its result to report.
    return evaluation or evaluate(job)


def optimizer_step(
    job: Job, progress: Progress, *, accumulate: Callable[[Job, Progress], Iterator[Sums]] | None = None
) -> list[Sums]:
    """Make one optimizer step; after running out of memory, repeat it with a smaller micro-batch.

    accumulate: makes the gradients; default `accumulate_gradients`. Repeating is exact: data are a function
    of the step, and nothing is updated before all gradients are complete. Raises OutOfMemory if memory runs
    out later, in the update itself.
    """
    while True:
        try:
            parts = list((accumulate or accumulate_gradients)(job, progress))
        except (RuntimeError, MemoryError) as error:
            reason = reason_if_out_of_memory(error)
        else:
            break
        # Outside the handler, where the traceback no longer keeps the activations alive.
        job.optimizer.zero_grad(set_to_none=True)
        discard_statistics(job.model)
        if job.carry is not None:
            job.carry.discard()
        if job.cuda_graph_forward is not None:
            from lib.nn.compile import release_programs

            job.cuda_graph_forward = None
            release_programs()  # else graphs of the size that did not fit keep their memory
        job.backend.release_memory()
        job.plan = _smaller_plan(job, reason)
    try:
        _update(job, progress, count=sum(part.count for part in parts))
    except (RuntimeError, MemoryError) as error:
        reason = reason_if_out_of_memory(error)
        raise OutOfMemory("out of memory while the weights were being updated", why=reason) from error
    return parts


def reason_if_out_of_memory(error: Exception) -> str:
    """Return the first line of an out-of-memory `error`; raise any other error again."""
    if not is_out_of_memory(error):
        raise error
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _smaller_plan(job: Job, reason: str) -> Plan:
    """Return a plan with a smaller micro-batch. Raises OutOfMemory if none exists or retries are disabled."""
    used, plan = job.plan.micro_batch, with_smaller_micro_batch(job.plan)
    what = f"out of memory at micro-batch {used}"
    if plan is None:
        raise OutOfMemory(f"{what}, and there is no smaller one", why=reason)
    todo = f"set CONFIG_HYPER_PARAM_MANUAL=y CONFIG_BATCH_SIZE={plan.micro_batch}"
    if job.backend.world > 1:
        # The other ranks wait in the backward pass and cannot be notified.
        raise OutOfMemory(f"{what} on one of several devices", why=reason, todo=todo)
    if not job.config.oom_retry:
        raise OutOfMemory(what, why=reason, todo=todo)
    job.record.replan(plan, f"{what}: continuing with {plan.micro_batch}")
    return plan


def accumulate_gradients(job: Job, progress: Progress) -> Generator[Sums, None, None]:
    """Compute the gradients of a step, one micro-batch after the other; yield the sums of each."""
    plan, backend = job.plan, job.backend
    # Each rank scales by the nominal count, and ranks are averaged, or pipelines summed: together the
    # sum over all ranks divided by that count. If the task counts something else, _rescale corrects it.
    # The factor is the gradient of the sum, which saves a multiplication and its derivative.
    averaged = plan.layout.replicas if job.pipeline is None else 1
    scale, replica = averaged / _nominal_count(job), plan.layout.replica_of(backend.rank)
    rows, sizes = plan.micro_batches_of(replica)
    firsts, offset = [*itertools.accumulate(sizes[:-1], initial=sum(plan.shares[:replica]))], 0
    if job.train_loader.by_length:
        from train.padding import dealt_firsts  # most data have no lengths

        firsts = dealt_firsts(plan, replica)
    batches = job.train_loader.micro_batches(
        step=progress.step, target=plan.effective_batch, firsts=firsts, sizes=sizes, rows=rows
    )
    if job.pipeline is not None:
        numbers = [progress.step * plan.effective_batch + first for first in firsts]
        yield from job.pipeline.train(list(zip(batches, numbers, strict=True)), job.task, scale=scale)
        return
    for number, batch in enumerate(batches, start=1):
        size, last = sizes[number - 1], number == plan.accumulation  # zip would keep the batch before
        row = firsts[number - 1]
        if job.dropouts or job.reseeds:
            keyed = progress.step * plan.effective_batch + row
            known: dict[str, Any] = {"seed": job.config.seed, "first": keyed, "reseeds": job.reseeds}
            known |= {"device": backend.device, "in_place": plan.cuda_graphs}
            key_samples(job.dropouts, count=len(batch.inputs), **known)
        if job.carry is not None:
            job.carry.seek(step=progress.step, first=row, offset=offset, count=size, rows=len(batch.inputs))
        if plan.norm_batch and batch.weights is not None:
            weigh_groups(job.model, batch.weights)
        offset += size
        with contextlib.nullcontext() if last else backend.without_gradient_sync(job.wrapped):
            with backend.autocast(plan.precision), job.keeping:
                sums = _training_sums(job, batch)
            check_sums(sums, job.config, targets=size * job.task.targets_per_sample)
            backend.backward(sums.loss, job.scaler.scale(torch.full_like(sums.loss, scale)), last=last)
        if not last:  # the update belongs to the last one's graph
            backend.mark_step()
        yield sums
    if not plan.cuda_graphs:  # which find the keys of all steps in one place
        for dropout in job.dropouts:  # a step leaves gradients and sums behind, and nothing else
            dropout.sample_keys = None


def _training_sums(job: Job, batch: Batch) -> Sums:
    if "loss" not in job.plan.compile_parts:
        return job.task.training(job.forward, batch)
    forward = job.forward if job.cuda_graph_forward is None else job.cuda_graph_forward
    return Sums(*forward(batch=(batch.inputs, batch.targets, batch.weights, batch.mixed)))


def _nominal_count(job: Job) -> int:
    """Number of targets per optimizer step if every sample has all its targets."""
    return job.plan.effective_batch * job.task.targets_per_sample


def _rescale(job: Job, count: Tensor) -> None:
    """Turn gradients of sum / nominal count into gradients of sum / global count."""
    # In the gradients' dtype: a quotient of integers would be a float32.
    trained = [weight for weight in job.model.parameters() if weight.requires_grad]
    count = count.detach().to(trained[0].dtype, copy=True)
    job.backend.all_reduce_sum(count)
    gradients = [local(weight.grad) for weight in trained if weight.grad is not None]
    if gradients:  # a stage of a pipeline may be frozen
        torch._foreach_mul_(gradients, _nominal_count(job) / count)


def _update(job: Job, progress: Progress, *, count: Tensor | int) -> None:
    job.backend.average_gradients(job.model)
    # A task may count padding on one rank by a tensor: then all ranks reduce the count.
    if isinstance(count, Tensor) or job.plan.is_padded:
        _rescale(job, send(count, job.backend.device))
    factor = rate_factor(job, progress)
    for group in job.optimizer.param_groups:
        group["lr"] = factor * group["peak_lr"]
    if job.config.optim.grad_clip > 0:
        job.scaler.unscale_(job.optimizer)
        clip = clip_gradients if job.pipeline is None else job.pipeline.clip_gradients
        clip(job.model, job.config.optim.grad_clip)
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    if job.plan.norm_batch:
        commit_statistics(job.model, job.backend.all_reduce_sum if job.backend.world > 1 else None)
    if job.ema is not None:
        job.ema.update()
    if job.carry is not None:
        job.carry.commit()
    job.backend.mark_step()


def rate_factor(job: Job, progress: Progress) -> float:
    """Return the factor on each group's peak learning rate for the next step, at its middle.

    In a warmup from 0 at its end: of n steps the first has 1 / n and the last 1.
    """
    config, budget = job.config, job.budget
    middle, end = (budget.fraction(step=progress.step + part, seconds=progress.seconds) for part in (0.5, 1))
    at_end = config.lr_schedule.warmup_start_ratio == 0 and end <= job.warmup_fraction
    return learning_rate_factor(
        end if at_end else middle,
        schedule=config.lr_schedule.schedule,
        warmup_fraction=job.warmup_fraction,
        warmup_start=config.lr_schedule.warmup_start_ratio,
        min_ratio=config.lr_schedule.lr_min_ratio,
        step_fractions=[percent / 100 for percent in config.lr_schedule.lr_step_pct_list or ()],
        gamma=config.lr_schedule.lr_step_gamma,
    )


def assess(
    job: Job, progress: Progress, stop: StopRequest, saver: AsyncCheckpointer
) -> tuple[dict[str, float], bool]:
    """Evaluate; return the result and whether it is the best so far.

    A signal interrupts it: the run saves, raises Stopped, and evaluates when it resumes.
    """
    progress.evaluation_pending = True
    totals = Totals()
    # With sharded weights or stages every forward pass is collective, so no rank may stop alone.
    alone = job.plan.strategy not in COLLECTIVE_FORWARD
    with contextlib.closing(evaluation_sums(job)) as batches:  # restores the training weights
        for index, sums in enumerate(itertools.takewhile(lambda _: not (alone and stop.signal), batches)):
            totals.add(sums)
            done = (index + 1) * job.plan.micro_batch * job.plan.layout.replicas
            job.record.evaluating(progress.step, min(done, job.eval_loader.size), job.eval_loader.size)
    (number,) = job.backend.all_reduce_max((stop.signal,))
    if number:
        _save(job, progress, saver, best=False)
        raise Stopped(int(number), progress.step)
    progress.evaluation_pending = False
    evaluation = report_of(job.task, totals, job.backend, job.config)
    job.record.row("eval", step=progress.step, epoch=epoch_of(job, progress.step), **evaluation)
    better = judge(job, progress, evaluation)
    return evaluation, better and job.config.checkpoints.keep_best


def _counters(job: Job, progress: Progress) -> dict[str, float]:
    """Return optimizer steps, seconds of training, and seconds of this rank's waiting, by column."""
    waited = {"data_wait": job.train_loader.waited_seconds, **job.backend.waited_seconds()}
    return {"step": progress.step, "seconds": progress.seconds, **waited}


def _train_row(
    job: Job, progress: Progress, means: dict[str, float], *, since: Mapping[str, float]
) -> Mapping[str, float]:
    waited = {name: value - since[name] for name, value in _counters(job, progress).items()}
    steps, seconds = waited.pop("step"), max(waited.pop("seconds"), 1e-9)
    row = {
        "step": progress.step,
        "epoch": epoch_of(job, progress.step),
        **{name: value for name, value in means.items() if name != "count"},
        "learning_rate": job.optimizer.param_groups[0]["lr"],
        "samples_per_second": steps * job.plan.effective_batch / seconds,
        **{name: value / seconds for name, value in waited.items()},
        "seconds": progress.seconds,
        "micro_batch": job.plan.micro_batch,
        **job.backend.compilations(compiled=job.plan.compile),
    }
    job.record.row("train", **row)
    return row


def _save(job: Job, progress: Progress, saver: AsyncCheckpointer, *, best: bool) -> None:
    # On every rank, because each may hold a shard.
    parts = job.backend.to_host(_local_state(job, progress))
    saver.save(progress.step, parts, job.backend.gatherer(job.plan.layout), best=best)


def state_dict(job: Job, progress: Progress) -> dict[str, Any]:
    """Return the state to resume from bit for bit. Collective; only rank 0 gets the full state."""
    state: dict[str, Any] = gather_full(_local_state(job, progress), job.backend.gatherer(job.plan.layout))
    return state


def _local_state(job: Job, progress: Progress) -> dict[str, Any]:
    saves_carry = job.config.checkpoints.checkpoint_carry
    state = {
        "model": to_local(job.saved_weights()),
        "optimizer": optimizer_state(job.optimizer),
        "scaler": job.scaler.state_dict(),
        "ema": to_local(job.ema.state_dict()) if job.ema is not None else None,
        "carry": job.carry.gathered(job.backend) if job.carry and saves_carry else None,
        "progress": dataclasses.asdict(progress),
        **({} if job.adapters is None else {"adapters": job.adapters}),
    }
    return state if job.pipeline is None else job.pipeline.own_state(state, job.model, job.optimizer)


def load_state_dict(job: Job, state: Mapping[str, Any], *, to_train: bool = True) -> Progress:
    """Load a `state_dict` into `job` and return the progress at that time.

    to_train: False leaves out what evaluation does not need: the state of the optimizer, and the carry, as
        evaluation starts every sample afresh.
    """
    try:
        job.check_base(state)
        own = job.saved_weights()  # of other stages on the meta device
        if own.keys() != state["model"].keys():
            raise KeyError(f"the weights of another model: {sorted(own.keys() ^ state['model'].keys())}")
        shards = {n: shard_of(state["model"][n], each) for n, each in own.items() if not each.is_meta}
        job.model.load_state_dict(shards, strict=False)
        if to_train:
            load_optimizer_state(job.optimizer, state["optimizer"])
        if job.scaler.is_enabled() and state["scaler"]:  # empty if saved in another precision
            job.scaler.load_state_dict(state["scaler"])
        if job.ema is not None:
            job.ema.load_state_dict(state["ema"])
        if job.carry is not None:
            job.carry.load(state["carry"] if to_train else None, job.backend, shares=job.plan.shares)
        return Progress(**{_RENAMED.get(name, name): value for name, value in state["progress"].items()})
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError("the checkpoint does not fit the model of this version", why=reason) from error

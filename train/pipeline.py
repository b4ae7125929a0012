"""Pipeline parallelism: a stage of the model on each rank, by torch.distributed.pipelining.

Rank r of a pipeline has the r-th group of consecutive blocks; the first rank also what comes before them, the
last one what comes after, and the loss. Weights of other stages are on the meta device. Micro-batches are
those of accumulation, in the order of 1F1B (Narayanan et al. 2021). Consecutive ranks are a pipeline. Of
several pipelines each has its own samples, and equal stages sum their gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from lib.data.loader import Batch
from lib.devices.base import Backend, send
from lib.distributed.fsdp import Entries
from lib.distributed.staged_model import HasStages
from lib.nn.dropout import dropouts, key_samples
from lib.plan.stages import stage_blocks
from lib.plan.types import Precision
from train.tasks.base import Forward, Sums, Task

Row: TypeAlias = tuple[Batch, int]  # a micro-batch, and the number of its first row in the training stream


class Pipeline:
    """The stage of this rank, and its exchange with the others. Methods that take batches are collective."""

    def __init__(
        self, model: nn.Module, backend: Backend, *, stages: int, seed: int, precision: Precision
    ) -> None:
        """Keep the weights of this stage, moved to the device; those of other stages become meta tensors."""
        assert isinstance(model, HasStages), f"{type(model).__name__} cannot be a pipeline"
        self._backend, self._seed, self._precision = backend, seed, precision
        self._stages, self._stage = stages, (stage := backend.rank % stages)
        self._is_first, self._is_last = stage == 0, stage == stages - 1
        parts = model.pipeline_stages()
        block, last = (
            sum(weight.numel() for weight in weights)
            for weights in (parts.blocks[0].parameters(), parts.last_weights)
        )
        sizes = stage_blocks(len(parts.blocks), block=block, last=last, stages=stages)
        # Not the parts themselves, which would keep the weights of other stages alive.
        self._first, self._chain, self._last = parts.first, parts.chain, parts.last
        self._blocks = parts.blocks[sum(sizes[:stage]) :][: sizes[stage]]
        self._sent = torch.empty(parts.channels, dtype=parts.first_weights[0].dtype, device=backend.device)
        inner = {id(each) for block in parts.blocks for each in dropouts(block)}
        self._outer = [each for each in dropouts(model) if id(each) not in inner]
        held = {id(weight) for block in self._blocks for weight in block.parameters()}
        first_end, last_end = ({*map(id, end)} for end in (parts.first_weights, parts.last_weights))
        held |= (first_end if self._is_first else set()) | (last_end if self._is_last else set())
        tied = first_end & last_end
        _keep(model, held, backend.device)
        # Both ends have tied weights; the first one saves them, and counts them in the norm.
        self._tied = [weight for weight in model.parameters() if id(weight) in tied & held]
        self._owned = held if self._is_first else held - tied
        self._weights = [weight for weight in model.parameters() if id(weight) in held]
        pipelines = [[*range(first, first + stages)] for first in range(0, backend.world, stages)]
        self._last_rank = backend.rank - stage + stages - 1
        groups: Any = dist.new_subgroups_by_enumeration  # every rank makes all of them
        self._own, _ = groups(pipelines)
        self._host, _ = groups(pipelines, backend="gloo")
        self._ends, _ = groups([[ranks[0], ranks[-1]] for ranks in pipelines])
        self._equal, _ = groups([*map(list, zip(*pipelines, strict=True))])
        self._schedules: dict[tuple[int, torch.Size, bool], PipelineScheduleSingle] = {}
        self._zeros: dict[bool, Sums] = {}
        self._queue: Iterator[Row] = iter(())
        self._finish: Callable[[Forward, Batch], Sums] | None = None
        self._found: list[Sums] = []
        self._scale = 1.0

    def train(self, rows: list[Row], task: Task, *, scale: float) -> list[Sums]:
        """Add the gradients of `scale` times the loss to this stage's weights; return the sums.

        The sums of all ranks but the last are zero.
        """
        self._scale = scale
        sums = self._run(rows, task.training, train=True)
        for weight in self._tied:
            if weight.requires_grad:
                dist.all_reduce(weight.grad, group=self._ends)
        if self._backend.world > self._stages:
            gradients = [weight.grad for weight in self._weights if weight.grad is not None]
            works = [dist.all_reduce(each, group=self._equal, async_op=True) for each in gradients]
            for work in works:
                work.wait()
        return sums

    def evaluate(self, batches: Iterator[Batch], task: Task) -> Iterator[Sums]:
        """Yield the sums of each batch; those of all ranks but the last are zero."""
        # Twice as many as stages at once, or most of them would wait.
        while group := [(batch, 0) for batch in itertools.islice(batches, 2 * self._stages)]:
            yield from self._run(group, task.evaluation, train=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of `inputs` on every rank, without gradients."""
        logits: list[Any] = [None]

        def take(forward: Forward, batch: Batch) -> Sums:
            logits[0] = forward(batch.inputs).cpu()
            return Sums(torch.zeros((), device=inputs.device), 0, {})

        with torch.no_grad():
            self._run([(Batch(inputs, inputs, None), 0)], take, train=False)
        del self._zeros[False]  # an evaluation has others
        return self._from_last(logits[0]).to(inputs.device)  # type: ignore[no-any-return]

    def clip_gradients(self, model: nn.Module, max_norm: float) -> None:
        """Clip gradients to the total norm `max_norm` over all stages."""
        gradients = {id(each): each.grad for each in model.parameters() if each.grad is not None}
        # In the order of the model: equal stages have to round alike.
        own = nn.utils.get_total_norm([each for key, each in gradients.items() if key in self._owned])
        square = own.square().to(self._sent)  # of no gradients it is a float32
        dist.all_reduce(square, group=self._own)
        if gradients:
            torch._foreach_mul_([*gradients.values()], (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0))

    def own_state(
        self, state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Return a state to save with the entries of this rank's weights (`fsdp.gather_full`)."""
        named = {name: id(weight) for name, weight in model.named_parameters(remove_duplicate=False)}
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]

        def own(entries: Mapping[Any, Any], keys: Mapping[Any, int]) -> Entries:
            return Entries({key: value for key, value in entries.items() if keys[key] in self._owned})

        numbers = own(state["optimizer"]["state"], dict(enumerate(map(id, weights))))
        averages = None if state["ema"] is None else own(state["ema"], named)
        optimizer_state = {**state["optimizer"], "state": numbers}
        return {**state, "model": own(state["model"], named), "optimizer": optimizer_state, "ema": averages}

    def _run(self, rows: list[Row], finish: Callable[[Forward, Batch], Sums], *, train: bool) -> list[Sums]:
        """Run the schedule on micro-batches of one shape."""
        count, shape = len(rows), rows[0][0].inputs.shape
        if (count, shape, train) not in self._schedules:
            self._schedules[count, shape, train] = self._schedule(count, shape, train=train)
        self._queue, self._finish, self._found = iter(rows), finish, []
        numbers = torch.zeros(count)  # the first stage needs an argument, and the last one a target
        try:
            arguments = [numbers] if self._is_first else []
            self._schedules[count, shape, train].step(*arguments, target=numbers, return_outputs=False)
        except RuntimeError as error:
            # Torch wraps what a stage raises, such as a lack of memory.
            raise (error.__cause__ or error) from None
        if train not in self._zeros:  # of the shapes of the last rank's sums
            own = _zeros(self._found[0], self._backend.host) if self._is_last else None
            self._zeros[train] = self._from_last(own)
        return self._found or [_zeros(self._zeros[train], self._backend.device)] * count

    def _from_last(self, value: Any) -> Any:
        """Return the last rank's `value` on every rank, through the host group."""
        box = [value]
        dist.broadcast_object_list(box, src=self._last_rank, group=self._host)
        return box[0]

    def _schedule(self, count: int, shape: torch.Size, *, train: bool) -> PipelineScheduleSingle:
        sent = self._sent.new_empty((*shape, len(self._sent)), requires_grad=train)
        number = torch.zeros(1)
        ends: dict[str, Any] = {
            "input_args": number if self._is_first else sent,
            "output_args": number if self._is_last else sent,
        }
        ends |= {"device": self._backend.device, "group": self._own}
        stage = PipelineStage(_Stage(self._compute), self._stage, self._stages, **ends)
        if not train:
            return ScheduleGPipe(stage, count)  # without a loss it only goes forward
        kind: type[PipelineScheduleSingle] = Schedule1F1B if count >= self._stages else ScheduleGPipe
        return kind(stage, count, loss_fn=lambda loss, _: loss * self._scale, scale_grads=False)

    def _compute(self, x: Tensor) -> Tensor:
        """Compute the next micro-batch: return hidden states, or on the last stage the loss."""
        batch, first = next(self._queue)
        keys: dict[str, Any] = {"seed": self._seed, "first": first, "count": len(batch.inputs)}
        keys["device"] = batch.inputs.device

        def keyed(block: nn.Module) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                # Set again where it is recomputed: by then another micro-batch has gone forward.
                key_samples(dropouts(block), **keys)
                return block(x)  # type: ignore[no-any-return]

            return run

        with self._backend.autocast(self._precision):
            if self._is_first:
                key_samples(self._outer, **keys)
                x = self._first(batch.inputs)
            x = self._chain(x, *map(keyed, self._blocks))
            if not self._is_last:
                return x
            assert self._finish is not None
            sums = self._finish(lambda *taken: self._last(x, *taken), batch)
        # Ranks without the loss must know, too, that the count is to be reduced: always a tensor.
        counted = send(sums.count, self._backend.device)
        self._found.append(Sums(sums.loss.detach(), counted, sums.metrics, sums.rows))
        return sums.loss


class _Stage(nn.Module):
    """The module of a PipelineStage. It registers no weights: the model has them."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = compute


def _zeros(sums: Sums, device: torch.device) -> Sums:
    """Return zeros on `device` with the shapes of `sums`, whose count is a tensor."""

    def zeros(like: Any) -> Tensor:
        return torch.zeros_like(like, device=device)

    metrics = {name: zeros(each) for name, each in sums.metrics.items()}
    return Sums(zeros(sums.loss), zeros(sums.count), metrics, tuple(map(zeros, sums.rows)))


def _keep(model: nn.Module, held: set[int], device: torch.device) -> None:
    """Move the weights of `model` with an id in `held` to `device`, and all others to the meta device."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in held:
                weight.data = weight.data.to(device)
            else:
                meta = weight.detach().to("meta")
                setattr(module, name, nn.Parameter(meta, requires_grad=weight.requires_grad))

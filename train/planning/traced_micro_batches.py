"""Micro-batches of traced optimizer steps, which run once and are then repeated as events."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lib.memory.live import LiveBytes
from train import loop
from train.job import Job, Progress
from train.tasks.base import Forward, Sums, Task


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    """A counted tensor without its memory."""

    number: int  # of its storage
    size: torch.Size
    stride: tuple[int, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, tensor: torch.Tensor, live: LiveBytes) -> _Shape:
        options = {"dtype": tensor.dtype, "device": tensor.device}
        return cls(live.number_of(tensor), tensor.shape, tensor.stride(), options)


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorded:
    """Events of the micro-batches of a step, from one position to another, and what they left behind."""

    start: int
    stop: int
    gradients: Mapping[nn.Parameter, _Shape | torch.Tensor]  # a tensor where it is older: in DDP's bucket
    sums: Sequence[Any]  # fields of Sums, with shapes for tensors


class MicroBatches:
    """The micro-batches of traced steps: run by the training loop once, and then repeated as events.

    They run in each step where they leave anything behind but gradients and sums, such as a carry.
    """

    def __init__(self, job: Job, live: LiveBytes) -> None:
        self._live, self._task = live, job.task
        self._recorded: _Recorded | None = None
        # Of all micro-batches of a step: launches in forward passes, others, and bytes that are copied.
        self._forward, self.counts = 0, (0, 0, 0)
        self.flop = Counter[torch.device]()  # of them
        self.launches_before_update, self.flop_before_update = 0, Counter[torch.device]()
        self.position_before_update = 0
        own = {"targets_per_sample": job.task.targets_per_sample, "evaluation": job.task.evaluation}
        job.task = cast("Task", SimpleNamespace(training=self._training, **own))

    def run(self, job: Job, progress: Progress) -> Iterator[Sums]:
        """Yield the sums of each micro-batch of a step; the gradients are there at the end."""
        found = self._recorded
        yield from self._run(job, progress) if found is None else self._repeat(found)
        self.launches_before_update = self._live.launches
        self.flop_before_update = self._live.flop_on.copy()
        self.position_before_update = self._live.position

    def _run(self, job: Job, progress: Progress) -> Iterator[Sums]:
        live, self._forward = self._live, 0
        start, launches, flop, sums = live.position, live.launches, live.flop_on.copy(), list[Any]()
        offloaded = getattr(job.keeping, "byte_count", 0)
        for each in loop.accumulate_gradients(job, progress):
            fields = (each.loss, each.count, dict(each.metrics))
            sums.append(tree_map_only(torch.Tensor, lambda tensor: _Shape.of(tensor, live), fields))
            del fields
            yield each
        del each
        copied = 2 * (getattr(job.keeping, "byte_count", 0) - offloaded)
        self.counts = self._forward, live.launches - launches - self._forward, copied
        self.flop = live.flop_on - flop
        gradients = {each: each.grad for each in job.model.parameters() if each.grad is not None}
        shapes = {each: _Shape.of(gradient, live) for each, gradient in gradients.items()}
        parts = [leaf for leaf in tree_leaves(sums) if isinstance(leaf, _Shape)]
        kept, known = live.kept_since(start), {each.number for each in (*shapes.values(), *parts)}
        if kept is not None and kept <= known and all(each.number >= start for each in parts):
            own = {each: of if of.number >= start else gradients[each] for each, of in shapes.items()}
            self._recorded = _Recorded(start, live.position, own, sums)

    def _repeat(self, found: _Recorded) -> Iterator[Sums]:
        live, made = self._live, dict[int, torch.Tensor]()
        live.name_the_rest("activations")
        shift = live.repeat(found.start, found.stop)

        def tensor_of(shape: _Shape) -> torch.Tensor:
            def make() -> torch.Tensor:
                return torch.empty_strided(shape.size, shape.stride, **shape.options)

            if shape.number not in made:
                made[shape.number] = live.stand_in(shape.number + shift, make)
            return made[shape.number]

        for parameter, gradient in found.gradients.items():
            parameter.grad = tensor_of(gradient) if isinstance(gradient, _Shape) else gradient
        for sums in found.sums:
            yield Sums(*tree_map_only(_Shape, tensor_of, sums))

    def _training(self, forward: Forward, batch: Any) -> Sums:
        before = self._live.launches
        sums = self._task.training(forward, batch)
        self._forward += self._live.launches - before
        self._live.name_the_rest("activations")  # storages that outlive a forward pass
        return sums

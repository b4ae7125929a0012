"""The steps of a memory trace: one micro-batch is run, and what follows is made of its events."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lib.memory.live import STEPS, LiveBytes, add_state, watch_gradients
from train import loop
from train.job import Job, Progress, evaluation_sums
from train.tasks.base import Forward, HoldsWeights, Sums, Task


class Launches(NamedTuple):
    """Operators that launch a kernel: of one micro-batch (backward: with reading it), and of the update."""

    forward: int
    backward: int
    update: int

    def of_step(self, accumulation: int) -> int:
        """Return their number in a step of `accumulation` micro-batches."""
        return accumulation * (self.forward + self.backward) + self.update


def run_traced(job: Job, live: LiveBytes) -> tuple[int, Launches, int]:
    """Run `job` for STEPS steps and a batch of evaluation, and categorize its storages.

    Returns the FLOP of the last step, on the device that has most of them, its kernel launches, and the bytes
    that a micro-batch copies to main memory and back.
    """
    live.add([*job.model.parameters(), *job.model.buffers()], "parameters")
    if isinstance(job.task, HoldsWeights):
        job.task.watch_weights(lambda weights: live.add(weights, "frozen models"))
    live.name_the_rest("data")
    if job.ema is not None:
        live.add(job.ema.state_dict().values(), "averages")
    watch_gradients(job.model, live)
    micro_batches = _MicroBatches(job, live)
    progress = Progress()
    for _ in range(STEPS):
        loop.optimizer_step(job, progress, accumulate=micro_batches.run)
        update = live.launches - micro_batches.launches_before_update
        flop = micro_batches.flop + (live.flop_on - micro_batches.flop_before_update)
        progress.step += 1
        add_state(job.optimizer, live)
        live.name_since(micro_batches.position_before_update, "update")
    for _ in evaluation_sums(job):
        break
    forward, backward, copied = (count // job.plan.accumulation for count in micro_batches.counts)
    return max(flop.values(), default=0), Launches(forward, backward, update), copied


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


def _shapes_of(sums: Sums, live: LiveBytes) -> Any:
    """Return the first fields of `sums` with shapes for tensors."""
    fields = (sums.loss, sums.count, dict(sums.metrics))
    return tree_map_only(torch.Tensor, lambda tensor: _Shape.of(tensor, live), fields)


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorded:
    """Events of the micro-batches of a step, from one position to another, and what they left behind."""

    start: int
    stop: int
    gradients: Mapping[nn.Parameter, _Shape | torch.Tensor]  # a tensor where it is older: in DDP's bucket
    sums: Sequence[Any]  # fields of Sums, with shapes for tensors


class _Accumulated:
    """How the gradients of the first micro-batch of a step came to their parameters.

    In the next one they are added to those instead, and released.
    """

    def __init__(self, model: nn.Module, live: LiveBytes) -> None:
        self._live, self._coming = live, dict[nn.Parameter, int]()
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.register_hook(functools.partial(self._comes, parameter))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(self._is_there)  # type: ignore[no-untyped-call]
        self.begin()

    def begin(self) -> None:
        """Begin with the step that follows."""
        self.start, self.additions = self._live.position, 0  # kernels that the next micro-batch launches more
        self.taken = dict[int, int]()  # storages that became the gradient, and the position when they did
        self.copies = set[int]()  # storages that were made for it

    def _comes(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self._coming[parameter] = self._live.number_of(gradient)

    def _is_there(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "it was accumulated"
        number, came = self._live.number_of(parameter.grad), self._coming.pop(parameter)
        if number == came:
            self.taken[number] = self._live.position
        elif number >= self.start and number not in self.taken:
            self.copies.add(number)
        self.additions += number == came or number < self.start  # in a bucket it was assigned


class _MicroBatches:
    """The micro-batches of traced steps: the training loop runs the first, and its events are repeated.

    Each is run where they leave anything behind but gradients and sums, such as a carry.
    """

    def __init__(self, job: Job, live: LiveBytes) -> None:
        self._live = live
        self._recorded: _Recorded | None = None
        self._accumulated = _Accumulated(job.model, live)
        self._read = 0  # events when the batch of the first micro-batch was there
        # Of all micro-batches of a step: launches in forward passes, others, and bytes that are copied.
        self._forward, self.counts = 0, (0, 0, 0)
        self.flop = Counter[torch.device]()  # of them
        self.launches_before_update, self.flop_before_update = 0, Counter[torch.device]()
        self.position_before_update = 0
        training = functools.partial(self._training, job.task.training)
        own = {"targets_per_sample": job.task.targets_per_sample, "evaluation": job.task.evaluation}
        job.task = cast("Task", SimpleNamespace(training=training, **own))
        if "loss" in job.plan.compile_parts:  # by the task that the model was compiled with
            job.forward = functools.partial(self._training, job.forward)

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
        offloaded, repeats, additions = getattr(job.keeping, "byte_count", 0), 1, 0
        accumulated, running = self._accumulated, loop.accumulate_gradients(job, progress)
        accumulated.begin()
        for each in running:
            sums.append(_shapes_of(each, live))
            yield each
            del each
            if second := self._second(job, sums):
                sums.append(_shapes_of(second, live))
                repeats, additions = 2, accumulated.additions
                yield second
                running.close()  # which releases its batch
        del running
        forward, copied = self._forward, 2 * (getattr(job.keeping, "byte_count", 0) - offloaded)
        others = live.launches - launches - forward
        self.counts = repeats * forward, repeats * others + additions, repeats * copied
        self.flop = Counter({device: repeats * n for device, n in (live.flop_on - flop).items()})
        gradients = {each: each.grad for each in job.model.parameters() if each.grad is not None}
        shapes = {each: _Shape.of(gradient, live) for each, gradient in gradients.items()}
        parts = [leaf for leaf in tree_leaves(sums) if isinstance(leaf, _Shape)]
        kept, known = live.kept_since(start), {each.number for each in (*shapes.values(), *parts)}
        if kept is not None and kept <= known and all(each.number >= start for each in parts):
            own = {each: of if of.number >= start else gradients[each] for each, of in shapes.items()}
            self._recorded = _Recorded(start, live.position, own, sums)

    def _second(self, job: Job, sums: Sequence[Any]) -> Sums | None:
        """Return the sums of the second of two micro-batches, made of the events of the first.

        None where it has to be run: after the second, and where the first left something else behind.
        """
        live, accumulated, read, (first, *more) = self._live, self._accumulated, self._read, sums
        start = accumulated.start
        if more or job.plan.accumulation != 2 or job.dropouts or job.reseeds or job.carry is not None:
            return None
        parts = {each.number for each in tree_leaves(first) if isinstance(each, _Shape)}
        kept, known = live.kept_since(start), parts.union(accumulated.taken, accumulated.copies)
        if kept is None or not known <= kept or not all(number < read for number in kept - known):
            return None
        numbers = live.repeat(
            start,
            live.position,
            without=accumulated.copies,
            released=accumulated.taken,
            replaced=dict.fromkeys(kept - known, read),  # the batch, once the next one is read
        )
        return Sums(*tree_map_only(_Shape, self._stand_ins(numbers), first))

    def _repeat(self, found: _Recorded) -> Iterator[Sums]:
        self._live.name_the_rest("activations")
        tensor_of = self._stand_ins(self._live.repeat(found.start, found.stop))
        for parameter, gradient in found.gradients.items():
            parameter.grad = tensor_of(gradient) if isinstance(gradient, _Shape) else gradient
        for sums in found.sums:
            yield Sums(*tree_map_only(_Shape, tensor_of, sums))

    def _stand_ins(self, numbers: Mapping[int, int]) -> Callable[[_Shape], torch.Tensor]:
        """Return what makes tensors of a repetition. numbers: of its storages, by those of the original."""
        made = dict[int, torch.Tensor]()

        def tensor_of(shape: _Shape) -> torch.Tensor:
            def make() -> torch.Tensor:
                return torch.empty_strided(shape.size, shape.stride, **shape.options)

            if shape.number not in made:
                made[shape.number] = self._live.stand_in(numbers[shape.number], make)
            return made[shape.number]

        return tensor_of

    def _training(self, run: Forward, *arguments: Any, **named: Any) -> Any:
        before, self._read = self._live.launches, self._live.position
        found = run(*arguments, **named)
        self._forward += self._live.launches - before
        self._live.name_the_rest("activations")  # storages that outlive a forward pass
        return found

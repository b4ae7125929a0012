"""Loaders: from parts of a data set to batches on the device.

A loader reads rows from a store, resident on the device or streamed by background threads, and augments and
normalises images on the device. The placement does not change any bit of a batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from lib.data.augment import ONE, HasSymmetries, Kind, Operation, apply, apply_symmetry, augment_ahead, draw
from lib.data.sampler import HasLengths, by_length, cut_lengths, sample_stream, window_shifts, with_partners
from lib.data.store import Placement, Request, Rows, open_store
from lib.data.types import ArrayPart, ImageSpec, Indices, Part, Spec
from lib.errors import ConfigError

RequestedPlacement: TypeAlias = Literal["auto", "resident", "stream"]

# Data that take more than this share of the free memory are streamed.
RESIDENT_SHARE = 0.25

# Order and augmentation are drawn for about this many samples at once, to amortize small array operations.
_POSITIONS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch on the device.

    inputs:  normalised images (N, C, H, W) or rows of a table (N, F), or int64 tokens (N, T).
    targets: int64 labels (N,), normalised numbers (N, K), or tokens (N, T) with IGNORED.
    weights: float32 (N,), 1 for a sample and 0 for padding, which comes last; None: all 1.
    mixed:   of mixup and cutmix: targets (N,) of the samples' partners, and the shares of their own, float32.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor | None = None
    mixed: tuple[torch.Tensor, torch.Tensor] | None = None


def choose_placement(
    requested: RequestedPlacement, *, parts: Sequence[Part], free_bytes: int
) -> tuple[Literal["resident", "stream"], str]:
    """Return where to keep `parts` for a device with `free_bytes` for this process, and the reason."""
    if requested != "auto":
        return requested, f"CONFIG_DATA_PLACEMENT_{requested.upper()} is set"
    byte_size = sum(part.byte_size for part in parts)
    size = f"{byte_size / 1e6:.1f} MB of data"
    share = f"a quarter of the {free_bytes / 1e9:.2f} GB that are free"
    if byte_size <= RESIDENT_SHARE * free_bytes:
        return "resident", f"{size} take at most {share}"
    return "stream", f"{size} take more than {share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderConfig:
    """Settings of a loader.

    dtype, channels_last: of images and rows of tables in batches; the arithmetic is float32.
    num_workers, prefetch: threads, and micro-batches read ahead (at least one per thread), of a stream.
    lengths: of how many lengths rows of tokens may be, where the data ask for it; 0: of one, uncut.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    placement: Placement = "stream"
    num_workers: int = 1
    prefetch: int = 1
    lengths: int = 0


def normalisation(spec: ImageSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset per channel, float32 (C,): (x / 255 - mean) / std is scale * x + offset."""
    mean = torch.tensor(spec.mean, dtype=torch.float64)
    std = torch.tensor(spec.std, dtype=torch.float64)
    return (1 / (255 * std)).float(), (-mean / std).float()


def _normaliser(spec: ImageSpec, loader_config: LoaderConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the normalisation of uint8 images (N, C, H, W)."""
    layout = torch.channels_last if loader_config.channels_last else torch.contiguous_format

    def whole_image(values_C: torch.Tensor) -> torch.Tensor:
        """Expand to float32 (1, C, H, W), which is faster than (C, 1, 1) in channels-last."""
        whole = values_C[None, :, None, None].expand(1, *spec.input_shape)
        return whole.contiguous(memory_format=layout).to(loader_config.device)

    scale, offset = map(whole_image, normalisation(spec))

    def normalise(images_NCHW: torch.Tensor) -> torch.Tensor:
        # The layout is changed while a pixel is one byte.
        images = images_NCHW.contiguous(memory_format=layout).to(torch.float32)
        return images.mul_(scale).add_(offset).to(loader_config.dtype)

    return normalise


def _converter(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the conversion of stored numbers to those of a batch: fractions to `dtype`, others to int64."""

    def convert(stored: torch.Tensor) -> torch.Tensor:
        return stored.to(dtype if stored.is_floating_point() else torch.int64)

    return convert


class _Loader:
    """Store and normalisation, shared by training and evaluation."""

    def __init__(self, part: Part, spec: Spec, loader_config: LoaderConfig) -> None:
        self.size, self._stride = part.size, part.stride
        self._store = open_store(
            part,
            device=loader_config.device,
            placement=loader_config.placement,
            num_workers=loader_config.num_workers,
            prefetch=loader_config.prefetch,
        )
        self._convert = _converter(loader_config.dtype)
        self._normalise = _normaliser(spec, loader_config) if isinstance(spec, ImageSpec) else self._convert
        self._lengths: Indices | None = None
        if loader_config.lengths and isinstance(spec, HasLengths) and spec.bucketed:
            self._lengths = spec.lengths(part)  # sorted as they are: what rows are cut to depends on the plan
            self._choices, self._size = loader_config.lengths, spec.input_shape[-1]

    @property
    def by_length(self) -> bool:
        """True if samples go by length into batches, whose rows are cut to their longest."""
        return self._lengths is not None

    def _cut_to(self, longest: Indices) -> list[int]:
        """Return the lengths to which rows are cut whose longest ones are given."""
        cut: list[int] = cut_lengths(longest, size=self._size, choices=self._choices).tolist()
        return cut

    def close(self) -> None:
        """Stop background threads; the loader cannot be used afterwards."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Step(NamedTuple):
    """Micro-batches of one rank for one optimizer step."""

    step: int
    target: int
    firsts: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: tuple[int, ...]


class TrainLoader(_Loader):
    """Augmented batches of the endless training stream (`lib.data.sampler`)."""

    def __init__(
        self,
        part: Part,
        spec: Spec,
        loader_config: LoaderConfig,
        *,
        seed: int,
        augment: Kind,
        pad: int,
        fixed: int = 0,
        epochs_ahead: int = 0,
        operations: Sequence[Operation] = (),
    ) -> None:
        """Open the store. Raises ConfigError if the augmentation does not fit the data.

        augment: "symmetries" for data that have some, else only images are augmented. pad: of images, in
        pixels. fixed: number of symmetries per sample, 0 for a new one in every epoch. epochs_ahead: epochs
        that are augmented in advance and must suffice; 0: augment on the fly. operations: further ones, of
        images.
        """
        required = HasSymmetries if augment == "symmetries" else ImageSpec
        if augment != "none" and not isinstance(spec, required):  # a model may support several kinds of data
            raise ConfigError(
                f"CONFIG_AUGMENT_{augment.upper()}=y is not for {spec.name}", todo="set CONFIG_AUGMENT_NONE=y"
            )
        size = part.size
        if epochs_ahead:
            assert isinstance(part, ArrayPart) and isinstance(spec, HasSymmetries)
            part = augment_ahead(part, spec=spec, seed=seed, epochs=epochs_ahead, fixed=fixed)
            augment = "none"
        super().__init__(part, spec, loader_config)
        self.size, self._epochs_ahead, self._spec = size, epochs_ahead, spec
        self._seed, self._kind, self._pad, self._fixed = seed, augment, pad, fixed
        self._operations, self._mixes = operations, any(each.name == "mix" for each in operations)
        self.waited_seconds = 0.0  # of the host, for batches: reading, and launching their augmentation
        self._next: _Step | None = None
        self._reader: Iterator[Rows] = iter(())
        self._cuts = deque[int]()  # of the micro-batches that are read, where rows are cut

    def micro_batches(
        self,
        *,
        step: int,
        target: int,
        sizes: Sequence[int],
        rows: Sequence[int] | None = None,
        firsts: Sequence[int] | None = None,
    ) -> Iterator[Batch]:
        """Yield the micro-batches of one rank for optimizer step `step`.

        target: samples of the step over all ranks. sizes: samples of each micro-batch. rows: rows of each,
        padded with weight 0; by default as many. firsts: number of the first sample of each among those of
        the step; by default they follow each other from 0. A stream reads ahead into the next steps, and
        restarts if another step is requested.
        """
        firsts = [*accumulate(sizes[:-1], initial=0)] if firsts is None else firsts
        assert firsts[0] >= 0 and firsts[-1] + sizes[-1] <= target, "micro-batches exceed the target"
        last = self._epochs_ahead * self.size
        assert not last or (step + 1) * target <= last, "step beyond the epochs augmented in advance"
        own = sizes if rows is None else rows
        request = _Step(step, target, tuple(firsts), tuple(sizes), tuple(own))
        if request != self._next:
            self._cuts = deque()
            self._reader = self._store.read(self._requests(request, self._cuts))
        self._next = None  # until every micro-batch is consumed
        for size, rows_read in zip(request.sizes, request.rows, strict=True):
            began = time.perf_counter()
            batch = self._finish(*self._read())  # what is read is not kept while a batch is used
            self.waited_seconds += time.perf_counter() - began
            if request.rows != request.sizes:
                weights = torch.arange(rows_read, device=batch.inputs.device) < size
                batch = replace(batch, weights=weights.to(torch.float32))
            yield batch
        self._next = request._replace(step=step + 1)

    def _read(self) -> Rows:
        read = next(self._reader)
        return _cut(read, self._cuts.popleft()) if self.by_length else read

    def _requests(self, first: _Step, cuts: deque[int]) -> Iterator[Request]:
        """Yield the requests of step `first` and all later ones; add to `cuts` the length of each's rows."""
        together = max(1, _POSITIONS_AT_ONCE // first.target)
        ends = np.cumsum(first.rows).tolist()
        places_N = _padded_places(first.firsts, first.sizes, first.rows)
        for step in count(first.step, together):
            start, positions = step * first.target, together * first.target
            stream = sample_stream(start=start, count=positions, seed=self._seed, size=self.size)
            epochs_SN, indices_SN = (part.reshape(together, first.target) for part in stream)
            if self._lengths is not None:  # nothing depends on the epoch of a sample
                indices_SN = by_length(indices_SN, self._lengths)
                longest_SM = self._lengths[indices_SN[:, np.minimum(first.firsts, first.target - 1)]]
                cuts.extend(self._cut_to(longest_SM.ravel()))
            epochs_SN, indices_SN = (part[:, places_N] for part in (epochs_SN, indices_SN))
            if self._mixes:
                epochs_SN, indices_SN = with_partners(epochs_SN, indices_SN, seed=self._seed, size=self.size)
            rows_KSN = [self._positions(epochs_SN, indices_SN)]
            if self._kind != "none":
                further = {"pad": self._pad, "seed": self._seed, "fixed": self._fixed}
                rows_KSN += draw(epochs_SN, indices_SN, kind=self._kind, **further)
            for each in self._operations:
                rows_KSN += each.rows(epochs_SN, indices_SN, seed=self._seed)
            for rows_KN in self._store.place(np.stack(rows_KSN, axis=1)):
                for begin, end in pairwise((0, *ends)):
                    request = rows_KN[..., begin:end]
                    yield request if request.ndim == 2 else request.reshape(len(request), -1)  # with partners

    def _positions(self, epochs_SN: Indices, indices_SN: Indices) -> Indices:
        """Return the positions of samples in the part; windows of a text are shifted in each epoch."""
        if self._epochs_ahead:
            return epochs_SN * self.size + indices_SN
        if self._stride == 1:
            return indices_SN
        return indices_SN * self._stride + window_shifts(epochs_SN, seed=self._seed, stride=self._stride)

    def _finish(self, inputs: torch.Tensor, targets: torch.Tensor, draws_KN: torch.Tensor) -> Batch:
        if self._kind == "symmetries":
            assert isinstance(self._spec, HasSymmetries)
            inputs, targets = apply_symmetry(inputs, targets, draws_KN, spec=self._spec)
        elif self._kind != "none":
            inputs = apply(inputs, draws_KN[:3], kind=self._kind, pad=self._pad)
            draws_KN = draws_KN[3:]
        rows = iter(draws_KN)
        for each in self._operations:
            inputs = each.apply(inputs, rows)
        batch = Batch(self._normalise(inputs), self._convert(targets))
        if not self._mixes:
            return batch
        own, partners = batch.targets.chunk(2)
        shares = next(rows)[: len(own)].to(torch.float32) / ONE
        return replace(batch, targets=own, mixed=(partners, shares))


def _cut(read: Rows, length: int) -> Rows:
    """Return rows of tokens without what is after `length`."""
    inputs, targets, notes = read
    return inputs[..., :length].contiguous(), targets[..., :length].contiguous(), notes


def _padded_places(firsts: Sequence[int], sizes: Sequence[int], rows: Sequence[int]) -> Indices:
    """Return which sample of the step each row has; padding repeats one."""
    last = firsts[-1] + sizes[-1] - 1
    places = [
        (first + np.arange(count).clip(max=max(size - 1, 0))).clip(max=last)
        for first, size, count in zip(firsts, sizes, rows, strict=True)
    ]
    return np.concatenate(places)


class EvalLoader(_Loader):
    """Batches for evaluation: every sample once, normalised only."""

    def batches(self, *, rank: int, world: int, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's batches; every rank gets the same number of batches of `batch_size` rows.

        Over all ranks each sample has weight 1 exactly once; padding rows have weight 0.
        """
        assert 0 <= rank < world and batch_size > 0
        step, lengths = world * batch_size, self._lengths
        starts = range(rank * batch_size, -(-self.size // step) * step, step)
        numbers = (np.arange(start, start + batch_size) for start in starts)
        order = np.arange(self.size)
        if lengths is not None:
            (order,) = by_length(order[None], lengths)
        requests = (
            self._store.place(np.stack((order.take(number, mode="clip") * self._stride, number < self.size)))
            for number in numbers
        )
        for start, read in zip(starts, self._store.read(requests), strict=True):
            inputs, targets, weights_1N = read
            if lengths is not None:
                (length,) = self._cut_to(lengths[order[[min(start, self.size - 1)]]])
                inputs, targets, weights_1N = _cut(read, length)
            yield Batch(self._normalise(inputs), self._convert(targets), weights_1N[0].to(torch.float32))

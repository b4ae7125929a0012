"""From parts of a data set to batches on the device.

Both loaders ask a store for rows, and change and normalise images on the device. A
resident store holds the whole part on the device; a stream reads ahead in background threads.
Which of the two it is changes no bit of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from lib.data.augment import Kind, apply, draw
from lib.data.datasets.sudoku.symmetry import changed
from lib.data.precompute import changed_ahead
from lib.data.sampler import sample_stream, window_shifts
from lib.data.store import Placement, Request, Store, open_store
from lib.data.types import ArrayPart, ImageSpec, Indices, Part, PuzzleSpec, Spec
from lib.errors import ConfigError

AskedPlacement: TypeAlias = Literal["auto", "resident", "stream"]

# A set that takes more than this share of the free memory is streamed.
RESIDENT_SHARE = 0.25

# Order and augmentation are drawn for about this many samples at once: the fixed cost of
# some thirty array operations would otherwise show in small batches.
_POSITIONS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples on the device.

    inputs:  images (N, C, H, W), normalised; or tokens, int64 (N, T).
    targets: int64, labels (N,), or tokens (N, T) that follow or solve, where IGNORED counts nothing.
    weights: float32 (N,), 1 for a sample and 0 for padding; None where every row counts.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor | None = None


def choose_placement(
    asked: AskedPlacement, *, parts: Sequence[Part], free_bytes: int
) -> tuple[Literal["resident", "stream"], str]:
    """Where to keep all of `parts` on a device that has `free_bytes` for this process, and the reason."""
    if asked != "auto":
        return asked, f"CONFIG_DATA_PLACEMENT_{asked.upper()} is set"
    byte_size = sum(part.byte_size for part in parts)
    size = f"{byte_size / 1e6:.1f} MB of data"
    share = f"a quarter of the {free_bytes / 1e9:.2f} GB that are free"
    if byte_size <= RESIDENT_SHARE * free_bytes:
        return "resident", f"{size} take at most {share}"
    return "stream", f"{size} take more than {share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How samples reach the device, which changes no bit of them but their type.

    dtype, channels_last: of the images that come out; the arithmetic is float32 throughout.
    num_workers, prefetch: threads, and micro-batches kept ready (one a thread at least), of a stream.
    """

    device: torch.device
    dtype: torch.dtype
    channels_last: bool
    placement: Placement
    num_workers: int
    prefetch: int


class _Normaliser:
    """Makes numbers of the bytes of images."""

    def __init__(self, spec: ImageSpec, delivery: Delivery) -> None:
        self._dtype = delivery.dtype
        self._layout = torch.channels_last if delivery.channels_last else torch.contiguous_format
        mean = torch.tensor(spec.mean, dtype=torch.float64)
        std = torch.tensor(spec.std, dtype=torch.float64)
        # (x / 255 - mean) / std as one multiplication and one addition.
        self._scale = self._whole_image(1 / (255 * std), spec).to(delivery.device)
        self._offset = self._whole_image(-mean / std, spec).to(delivery.device)

    def _whole_image(self, values_C: torch.Tensor, spec: ImageSpec) -> torch.Tensor:
        """One value per channel as float32 (1, C, H, W): in channels-last faster than (C, 1, 1)."""
        whole = values_C.float()[None, :, None, None].expand(1, spec.channels, spec.height, spec.width)
        return whole.contiguous(memory_format=self._layout)

    def __call__(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        # The layout is changed while there is one byte to a pixel.
        images = images_NCHW.contiguous(memory_format=self._layout).to(torch.float32)
        return images.mul_(self._scale).add_(self._offset).to(self._dtype)


def _as_numbers(tokens_NT: torch.Tensor) -> torch.Tensor:
    return tokens_NT.to(torch.int64)


class _Loader:
    """What training and evaluation share: the store, and what becomes of its rows."""

    def __init__(self, part: Part, spec: Spec, delivery: Delivery) -> None:
        self.size, self._stride = part.size, part.stride
        self._store: Store = open_store(
            part,
            device=delivery.device,
            placement=delivery.placement,
            num_workers=delivery.num_workers,
            prefetch=delivery.prefetch,
        )
        self._normalise: Callable[[torch.Tensor], torch.Tensor] = (
            _Normaliser(spec, delivery) if isinstance(spec, ImageSpec) else _as_numbers
        )

    def close(self) -> None:
        """Stop background threads. The loader cannot be used afterwards."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Step(NamedTuple):
    """What one rank wants of one optimizer step."""

    step: int
    target: int
    rank: int
    world: int
    sizes: tuple[int, ...]

    def following(self) -> _Step:
        return self._replace(step=self.step + 1)


class TrainLoader(_Loader):
    """Batches of the endless training stream (`lib.data.sampler`), augmented."""

    def __init__(
        self,
        part: Part,
        spec: Spec,
        delivery: Delivery,
        *,
        seed: int,
        augment: Kind,
        pad: int,
        fixed: int = 0,
        epochs_ahead: int = 0,
    ) -> None:
        """augment: "symmetries" of puzzles, "none" for anything else but images. pad: of images.

        fixed: symmetries of each puzzle that there are, or 0 for a new one in every epoch.
        epochs_ahead: so many epochs of puzzles are changed now, and no further one is there; 0: on the fly.
        """
        wanted = PuzzleSpec if augment == "symmetries" else ImageSpec
        if augment != "none" and not isinstance(spec, wanted):  # a model may select several kinds of data
            raise ConfigError(
                f"CONFIG_AUGMENT_{augment.upper()}=y is not for {spec.name}", todo="set CONFIG_AUGMENT_NONE=y"
            )
        self._box = round(spec.side**0.5) if isinstance(spec, PuzzleSpec) else 0
        size = part.size
        if epochs_ahead:
            assert isinstance(part, ArrayPart) and augment == "symmetries"
            part = changed_ahead(part, box=self._box, seed=seed, epochs=epochs_ahead, fixed=fixed)
            augment = "none"
        super().__init__(part, spec, delivery)
        self.size, self._epochs_ahead = size, epochs_ahead
        self._seed, self._kind, self._pad, self._fixed = seed, augment, pad, fixed
        self._next: _Step | None = None
        self._reader: Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = iter(())

    def micro_batches(
        self, *, step: int, target: int, rank: int, world: int, sizes: Sequence[int]
    ) -> Iterator[Batch]:
        """The micro-batches of `rank` for optimizer step `step`, in order.

        target: samples of the step over all ranks. sizes: those of this rank's micro-batches; they
        add up to target / world. A stream reads on into the following steps, and starts anew when
        another step than the following one is asked for.
        """
        assert sum(sizes) * world == target and 0 <= rank < world, "micro-batches do not add up to the target"
        last = self._epochs_ahead * self.size
        assert not last or (step + 1) * target <= last, "so many epochs were not changed ahead"
        wanted = _Step(step, target, rank, world, tuple(sizes))
        if wanted != self._next:
            self._reader = self._store.read(self._requests(wanted))
        self._next = None  # until every micro-batch is taken
        for _ in sizes:
            yield self._finish(*next(self._reader))
        self._next = wanted.following()

    def _requests(self, first: _Step) -> Iterator[Request]:
        """The micro-batches of step `first` and of all that follow it."""
        share = first.target // first.world
        together = max(1, _POSITIONS_AT_ONCE // first.target)
        ends = np.cumsum(first.sizes)[:-1]
        for step in count(first.step, together):
            stream = sample_stream(
                start=step * first.target, count=together * first.target, seed=self._seed, size=self.size
            )
            epochs_SN, indices_SN = (
                part.reshape(together, first.world, share)[:, first.rank] for part in stream
            )
            rows_KSN = [self._places(epochs_SN, indices_SN)]
            if self._kind != "none":
                rows_KSN += draw(
                    epochs_SN,
                    indices_SN,
                    kind=self._kind,
                    pad=self._pad,
                    seed=self._seed,
                    fixed=self._fixed,
                )
            rows_SKN = np.stack(rows_KSN, axis=1)
            for rows_KN in rows_SKN:
                yield from np.split(rows_KN, ends, axis=1)

    def _places(self, epochs_SN: Indices, indices_SN: Indices) -> Indices:
        """Where samples are in the part. Windows of a text begin somewhere else in each epoch."""
        if self._epochs_ahead:
            return epochs_SN * self.size + indices_SN
        if self._stride == 1:
            return indices_SN
        return indices_SN * self._stride + window_shifts(epochs_SN, seed=self._seed, stride=self._stride)

    def _finish(self, inputs: torch.Tensor, targets: torch.Tensor, draws_KN: torch.Tensor) -> Batch:
        if self._kind == "symmetries":
            inputs, targets = changed(inputs, targets, list(draws_KN), box=self._box)
        elif self._kind != "none":
            row, column, mirror = draws_KN
            inputs = apply(inputs, (row, column, mirror), kind=self._kind, pad=self._pad)
        return Batch(self._normalise(inputs), _as_numbers(targets))


class EvalLoader(_Loader):
    """Batches for evaluation: every sample once, unchanged but for normalisation."""

    def batches(self, *, rank: int, world: int, batch_size: int) -> Iterator[Batch]:
        """This rank's batches. Over all ranks each sample has weight 1 exactly once.

        Every rank gets the same number of batches of `batch_size` rows; rows that pad the end have weight 0.
        """
        assert 0 <= rank < world and batch_size > 0
        starts = range(rank * batch_size, _round_up(self.size, world * batch_size), world * batch_size)
        numbers = (np.arange(start, start + batch_size) for start in starts)
        requests = (
            np.stack((number.clip(max=self.size - 1) * self._stride, number < self.size))
            for number in numbers
        )
        for inputs, targets, weights_1N in self._store.read(requests):
            yield Batch(self._normalise(inputs), _as_numbers(targets), weights_1N[0].to(torch.float32))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

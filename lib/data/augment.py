"""Augmentation as a pure, vectorized function of (seed, epoch, index) of each sample.

A sample is augmented identically in every batch, worker, rank and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.nn import functional

from lib.data.types import ArrayPart, Indices
from lib.memory.simulation import simulated
from lib.rng import Words, key, mix

Kind: TypeAlias = Literal["none", "shift", "crop_flip", "crop_alternate", "symmetries"]
Draws: TypeAlias = Sequence[torch.Tensor] | torch.Tensor  # K tensors (N,)
DrawnRows: TypeAlias = Iterator[torch.Tensor]  # tensors (N,), of which an operation takes its own
ONE = 1 << 16  # 1 in fixed point


@runtime_checkable
class HasSymmetries(Protocol):
    """A spec whose samples have symmetries, such as puzzles."""

    def transformed(
        self, inputs_NL: torch.Tensor, targets_NL: torch.Tensor, hashes_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the symmetry that each hash (N,) selects to inputs and targets."""


# Bit fields of a sample's hash that serve as its random numbers.
_FIELD_BITS = 20
_FIELD_MASK = (1 << _FIELD_BITS) - 1


def draw(
    epochs_N: Words, indices_N: Words, *, kind: Kind, pad: int, seed: int, fixed: int = 0
) -> tuple[Words, ...]:
    """Draw row and column of the crop, in [0, 2 pad], and 1 to mirror, else 0; for "symmetries" a hash.

    "crop_alternate" mirrors each sample in every second epoch, half of them in the first (Jordan 2024).
    fixed: number of symmetries of each sample, the same in every epoch; 0 for a new one each. With it a
    second number is drawn, which is 0 for the unchanged sample, as likely as each of its symmetries. Works
    on int64 NumPy arrays and torch tensors, with equal results.
    """
    assert kind != "none" and pad >= 0
    hashes = mix(mix(indices_N ^ mix(epochs_N ^ key("augment", seed))))
    if kind == "symmetries" and fixed:
        chosen = ((hashes >> 32) & 0x7FFFFFFF) * (fixed + 1) >> 31
        return mix(mix(indices_N ^ mix(chosen ^ key("fixed", seed)))), chosen
    if kind == "symmetries":
        return (hashes,)
    places = 2 * pad + 1
    row = ((hashes & _FIELD_MASK) * places) >> _FIELD_BITS
    column = (((hashes >> _FIELD_BITS) & _FIELD_MASK) * places) >> _FIELD_BITS
    if kind == "crop_alternate":
        return row, column, (mix(mix(indices_N ^ key("mirror", seed))) + epochs_N) & 1
    mirror = (hashes >> (2 * _FIELD_BITS)) & (1 if kind == "crop_flip" else 0)
    return row, column, mirror


def apply(images_NCHW: torch.Tensor, draws: Draws, *, kind: Kind, pad: int) -> torch.Tensor:
    """Shift uint8 images (N, C, H, W) by up to `pad` pixels (padded with zeros) and mirror some.

    draws: from `draw`, int64 tensors (N,) on the device of the images.
    """
    row, column, mirror = draws
    count, _, height, width = images_NCHW.shape
    padded = functional.pad(images_NCHW, (pad, pad, pad, pad))
    # All crops of every image as a view (N, row, column, C, H, W): cropping is one gather.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
    sample = torch.arange(count, device=images_NCHW.device)
    if images_NCHW.device.type == "cpu" and not simulated():
        # The same gather in NumPy, which copies a row of pixels at a time, torch a byte.
        cropped = torch.from_numpy(windows.numpy()[sample.numpy(), row.numpy(), column.numpy()])
    else:
        cropped = windows[sample, row, column]
    return mirrored(cropped, iter([mirror]), dim=3) if kind in ("crop_flip", "crop_alternate") else cropped


def mirrored(images_NCHW: torch.Tensor, rows: DrawnRows, *, dim: int) -> torch.Tensor:
    """Mirror the uint8 images whose drawn number is 1, and not 0, along dimension `dim`."""
    # Selecting by a bit mask is faster than torch.where on bytes.
    mask = next(rows).neg().to(torch.uint8)[:, None, None, None]
    return images_NCHW ^ ((images_NCHW ^ images_NCHW.flip(dim)) & mask)


class Random:
    """Random numbers of samples: functions of (seed, name, epoch, index), and of how many came before."""

    def __init__(self, epochs_N: Indices, indices_N: Indices, *, seed: int, name: str) -> None:
        self._hashes_N: Indices = mix(mix(indices_N ^ mix(epochs_N ^ key(name, seed))))
        self._drawn = 0

    def below(self, bound: int | Indices) -> Indices:
        """Draw from [0, bound), int64 (N,). bound: at most 2**31."""
        self._drawn += 1
        drawn_N: Indices = ((mix(self._hashes_N ^ self._drawn) >> 32) & 0x7FFFFFFF) * bound >> 31
        return drawn_N

    def around(self, strength: float | None) -> Indices:
        """Draw from 1 - strength to 1 + strength, in fixed point."""
        reach = round((strength or 0) * ONE)
        return ONE - reach + self.below(2 * reach + 1)


class Operation(NamedTuple):
    """An augmentation of images: draw makes rows of numbers on the host, which apply takes on the device."""

    name: str  # of its random numbers, at most 8 bytes
    draw: Callable[[Random], Sequence[Indices]]
    apply: Callable[[torch.Tensor, DrawnRows], torch.Tensor]  # of uint8 images (N, C, H, W)

    def rows(self, epochs_N: Indices, indices_N: Indices, *, seed: int) -> Sequence[Indices]:
        """Draw for samples."""
        return self.draw(Random(epochs_N, indices_N, seed=seed, name=self.name))


def apply_symmetry(
    inputs_NL: torch.Tensor, targets_NL: torch.Tensor, draws: Draws, *, spec: HasSymmetries
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the symmetries that `draw` drew; samples whose second number is 0 stay."""
    inputs, targets = spec.transformed(inputs_NL, targets_NL, draws[0])
    if len(draws) == 1:
        return inputs, targets
    same_N1 = draws[1][:, None] == 0
    return torch.where(same_N1, inputs_NL, inputs), torch.where(same_N1, targets_NL, targets)


_CHUNK = 8192  # samples


def augmented_bytes(part: ArrayPart, *, epochs: int) -> int:
    """Return the host memory that `augment_ahead` needs."""
    return 2 * part.byte_size * epochs


def augment_ahead(
    part: ArrayPart, *, spec: HasSymmetries, seed: int, epochs: int, fixed: int = 0
) -> ArrayPart:
    """Augment every sample of `part` for epochs 0, 1, ...: sample i of epoch e is at e * size + i."""
    inputs_NL, targets_NL = map(torch.from_numpy, part.take())
    size, end = part.size, part.size * epochs
    results = tuple(np.empty((end, inputs_NL.shape[1]), np.uint8) for _ in range(2))
    for start in range(0, end, _CHUNK):
        places = torch.arange(start, min(start + _CHUNK, end))
        epochs_N, indices_N = places // size, places % size
        draws = draw(epochs_N, indices_N, kind="symmetries", pad=0, seed=seed, fixed=fixed)
        boards = apply_symmetry(inputs_NL[indices_N], targets_NL[indices_N], draws, spec=spec)
        for whole, board_NL in zip(results, boards, strict=True):
            whole[start : start + len(places)] = board_NL.numpy()
    return ArrayPart(inputs=results[0], targets=results[1])

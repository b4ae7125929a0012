"""What the rest of the toolkit must know of a data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]  # (N, C, H, W)
Labels = npt.NDArray[np.int64]  # (N,)
Indices = npt.NDArray[np.int64]  # (N,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """What a model and its normalisation must know. mean and std are on the scale 0..1, one per channel."""

    name: str
    channels: int
    height: int
    width: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    synthetic: bool

    def __post_init__(self) -> None:
        assert len(self.mean) == len(self.std) == self.channels


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a data set (training, test, held-out samples).

    images: uint8 (N, C, H, W), possibly a memory map that does not fit in memory.
    labels: int64 (N,).
    rows:   where the part is a selection, the N positions it takes from `images` and
            `labels` (which then hold more than N samples); None means all of them.
    """

    images: Images
    labels: Labels
    rows: Indices | None = None

    def __post_init__(self) -> None:
        assert self.images.ndim == 4 and self.images.dtype == np.uint8
        assert self.labels.shape == self.images.shape[:1] and self.labels.dtype == np.int64

    @property
    def size(self) -> int:
        """Samples in this part."""
        return len(self.labels) if self.rows is None else len(self.rows)

    @property
    def image_bytes(self) -> int:
        """Memory the images of this part take as bytes."""
        return self.size * int(np.prod(self.images.shape[1:]))

    def take(self, indices: Indices | None = None) -> tuple[Images, Labels]:
        """Copies of the images and labels at `indices`, which count within this part (default: all)."""
        if indices is None:
            indices = np.arange(self.size)
        rows = indices if self.rows is None else self.rows[indices]
        return np.take(self.images, rows, axis=0), np.take(self.labels, rows)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set. source: one line saying where it came from and how many images it has."""

    spec: ImageSpec
    train: Part
    test: Part
    source: str

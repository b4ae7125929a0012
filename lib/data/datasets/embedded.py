"""Embedded data sets: generated on first use, cached on disk, identical on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from lib.data.cache import cached_folder
from lib.data.datasets.files import DataLocation, describe_images
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec, Labels
from lib.rng import Floats

PartName: TypeAlias = Literal["train", "test"]
_PARTS: tuple[PartName, ...] = ("train", "test")


@dataclass(frozen=True, slots=True)
class EmbeddedSet:
    """A generated set of images; its methods are the functions of a data-set plug-in.

    version: raise it whenever a pixel changes. sizes: of training and test.
    made_with: what else the pixels depend on.
    """

    spec: ImageSpec
    version: int
    sizes: tuple[int, int]
    generate: Callable[[PartName], tuple[Images, Labels]]
    made_with: str = ""

    def describe(self, options: object, location: DataLocation) -> Dataset:  # noqa: ARG002
        """Return the metadata of the set."""
        return describe_images(self.spec, self.sizes, "as it is generated")

    def open_set(self, options: object, location: DataLocation) -> Dataset:  # noqa: ARG002
        """Open the set, generated into the cache once. Raises DataError without a font, ToolkitError."""
        name, cache_dir = self.spec.name, location.cache_dir
        train_size, test_size = self.sizes

        def fill(folder: Path) -> None:
            location.log(f"{name}: making {train_size} + {test_size} synthetic images in {cache_dir}")
            for part in _PARTS:
                images, labels = self.generate(part)
                np.save(folder / f"{part}-images.npy", images)
                np.save(folder / f"{part}-labels.npy", labels)

        identity = f"{name} {self.version} {train_size} {test_size}{self.made_with}"
        folder = cached_folder(
            cache_dir / f"{name}-v{self.version}", identity=identity, fill=fill, log=location.log
        )
        train, test = (
            ArrayPart(np.load(folder / f"{part}-images.npy"), np.load(folder / f"{part}-labels.npy"))
            for part in _PARTS
        )
        source = f"{name}: {train.size} + {test.size} images, generated, synthetic ({folder})"
        return Dataset(self.spec, train, test, source)


def rotation(degrees: Floats) -> tuple[Floats, Floats]:
    """Cosine and sine by their Taylor series: exact to 1e-6 up to 90 degrees."""
    angle = degrees.astype(np.float64) * 0.017453292519943295
    square = angle * angle
    cosine, sine, term = np.ones_like(angle), angle.copy(), np.ones_like(angle)
    for order in range(1, 8):
        term = -term * square / ((2 * order - 1) * (2 * order))
        cosine += term
        sine += term * angle / (2 * order + 1)
    return cosine.astype(np.float32), sine.astype(np.float32)


def pixel_centres(size: int) -> Floats:
    """Coordinates of pixel centres with the origin in the middle of the image: (size,)."""
    return np.arange(size, dtype=np.float32) - np.float32((size - 1) / 2)


def outer(rows_NH: Floats, columns_NW: Floats) -> Floats:
    """Sum of a function of the row and one of the column: (..., H) and (..., W) to (..., H, W)."""
    return rows_NH[..., :, None] + columns_NW[..., None, :]

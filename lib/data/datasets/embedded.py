"""The embedded sets: generated on first use, kept on disk, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from lib.data.cache import cached_folder
from lib.data.datasets.files import Place
from lib.data.metadata import outlined, told
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec, Labels


class Generator(Protocol):
    """What data.py of such a set has."""

    VERSION: int
    TRAIN_SIZE: int
    TEST_SIZE: int
    SPEC: ImageSpec
    identity: Callable[[], str]  # all that the pixels follow from
    generate: Callable[[Literal["train", "test"]], tuple[Images, Labels]]


def outline_of(generator: Generator) -> Dataset:
    """As it will be generated."""
    sizes, name = (generator.TRAIN_SIZE, generator.TEST_SIZE), generator.SPEC.name
    return outlined(generator.SPEC, *sizes, f"{name}: as it is generated, {told(*sizes)}")


def open_embedded(generator: Generator, place: Place) -> Dataset:
    """Open an embedded set, generating it into the cache if it is not there.

    Raises DataError where matplotlib lacks a font, ToolkitError where the cache cannot be written.
    """
    name, cache_dir, say = generator.SPEC.name, place.cache_dir, place.say
    parts: tuple[Literal["train", "test"], ...] = ("train", "test")

    def fill(folder: Path) -> None:
        say(f"{name}: making {generator.TRAIN_SIZE} + {generator.TEST_SIZE} synthetic images in {cache_dir}")
        for part in parts:
            images, labels = generator.generate(part)
            np.save(folder / f"{part}-images.npy", images)
            np.save(folder / f"{part}-labels.npy", labels)

    folder = cached_folder(
        cache_dir / f"{name}-v{generator.VERSION}", identity=generator.identity(), fill=fill, say=say
    )
    train, test = (
        ArrayPart(np.load(folder / f"{part}-images.npy"), np.load(folder / f"{part}-labels.npy"))
        for part in ("train", "test")
    )
    return Dataset(
        generator.SPEC,
        train,
        test,
        f"{name}: {train.size} + {test.size} images, generated, synthetic ({folder})",
    )

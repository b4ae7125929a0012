"""The embedded sets: generated on first use, kept on disk, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from lib.data.cache import cached_folder
from lib.data.datasets import digits, scenes
from lib.data.types import ArrayPart, Dataset

_GENERATORS: dict[str, ModuleType] = {"digits": digits, "scenes": scenes}
NAMES = tuple(_GENERATORS)


def open_embedded(name: str, *, cache_dir: Path, say: Callable[[str], None]) -> Dataset:
    """Open an embedded set (one of NAMES), generating it into `cache_dir` if it is not there.

    Raises DataError where matplotlib lacks a font, ToolkitError where the cache cannot be written.
    """
    generator = _GENERATORS[name]

    def fill(folder: Path) -> None:
        say(f"{name}: making {generator.TRAIN_SIZE} + {generator.TEST_SIZE} synthetic images in {cache_dir}")
        for part in ("train", "test"):
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

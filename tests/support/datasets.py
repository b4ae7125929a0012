"""Data sets by name for tests: opened, or looked at, with what is asked of them as keywords."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lib.data import DataLocation, Dataset, describe_dataset, open_dataset

# Symbols of puzzles that are generated, where they are not.
FROM_FILES = dict.fromkeys(("level", "clues", "train_size", "test_size"))
# Those of a folder of images.
IMAGE_FOLDER: Mapping[str, Any] = MappingProxyType(
    {"on_bad_sample": "error", "validation_pct": 20, "group": ""}
)
NOTHING: Mapping[str, Any] = MappingProxyType({})


def place_of(name: str, requested: Mapping[str, Any]) -> DataLocation:
    """Nothing is downloaded and nothing said, unless `requested` otherwise."""
    silent: dict[str, Any] = {"root": Path("nowhere"), "download": False, "log": lambda _: None}
    return DataLocation(name=name, **silent | {"cache_dir": Path("nowhere"), "data_dir": None} | requested)


def opened(name: str, options: Mapping[str, Any] = NOTHING, **requested: Any) -> Dataset:
    """options: values of the data set's own symbols."""
    return open_dataset(place_of(name, requested), options)


def looked(name: str, options: Mapping[str, Any] = NOTHING, **requested: Any) -> Dataset | None:
    return describe_dataset(place_of(name, requested), options)

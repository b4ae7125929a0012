"""Data sets by name for tests: opened, or looked at, with what is asked of them as keywords."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lib.data import Dataset, Place, open_dataset, outline

# Symbols of puzzles that are generated, where they are not.
FROM_FILES = dict.fromkeys(("level", "clues", "train_size", "test_size"))
NOTHING: Mapping[str, Any] = MappingProxyType({})


def place_of(name: str, asked: Mapping[str, Any]) -> Place:
    """Nothing is downloaded and nothing said, unless `asked` otherwise."""
    silent: dict[str, Any] = {"root": Path("nowhere"), "download": False, "say": lambda _: None}
    return Place(name=name, **silent | {"cache_dir": Path("nowhere"), "data_dir": None} | asked)


def opened(name: str, options: Mapping[str, Any] = NOTHING, **asked: Any) -> Dataset:
    """options: values of the data set's own symbols."""
    return open_dataset(place_of(name, asked), options)


def looked(name: str, options: Mapping[str, Any] = NOTHING, **asked: Any) -> Dataset | None:
    return outline(place_of(name, asked), options)

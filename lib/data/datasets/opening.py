"""Open a data set by name: the folder beside this file that has the name in its Kconfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lib.data.datasets.files import Place
from lib.data.types import Dataset
from lib.plugins import DATASETS


def open_dataset(place: Place, options: Mapping[str, Any]) -> Dataset:
    """Open the data set `place.name`, with the values of its own symbols as `options`.

    Files are looked for in `place.data_dir` (None will do for an embedded set) and in a folder of the set's
    name in it, and fetched to the latter if they are missing and may be. What is generated or packed is kept
    in `place.cache_dir`. `place.say` gets lines for the user; a download shows on standard output how far it
    is. Raises DataError where the set is missing or damaged, ConfigError where there is none of the name, a
    text is too short, more puzzles are asked for than there are or a language model is not known,
    ToolkitError where the disk fails.
    """
    opened: Dataset = DATASETS.load(place.name).open_set(DATASETS.options(place.name, options), place)
    return opened


def outline(place: Place, options: Mapping[str, Any]) -> Dataset | None:
    """The shapes and sizes of a data set; its samples are all zero. None: only its contents can tell.

    Raises what `open_dataset` does, as far as a look can tell.
    """
    looked: Dataset | None = DATASETS.load(place.name).outline(DATASETS.options(place.name, options), place)
    return looked

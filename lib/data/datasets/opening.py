"""Open data sets by name, as plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lib.data.datasets.files import DataLocation
from lib.data.types import Dataset
from lib.plugins import DATASETS


def open_dataset(location: DataLocation, options: Mapping[str, Any]) -> Dataset:
    """Open the data set `location.name`; `options` are the values of its own symbols.

    Files are looked for in `location.data_dir` and in a folder of the set's name in it, and downloaded to the
    latter if that is allowed. Generated or packed data are kept in `location.cache_dir`. `location.log` gets
    lines for the user; downloads show their progress on standard output. Raises DataError if the set is
    missing or damaged, ConfigError if it is unknown or cannot meet the request, ToolkitError if the disk
    fails.
    """
    dataset: Dataset = DATASETS.load(location.name).open_set(_options(location, options), location)
    return dataset


def describe_dataset(location: DataLocation, options: Mapping[str, Any]) -> Dataset | None:
    """Return the metadata of a data set: its spec and sizes, with zeros for samples.

    None if only the contents tell them. Raises what `open_dataset` does, as far as file names and headers
    tell.
    """
    describe = getattr(DATASETS.load(location.name), "describe", None)
    metadata: Dataset | None = describe and describe(_options(location, options), location)
    return metadata


def _options(location: DataLocation, options: Mapping[str, Any]) -> Any:
    return DATASETS.options(location.name, options)

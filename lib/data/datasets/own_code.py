"""Faults in the code of data sets, as one-line errors with its file and line."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from lib import plugin_folders
from lib.data import types
from lib.data.array_faults import described
from lib.data.types import Dataset
from lib.devices.backend import is_out_of_memory
from lib.errors import DataError, ToolkitError
from lib.nn import IGNORED
from lib.nn.model_code import place_in_code, with_place
from lib.plugins import DATASETS


@dataclass(frozen=True, slots=True)
class DataCode(AbstractContextManager[None]):
    """Context that turns exceptions from the code of data set `name` into a DataError with file and line."""

    name: str

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, ToolkitError) or is_out_of_memory(error):
            return
        place = place_in_code(error, root=plugin_folders.ROOT)
        if not place and trace is not None and trace.tb_next is None:  # the call itself: of other parameters
            place = f"{DATASETS.place(self.name)}/data.py"
        if place and not isinstance(error, BrokenPipeError):  # of the log: nobody reads standard output
            what = f"data set {self.name}: {with_place(error, place)}"
            raise DataError(what, todo="correct it there") from error


def check_dataset(dataset: Any, name: str, function: str) -> None:
    """Raise DataError unless `dataset`, which `function` of data set `name` has returned, can be used."""
    if fault := _fault(dataset):
        what = f"data set {name}: {DATASETS.place(name)}/data.py: {function} returns {fault}"
        raise DataError(what, todo="correct that, or the spec")


def _fault(dataset: Any) -> str:
    """Return what is wrong with the metadata or the values in memory of `dataset`, "" for nothing."""
    if not isinstance(dataset, Dataset):
        return f"{type(dataset).__name__}, not a Dataset"
    named, classes = len(dataset.class_names), getattr(dataset.spec, "classes", None)
    if named and classes not in (named, None):
        return f"{named} class_names for {classes} classes of the spec"
    for name, part in (("train", dataset.train), ("test", dataset.test)):
        if not isinstance(part, types.Part) or not part.size:
            return f"{type(part).__name__} without samples for {name}"
        if fault := _part_fault(part, dataset.spec):
            return f"{fault} in {name}"
    return ""


def _part_fault(part: types.Part, spec: Any) -> str:
    shape, end = spec.input_shape, getattr(spec, "vocab_size", 0)
    if isinstance(part, types.TokenPart):
        if shape != (part.block_size,):
            return f"windows of {part.block_size} tokens, for samples {shape} of the spec,"
        return _range_fault(part.tokens, "token", end)
    inputs, targets, is_float = part.inputs, part.targets, spec.input_dtype == "float32"
    if inputs.shape[1:] not in (shape, (2, *shape)) or (
        inputs.ndim == 2 and is_float != (inputs.dtype.name == "float32")
    ):
        return f"inputs {described(inputs)}, for samples {shape} of {type(spec).__name__},"
    classes, tags = getattr(spec, "classes", 0), getattr(spec, "tags", ())
    for kinds, dtype, wanted, noun, values in (
        (types.LABELLED, "int64", (), "label", classes),
        (types.TokenTagSpec, "int32", shape, "tag", len(tags)),
        (types.TableLabelsSpec, "float32", (classes,), "", 0),
        (types.TableSpec, "float32", (len(getattr(spec, "targets", ())),), "", 0),
    ):
        if isinstance(spec, kinds):
            if (targets.dtype.name, targets.shape[1:]) != (dtype, wanted):
                return f"targets {described(targets)}, not {dtype} {(len(targets), *wanted)},"
            if fault := _range_fault(part.sample_targets, noun, values):
                return fault
    return _range_fault(inputs if inputs.ndim == 2 else inputs[:, 0], "token", end)


def _range_fault(values: Any, noun: str, end: int) -> str:
    """Return which of `values` is not in 0..end - 1. Neither files are read, nor the zeros of metadata."""
    in_memory = isinstance(values, np.ndarray) and not isinstance(values, np.memmap)
    if not end or not in_memory or not values.strides[0]:
        return ""
    known = values[values != IGNORED] if noun == "tag" else values
    low, high = int(known.min(initial=0)), int(known.max(initial=0))
    if low >= 0 and high < end:
        return ""
    wrong = high if high >= end else low
    return f"{noun} {wrong} at {np.argwhere(values == wrong)[0].tolist()}, not in 0..{end - 1},"

"""Data sets by name: opened as plug-ins and checked, their location, and how missing files are downloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np

from lib import plugin_folders
from lib.data import types
from lib.data.cache import check_now
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec
from lib.errors import DataError, ToolkitError
from lib.nn import IGNORED
from lib.nn.model_code import PluginCode, with_place
from lib.plugins import DATASETS
from lib.runs.console import download_progress

if TYPE_CHECKING:  # an embedded set has no files
    from lib.data.datasets.published import Remote

# Arrays of a part by dimensions and dtype, in words for the author of its code.
_INPUTS = {
    (4, "uint8"): "uint8 (N, C, H, W) for images",
    (2, "int64"): "int64 (N, T) or (N, 2, T) for tokens",
    (3, "int64"): "int64 (N, T) or (N, 2, T) for tokens",
    (2, "uint8"): "uint8 (N, L) for puzzles and bytes",
    (2, "float32"): "float32 (N, F) for tables",
}
_TARGETS = {
    (1, "int64"): "int64 (N,) for labels",
    (2, "float32"): "float32 (N, K) for numbers",
    (2, "uint8"): "uint8 (N, L) for puzzles",
    (2, "int32"): "int32 (N, K) for tokens or tags",
}

TokenizerName: TypeAlias = Literal["byte", "char", "gpt2", "huggingface"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLocation:
    """Location of a data set, and settings that all data sets share (None: not applicable).

    name:       in CONFIG_DATASET.
    root:       of the source tree, to which relative paths refer.
    data_dir:   CONFIG_DATA_DIR. cache_dir: for generated and packed data.
    download:   whether missing files may be downloaded into `data_dir`.
    image_size: height and width of packed images.
    block_size: context length in tokens. tokenizer: None for data that are tokens already. tokenizer_dir: of
                a tokenizer of Hugging Face.
    """

    name: str
    root: Path
    data_dir: Path | None
    cache_dir: Path
    download: bool
    log: Callable[[str], None]
    image_size: int | None = None
    block_size: int | None = None
    tokenizer: TokenizerName | None = None
    tokenizer_dir: str | None = None

    @property
    def files(self) -> Path:
        """`data_dir` of a data set that needs one."""
        assert self.data_dir is not None, f"{self.name} is made of files"
        return self.data_dir

    def find_all(
        self, remotes: tuple[Remote, ...], folders: tuple[str, ...], *, name: str, instead: str
    ) -> list[Path]:
        """Return all `remotes` from the first of `folders` that has them, or download them into the first."""
        for folder in folders:
            found = [self.files / folder / remote.file for remote in remotes]
            if all(file.is_file() for file in found):
                return found
        return [self._find(remote, self.files / folders[0], name=name, instead=instead) for remote in remotes]

    def find_image_file(self, remote: Remote, content: str = "") -> Path:
        """Return a file of an image set, downloaded if missing. content: of an archive, for messages."""
        instead = "an embedded set (CONFIG_DATASET_DIGITS=y or CONFIG_DATASET_SCENES=y)"
        folder = self.files / self.name
        return self._find(remote, folder, name=f"data set {self.name}", instead=instead, content=content)

    def _find(self, remote: Remote, folder: Path, *, name: str, instead: str, content: str = "") -> Path:
        """Return `folder`/FILE, downloaded if allowed. Raises DataError with the alternatives."""
        target = folder / remote.file
        if target.is_file():
            return target
        is_file = file_in_place_of(self.files)
        reason = is_file or "CONFIG_DATA_DOWNLOAD is off"
        if self.download and not is_file:
            from lib.data.datasets.download import fetch

            check_now()
            try:
                with download_progress() as progress:
                    fetch(target, urls=remote.urls, sha256=remote.sha256, log=self.log, progress=progress)
                return target
            except DataError as error:
                reason = str(error)
        file = content or remote.file.removesuffix(".gz")
        allow = "" if self.download else ", or set CONFIG_DATA_DOWNLOAD=y"
        raise DataError(
            f"{name} is not there: no {file} in {folder} or {folder.parent}",
            why=reason,
            todo=f"put its files into {folder}{allow}, or use {instead}",
        )


def open_dataset(location: DataLocation, options: Mapping[str, Any]) -> Dataset:
    """Open the data set `location.name`; `options` are the values of its own symbols.

    Files are looked for in `location.data_dir` and in a folder of the set's name in it, and downloaded to the
    latter if that is allowed. Generated or packed data are kept in `location.cache_dir`. Raises DataError if
    the set is missing or damaged, ConfigError if it cannot meet the request, ToolkitError if the disk fails.
    """
    with DataCode(location.name):
        chosen = DATASETS.options(location.name, options)
        dataset: Dataset = DATASETS.load(location.name).open_set(chosen, location)
        check_dataset(dataset, location.name, "open_set")
    return dataset


def describe_dataset(location: DataLocation, options: Mapping[str, Any]) -> Dataset | None:
    """Return the metadata of a data set, with zeros for samples; None if only the contents tell them.

    Raises what `open_dataset` does, as far as file names and headers tell.
    """
    with DataCode(location.name):
        chosen = DATASETS.options(location.name, options)
        describe = getattr(DATASETS.load(location.name), "describe", None)
        metadata: Dataset | None = describe and describe(chosen, location)
        if metadata is not None:
            check_dataset(metadata, location.name, "describe")
    return metadata


def check_described(known: Dataset, opened: Dataset, name: str) -> None:
    """Raise DataError where `known`, which `describe` of data set `name` returned, is not what was `opened`.

    Compared is what plans are made of; sizes are not where damaged files are left out.
    """
    facts = [_planned_facts(each, sizes=not opened.skipped) for each in (known, opened)]
    for fact, value in facts[0].items():
        if value != (other := facts[1].get(fact)):
            raise wrong_result(name, "describe", f"{fact} {value}, and open_set {other}")


def _planned_facts(dataset: Dataset, *, sizes: bool) -> dict[str, Any]:
    spec = dataset.spec
    counts = {name: getattr(spec, name) for name in ("classes", "vocab_size") if hasattr(spec, name)}
    facts = {"spec": type(spec).__name__, "input_shape": tuple(spec.input_shape), **counts}
    return facts | ({"train.size": dataset.train.size, "test.size": dataset.test.size} if sizes else {})


def first_file(files: Iterable[Path]) -> Path | None:
    """Return the first of `files` that exists."""
    return next((file for file in files if file.is_file()), None)


def file_in_place_of(folder: Path) -> str:
    """Return that a file is in the place of `folder`, or of one above it; "" where none is."""
    file = first_file((folder, *folder.parents))
    return f"{file} is a file, not a folder" if file else ""


def damaged(file: Path, why: str) -> DataError:
    """Return the error for a damaged file."""
    return DataError(f"{file} is damaged", why=why, todo="delete it and fetch it again")


def check_labels(labels: Images, file: Path, *, classes: int) -> None:
    """Raise DataError if a label is out of range."""
    wrong = np.flatnonzero(labels >= classes)
    if len(wrong):
        raise damaged(file, f"label {labels[wrong[0]]} of sample {wrong[0]} is not below {classes}")


def describe_images(spec: ImageSpec, sizes: tuple[int, int], where: str) -> Dataset:
    """Return the metadata of images (training, test) whose sizes come from `where`: zeros in one byte."""
    train, test = (
        ArrayPart(np.broadcast_to(np.uint8(0), (n, *spec.input_shape)), np.broadcast_to(np.int64(0), (n,)))
        for n in sizes
    )
    return Dataset(spec, train, test, f"{spec.name}: {where}, {sizes[0]} + {sizes[1]} images, not opened")


@dataclass(frozen=True, slots=True)
class DataCode(PluginCode):
    """Context that turns exceptions from the code of data set `name` into a DataError with file and line."""

    kind = DATASETS
    loop_frees_memory = False

    def reported(self, error: Exception, place: str) -> ToolkitError | None:
        """Return a DataError for a fault of its code."""
        own = plugin_folders.external()
        is_shipped = own is None or not (plugin_folders.ROOT / place).is_relative_to(own)
        if is_shipped and isinstance(error, OSError):  # of a file of the user, which `run_main` names
            return None
        if not place or isinstance(error, BrokenPipeError):  # of the log: nobody reads standard output
            return None
        todo = "" if isinstance(error, MemoryError) else "correct it there"
        return DataError(f"data set {self.name}: {with_place(error, place)}", todo=todo)


def check_dataset(dataset: Any, name: str, function: str) -> None:
    """Raise DataError unless `dataset`, which `function` of data set `name` has returned, can be used."""
    if fault := _fault(dataset):
        raise wrong_result(name, function, fault, or_else=", or the spec")


def wrong_result(name: str, function: str, fault: str, *, or_else: str = "") -> DataError:
    """Return the error for what `function` of data set `name` has returned."""
    what = f"data set {name}: {DATASETS.place(name)}/data.py: {function} returns {fault}"
    return DataError(what, todo=f"correct that{or_else}")


def _fault(dataset: Any) -> str:
    """Return what is wrong with the metadata or the values in memory of `dataset`, "" for nothing."""
    if not isinstance(dataset, Dataset):
        return f"{type(dataset).__name__}, not a Dataset"
    if fault := _spec_fault(dataset.spec) or _mistyped(dataset):
        return fault
    named, classes = len(dataset.class_names), getattr(dataset.spec, "classes", None)
    if named and classes not in (named, None):
        return f"{named} class_names for {classes} classes of the spec"
    for name, part in (("train", dataset.train), ("test", dataset.test)):
        if isinstance(part, types.TokenPart):
            fault = _token_fault(part, shifted=name == "train")
        else:
            fault = _row_fault(part)
        if not fault and not part.size:
            return f"{type(part).__name__} without samples for {name}"
        if fault := fault or _part_fault(part, dataset.spec):
            return f"{fault} in {name}"
    return ""


def _mistyped(value: Any) -> str:
    """Return which field, of a class of lib/data/types.py, has not the annotated type; "" for none."""
    known = [each for each in type(value).__mro__ if each.__module__ == types.__name__ and is_dataclass(each)]
    for field in fields(known[0]) if known else ():
        item = getattr(value, field.name)
        if not _fits(item, _hints(known[0])[field.name]):
            return f"{field.name} {described(item)}, not {field.type}"
        columns = [each for each in item if isinstance(each, types.Column)] if type(item) in _LISTS else []
        if fault := next(filter(None, map(_mistyped, columns)), ""):
            return f"Column with {fault}"
    return ""


_LISTS = tuple, list
_hints = functools.cache(get_type_hints)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether `value` has the annotated type. A list is as good as a tuple, and an int as a float."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is tuple:
        return isinstance(value, _LISTS) and all(_fits(each, inner[0]) for each in value)
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if kind in (int, float):  # which a run's files can hold: no numbers of NumPy
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _spec_fault(spec: Any) -> str:
    name = type(spec).__name__
    if fault := _mistyped(spec):  # before its properties are read
        return f"{name} with {fault}"
    if not isinstance(spec, types.Spec):
        return f"spec {described(spec)}, no dataclass with name, synthetic, input_shape and input_dtype"
    counts = {each: getattr(spec, each, None) for each in ("classes", "vocab_size")}
    sizes_of = {each: (count,) for each, count in counts.items() if count is not None}
    for field, sizes in (sizes_of | {"input_shape": spec.input_shape}).items():
        if not isinstance(sizes, tuple):
            return f"{name} with {field} {described(sizes)}, not a tuple"
        if not _fits(sizes, tuple[int, ...]):
            return f"{name} with {field} {described(sizes)}, not int"
        if min(sizes, default=0) <= 0:
            return f"{name} with {field} {sizes}, not above 0"
    if not _fits(spec.input_dtype, types.InputDtype):
        return f"{name} with input_dtype {described(spec.input_dtype)}, not 'float32' or 'int64'"
    return ""


def _part_fault(part: types.Part, spec: Any) -> str:
    shape, end, kind = spec.input_shape, getattr(spec, "vocab_size", None), type(spec).__name__
    wanted = _wanted_targets(spec)
    if isinstance(part, types.TokenPart):
        if wanted or shape != (part.block_size,):
            return f"windows of {part.block_size} tokens, for samples {shape} of {kind},"
        return _range_fault(part.tokens, "token", end)
    if isinstance(spec, types.TextSpec):  # whose targets are counted without a look at IGNORED ones
        return "ArrayPart, not TokenPart,"
    inputs, targets, is_float = part.inputs, part.targets, spec.input_dtype == "float32"
    if inputs.shape[1:] not in (shape, (2, *shape)) or (
        inputs.ndim == 2 and is_float != (inputs.dtype.name == "float32")
    ):
        return f"inputs {described(inputs)}, for samples {shape} of {kind},"
    if wanted:
        dtype, of_one, noun, values = wanted
        if (targets.dtype.name, targets.shape[1:]) != (dtype, of_one):
            return f"targets {described(targets)}, not {dtype} {(len(targets), *of_one)},"
        on_disk = any(isinstance(each, np.memmap) for each in (targets, part.rows))
        if not on_disk and (fault := _range_fault(part.sample_targets, noun, values)):
            return fault
    return _range_fault(inputs if inputs.ndim == 2 else inputs[:, 0], "token", end)


def _wanted_targets(spec: Any) -> tuple[str, tuple[int, ...], str, int | None] | None:
    """Return dtype and shape of a sample's targets, their noun, and how many there are; None for any."""
    if isinstance(spec, types.LABELLED):
        return "int64", (), "label", spec.classes
    if isinstance(spec, types.TokenTagSpec):
        return "int32", spec.input_shape, "tag", len(spec.tags)
    if isinstance(spec, types.TableLabelsSpec):
        return "float32", (spec.classes,), "", None
    return ("float32", (len(spec.targets),), "", None) if isinstance(spec, types.TableSpec) else None


def _row_fault(part: ArrayPart) -> str:
    """Return why `part` cannot be read, whatever the spec; "" if it can."""
    rows = part.rows
    if (fault := array_fault(part.inputs, part.targets)) or rows is None:
        return fault
    numbers = isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype.kind in "iu"
    if not numbers or not np.can_cast(rows.dtype, np.int64):  # True and False would be rows 1 and 0
        return f"rows {described(rows)}, not int64 (N,) or None,"
    return _range_fault(rows, "row", len(part.targets))


def _token_fault(part: types.TokenPart, *, shifted: bool) -> str:
    """Return why `part` is no text for training (`shifted`) or evaluation; "" if it is one."""
    tokens, size = part.tokens, part.block_size
    is_row = isinstance(tokens, np.ndarray | types.Shards) and tokens.ndim == 1
    if not is_row or tokens.dtype.name not in ("uint8", "uint16", "uint32"):
        return f"tokens {described(tokens)}, not uint8, uint16 or uint32 (n,),"
    if fault := _mistyped(part):
        return f"{fault},"
    if part.shifted != shifted:
        return f"TokenPart with shifted={part.shifted}, not {shifted},"
    return f"{len(tokens)} tokens, less than a window of {size}," if size <= 0 or part.size <= 0 else ""


def _range_fault(values: Any, noun: str, end: int | None) -> str:
    """Return which of `values` is not in 0..end - 1. No files are read, and of metadata the one zero."""
    if end is None or not isinstance(values, np.ndarray) or isinstance(values, np.memmap):
        return ""
    values = values if values.strides[0] else values[:1]
    known = values[values != IGNORED] if noun == "tag" else values
    low, high = int(known.min(initial=0)), int(known.max(initial=0))
    if low >= 0 and (high < end or not known.size):
        return ""
    wrong = high if high >= end else low
    return f"{noun} {wrong} at {np.argwhere(values == wrong)[0].tolist()}, not in 0..{end - 1},"


def described(value: Any) -> str:
    """Return dtype and shape of an array, a text, or the type of anything else, with those in a list."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    kind = f"{'numpy.' * isinstance(value, np.generic)}{type(value).__name__}"
    if isinstance(value, _LISTS) and value:
        return f"{kind} of {', '.join(sorted({type(each).__name__ for each in value}))}"
    return f"{value!r:.60}" if isinstance(value, str) else kind


def array_fault(inputs: Any, targets: Any) -> str:
    """Return why these cannot be the arrays of an `ArrayPart`; "" if they can."""
    for name, array, known in (("inputs", inputs, _INPUTS), ("targets", targets, _TARGETS)):
        if not isinstance(array, np.ndarray) or (array.ndim, array.dtype.name) not in known:
            return f"{name} {described(array)}, not {' or '.join(dict.fromkeys(known.values()))},"
    if len(targets) != len(inputs):
        return f"{len(inputs)} inputs and {len(targets)} targets"
    of_puzzle, is_row = targets.dtype.name == "uint8", (inputs.ndim, inputs.dtype.name) == (2, "uint8")
    if (of_puzzle and targets.shape != inputs.shape) or (is_row and targets.ndim == 1):
        return f"targets {described(targets)}, which are not for inputs {described(inputs)},"
    return ""

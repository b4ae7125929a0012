"""Inputs to predict: files, folders, standard input or arrays, encoded as the samples of a run were."""

from __future__ import annotations

import glob
import io
import shlex
import sys
import zipfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lib.data import types
from lib.data.datasets.image_folder.data import BadSampleError, decode
from lib.data.datasets.image_folder.image_files import SUFFIXES
from lib.data.datasets.tabular.data import OF_DATES, counted_unknown, encoded, unknown_categories
from lib.data.datasets.tabular.table_files import AS_NPZ, Table, read_table
from lib.data.datasets.text_files import padded
from lib.data.file_kinds import check_is_text
from lib.data.input_tables import from_columns, json_lines
from lib.data.tokenizers import as_lines, tokenizer_from_json
from lib.data.types import ArrayPart, Column, Dataset, Images, Part, Spec, TextSpec, TokenPart
from lib.errors import ConfigError, DataError, close_to, meant, os_errors, raise_faults
from lib.units import counted

STDIN = "-"
_ARRAYS = frozenset({".npz"})
_TABLES = frozenset({".csv", ".tsv", ".jsonl"})
_TEXTS = frozenset({".txt", ".csv", ".tsv", ".jsonl"})
_TEXT_COLUMNS = ("text", "sentence")

# Paths or STDIN; columns by name, of a table or of texts; or samples as they are stored (ArrayPart.inputs).
Inputs: TypeAlias = str | Path | Sequence[str | Path] | Mapping[str, Sequence[Any]] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples to predict: a name of each, and the inputs as in an ArrayPart, (N, ...)."""

    names: list[str]
    inputs: npt.NDArray[Any]


def stored_dataset(content: Mapping[str, Any], *, plugin: Mapping[str, Any]) -> Dataset | None:
    """Return the data set that preprocess.json describes, with a blank sample for each of its parts.

    plugin: names in the file of the data set, where a spec of tokens may be its own. None for another kind of
    data that only a plug-in knows. Raises KeyError, TypeError or ValueError if `content` is malformed.
    """
    own = plugin.get(content["kind"])
    of_tokens = isinstance(own, type) and issubclass(own, types.TokensSpec)
    kind: Any = vars(types).get(content["kind"], own if of_tokens else None)
    if kind is None:
        return None
    spec = kind(**{name: _restored(value) for name, value in content["spec"].items()})
    tokenizer = content["tokenizer"] and tokenizer_from_json(content["tokenizer"])
    names, fills = tuple(content["class_names"]), content["fills_missing"]
    blank = _blank(spec)
    return Dataset(spec, blank, blank, content["source"], tokenizer, (), names, fills)


def _restored(value: Any) -> Any:
    """Return a field of a spec: JSON has lists for tuples, and objects for columns."""
    if isinstance(value, list):
        return tuple(map(_restored, value))
    return Column(**{n: _restored(v) for n, v in value.items()}) if isinstance(value, dict) else value


def _blank(spec: Spec) -> Part:
    if isinstance(spec, TextSpec):
        return TokenPart(np.zeros(2 * spec.block_size, np.uint8), spec.block_size, shifted=True)
    return unlabelled(np.zeros((1, *spec.input_shape), _stored_dtype(spec)))


def _stored_dtype(spec: Spec) -> str:
    return "uint8" if len(spec.input_shape) == 3 else spec.input_dtype


def unlabelled(inputs: npt.NDArray[Any]) -> ArrayPart:
    """Return a part of `inputs` whose targets are not known: one zero for all, which nothing may read."""
    return ArrayPart(inputs, np.broadcast_to(np.int64(0), (len(inputs),)))


def split_inputs(text: str) -> list[str]:
    """Split INPUT= into paths as a shell does, unless all of it is one; * and ? match names."""
    if text == STDIN or Path(text).exists():
        return [text]
    try:
        words = shlex.split(text)
    except ValueError as error:
        todo = "close each quote, or escape one that is in a name by a backslash"
        raise ConfigError(f"INPUT={text} cannot be split into names", why=str(error), todo=todo) from error
    return [name for word in words for name in (sorted(glob.glob(word)) or [word])]  # noqa: PTH207


def read_inputs(
    given: Inputs, dataset: Dataset, *, rows: int, log: Callable[[str], None]
) -> tuple[int, Iterator[Rows]]:
    """Return the number of samples in `given`, and the samples in their order, at most `rows` at a time.

    They are read as `dataset` was: images are resized like those of a folder, tables need its columns, texts
    its tokenizer. Raises ConfigError or DataError, which name the file and line, for what cannot be read, is
    of another shape, or was not known in training.
    """
    spec: Any = dataset.spec
    if isinstance(given, np.ndarray):
        return _split(_array(given, "the array", spec), rows)
    is_table, is_text = hasattr(spec, "columns"), hasattr(spec, "pad")
    if isinstance(given, Mapping):
        if not is_table and not is_text:
            what = f"columns by name are for tables and texts, and the run was trained on {spec.name}"
            raise ConfigError(what, todo="name files, or give an array")
        return _split((_from_table if is_table else _from_texts)(from_columns(given), dataset, log), rows)
    listed: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if wrong := [each for each in listed if not isinstance(each, str | Path)]:
        what = f"inputs of type {type(wrong[0]).__name__} cannot be predicted"
        todo = "give a list of names, a numpy array (of a tensor: .numpy()), or columns as a dict of lists"
        raise ConfigError(what, todo=todo)
    paths = [str(path) for path in listed]
    if not paths:
        raise ConfigError("there is nothing to predict", todo="name files by INPUT=")
    if len(spec.input_shape) == 3:
        return _images(paths, spec, rows)
    if not is_table and not is_text:
        raise ConfigError(f"samples of {spec.name} cannot be read from files", todo="give an array")
    files = files_of(paths, (_TABLES if is_table else _TEXTS) | _ARRAYS)
    read = [_from_file(file, dataset, log, is_table=is_table) for file in files]
    names = [name for part in read for name in part.names]
    return _split(Rows(names, np.concatenate([part.inputs for part in read])), rows)


def _split(whole: Rows, rows: int) -> tuple[int, Iterator[Rows]]:
    starts = range(0, len(whole.names), rows)
    parts = (Rows(whole.names[at : at + rows], whole.inputs[at : at + rows]) for at in starts)
    return len(whole.names), parts


def files_of(paths: Sequence[str], suffixes: frozenset[str]) -> list[str]:
    """Return the files that `paths` name, those of a folder sorted. Raises ConfigError without one."""
    found: list[str] = []
    for path in paths:
        if path == STDIN:
            found.append(path)
        elif Path(path).is_dir():
            entries = (each for each in Path(path).rglob("*") if each.suffix.lower() in suffixes)
            files = sorted(str(each) for each in entries if each.is_file())
            if not files:
                what, todo = f"INPUT={path} has no files to predict", "name a folder that has some"
                raise ConfigError(what, why=_looked_for(suffixes), todo=todo)
            found += files
        elif not Path(path).is_file():
            todo = f"name a file or a folder; INPUT={STDIN} reads standard input"
            if ".txt" in suffixes:
                todo += f': echo "a text" | make predict INPUT={STDIN}'
            raise ConfigError(f"INPUT={path} is not there", todo=todo)
        elif Path(path).suffix.lower() not in suffixes:
            what, todo = f"INPUT={path} is no file for this run", "save it as one of these"
            raise ConfigError(what, why=_looked_for(suffixes), todo=todo)
        else:
            found.append(path)
    return found


def _looked_for(suffixes: Iterable[str]) -> str:
    return f"it reads {', '.join(sorted(suffixes))}"


def content_of(file: str) -> bytes:
    """Return the content of a file, or of standard input. Raises ToolkitError."""
    if file == STDIN:
        return sys.stdin.buffer.read()
    with os_errors("read"):
        return Path(file).read_bytes()


def _images(paths: list[str], spec: Any, rows: int) -> tuple[int, Iterator[Rows]]:
    """Images; STDIN has names of files, one per line."""
    if STDIN in paths:
        listed = as_lines(content_of(STDIN))
        if blank := [number for number, name in enumerate(listed, 1) if not name.strip()]:
            raise ConfigError(f"standard input, line {blank[0]} is blank", todo="remove blank lines")
        paths = [name for path in paths for name in (listed if path == STDIN else [path])]
        if not paths:
            raise ConfigError("standard input is empty", todo="give it names of images, one per line")
    files = files_of(paths, SUFFIXES | _ARRAYS)
    arrays = [file for file in files if Path(file).suffix.lower() in _ARRAYS]
    if arrays:
        if len(files) > 1:
            raise ConfigError(
                f"INPUT names {arrays[0]} and {len(files) - 1} others", todo="name one npz file"
            )
        return _split(_npz(files[0], spec), rows)
    if spec.height != spec.width:
        raise ConfigError(f"images of {spec.height}x{spec.width} are not resized", todo="give an npz file")
    return len(files), _decoded(files, spec, rows)


def _decoded(files: list[str], spec: Any, rows: int) -> Iterator[Rows]:
    """Yield images until one is damaged; then look for others, and raise ConfigError with all."""
    bad: list[str] = []

    def one(file: str) -> Images | None:
        try:
            return _with_channels(decode(Path(file), spec.width), spec.channels)
        except BadSampleError as error:
            bad.append(f"{file}: {error}")
            return None

    with ThreadPoolExecutor(thread_name_prefix="decode") as pool:
        for start in range(0, len(files), rows):
            names = files[start : start + rows]
            images = [*pool.map(one, names)]
            if not bad:
                yield Rows(names, np.stack(cast(list[Images], images)))
    todo = "replace them, or leave them out: INPUT=- reads names of files, one per line"
    raise_faults(f"{len(bad)} of {len(files)} images cannot be used", sorted(bad), todo=todo)


def _with_channels(image_CHW: Images, channels: int) -> Images:
    """Return an image with as many channels. Raises BadSampleError for colours where there is one."""
    if len(image_CHW) == channels:
        return image_CHW
    if len(image_CHW) == 1:
        return image_CHW.repeat(channels, axis=0)
    if channels != 1 or not (image_CHW == image_CHW[:1]).all():
        trained = f"the run was trained on images of {counted(channels, 'channel')}"
        raise BadSampleError(f"it has colours, and {trained}")
    return image_CHW[:1]


def _npz(file: str, spec: Any) -> Rows:
    try:
        with np.load(io.BytesIO(content_of(file)), allow_pickle=False) as arrays:
            names = arrays.files
            if len(names) > 1 and "inputs" not in names:
                raise ConfigError(f"{file} has {len(names)} arrays", todo="call the one to predict inputs")
            return _array(arrays["inputs" if "inputs" in names else names[0]], file, spec)
    except (ValueError, OSError, EOFError, IndexError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file} is no npz file of plain arrays", why=str(error), todo=AS_NPZ) from error


def _array(array: npt.NDArray[Any], file: str, spec: Any) -> Rows:
    """Return samples as they are stored. Raises ConfigError for another shape or type, or none."""
    shape, dtype, given = spec.input_shape, _stored_dtype(spec), array.shape
    if array.ndim == len(shape) and shape[0] == 1:
        array = array[:, None]
    if array.shape[1:] != shape or not len(array) or not np.can_cast(array.dtype, dtype):
        needed = f"{dtype} (N, {', '.join(map(str, shape))})"
        todo = f"give N >= 1 samples of this shape as {dtype}, as they are stored (pixels: 0 to 255)"
        why = f"the run was trained on {needed}"
        raise ConfigError(f"{file} is {array.dtype} {given}", why=why, todo=todo)
    limit = spec.vocab_size if hasattr(spec, "vocab_size") else 256
    if array.dtype.kind in "iu" and not (array.min() >= 0 and array.max() < limit):
        todo = f"give {'tokens' if hasattr(spec, 'vocab_size') else 'pixels'} as the training data have them"
        raise ConfigError(f"{file} has numbers outside 0..{limit - 1}", todo=todo)
    return Rows([f"{file} row {n + 1}" for n in range(len(array))], array.astype(dtype, copy=False))


def _from_file(file: str, dataset: Dataset, log: Callable[[str], None], *, is_table: bool) -> Rows:
    suffix, content = Path(file).suffix.lower(), content_of(file)
    name = Path("standard input" if file == STDIN else file)
    if not is_table and suffix == ".npz":
        return _npz(file, dataset.spec)
    if suffix == ".jsonl" or (file == STDIN and content.removeprefix(BOM_UTF8)[:1] == b"{"):
        table = json_lines(name, content)
    elif not is_table and suffix in ("", ".txt"):
        check_is_text(content, name, wanted="text")
        table = Table(name, {_TEXT_COLUMNS[0]: as_lines(content, name)}, "")
    else:
        table = read_table(name, content)
    if not is_table:
        return _from_texts(table, dataset, log)
    return _from_table(table, dataset, log)


def _from_texts(table: Table, dataset: Dataset, log: Callable[[str], None]) -> Rows:
    spec: Any = dataset.spec
    if dataset.tokenizer is None:
        raise ConfigError(f"the tokens of {spec.name} came without a tokenizer", todo="give an npz of tokens")
    name = next((name for name in _TEXT_COLUMNS if name in table.columns), "")
    if not name:
        what = f"{table.file} has no column {' or '.join(_TEXT_COLUMNS)}"
        raise ConfigError(what, why=f"it has {', '.join(table.columns)}", todo=f"call one {_TEXT_COLUMNS[0]}")
    texts = [text.strip() for text in table.columns[name]]
    if not texts:
        raise ConfigError(f"{table.file} has no rows", todo="write a text on a line for each")
    if not all(texts):
        what = f"{table.file}, {table.row(texts.index(''))} has no text"
        raise ConfigError(what, todo="write one, or remove it")
    try:
        names = [table.row(row) for row in range(len(table))]
        rows: dict[str, Any] = {"block_size": spec.block_size, "pad": spec.pad, "places": names}
        tokens, cut = padded(texts, tokenizer=dataset.tokenizer, **rows)
    except DataError as error:  # unknown characters, or the token of padding
        raise ConfigError(f"{table.file}: {error.what}", why=error.why, todo=error.todo) from error
    if cut:
        length = f"{spec.block_size} {dataset.tokenizer.unit}s"
        log(f"{table.file}: {cut} of {len(texts)} texts are cut at {length}")
    return Rows(_row_names(table), tokens)


def _from_table(table: Table, dataset: Dataset, log: Callable[[str], None]) -> Rows:
    """Raises ConfigError for a column that is not there, a missing value and an unknown category."""
    columns: tuple[Column, ...] = cast(Any, dataset.spec).columns
    inputs, rows = {column.name for column in columns}, np.arange(len(table))
    for column in columns:
        if column.name not in table.columns:
            close = close_to(column.name, table.columns.keys() - inputs)
            todo = f"rename {close[0]} to {column.name}" if close else f"there are {', '.join(table.columns)}"
            raise ConfigError(f"{table.file} has no column {column.name!r}, an input of the run", todo=todo)
        if not dataset.fills_missing:
            _check_known(column, table)
    if unknown := counted_unknown(columns, table, rows):
        log(f"{table.file}: categories unknown to the run count as missing: {unknown}")
    if unused := [name for name in table.columns if name not in inputs]:
        log(f"{table.file}: columns that are no inputs: {', '.join(unused)}")
    return Rows(_row_names(table), encoded(columns, table, rows))


def _check_known(column: Column, table: Table) -> None:
    """Raise ConfigError for a value that the run had no way to learn."""
    if (missing := table.missing(column.name)).any():
        raise ConfigError(
            f"{table.file}, {table.row(int(missing.argmax()))}: {column.name!r} is missing",
            why="the run was trained without missing values",
            todo="write a value, or remove the row",
        )
    if unknown := unknown_categories(column, table, np.arange(len(table))):
        text = table.columns[column.name][unknown[0]]
        what = f"{table.file}, {table.row(unknown[0])}: {column.name!r} is {text!r}"
        todo = meant(text, column.values, listed="" if len(column.values) <= 20 else "remove the row")
        if table.date(column.name):
            todo = f"{OF_DATES}, and train again"
        raise ConfigError(what, why="the training data did not have it", todo=todo)


def _row_names(table: Table) -> list[str]:
    return [f"{table.file} {table.row(row)}" for row in range(len(table))]

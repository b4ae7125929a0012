"""A table of the user: rows of numbers and categories, split, normalised and opened for training.

Mean, standard deviation and categories are those of the training part. Rows are chosen for validation by a
hash of their text, so that the same rows are chosen on every machine, in whatever order they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lib.data.datasets.class_names import naming_note
from lib.data.datasets.files import DataLocation
from lib.data.datasets.tabular.table_files import Table, read_table
from lib.data.datasets.user_files import check_there
from lib.data.sampler import held_out_by_hash
from lib.data.types import ArrayPart, Column, Dataset, TableClassSpec, TableLabelsSpec, TableSpec
from lib.errors import ConfigError, DataError, meant, raise_faults

MOST_CATEGORIES = 1000  # of a column; one with more is rather a mistake
MANY_CATEGORIES = 50  # of a column; more than this, and than one in ten rows for training, are reported
FEWEST_ROW_NAMES = 20  # whole numbers of fewer rows may all differ by chance
_PARTS = "training", "validation"
_OTHER_INPUTS = "leave it out by naming the others in CONFIG_TABULAR_INPUTS"
OF_DATES = (
    "make numbers of the dates in the table, such as year, month and weekday, or the days since the first"
)
_OTHER_TARGET = "add rows with other values, or name another column in CONFIG_TABULAR_TARGETS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/tabular/Kconfig."""

    file: str
    validation: Literal["split", "other"]
    validation_file: str | None  # None where the file is split
    validation_pct: int | None  # these two are None where it is not
    group: str | None
    targets: str
    target: Literal["numbers", "classes", "labels"]
    inputs: str
    categories: str
    missing: Literal["error", "mean", "drop"]


@dataclass(frozen=True, slots=True)
class _Schema:
    """Names of the columns that are predicted, and of those that are inputs."""

    targets: list[str]
    inputs: list[str]


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open the table. Raises DataError where it is missing or damaged, ConfigError for unknown columns."""
    table = _read(location.files / options.file, "TABULAR_FILE")
    schema = _schema(options, table)
    if options.validation == "other":
        assert options.validation_file is not None
        other = _read(location.files / options.validation_file, "TABULAR_VALIDATION_FILE")
        for name in [*schema.inputs, *schema.targets]:
            _known(other, name, "TABULAR_INPUTS")
        tables = [table, other]
        rows = [np.arange(len(each)) for each in tables]
    else:
        held_out = _held_out(options, table)
        tables, rows = [table, table], [np.flatnonzero(~held_out), np.flatnonzero(held_out)]
    rows = [_complete(options, *each, schema, location) for each in zip(_PARTS, tables, rows, strict=True)]
    for part, kept in zip(_PARTS, rows, strict=True):
        if not len(kept):
            why, todo, key = "", "add rows", "group" if options.group else "content"
            if options.validation == "split":
                why = f"a hash of its {key} puts a row in a part, so that rows of equal {key} are in one part"
                todo = "add rows that differ, or set CONFIG_TABULAR_VALIDATION_OTHER=y"
            raise DataError(f"{table.file}: no row is left for {part}", why=why, todo=todo)
    train = table, rows[0]
    columns = tuple(_column(options, *train, name) for name in schema.inputs)
    advice = {column.name: _advice(options, *train, column) for column in columns}
    for name in filter(advice.get, advice):
        location.log(f"{table.file}: input {name!r} {advice[name]}")
    others = [column for column in columns if not advice[column.name]]
    if unknown := counted_unknown(others, tables[1], rows[1]):
        effect = "they count as missing" + ", and predictions refuse them" * (options.missing != "mean")
        location.log(f"{tables[1].file}: validation has categories that training lacks: {unknown}; {effect}")
    inputs = [encoded(columns, *pair) for pair in zip(tables, rows, strict=True)]
    spec, targets, classes = _targets(options, columns, schema, tables, rows)
    parts = [ArrayPart(*pair) for pair in zip(inputs, targets, strict=True)]
    categories = sum(bool(column.values) for column in columns)
    source = (
        f"tabular: {parts[0].size} + {parts[1].size} rows from {table.file}, SHA-256 {table.sha256[:16]}; "
        f"{', '.join(schema.targets)} from {len(columns) - categories} columns of numbers and "
        f"{categories} of categories ({spec.input_shape[0]} inputs)"
    )
    if options.target == "classes":
        source += naming_note(classes)
    fills = options.missing == "mean"
    return Dataset(spec, parts[0], parts[1], source, class_names=classes, fills_missing=fills)


def _read(file: Path, symbol: str) -> Table:
    check_there(file, symbol, ".csv", ".tsv", ".npz")
    return read_table(file)


def _schema(options: Options, table: Table) -> _Schema:
    targets = _names(options.targets)
    group = [options.group] if options.group else []
    inputs = _names(options.inputs) or [name for name in table.columns if name not in (*targets, *group)]
    chosen = {"TABULAR_TARGETS": targets, "TABULAR_INPUTS": inputs, "TABULAR_GROUP": group}
    chosen["TABULAR_CATEGORIES"] = _names(options.categories)
    for symbol, names in chosen.items():
        for name in names:
            _known(table, name, symbol)
    if not targets or not inputs:
        symbol = "TABULAR_INPUTS" if targets else "TABULAR_TARGETS"
        raise ConfigError(f"CONFIG_{symbol} names no column", todo=f"{table.file} has {_listed(table)}")
    if both := sorted({*targets} & {*inputs}):
        what = f"CONFIG_TABULAR_INPUTS and CONFIG_TABULAR_TARGETS both name {both[0]!r}"
        raise ConfigError(what, todo="leave it out of CONFIG_TABULAR_INPUTS, or out of the other")
    if options.target == "classes" and len(targets) > 1:
        raise ConfigError(
            f"CONFIG_TABULAR_TARGETS names {len(targets)} columns, and only one can have classes",
            todo="name one, or set CONFIG_TABULAR_TARGET_NUMBERS=y or CONFIG_TABULAR_TARGET_LABELS=y",
        )
    return _Schema(targets, inputs)


def _advice(options: Options, table: Table, rows: npt.NDArray[np.int64], column: Column) -> str:
    """Return what is odd about an input, and what to do about it; "" for nothing.

    Categories by name may be dates, and many; inputs by name may have another value in each row.
    """
    name, count, is_category = column.name, len(column.values), bool(column.values)
    if name in _names(options.categories):
        return ""
    if is_category and (date := table.date(name)):
        effect = f"has dates or times, such as {date}, which are {count} categories"
        return f"{effect}, and none of them is a later one; {OF_DATES}, or {_OTHER_INPUTS}"
    if not options.inputs and len(table) >= FEWEST_ROW_NAMES:
        values = table.numbers(name)
        is_counted = values is None or bool((values == np.round(values)).all())  # a measurement is no name
        if is_counted and len({*table.columns[name]}) == len(table):
            return f"has another value in each of {len(table)} rows; if it only names them, {_OTHER_INPUTS}"
    if count > max(MANY_CATEGORIES, len(rows) // 10):
        effect = f"has {count} categories in {len(rows)} rows for training, one input each"
        return f"{effect}; {_OTHER_INPUTS}, make numbers of it, or name it in CONFIG_TABULAR_CATEGORIES"
    return ""


def _names(listed: str) -> list[str]:
    return [*dict.fromkeys(name.strip() for name in listed.split(",") if name.strip())]


def _listed(table: Table) -> str:
    return ", ".join(table.columns)


def _known(table: Table, name: str, symbol: str) -> None:
    if name not in table.columns:
        raise ConfigError(
            f"CONFIG_{symbol}: {table.file} has no column {name!r}", todo=meant(name, table.columns)
        )


def _held_out(options: Options, table: Table) -> npt.NDArray[np.bool_]:
    """Return which rows are for validation (N,)."""
    assert options.validation_pct is not None
    keys = [table.columns[options.group]] if options.group else [*table.columns.values()]
    return held_out_by_hash(map("\x1f".join, zip(*keys, strict=True)), options.validation_pct)


def _complete(
    options: Options,
    part: str,
    table: Table,
    rows: npt.NDArray[np.int64],
    schema: _Schema,
    location: DataLocation,
) -> npt.NDArray[np.int64]:
    """Return `rows` without those that lack what they need. Raises DataError if none may, or all do."""
    lacking = {name: table.missing(name)[rows] for name in [*schema.inputs, *schema.targets]}
    found = {name: missing for name, missing in lacking.items() if missing.any()}
    if not found:
        return rows
    counts = ", ".join(f"{name} {missing.sum()}" for name, missing in found.items())
    if options.missing == "error":
        name, missing = next(iter(found.items()))
        raise DataError(
            f"{table.file}: values are missing: {counts}",
            why=f"the first is {name!r} of {table.row(int(rows[missing.argmax()]))}",
            todo="set CONFIG_TABULAR_MISSING_MEAN=y or CONFIG_TABULAR_MISSING_DROP=y",
        )
    needed = [*found.values()] if options.missing == "drop" else [lacking[name] for name in schema.targets]
    dropped = np.any(needed, axis=0) if needed else np.zeros(len(rows), np.bool_)
    if dropped.all():
        raise DataError(
            f"{table.file}: no row is left for {part}",
            why=f"all {len(rows)} lack a value that they need; values are missing: {counts}",
            todo="fill them in, or name other columns in CONFIG_TABULAR_INPUTS and CONFIG_TABULAR_TARGETS",
        )
    effects = [f"{dropped.sum()} of {len(rows)} rows are left out"] if dropped.any() else []
    if options.missing == "mean" and {*found} - {*schema.targets}:
        effects.insert(0, "those of inputs are replaced by the mean (of a category: by none)")
    location.log(f"{table.file}: values are missing: {counts}; {', and '.join(effects)}")
    kept: npt.NDArray[np.int64] = rows[~dropped]
    return kept


def _column(options: Options, table: Table, rows: npt.NDArray[np.int64], name: str) -> Column:
    """Return what the training rows tell of an input column.

    Raises DataError for too many categories, and, unless they are categories by name, for numbers with a
    comma and for a few texts among numbers: they would make a category of each number.
    """
    is_named = name in _names(options.categories)
    if not is_named and (values := table.numbers(name)) is not None:
        return Column.of_numbers(name, values[rows])
    if not is_named:
        table.check_commas(name, instead=", or name the column in CONFIG_TABULAR_CATEGORIES")
    strays = [] if is_named else _no_numbers(table, name)
    if strays and 2 * len(strays) < len(table):
        raise DataError(
            f"{table.file}: column {name!r} has values that are no numbers, {len(strays)} of {len(table)}",
            why=f"the first is {strays[0]}",
            todo="mend it, leave the field empty if the value is missing, or name the column in "
            "CONFIG_TABULAR_CATEGORIES",
        )
    texts = _texts(table, rows, name)
    if len(texts) > MOST_CATEGORIES:
        date = table.date(name)
        raise DataError(
            f"{table.file}: column {name!r} has {len(texts)} different texts, more than {MOST_CATEGORIES}",
            why=f"they are dates or times, such as {date}" if date else "",
            todo=f"{OF_DATES}, or {_OTHER_INPUTS}" if date else _OTHER_INPUTS,
        )
    return Column(name=name, values=texts)


def _texts(table: Table, rows: npt.NDArray[np.int64], name: str) -> tuple[str, ...]:
    missing, column = table.missing(name), table.columns[name]
    return tuple(sorted({column[row] for row in rows.tolist() if not missing[row]}))


def _no_numbers(table: Table, name: str) -> list[str]:
    """Return the texts of a column that are no numbers, with their places."""
    return [f"{text!r} in {table.row(row)}" for row, text in table.no_numbers(name).items()]


def encoded(columns: Sequence[Column], table: Table, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return inputs (N, width); a missing number or an unknown category is all zeros."""
    parts = []
    for column in columns:
        if column.values:
            places = {text: place for place, text in enumerate(column.values)}
            texts = table.columns[column.name]
            known = np.array([places.get(texts[row], -1) for row in rows.tolist()])
            parts.append((known[:, None] == np.arange(len(places))).astype(np.float32))
        else:
            parts.append(_normalised(column, table, rows))
    return np.concatenate(parts, axis=1)


def unknown_categories(column: Column, table: Table, rows: npt.NDArray[np.int64]) -> list[int]:
    """Return which of `rows` have a text that is no category of `column`, and not missing either."""
    if not column.values:
        return []
    missing, values, texts = table.missing(column.name), {*column.values}, table.columns[column.name]
    return [row for row in rows.tolist() if not missing[row] and texts[row] not in values]


def counted_unknown(columns: Sequence[Column], table: Table, rows: npt.NDArray[np.int64]) -> str:
    """Return the number of unknown categories in each column that has some, with the first; "" for none."""
    found = {column.name: unknown_categories(column, table, rows) for column in columns}
    first = {name: unknown[0] for name, unknown in found.items() if unknown}
    return ", ".join(
        f"{name} {len(found[name])} (the first is {table.columns[name][row]!r} in {table.row(row)})"
        for name, row in first.items()
    )


def _normalised(column: Column, table: Table, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Return a column of numbers (N, 1), 0 where one is missing. Raises DataError for a text."""
    values = table.numbers(column.name)
    if values is None:
        table.check_commas(column.name)
        raise DataError(
            f"{table.file}: column {column.name!r} is no column of numbers",
            why=f"it has {_no_numbers(table, column.name)[0]}",
            todo="mend it, or leave the field empty if the value is missing",
        )
    return column.normalised(values[rows])[:, None]


def _flags(table: Table, rows: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.float32]:
    """Return a column of zeros and ones (N,). Raises ConfigError for anything else."""
    for row in rows.tolist():
        if (text := table.columns[name][row]) not in ("0", "1", "0.0", "1.0", "False", "True"):
            raise ConfigError(
                f"{table.file}: column {name!r} has {text!r} in {table.row(row)}, not 0 or 1",
                todo="mend it, or set CONFIG_TABULAR_TARGET_CLASSES=y or CONFIG_TABULAR_TARGET_NUMBERS=y",
            )
    return np.array([table.columns[name][row][0] in "1T" for row in rows.tolist()], np.float32)


def _check_varies(
    table: Table, names: Sequence[str], targets_TN: Iterable[npt.NDArray[np.floating[Any]]]
) -> None:
    """Raise DataError for each target that is the same in all rows for training."""
    constant = [
        f"column {name!r} is {values[0]:g} in all {len(values)} rows for training"
        for name, values in zip(names, targets_TN, strict=True)
        if values.min() == values.max()
    ]
    raise_faults(f"{table.file} has nothing to predict", constant, todo=_OTHER_TARGET)


def _targets(
    options: Options,
    columns: tuple[Column, ...],
    schema: _Schema,
    tables: Sequence[Table],
    rows: Sequence[npt.NDArray[np.int64]],
) -> tuple[TableSpec | TableClassSpec | TableLabelsSpec, list[npt.NDArray[np.generic]], tuple[str, ...]]:
    """Return the spec, the targets of both parts, and the names of the classes."""
    pairs = [*zip(tables, rows, strict=True)]
    if options.target == "labels":
        labels = [np.stack([_flags(*pair, name) for name in schema.targets], axis=1) for pair in pairs]
        _check_varies(tables[0], schema.targets, labels[0].T)
        spec = TableLabelsSpec(name="tabular", columns=columns, classes=len(schema.targets))
        return spec, [*labels], tuple(schema.targets)
    if options.target == "numbers":
        known, trained = [], []
        for name in schema.targets:
            values = tables[0].numbers(name)
            if values is None:
                tables[0].check_commas(name)
                mend = OF_DATES if tables[0].date(name) else "mend it, or set CONFIG_TABULAR_TARGET_CLASSES=y"
                raise DataError(
                    f"{tables[0].file}: column {name!r} is predicted and no column of numbers",
                    why=f"it has {_no_numbers(tables[0], name)[0]}",
                    todo=mend,
                )
            trained.append(values[rows[0]])
            known.append(Column.of_numbers(name, trained[-1]))
        _check_varies(tables[0], schema.targets, trained)
        numbers = [np.concatenate([_normalised(column, *pair) for column in known], axis=1) for pair in pairs]
        return TableSpec(name="tabular", columns=columns, targets=tuple(known)), [*numbers], ()
    (name,) = schema.targets
    classes = _texts(*pairs[0], name)
    if len(classes) < 2:
        why = f"column {name!r} is {classes[0]!r} in all {len(rows[0])} rows for training"
        raise DataError(f"{tables[0].file} has nothing to predict", why=why, todo=_OTHER_TARGET)
    places = {text: place for place, text in enumerate(classes)}
    for table, kept in pairs:
        unknown = [row for row in kept.tolist() if table.columns[name][row] not in places]
        if unknown:
            first, todo = unknown[0], "leave its rows out, or add some for training"
            what = f"{table.file}: class {table.columns[name][first]!r} of {table.row(first)}"
            if table.numbers(name) is not None:
                todo = f"if they are no classes, set CONFIG_TABULAR_TARGET_NUMBERS=y; otherwise {todo}"
                why = f"column {name!r} has numbers, {len(classes)} different ones for training"
                raise DataError(f"{what} is not in the training part", why=why, todo=todo)
            raise DataError(f"{what} is not in the training part", todo=todo)
    labels = [np.array([places[table.columns[name][row]] for row in kept.tolist()]) for table, kept in pairs]
    return TableClassSpec(name="tabular", columns=columns, classes=len(classes)), [*labels], classes

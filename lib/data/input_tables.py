"""Tables to predict that are no CSV: JSON Lines, and columns by name."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from lib.data.datasets.tabular.table_files import Table
from lib.data.file_kinds import check_is_text
from lib.data.jsonl import json_of, remedy
from lib.data.tokenizers import as_lines
from lib.errors import ConfigError


def json_lines(file: Path, content: bytes) -> Table:
    """Read a JSON object per line as columns; a key that some lines lack is missing there."""
    rows: list[dict[str, Any]] = []
    todo = 'write {"column": value, ...} there, or remove the line'
    check_is_text(content, file, wanted="JSON Lines")
    for number, line in enumerate(as_lines(content, file), start=1):
        if not line.strip():
            raise ConfigError(f"{file}, line {number} is blank", todo=todo)
        try:
            row = json_of(line)
        except ValueError as error:
            what = f"{file}, line {number} is no JSON"
            raise ConfigError(what, why=str(error), todo=remedy(error, todo)) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, line {number} is no JSON object", todo=todo)
        rows.append({key: _cell(value, f"{file}, line {number}: {key}") for key, value in row.items()})
    if not rows:
        raise ConfigError(f"{file} has no rows", todo='write {"column": value, ...} on a line for each')
    names = dict.fromkeys(name for row in rows for name in row)
    return Table(file, {name: [row.get(name, "") for row in rows] for name in names}, "")


def from_columns(given: Mapping[str, Any]) -> Table:
    """Return a table of columns by name. Raises ConfigError for no columns, or not of one length."""
    columns = dict[str, list[str]]()
    for name, column in given.items():
        if not isinstance(name, str):
            what = f"a column is called {name!r}, of type {type(name).__name__}"
            raise ConfigError(what, todo=f"call it by a text, such as {str(name)!r}")
        try:
            values = None if isinstance(column, str | bytes | Mapping | Set) else [*column]
        except TypeError:  # a number, or an array (or tensor) without a dimension
            values = None
        if values is None:
            what = f"column {name!r} is {type(column).__name__}, not a list of values"
            raise ConfigError(what, todo=f"give a list, also for one row: {{{name!r}: [...]}}")
        columns[name] = [_cell(value, f"column {name!r}, row {row}") for row, value in enumerate(values, 1)]
    lengths = {name: len(column) for name, column in columns.items()}
    if not any(lengths.values()):
        what = "the columns have no rows" if columns else "there are no columns"
        raise ConfigError("there is nothing to predict", why=what, todo="give each column a list of values")
    if len({*lengths.values()}) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise ConfigError("columns are not of one length", why=counts, todo="give each a value for every row")
    return Table(Path("table"), columns, "")


def _cell(value: Any, place: str) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is not None and not isinstance(value, str | int | float):
        todo = "give a number, a text or null"
        raise ConfigError(f"{place} is {type(value).__name__}, no single value", todo=todo)
    return "" if value is None else str(value).strip()

"""Reading of tables: CSV and npz files as columns of texts or numbers."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lib.data.file_kinds import check_is_text
from lib.data.tokenizers import as_text
from lib.errors import DataError, os_errors

# With every spelling of nan that NumPy reads, which would become the mean, even where none may be missing.
_NANS = {"".join(letters) for letters in product(("", "+", "-"), "nN", "aA", "nN")}
MISSING = frozenset({"", "NA", "N/A", "null", "?", *_NANS})
_LONGEST = 2**31 - 1  # characters of a field: the largest C long of every platform
AS_NPZ = "write it by numpy.savez(file, name=array), without arrays of objects"
_SEPARATORS = ",;\t"
_SHOWN = 3  # of many faults
_CHUNK = 10_000  # rows that are read at a time
_TEXT = np.dtypes.StringDType()  # 16 bytes for a text of up to 15; a str has 49 more than its text

# Commas are decimal in 36,4 and 1.234,5, and separate thousands in 1,234.5 and 1,234,567; 1,234 may be both.
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+|\d{1,3}([. '\u2019\u00a0\u202f]\d{3})+),\d+([eE][+-]?\d+)?")
_THOUSANDS_COMMA = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")

# 2024-05-31, 2024-05, 31.5.2024, 5/31/24, 31 May 2024 and May 31, 2024, with or without a time, and 12:30:00.
_MONTH = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAYS = (
    r"\d{4}-\d\d?(-\d\d?)?",
    r"\d{4}(?P<first>[/.])\d\d?(?P=first)\d\d?",
    r"\d\d?(?P<second>[-/.])\d\d?(?P=second)(\d{4}|\d\d)",
    rf"\d\d?\.?[- ]{_MONTH}[- ]\d{{2,4}}",
    rf"{_MONTH}[- ](\d\d?,? )?\d{{4}}",
)
_DAY = "|".join(_DAYS)
_TIME = r"\d\d?:\d\d(:\d\d([.,]\d+)?)?( ?[ap]m)?( ?(z|utc|[-+]\d\d(:?\d\d)?))?"
_DATE = re.compile(rf"({_DAY})([t ]{_TIME})?|{_TIME}", re.IGNORECASE)

Texts: TypeAlias = Sequence[str]  # a list, or an array of _TEXT


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equal length by name, as texts without blanks around them."""

    file: Path
    columns: Mapping[str, Texts]
    sha256: str

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @staticmethod
    def row(index: int) -> str:
        """Return the name of a row in messages, which count from 1 and leave out the heading."""
        return f"row {index + 1}"

    def numbers(self, name: str) -> npt.NDArray[np.float64] | None:
        """Return a column as numbers (N,), nan where one is missing; None if some text is no number.

        Raises DataError for an infinite number.
        """
        texts = np.array(self.columns[name], _TEXT)
        texts[self.missing(name)] = "nan"
        if (np.strings.find(texts, "_") >= 0).any():  # 57_8 is a number in Python alone
            return None
        try:
            values = texts.astype(np.float64)
        except ValueError:
            return None
        if len(infinite := np.flatnonzero(np.isinf(values))):
            what = f"{self.file}: column {name!r} is infinite in {self.row(int(infinite[0]))}"
            raise DataError(what, todo="write a finite number, or leave the field empty if it is missing")
        return values

    def no_numbers(self, name: str) -> dict[int, str]:
        """Return the texts of a column that are no numbers, by row."""
        found = {}
        for row, text in enumerate(self.columns[name]):
            try:
                float("nan" if text in MISSING else text.replace("_", "?"))
            except ValueError:
                found[row] = text
        return found

    def check_commas(self, name: str, *, instead: str = "") -> None:
        """Raise DataError for a column of numbers some of which have a comma: decimal, or before thousands.

        It is one of numbers if most of its values are such numbers, or plain ones. instead: another remedy.
        """
        texts = self.no_numbers(name)
        written = {row: number for row, text in texts.items() if (number := _without_comma(text))}
        given = len(self) - int(self.missing(name).sum())
        if not written or 2 * (given - len(texts) + len(written)) <= given:
            return
        rule = "with a decimal point and nothing between thousands"
        row = next((row for row, numbers in written.items() if len(numbers) == 1), next(iter(written)))
        raise DataError(
            f"{self.file}: column {name!r} has numbers with a comma, {len(written)} of {given} values",
            why=f"such as {texts[row]!r} in {self.row(row)}",
            todo=f"write {' or '.join(written[row])} {rule}{instead}",
        )

    def date(self, name: str) -> str:
        """Return the first date or time of a column with its row; "" unless most of its values are some."""
        texts = self.columns[name]
        found = [row for row, text in enumerate(texts) if _DATE.fullmatch(text)]
        given = len(self) - int(self.missing(name).sum())
        return f"{texts[found[0]]!r} in {self.row(found[0])}" if 2 * len(found) > given else ""

    def missing(self, name: str) -> npt.NDArray[np.bool_]:
        """Return where a column has no value (N,)."""
        return np.fromiter((text in MISSING for text in self.columns[name]), np.bool_, len(self))


def _without_comma(text: str) -> list[str]:
    """Return the numbers that a text with a comma may mean, with a decimal point; none for other texts."""
    found = []
    if _DECIMAL_COMMA.fullmatch(text):
        whole, _, fraction = text.partition(",")
        found.append(f"{re.sub(r'[^-+0-9]', '', whole)}.{fraction}")
    if _THOUSANDS_COMMA.fullmatch(text):
        found.append(text.replace(",", ""))
    return found


def read_table(file: Path, content: bytes | None = None) -> Table:
    """Read a CSV or npz file. Raises DataError where it is damaged or of another format.

    content: read already, from a source that has only a name.
    """
    if content is None:
        with os_errors("read"):
            content = file.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    columns = _npz(file, content) if file.suffix == ".npz" else _csv(file, content)
    return Table(file, columns, sha256)


def _csv(file: Path, content: bytes) -> dict[str, Texts]:
    content = content.removeprefix(b"\xef\xbb\xbf")
    check_is_text(content, file, wanted="a table in CSV")
    as_text(content, file)  # all of it, before rows are counted
    separator = max(_SEPARATORS, key=content.partition(b"\n")[0].decode().count)
    csv.field_size_limit(_LONGEST)
    lines = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="")
    read = csv.reader(lines, delimiter=separator, strict=True)
    rows = ([field.strip() for field in row] for row in read if row)
    count, ragged = 0, list[str]()
    try:
        names = next(rows, [])
        # No more rows than lines: the rest of an array is never written, and so takes no memory.
        most = max(content.count(b"\n"), content.count(b"\r")) + 1
        columns = [np.empty(most, _TEXT) for _ in names]
        while chunk := list(islice(rows, _CHUNK)):
            numbered = enumerate(chunk, count + 1)
            ragged += [f"row {n} has {len(row)}" for n, row in numbered if len(row) != len(names)]
            if not ragged:
                for column, texts in zip(columns, zip(*chunk, strict=True), strict=True):
                    column[count : count + len(chunk)] = texts
            count += len(chunk)
    except csv.Error as error:
        why = f"row {count + 1} or below: {error}"
        todo = 'close each quote, and write " in a quoted field as ""'
        raise DataError(f"{file} is no table", why=why, todo=todo) from error
    if not count:
        why = "the first line is the heading" if names else "it is empty"
        raise DataError(f"{file} has no rows", why=why, todo="add rows below a heading")
    _check_names(file, names)
    if ragged:
        more = f", and {len(ragged) - _SHOWN} more" if len(ragged) > _SHOWN else ""
        raise DataError(
            f"{file}: {len(ragged)} of {count} rows do not have the {len(names)} fields of the heading",
            why=", ".join(ragged[:_SHOWN]) + more,
            todo="quote fields that contain the separator",
        )
    return {name: cast(Texts, column[:count]) for name, column in zip(names, columns, strict=True)}


def _npz(file: Path, content: bytes) -> dict[str, Texts]:
    """Arrays (N,) are columns; (N, K) are K columns NAME_0, NAME_1, ..."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            loaded = {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} is no npz file of plain arrays", why=str(error), todo=AS_NPZ) from error
    columns = dict[str, Texts]()
    for name, array in loaded.items():
        if array.ndim not in (1, 2) or array.dtype.kind not in "biufU":
            what = f"{file}: array {name!r} is {array.dtype} {array.shape}, not a column of a table"
            raise DataError(what, todo="give arrays (N,) or (N, K) of numbers, bools or texts")
        parts = {name: array} if array.ndim == 1 else {f"{name}_{k}": one for k, one in enumerate(array.T)}
        for key, one in parts.items():
            columns[key] = cast(Texts, np.array([str(value).strip() for value in one.tolist()], _TEXT))
    _check_names(file, [*columns])
    if len(lengths := {len(column) for column in columns.values()}) != 1 or lengths == {0}:
        why, todo = f"they have {sorted(lengths)} rows", "give each a value for every row"
        raise DataError(f"{file}: its columns are not of one length", why=why, todo=todo)
    return columns


def _check_names(file: Path, names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if not names or "" in names or twice:
        why = f"{twice[0]!r} is there twice" if twice else "a column has no name"
        todo = "give each column a name of its own"
        raise DataError(f"{file}: the heading does not name its columns", why=why, todo=todo)

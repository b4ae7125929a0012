"""Files of another kind that are named as a table or a text are called by what they are."""

from __future__ import annotations

import gzip
import io
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lib.data.datasets.tabular.table_files import read_table
from lib.data.file_kinds import check_is_text
from lib.data.input_tables import json_lines
from lib.data.jsonl import read_objects
from lib.errors import DataError

CSV = b"x,y\n1,2\n"


def zipped(*names: str) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(name, CSV)
    return file.getvalue()


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "own.db") as connection:
        connection.execute("create table t (x, y)")
    connection.close()
    return (folder / "own.db").read_bytes()


def arrays(_: Path) -> bytes:
    np.savez(file := io.BytesIO(), x=np.arange(3))
    return file.getvalue()


def array(_: Path) -> bytes:
    np.save(file := io.BytesIO(), np.arange(3))
    return file.getvalue()


KINDS: dict[str, tuple[Callable[[Path], bytes], str, str]] = {
    "workbook": (
        lambda _: zipped("[Content_Types].xml", "xl/workbook.xml"),
        "an Excel workbook",
        "save it as",
    ),
    "binary workbook": (lambda _: zipped("xl/workbook.bin"), "an Excel workbook", "save it as"),
    "sheet": (lambda _: zipped("mimetype", "content.xml"), "an OpenDocument file", "save it as"),
    "zip": (lambda _: zipped("a.csv"), "a zip archive", "unpack it"),
    "cut zip": (lambda _: b"PK\x03\x04", "a damaged zip archive", "save it as"),
    "npz": (arrays, "an npz file of numpy", "end its name in .npz"),
    "npy": (array, "an array of numpy", "save it by numpy.savez"),
    "gzip": (lambda _: gzip.compress(CSV), "a gzip archive", "unpack it"),
    "parquet": (lambda _: b"PAR1" + bytes(9), "a Parquet file", "save it as"),
    "sqlite": (database, "an SQLite database", "save it as"),
    "UTF-16": (lambda _: CSV.decode().encode("utf-16"), "text in UTF-16", "save it as"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_another_kind_is_called_by_it(kind: str, tmp_path: Path) -> None:
    make, name, todo = KINDS[kind]
    content = make(tmp_path)
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_table(tmp_path / "t.csv")
    assert str(caught.value).startswith(f"{tmp_path}/t.csv is {name}, not a table in CSV; {todo}")
    for read in (
        lambda: json_lines(tmp_path / "t.csv", content),
        lambda: read_objects(tmp_path / "t.csv", str),
    ):
        with pytest.raises(DataError, match=f"t.csv is {name}, not JSON Lines; {todo}"):
            read()


@pytest.mark.parametrize("content", [b"", CSV, b"P,K\n1,2\n", b"\xef\xbb\xbfx,y\n", b'{"a": 1}\n'])
def test_text_is_text(content: bytes, tmp_path: Path) -> None:
    check_is_text(content, tmp_path / "t.csv", wanted="a table in CSV")

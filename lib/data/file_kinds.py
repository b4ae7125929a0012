"""Formats of files that are no text, by their first bytes: a table may be a workbook with another name."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from lib.errors import DataError

_UNPACK, _SAVE = "unpack it", "save it as {wanted} (in UTF-8)"
_FORMATS = {
    b"\x1f\x8b": ("a gzip archive", _UNPACK),
    b"BZh": ("a bzip2 archive", _UNPACK),
    b"\xfd7zXZ\x00": ("an xz archive", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("a Zstandard archive", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    b"PK\x05\x06": ("an empty zip archive", _SAVE),
    b"PAR1": ("a Parquet file", _SAVE),
    b"ARROW1": ("a Feather file", _SAVE),
    b"SQLite format 3\x00": ("an SQLite database", _SAVE),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an old Excel workbook", _SAVE),
    b"%PDF-": ("a PDF file", _SAVE),
    b"\x89HDF\r\n": ("an HDF5 file", _SAVE),
    b"\x93NUMPY": ("an array of numpy", "save it by numpy.savez, as .npz"),
    b"\xff\xfe": ("text in UTF-16", _SAVE),
    b"\xfe\xff": ("text in UTF-16", _SAVE),
    b"version https://git-lfs": ("a Git LFS pointer without the file", "fetch it: git lfs pull"),
}
_ZIPPED = {  # how a name in a zip archive begins or ends
    "xl/workbook.": ("an Excel workbook", _SAVE),
    "content.xml": ("an OpenDocument file", _SAVE),
    "word/document.": ("a Word document", _SAVE),
    ".npy": ("an npz file of numpy", "end its name in .npz"),
}


def check_is_text(content: bytes, file: Path, *, wanted: str) -> None:
    """Raise DataError if `content` begins as a file of another kind does.

    wanted: the format to save it in, in words.
    """
    found = next((known for magic, known in _FORMATS.items() if content.startswith(magic)), None)
    if content.startswith(b"PK\x03\x04"):
        found = _zipped(content)
    if found is not None:
        kind, todo = found
        raise DataError(f"{file} is {kind}, not {wanted}", todo=todo.format(wanted=wanted))


def _zipped(content: bytes) -> tuple[str, str]:
    """Return what a zip archive is, and what to do with it."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        return "a damaged zip archive", _SAVE
    for part, known in _ZIPPED.items():
        if any(name.startswith(part) or name.endswith(part) for name in names):
            return known
    return "a zip archive", _UNPACK

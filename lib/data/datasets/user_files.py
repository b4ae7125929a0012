"""Files that users name or put into a folder: how they are found, and what tells that they have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lib.data.datasets.files import file_in_place_of, first_file
from lib.errors import DataError, os_errors
from lib.units import some_of


def find_file(data_dir: Path, name: str, spellings: Sequence[str], *, why: str = "", instead: str) -> Path:
    """Return the first of `spellings` in DATA_DIR/`name` or DATA_DIR. Raises DataError, with `instead`."""
    folders = data_dir / name, data_dir
    file = first_file(folder / spelling for folder in folders for spelling in spellings)
    if file is None:
        what = f"there is no {' or '.join(spellings)} in {folders[0]} or {folders[1]}"
        raise DataError(what, why=file_in_place_of(data_dir) or why, todo=f"put it there, or {instead}")
    return file


def check_there(file: Path, symbol: str, *suffixes: str) -> None:
    """Raise DataError if the file of CONFIG_`symbol` is not there, with others that end in `suffixes`."""
    if file.is_file():
        return
    folder, kinds = file.parent, ", ".join(f"*{suffix}" for suffix in suffixes)
    is_file = file_in_place_of(folder)
    why = is_file or f"there is no folder {folder}"
    if folder.is_dir():
        found = sorted(each.name for each in folder.iterdir() if each.suffix in suffixes and each.is_file())
        why = f"{folder} has {some_of(found) if found else f'no {kinds}'}"
    todo = f"put it there, or name another by CONFIG_DATA_DIR and CONFIG_{symbol}"
    if is_file:
        todo = "point CONFIG_DATA_DIR to the folder of the file"
    raise DataError(f"{file} {'is a folder' if file.is_dir() else 'is not there'}", why=why, todo=todo)


def marks(files: Iterable[Path]) -> Iterator[str]:
    """Yield name, size and modification time of each file. Raises ToolkitError if one is missing."""
    for file in files:
        with os_errors("read"):
            status = file.stat()
        yield f"{file} {status.st_size} {status.st_mtime_ns}"

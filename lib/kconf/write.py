"""Writing configuration files: all or nothing, the old one kept, an unchanged one untouched."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kconfiglib

from lib import atomic
from lib.kconf.reader import HEADER, MADE_FROM


def full_text(tree: Any, *, made_from: Sequence[str] = ()) -> str:
    """The full configuration: every symbol that has a value, under a header that says so, and of which
    shipped files it was made."""
    header = f"{HEADER}\n{MADE_FROM}{', '.join(made_from)}\n" if made_from else f"{HEADER}\n"
    return _written(kconfiglib.Kconfig.write_config, tree, header=header, save_old=False)


def minimal_text(tree: Any) -> str:
    """The least that reproduces the configuration (savedefconfig form); without a header."""
    return _written(kconfiglib.Kconfig.write_min_config, tree, header="")


def write_atomically(path: Path, text: str, *, keep_old: bool = False) -> bool:
    """Make `text` (UTF-8) the content of `path`; at every moment the file is whole, old or new.

    Returns False, and leaves even the modification time alone, where the content is already that. With
    `keep_old` what was there goes to `<path>.old`. A symbolic link is followed. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    data = text.encode()
    old = path.read_bytes() if path.is_file() else None
    if old == data:
        return False
    if old is not None and not os.access(path, os.W_OK):
        # Renaming would replace it all the same, but whoever made it read-only meant something by that.
        raise PermissionError(errno.EACCES, "the file is read-only", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if keep_old and old is not None:
        atomic.write_bytes(path.with_name(path.name + ".old"), old)
    atomic.write_bytes(path, data)
    return True


def _written(write: Any, tree: Any, **arguments: object) -> str:
    """What a method of kconfiglib writes: it knows files only. The menu replaces these methods on its tree,
    hence those of the class."""
    import tempfile  # not every command writes, and it takes long to import

    with tempfile.TemporaryDirectory(prefix="kconf-") as directory:
        path = Path(directory) / "config"
        write(tree, str(path), **arguments)
        return path.read_bytes().decode("utf-8")

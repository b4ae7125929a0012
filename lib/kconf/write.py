"""Atomic writing of configuration files, with a backup; unchanged files are not touched."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kconfiglib

from lib import atomic
from lib.kconf.reader import END, HEADER, MADE_FROM, MADE_WITH, read_file, refuse_special
from lib.kconf.tree import display
from lib.plugin_folders import external

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH  # by anybody


def full_text(tree: Any, *, sources: Sequence[str] = ()) -> str:
    """Return the full configuration: every symbol with a value, a header with the shipped files used, END."""
    header = f"{HEADER}\n{MADE_FROM}{', '.join(sources)}\n" if sources else f"{HEADER}\n"
    header += f"{MADE_WITH}{base}\n" if (base := external()) else ""
    return _written(kconfiglib.Kconfig.write_config, tree, header=header, save_old=False) + f"{END}\n"


def minimal_text(tree: Any) -> str:
    """Return the minimal configuration (savedefconfig form), without a header."""
    return _written(kconfiglib.Kconfig.write_min_config, tree, header="")


def would_change(path: Path, text: str) -> bool:
    """True if `text` (UTF-8) differs from the content of `path`.

    Raises OSError where it must not be written: read-only and special files, dangling symbolic links.
    """
    name, path = path, Path(os.path.realpath(path))
    if path.is_symlink():  # a loop, since realpath did not resolve it
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    refuse_special(path)
    if not path.is_file():
        for link in (name, *name.parents):  # a missing directory behind a symbolic link must not be created
            target = Path(os.path.realpath(link))
            if link.is_symlink() and not (target.parent if link == name else target).is_dir():
                what = f"{display(link)} is a symbolic link to {target}, and there is no such directory"
                raise FileNotFoundError(errno.ENOENT, what, os.path.realpath(name))
        return True
    if path.read_bytes() == text.encode():
        return False
    _refuse_read_only(path)
    return True


def write_configuration(path: Path, text: str, *, keep_old: bool = False) -> bool:
    """Write atomically, but not over a file that does not parse as a configuration: probably a wrong name.

    Returns true if the file changed. Raises OSError.
    """
    layer = read_file(path) if path.is_file() else None
    if layer is not None and layer.faults and not (layer.assignments or layer.by_tool):
        raise OSError(errno.EEXIST, f"{path.name} is not a configuration", os.path.realpath(path))
    return write_atomically(path, text, keep_old=keep_old)


def write_atomically(path: Path, text: str, *, keep_old: bool = False) -> bool:
    """Make `text` (UTF-8) the content of `path`; at every moment the file is complete, old or new.

    Returns False, and does not even change the modification time, where the content is the same. With
    `keep_old` the previous content goes to `<path>.old`. A symbolic link is followed. Raises OSError.
    """
    if not would_change(path, text):
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path = Path(os.path.realpath(path))
    if keep_old and path.is_file():
        old = path.with_name(path.name + ".old")
        if old.is_file():
            _refuse_read_only(old)
        atomic.write_bytes(old, path.read_bytes())
    atomic.write_bytes(path, text.encode())
    return True


def _refuse_read_only(path: Path) -> None:
    """Raise PermissionError for a read-only file, which renaming, or root, would replace anyway."""
    if not os.access(path, os.W_OK) or not path.stat().st_mode & _WRITABLE:
        raise PermissionError(errno.EACCES, f"{path.name} is read-only", str(path))


def _written(write: Any, tree: Any, **arguments: object) -> str:
    """Return the output of kconfiglib's writer, which only writes to files.

    The method is passed from the class, since the menu overrides it on its tree.
    """
    import tempfile  # slow to import, and not every command writes

    with tempfile.TemporaryDirectory(prefix="kconf-") as directory:
        path = Path(directory) / "config"
        with atomic.naming(path):
            write(tree, str(path), **arguments)
        return path.read_bytes().decode("utf-8")

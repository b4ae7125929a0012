"""Where plug-ins are: this tree and the folder of EXTERNAL=, and which symbols their Kconfig files define."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTERNAL = "ANNEAL_EXTERNAL"  # environment variable with the folder of EXTERNAL=
_DEFINITION = re.compile(r"^(?:menu)?config (\w+)\n((?:[ \t].*\n|\n)*)", re.MULTILINE)
_OF_ITS_OWN = re.compile(r"^\s+(?:help$|(?:bool|int|hex|string|prompt) \")", re.MULTILINE)


def external() -> Path | None:
    """Return the folder of EXTERNAL=, whose plug-ins count as those of the tree; None without one."""
    name = os.environ.get(EXTERNAL)
    return shortened(Path(name).absolute()) if name else None


def shortened(path: Path) -> Path:
    """Return `path` without "..", unless a symbolic link makes the shorter one another file."""
    if ".." not in path.parts:
        return path
    short = Path(os.path.normpath(path))
    return short if not path.exists() or (short.exists() and short.samefile(path)) else path


def shown(path: Path) -> str:
    """Return the name of a plug-in's folder or file for messages: relative to the tree if it is in it."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def symbols_of(home: Path) -> dict[str, str]:
    """Return the symbols that the Kconfig in `home` defines, with their fields of `Options`.

    A definition has a prompt or a help. An entry with neither adds defaults to a symbol of another file, or
    is a capability that models select.
    """
    prefix = f"{home.name.upper()}_"
    owned = [name for name, body in definitions_in(home / "Kconfig") if _OF_ITS_OWN.search(body)]
    return {name: name.removeprefix(prefix).lower() for name in owned}


@functools.cache
def definitions_in(kconfig: Path) -> tuple[tuple[str, str], ...]:
    """Return the symbol and body of every definition in a file."""
    return tuple(_DEFINITION.findall(kconfig.read_text(encoding="utf-8") + "\n")) if kconfig.is_file() else ()

"""EXTERNAL=DIR: models, tasks, data sets and configurations from outside, as M= has modules of the kernel.

The Makefile passes the folder to every command in ANNEAL_EXTERNAL, also if an earlier command kept it in O=.
Its name is not in the identity of a run. Its Kconfig files may add to the tree, and never change it.
"""

from __future__ import annotations

import keyword
import os
import re
from pathlib import Path
from typing import Any

import kconfiglib

from lib import atomic
from lib.errors import ConfigError, os_errors
from lib.plugin_folders import EXTERNAL, external
from lib.plugins import KINDS
from lib.units import setting

KEPT = ".external"  # file in O= with the folder for later commands
FILES = ("Kconfig", *(f"{kind.external}/*/Kconfig" for kind in KINDS))
_SHELL = "EXTERNAL_SHELL"
_HARMLESS = {"error-if", "filename", "info", "lineno", "warning-if"}  # macro functions that run nothing
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OF_THE_TREE = ("anneal", "defconfigs", "docs", "lib", "models", "scripts", "tests", "train")
_FORGET = "give another EXTERNAL=DIR, or EXTERNAL= to do without"


def check_place(base: Path, root: Path) -> None:
    """Raise ConfigError where `base`, existing or not, cannot be EXTERNAL= for the tree at `root`."""
    what, inside, here = f"EXTERNAL={base}", base.resolve(), root.resolve()
    if base.exists() and not base.is_dir():
        raise ConfigError(f"{what} is not a folder", todo=_FORGET)
    if inside == here or any(inside.is_relative_to(here / name) for name in _OF_THE_TREE):
        raise ConfigError(f"{what} is this tree itself, or a part of it", todo=_FORGET)
    if not str(base).isprintable() or re.search(r'[$"\\]', str(base)):
        raise ConfigError(f"{what!r} has a character that Kconfig cannot name", todo="rename the folder")


def check(base: Path, root: Path) -> None:
    """Raise ConfigError where the folder `base` of EXTERNAL= cannot extend the tree at `root`."""
    check_place(base, root)
    if not has_kconfig(base):
        wanted = ", ".join(f"{kind.external}/NAME" for kind in KINDS)
        why = f"it needs one beside a model.py, or in {wanted}"
        todo = f"{_FORGET}; make new-model writes one"
        what = f"EXTERNAL={base} {'has no Kconfig' if base.exists() else 'is not there'}"
        raise ConfigError(what, why=why if base.exists() else "", todo=todo)
    for kind in KINDS:
        kind.names()  # it refuses two of one name
        file = f"{kind.file}.py"
        for home in sorted({path.parent for name in (file, "Kconfig") for path in kind.of_external(name)}):
            if not _NAME.fullmatch(home.name) or keyword.iskeyword(home.name):
                why = "its name is not one of a Python package in lower case"
                raise ConfigError(f"{home} cannot be a {kind.noun}", why=why, todo="rename it")
            for missing in (name for name in (file, "Kconfig") if not (home / name).is_file()):
                raise ConfigError(f"{home} has no {missing}", todo=f"a {kind.noun} has {file} and Kconfig")


def guarded(kind: type[Any]) -> type[Any]:
    """Return the class `kind` of trees that runs no program for its Kconfig files, unless EXTERNAL_SHELL=1.

    Macro functions are refused where kconfiglib would call them, whatever file, variable or name leads there.
    """
    if os.environ.get(_SHELL) == "1":
        return kind

    class Guarded(kind):  # type: ignore[misc]
        def _fn_val(self, arguments: list[str]) -> Any:
            name = arguments[0]
            if name in self._functions and name not in self.variables and name not in _HARMLESS:
                raise ConfigError(
                    f"{self.filename}:{self.linenr}: $({','.join(arguments)}) runs a program",
                    why="Kconfig files of EXTERNAL= may not",
                    todo=f"read it, and give {_SHELL}=1 if you trust it",
                )
            return super()._fn_val(arguments)

    return Guarded


def refuse_changes(tree: Any, base: Path) -> None:
    """Raise ConfigError where Kconfig files of `base` change the tree, with both places.

    They may add members to choices, and to a symbol of the tree defaults that hang on a symbol of their own.
    """
    root, files = Path(tree.srctree), tree.kconfig_filenames
    if twice := next((name for name in files if files.count(name) > 1), None):
        raise ConfigError(f"{twice} is sourced twice", todo="the tree sources what EXTERNAL= has by itself")

    def is_theirs(node: Any) -> bool:
        path = root / node.filename
        return path.is_relative_to(base) or not path.is_relative_to(root)

    own = {symbol for symbol in tree.unique_defined_syms if all(map(is_theirs, symbol.nodes))}
    for symbol in sorted(own, key=lambda symbol: str(symbol.name)):
        for target, *_ in symbol.selects + symbol.implies:
            if target not in own and any(node.prompt for node in target.nodes):
                what = f"{_place(symbol.nodes[0])} sets CONFIG_{target.name}, which a user sets"
                raise ConfigError(what, todo="select only symbols without a prompt")
    for item in [*tree.unique_defined_syms, *tree.unique_choices]:
        known = next((node for node in item.nodes if not is_theirs(node)), None)
        name = item.name if isinstance(item, kconfiglib.Choice) else f"CONFIG_{item.name}"
        for node in (node for node in item.nodes if known and is_theirs(node)):
            if node.prompt or node.help or node.ranges or node.selects or node.implies:
                what = f"{_place(node)} defines {name}, and so does {_place(known)}"
                raise ConfigError(what, todo="choose another name")
            for _, condition in node.defaults:
                if not own.intersection(kconfiglib.split_expr(condition, kconfiglib.AND)):
                    what = f"{_place(node)} changes the default of {name}, which {_place(known)} defines"
                    raise ConfigError(what, todo="end the line in `if` and a symbol of your own")


def check_forgotten(made_with: str, file: str) -> None:
    """Raise ConfigError if unknown symbols of `file` are those of a folder of EXTERNAL= that is not in use.

    made_with: the folder that its header names; "" for none. Files in DIR/defconfigs belong to DIR.
    """
    above = Path(file).absolute().parent
    if not made_with and above.name == "defconfigs" and _has_plug_ins(above.parent):
        made_with = str(above.parent)
    now = external()
    if made_with and (now is None or Path(made_with).resolve() != now.resolve()):
        state = f"EXTERNAL={now} is given" if now else "EXTERNAL= is not given"
        what = f"{file} was made with EXTERNAL={made_with}, and {state}"
        raise ConfigError(what, todo=f"give {setting('EXTERNAL', made_with)}")


def keep(output: Path) -> str:
    """Keep the folder of EXTERNAL= in `output` for later commands, or forget it; returns a message."""
    path, base = output / KEPT, external()
    with os_errors("keep EXTERNAL="):
        if base is None:
            path.unlink(missing_ok=True)
            return "EXTERNAL= is forgotten"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, f"{base}\n")
    return f"EXTERNAL={base} is kept in {path} for later commands; EXTERNAL= forgets it"


def variables() -> dict[str, str]:
    """Return the variables of the environment by which a process has EXTERNAL= as this one; {} without it."""
    shell = {name: value for name, value in os.environ.items() if name == _SHELL}
    return {EXTERNAL: str(base), **shell} if (base := external()) else {}


def has_kconfig(folder: Path) -> bool:
    """True if plug-ins are in `folder`, or it is one."""
    return any(next(folder.glob(pattern), None) for pattern in FILES)


def _has_plug_ins(folder: Path) -> bool:
    """True for a folder of EXTERNAL=, not for a tree such as this one, whose data sets are elsewhere."""
    return has_kconfig(folder) and not (folder / "lib" / "plugins.py").is_file()


def _place(node: Any) -> str:
    return f"{node.filename}:{node.linenr}"

"""The one registry of models, tasks and data sets: folders found by name. There is no list.

A plug-in is a folder with one Python file, and a Kconfig that defines its own symbols. The file has a frozen
dataclass `Options` with a field for each of them, and functions that take one. Nothing is imported to find a
plug-in or to tell its symbols, so that configuring stays light.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lib.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
_TASK = re.compile(r'^TASK(?:: \w+)? = "(\w+)"', re.MULTILINE)
_DEFINITION = re.compile(r"^(?:menu)?config (\w+)\n((?:[ \t].*\n|\n)*)", re.MULTILINE)
_OF_ITS_OWN = re.compile(r"^\s+(?:help$|(?:bool|int|hex|string|prompt) \")", re.MULTILINE)
_NAMED = re.compile(r'^\s+default "(\w+)" if', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plug-in.

    package:  whose folders are plug-ins of it.
    file:     what each of them has, without its suffix.
    required: what that file must define besides `Options`.
    symbol:   the string symbol that names the chosen plug-in, where one folder may have several names: those
              that its Kconfig gives to the symbol. "" where a folder has its own name.
    """

    noun: str
    package: str
    file: str
    required: tuple[str, ...]
    symbol: str = ""

    def names(self) -> tuple[str, ...]:
        """Names of all plug-ins of the kind, sorted."""
        return tuple(sorted(self._homes()))

    def home(self, name: str) -> Path:
        """The folder of plug-in `name`. Raises ConfigError if there is none."""
        homes = self._homes()
        if name not in homes:
            place = self.package.replace(".", "/")
            raise ConfigError(f"there is no {self.noun} {name!r} under {place}/", todo=meant(name, homes))
        return homes[name]

    def load(self, name: str) -> Any:
        """Import the file of plug-in `name`. Raises ConfigError if there is none, or a definition lacks."""
        home = self.home(name)
        module = importlib.import_module(f"{self.package}.{home.name}.{self.file}")
        place = f"{self.package.replace('.', '/')}/{home.name}/{self.file}.py"
        missing = [wanted for wanted in ("Options", *self.required) if not hasattr(module, wanted)]
        if missing:
            raise ConfigError(f"{place} does not define {', '.join(missing)}")
        if not (isinstance(module.Options, type) and dataclasses.is_dataclass(module.Options)):
            raise ConfigError(f"{place}: Options is no dataclass")
        return module

    def own(self, name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of `values` by symbol those that plug-in `name` owns, as fields of its `Options`.

        A symbol belongs to the plug-in whose Kconfig defines it, whatever it is called.
        """
        symbols = symbols_of(self.home(name))
        return MappingProxyType({f: values[s] for s, f in symbols.items() if s in values})

    def options(self, name: str, options: Mapping[str, Any]) -> Any:
        """`Options` of plug-in `name`. Raises ConfigError where `options` are not exactly its fields."""
        module = self.load(name)
        declared = {field.name for field in dataclasses.fields(module.Options)}
        home = self.home(name)
        symbols = {field: symbol for symbol, field in symbols_of(home).items()}

        def told(fields: set[str], fault: str) -> list[str]:
            names = sorted(f"CONFIG_{symbols.get(f, f'{home.name}_{f}'.upper())}" for f in fields)
            return [f"{', '.join(names)} {fault}"] if names else []

        problems = told(declared - set(options), "are not set")
        problems += told(set(options) - declared, f"are not known to the {self.noun}")
        if problems:
            place = f"{self.package.replace('.', '/')}/{home.name}"
            raise ConfigError(
                f"{place}/{self.file}.py and {place}/Kconfig disagree",
                why=" and ".join(problems),
                todo=f"make the fields of Options the {self.noun}'s own symbols",
            )
        return module.Options(**options)

    def _homes(self) -> dict[str, Path]:
        folder = ROOT / self.package.replace(".", "/")
        homes = {}
        for path in sorted(folder.glob(f"*/{self.file}.py")):
            kconfig = dict(_definitions(path.parent / "Kconfig")) if self.symbol else {}
            names = _NAMED.findall(kconfig.get(self.symbol, "")) or [path.parent.name]
            homes.update(dict.fromkeys(names, path.parent))
        return homes


MODELS = Kind("model", "models", "model", ("TASK", "build"))
DATASETS = Kind("data set", "lib.data.datasets", "data", ("outline", "open_set"), symbol="DATASET")
TASKS = Kind("task", "train.tasks", "task", ("DATA", "build", "fault"))


def task_of(model: str) -> str:
    """The task that the file of `model` names, read without importing it; "" where it has no such line."""
    found = _TASK.search((MODELS.home(model) / "model.py").read_text(encoding="utf-8"))
    return found[1] if found else ""


def symbols_of(home: Path) -> dict[str, str]:
    """Symbols that the Kconfig in the folder `home` defines, with the fields of `Options` that they are.

    A definition has a prompt or a help. What has neither adds defaults to a symbol of another file, or is a
    capability that models select.
    """
    prefix = f"{home.name.upper()}_"
    owned = [name for name, body in _definitions(home / "Kconfig") if _OF_ITS_OWN.search(body)]
    return {name: name.removeprefix(prefix).lower() for name in owned}


def meant(name: object, known: Any) -> str:
    """What to do about a `name` that is none of `known`."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"


@functools.cache
def _definitions(kconfig: Path) -> tuple[tuple[str, str], ...]:
    """(symbol, what follows it) of every definition in a file."""
    return tuple(_DEFINITION.findall(kconfig.read_text(encoding="utf-8") + "\n")) if kconfig.is_file() else ()

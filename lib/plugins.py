"""The one registry of models, tasks and data sets: folders found by name. There is no list.

A plug-in is a folder with one Python file, and a Kconfig that defines its own symbols. The file has a frozen
dataclass `Options` with a field for each of them, and functions that take one. Nothing is imported to find a
plug-in or to tell its symbols, so that configuring stays light.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lib import plugin_folders
from lib.errors import ConfigError, meant
from lib.plugin_folders import definitions_in, external, shown, symbols_of

_ABOVE = __name__.removesuffix("lib.plugins")  # the package that holds this tree for `import anneal`, else ""
_TASK = re.compile(r'^TASK(?:: \w+)? = "(\w+)"', re.MULTILINE)
_NAMED = re.compile(r'^\s+default "(\w+)" if', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """`Options` of a plug-in without symbols of its own."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plug-in.

    noun:     its name in messages.
    package:  package whose folders are the plug-ins.
    file:     name of the Python file of each, without suffix.
    required: names that the file defines besides `Options`.
    external: folder of a folder of EXTERNAL= whose folders are plug-ins of the kind, too.
    symbol:   symbol to which a folder's Kconfig gives the names of its plug-ins; "" if it has its own name.
    """

    noun: str
    package: str
    file: str
    required: tuple[str, ...]
    external: str = ""
    symbol: str = ""

    def names(self) -> tuple[str, ...]:
        """Return the names of all plug-ins of the kind, sorted."""
        return tuple(sorted(self._homes()))

    def home(self, name: str) -> Path:
        """Return the folder of plug-in `name`. Raises ConfigError if there is none."""
        if name not in (homes := self._homes()):
            place = f"{self.package.replace('.', '/')}/{f' or in {found}' if (found := external()) else ''}"
            raise ConfigError(f"there is no {self.noun} {name!r} under {place}", todo=meant(name, homes))
        return homes[name]

    def load(self, name: str) -> Any:
        """Import the file of plug-in `name`. Raises ConfigError without one, or for a missing definition."""
        module, file = self.module(name, self.file), f"{self.file}.py"
        if missing := [wanted for wanted in ("Options", *self.required) if not hasattr(module, wanted)]:
            raise ConfigError(f"{self.place(name)}/{file} does not define {', '.join(missing)}")
        if not (isinstance(module.Options, type) and dataclasses.is_dataclass(module.Options)):
            raise ConfigError(f"{self.place(name)}/{file}: Options is not a dataclass")
        return module

    def place(self, name: str) -> str:
        """Return the folder of plug-in `name` for messages, existing or not."""
        return shown(self._homes().get(name, plugin_folders.ROOT / self.package.replace(".", "/") / name))

    def module(self, name: str, file: str) -> Any:
        """Import `file` (without suffix) of plug-in `name`, also from the folder of EXTERNAL=."""
        home, package = self.home(name), importlib.import_module(_ABOVE + self.package)
        if str(home.parent) not in package.__path__:
            package.__path__.append(str(home.parent))  # what its files import is found, too
        return importlib.import_module(f"{_ABOVE}{self.package}.{home.name}.{file}")

    def own(self, name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values of the symbols of plug-in `name`, by fields of its `Options`.

        A symbol belongs to the plug-in whose Kconfig defines it, whatever its prefix.
        """
        symbols = symbols_of(self.home(name))
        return MappingProxyType({f: values[s] for s, f in symbols.items() if s in values})

    def options(self, name: str, options: Mapping[str, Any]) -> Any:
        """Make the `Options` of plug-in `name`. Raises ConfigError unless they are exactly its fields."""
        module, home = self.load(name), self.home(name)
        declared = {field.name for field in dataclasses.fields(module.Options)}
        symbols = {field: symbol for symbol, field in symbols_of(home).items()}

        def are(fields: set[str]) -> str:
            names = sorted(f"CONFIG_{symbols.get(f, f'{home.name}_{f}'.upper())}" for f in fields)
            return f"{', '.join(names)} {'are' if names[1:] else 'is'}"

        unset, unknown = declared - set(options), set(options) - declared
        known = f"known to the {self.noun}"
        if problems := [f"{are(each)} not {to}" for each, to in ((unset, "set"), (unknown, known)) if each]:
            what = f"{shown(home)}/{self.file}.py and {shown(home)}/Kconfig disagree"
            todo = f"make the fields of Options the {self.noun}'s own symbols"
            raise ConfigError(what, why=" and ".join(problems), todo=todo)
        return module.Options(**options)

    def _homes(self) -> dict[str, Path]:
        homes: dict[str, Path] = {}
        file = f"{self.file}.py"
        for path in (*self.folders(plugin_folders.ROOT, file), *self.of_external(file)):
            kconfig = dict(definitions_in(path.parent / "Kconfig")) if self.symbol else {}
            for name in _NAMED.findall(kconfig.get(self.symbol, "")) or [path.parent.name]:
                if name in homes:
                    what = f"{shown(homes[name])} and {shown(path.parent)} both have a {self.noun} {name!r}"
                    raise ConfigError(what, todo="rename one of them in its Kconfig")
                homes[name] = path.parent
        return homes

    def folders(self, root: Path, file: str) -> list[Path]:
        """The `file` of each folder of the package below `root` that has one, sorted."""
        return sorted((root / self.package.replace(".", "/")).glob(f"*/{file}"))

    def of_external(self, file: str) -> list[Path]:
        """The `file` of each folder of EXTERNAL= that has one, sorted; with a model.py that is one itself."""
        if (base := external()) is None:
            return []
        alone = [base / file] if self is MODELS and (base / "model.py").is_file() else []
        return [path for path in (*alone, *sorted(base.glob(f"{self.external}/*/{file}"))) if path.is_file()]


MODELS = Kind("model", "models", "model", ("TASK", "build"), "models")
DATASETS = Kind("data set", "lib.data.datasets", "data", ("open_set",), "data", symbol="DATASET")
TASKS = Kind("task", "train.tasks", "task", ("DATA", "build", "fault"), "tasks")
KINDS = (MODELS, DATASETS, TASKS)


def task_of(model: str) -> str:
    """Return the TASK of a model, read without importing its file; "" where it has no such line."""
    found = _TASK.search((MODELS.home(model) / "model.py").read_text(encoding="utf-8"))
    return check_task(model, found[1]) if found else ""


def check_task(model: str, task: str) -> str:
    """Return `task`. Raises ConfigError, with the file of `model` and all tasks, where there is none such."""
    if task not in (known := TASKS.names()):
        todo = f"there are {', '.join(known)}"
        raise ConfigError(f"{MODELS.place(model)}/model.py: there is no task {task!r}", todo=todo)
    return task

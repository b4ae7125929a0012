"""Reader of YAML 1.2 that knows the line of each key: 4e-4 is a number, `on` is a string, 010 is ten.

PyYAML follows version 1.1, which reads these three as a string, as true and as eight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import yaml

from lib.errors import ConfigError, os_error
from lib.kconf.tree import display

Plain: TypeAlias = "str | int | float | bool | list[Plain] | dict[str, Plain] | None"
Route: TypeAlias = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the core schema of YAML 1.2.2 (10.3.2), which refuses repeated keys."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: ARG002
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            fault = "a key is not a word" if not isinstance(key, yaml.ScalarNode) else ""
            if fault or key.value in mapping:
                fault = fault or f"{key.value} is given twice"
                raise yaml.constructor.ConstructorError(None, None, fault, key.start_mark)
            mapping[key.value] = self.construct_object(value, deep=True)
        return mapping


for _kind, _pattern in (
    ("null", r"~|null|Null|NULL|"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), [None, ""])
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda _, node: int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A mapping with the places of its parts: route of keys and list indices to an item -> file:line."""

    file: Path
    content: Mapping[str, Plain]
    places: Mapping[Route, str]

    def place(self, *route: str | int) -> str:
        """Return file:line of a part, or of the nearest part around it that has one."""
        while route and route not in self.places:
            route = route[:-1]
        return self.places[route] if route else display(self.file)

    def error(self, *route: str | int, fault: str, why: str = "", todo: str = "") -> ConfigError:
        """Return the error for the part at `route`, which starts with its place."""
        return ConfigError(f"{self.place(*route)}: {fault}", why=why, todo=todo)

    def check_value(self, value: Plain, *route: str | int) -> None:
        """Raise ConfigError where the `value` at `route` is, or is a list of, null, mappings or lists."""
        for one in value if isinstance(value, list) else [value]:
            if one is None or isinstance(one, dict | list):
                kind = "null" if one is None else "a mapping" if isinstance(one, dict) else "a list in a list"
                name = ".".join(str(key) for key in route[:2]).removeprefix("set.").removeprefix("axes.")
                raise self.error(*route, fault=f"{name} is {kind}, and an option takes one value")


def read_yaml(file: Path) -> Document:
    """Read the mapping in `file`. Raises ConfigError, with the line, where it holds none."""
    name = display(file)
    try:
        text = file.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise os_error("read", error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not in UTF-8", why=str(error)) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: {error.reason}") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"{name} holds no mapping of names to values")
    return Document(file=file, content=content or {}, places=dict(_places(name, node, ())))


def _places(name: str, node: Any, route: Route) -> Iterator[tuple[Route, str]]:
    """Yield route and file:line of the keys and items below `node`."""
    parts: list[tuple[str | int, Any, Any]] = []
    if isinstance(node, yaml.MappingNode):
        parts = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(index, item, item) for index, item in enumerate(node.value)]
    for key, written, value in parts:
        yield (*route, key), f"{name}:{written.start_mark.line + 1}"
        yield from _places(name, value, (*route, key))

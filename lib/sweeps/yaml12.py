"""YAML as its version 1.2 reads it: 4e-4 is a number, `on` and `yes` are words, 010 is ten.

Version 1.1, which PyYAML follows, has it the other way round, without a word.
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

# The core schema (YAML 1.2.2, 10.3.2).
_RESOLVERS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the other schema, and keys that may be given once only."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: ARG002
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice", key.start_mark
                )
            seen.add(key.value)
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}


def _int(loader: Any, node: Any) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(
        _tag, re.compile(rf"^(?:{_pattern})$"), ["" if one == "\0" else one for one in _first]
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A mapping, and where its parts are written.

    places: the keys and numbers that lead to a key or to an item of a list -> file:line.
    """

    file: Path
    content: Mapping[str, Plain]
    places: Mapping[Route, str]

    def place(self, *route: str | int) -> str:
        """Where that is written, or what is around it."""
        while route and route not in self.places:
            route = route[:-1]
        return self.places[route] if route else display(self.file)


def read_yaml(file: Path) -> Document:
    """The mapping that `file` holds. Raises ConfigError, with the line, where it holds none."""
    name = display(file)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise os_error("read", error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not in UTF-8", why=str(error)) from error
    try:
        loader = _Loader(text)  # a SafeLoader: it makes nothing but plain values
        try:
            node = loader.get_single_node()
            found = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: {error.reason}") from error
    if found is None:
        return Document(file=file, content={}, places={})
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds no mapping of names to values")
    places = {route: f"{name}:{line}" for route, line in _lines(node, ())}
    return Document(file=file, content=found, places=places)


def _lines(node: Any, route: Route) -> Iterator[tuple[Route, int]]:
    """Of the keys and items below `node`."""
    if isinstance(node, yaml.MappingNode):
        parts = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(number, item, item) for number, item in enumerate(node.value)]
    else:
        return
    for name, written, value in parts:
        yield (*route, name), written.start_mark.line + 1
        yield from _lines(value, (*route, name))

"""YAML as its version 1.2 reads it: 4e-4 is a number, `on` and `yes` are words, 010 is ten.

Version 1.1, which PyYAML follows, has it the other way round, without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import yaml

from lib.errors import ConfigError, os_error

Plain: TypeAlias = "str | int | float | bool | list[Plain] | dict[str, Plain] | None"

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


def read_yaml(file: Path) -> Mapping[str, Plain]:
    """The mapping that `file` holds. Raises ConfigError, with the line, where it holds none."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise os_error("read", error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not in UTF-8", why=str(error)) from error
    try:
        found = yaml.load(text, Loader=_Loader)  # a SafeLoader: it makes nothing but plain values
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}:{line}: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{file}:{line}: {error.reason}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no mapping of names to values")
    return found

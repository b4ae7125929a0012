"""Nested experiment files: sections such as `model: {H_cycles: 3}`, read by models/*/experiment_keys.toml."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from lib.errors import meant
from lib.plugin_folders import ROOT
from lib.sweeps.yaml12 import Document, Plain

_NOTHING = "none: "


@cache
def tables() -> Mapping[str, Any]:
    """Return the tables of all models: section -> key -> assignments, or assignments by value."""
    files = sorted((ROOT / "models").glob("*/experiment_keys.toml"))
    return {name: part for file in files for name, part in tomllib.loads(file.read_text("utf-8")).items()}


def with_symbols(document: Document, raw: Callable[[Plain], str]) -> tuple[Document, tuple[str, ...]]:
    """Return `document` with its sections as symbols of `set`, and a notice for each key that sets nothing.

    raw: formats a value as on a command line. Raises ConfigError for an unknown key or value.
    """
    sections = {name: part for name, part in document.content.items() if name in tables()}
    if not sections:
        return document, ()
    base = {"config": tables()["_file"]["config"]}
    content = base | {name: part for name, part in document.content.items() if name not in sections}
    given: dict[tuple[str, str], str] = {}
    for name, part in sections.items():
        if not isinstance(part, dict):
            raise document.error(name, fault=f"{name} is not a mapping of keys to values")
        for key, value in part.items():
            document.check_value(value, name, key)
            given[name, key] = raw(value)
    places, notices, symbols = dict(document.places), list[str](), dict[str, Plain]()
    for (name, key), text in given.items():
        rules, here = tables()[name], f"{name}.{key}"
        rule = rules.get(key)
        if isinstance(rule, dict):
            rule = rule.get(text, rule.get("*"))
        if rule is None:
            todo = f"it takes {', '.join(rules[key])}" if key in rules else meant(key, rules)
            raise document.error(name, key, fault=f"{here}: {text} is not known here", todo=todo)
        other, _, value = tables()["_file"]["without_effect"].get(here, "").partition("=")
        if other and given.get(tuple(other.split("."))) == value:
            rule = f"{_NOTHING}{other} is { {'y': 'true', 'n': 'false'}[value] }"
        if rule.startswith(_NOTHING):
            notices.append(f"{document.place(name, key)}: {here} sets nothing: {rule.removeprefix(_NOTHING)}")
            continue
        for symbol, _, value in (assignment.partition("=") for assignment in rule.split()):
            symbols[symbol] = text if value == "*" else value
            places.setdefault(("set", symbol), f"{document.place(name, key)}: {here}")
    if "SEED" in symbols:
        content.setdefault("seeds", [int(str(symbols.pop("SEED")))])
    content["set"] = symbols | dict(content.get("set") or {})
    return dataclasses.replace(document, content=content, places=places), tuple(notices)

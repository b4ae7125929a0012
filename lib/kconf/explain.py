"""Description of one option, and search for options by words."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kconfiglib

from lib.errors import ConfigError
from lib.kconf import diagnostics
from lib.kconf.legacy import read_legacy
from lib.kconf.resolve import is_given, origin
from lib.kconf.spelling import expression
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import find, has_prompt, is_logical, option, prompt_of, shown
from lib.kconf.values import help_text, rule_of

_LABEL = 12
_COLUMNS = 100


def explain(configuration: StrictLoad, name: str) -> Iterator[str]:
    """Yield lines on the symbol or choice `name`, with or without prefix.

    Value and origin, possible values, dependencies, what hides it, and dependents. Raises ConfigError.
    """
    tree = configuration.tree
    bare = name.removeprefix(tree.config_prefix)
    if not bare:
        raise ConfigError("no option is named", todo="give one, as in make explain SYM=LEARNING_RATE")
    choice = tree.named_choices.get(bare)
    symbol = find(tree, bare)
    if symbol is None and choice is None:
        symbol = _successor(tree, bare)
        yield _renamed(tree, bare, symbol)
    rows = _choice_rows(choice, configuration) if symbol is None else _symbol_rows(symbol, configuration)
    for label, text in rows:
        yield from _wrapped(label, text)


def search(tree: Any, words: str) -> Iterator[str]:
    """Yield the options whose name, prompt or help match all `words` (case-insensitive regular expressions).

    Matches in name and prompt come first. Raises ConfigError where there are none.
    """
    try:
        patterns = [re.compile(word, re.IGNORECASE) for word in words.split()]
    except re.error as error:
        raise ConfigError(f"Q={words} is not a regular expression", why=str(error)) from error
    if not patterns:
        raise ConfigError("nothing is looked for", todo="give words, as in make searchconfig Q=momentum")
    near, far = [], []
    for symbol in tree.unique_defined_syms:
        title = f"{option(symbol)} {prompt_of(symbol)}"
        if all(pattern.search(title) for pattern in patterns):
            near.append(symbol)
        elif all(pattern.search(f"{title} {_help(symbol)}") for pattern in patterns):
            far.append(symbol)
    if not near and not far:
        name = words.strip().removeprefix(tree.config_prefix)
        if name in read_legacy(Path(tree.srctree)).names():
            yield _renamed(tree, name, _successor(tree, name))
            return
        meant = diagnostics.suggest(tree, words.strip())
        raise ConfigError(f"no option has '{words}'", todo=f"did you mean {meant}?" if meant else "")
    for symbol in near + far:
        hidden = "" if symbol.visibility or not has_prompt(symbol) else " (hidden)"
        yield f"{_value(symbol)}{hidden}  {prompt_of(symbol)}  {_place(symbol)}".rstrip()


def _successor(tree: Any, name: str) -> Any:
    """Return the symbol that the old `name` was renamed to. Raises ConfigError where there is none."""
    legacy, full = read_legacy(Path(tree.srctree)), f"{tree.config_prefix}{name}"
    if name in legacy.removed:
        raise ConfigError(f"{full} is no more", why=legacy.removed[name])
    symbol = find(tree, legacy.present(name))
    if symbol is None:
        meant = diagnostics.suggest(tree, name)
        todo = f"did you mean {meant}?" if meant else "make searchconfig Q=WORD finds options"
        raise ConfigError(f"{full} is not a symbol", todo=todo)
    return symbol


def _renamed(tree: Any, name: str, symbol: Any) -> str:
    return f"{tree.config_prefix}{name} is called {option(symbol)} now"


def _symbol_rows(symbol: Any, configuration: StrictLoad) -> Iterator[tuple[str, str]]:
    yield "", _value(symbol)
    yield "prompt", prompt_of(symbol) or "none: it follows from others"
    if symbol.config_string:
        yield "from", _origin(symbol, configuration)
    yield "kind", _kind(symbol)
    yield from _defaults(symbol)
    yield from _needs(symbol)
    for selector in diagnostics.selecting(symbol):
        yield "held on by", f"{option(selector)} (now {selector.str_value}), which selects it"
    if symbol.choice:
        others = ", ".join(option(member) for member in symbol.choice.syms if member is not symbol)
        chosen = option(symbol.choice.selection) if symbol.choice.selection is not None else "none"
        yield "instead of", f"{others}: a choice has one member, now {chosen}"
    yield from _dependents(symbol)
    yield "defined", ", ".join(f"{node.filename}:{node.linenr}" for node in symbol.nodes)
    yield "help", _help(symbol) or "none"


def _choice_rows(choice: Any, configuration: StrictLoad) -> Iterator[tuple[str, str]]:
    yield "", f"{choice.name}: {prompt_of(choice)}"
    for member in choice.syms:
        forbids = "" if member.visibility else f"; it {diagnostics.unmet(member)}"
        yield "chosen" if member is choice.selection else "member", f"{_value(member)}{forbids}"
    if choice.selection is not None:
        yield "from", _origin(choice.selection, configuration)
    yield from _needs(choice)
    yield "defined", ", ".join(f"{node.filename}:{node.linenr}" for node in choice.nodes)
    yield "help", _help(choice) or "none"


def _value(symbol: Any) -> str:
    return shown(symbol, symbol.str_value) if symbol.config_string else f"{option(symbol)} has no value"


def _origin(symbol: Any, configuration: StrictLoad) -> str:
    """Return the origin; for a default with the place of its definition."""
    place = origin(configuration, symbol)
    return place if is_given(place) else f"{place}, {_place(symbol)}"


def _kind(symbol: Any) -> str:
    kind = str(kconfiglib.TYPE_TO_STR[symbol.orig_type])
    rule = rule_of(symbol)
    if rule is not None:
        return f"{kind}, Value: {rule.text}"
    ranges = []
    for low, high, condition, *_ in symbol.orig_ranges:
        when = "" if condition is symbol.kconfig.y else f" while {expression(condition)}"
        ranges.append(f"{low.str_value}..{high.str_value}{when}")
    return ", ".join(filter(None, [kind, ", else ".join(ranges)]))


def _defaults(symbol: Any) -> Iterator[tuple[str, str]]:
    for value, condition in symbol.orig_defaults:
        text = expression(value) if is_logical(symbol) else f'"{value.str_value}"'
        text = text if symbol.orig_type != kconfiglib.INT else value.str_value
        yield "default", text if condition is symbol.kconfig.y else f"{text} if {expression(condition)}"


def _needs(item: Any) -> Iterator[tuple[str, str]]:
    """Yield the dependencies, and the unmet ones if the item is invisible."""
    if item.direct_dep is not item.kconfig.y:
        yield "needs", expression(item.direct_dep)
    if not has_prompt(item) or item.visibility:
        return
    yield "forbidden", f"it {diagnostics.unmet(item)}"
    words = diagnostics.remedy(item)
    if words:
        yield "allowed by", " ".join(words)


def _dependents(symbol: Any) -> Iterator[tuple[str, str]]:
    """Yield the symbols that depend on it, whose default or range uses it, and that it selects."""
    groups: dict[str, dict[Any, None]] = {"needed by": {}, "default of": {}, "range of": {}}
    for node in (node for other in symbol.kconfig.unique_defined_syms for node in other.nodes):
        uses = {
            "needed by": [node.dep, *(node.prompt or ())[1:]],
            "default of": [part for entry in node.orig_defaults for part in entry],
            "range of": [part for entry in node.orig_ranges for part in entry[:3]],
        }
        for label, expressions in uses.items():
            if node.item is not symbol and any(symbol in kconfiglib.expr_items(one) for one in expressions):
                groups[label][option(node.item)] = None
                break
    for label, names in groups.items():
        if names:
            yield label, ", ".join(names)
    if symbol.orig_selects:
        yield "selects", ", ".join(option(target) for target, _ in symbol.orig_selects)


def _help(item: Any) -> str:
    return next((help_text(node) for node in item.nodes if node.help), "")


def _place(symbol: Any) -> str:
    """Return the place of the first definition; further ones of the same name extend it."""
    return f"{symbol.nodes[0].filename}:{symbol.nodes[0].linenr}"


def _wrapped(label: str, text: str) -> list[str]:
    if not label:
        return [text]
    head, indent = f"  {label:<{_LABEL}}", " " * (_LABEL + 2)
    wrapper = textwrap.TextWrapper(_COLUMNS, subsequent_indent=indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(head + text)

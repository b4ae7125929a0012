"""Descriptions of options: of one, of those that words find, and docs/options.md of all that can be set."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kconfiglib

from lib.errors import ConfigError
from lib.kconf import diagnostics
from lib.kconf.legacy import FILE as LEGACY_FILE
from lib.kconf.legacy import read_legacy
from lib.kconf.resolve import is_given, origin
from lib.kconf.spelling import expression
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import find, has_prompt, is_logical, load_own_tree, menu_of, option, prompt_of, shown
from lib.kconf.values import help_text, rule_of

_LABEL = 12
_COLUMNS = 100

PAGE = "docs/options.md"

_HEAD = """# Options

Every option that you can set, in menu order. `make kconfig-docs` writes this page from the Kconfig
files. `make explain SYM=NAME` shows the value of one option, its origin, and what depends on it;
`make searchconfig Q=WORD` finds options.
"""
_ENTRY = re.compile(r"^(?:###|-) `CONFIG_([A-Z0-9_]+)`", re.MULTILINE)


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

    Matches in name and prompt come first, and of each those that can be set now. Raises ConfigError where
    there are none.
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
    for symbol in (one for found in (near, far) for one in sorted(found, key=lambda one: not one.visibility)):
        why = diagnostics.why_hidden(symbol)
        hidden = f" (hidden: {why})" if why else ""
        yield f"{_value(symbol)}{hidden}  {prompt_of(symbol)}  {_place(symbol)}".rstrip()


def _successor(tree: Any, name: str) -> Any:
    """Return the symbol that the old `name` was renamed to. Raises ConfigError where there is none."""
    legacy, full = read_legacy(Path(tree.srctree)), f"{tree.config_prefix}{name}"
    if name in legacy.removed:
        raise ConfigError(f"{full} was removed", why=legacy.removed[name])
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
    yield "hidden", f"it {diagnostics.unmet(item)}"
    words = diagnostics.remedy(item)
    if words:
        yield "shown by", " ".join(words)


def _dependents(symbol: Any) -> Iterator[tuple[str, str]]:
    """Yield the symbols that depend on it, whose default or range uses it, and that it selects."""
    groups: dict[str, dict[str, None]] = {"needed by": {}, "default of": {}, "range of": {}}
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
    line, indent = f"  {label:<{_LABEL}}{text}", " " * (_LABEL + 2)
    wrapper = textwrap.TextWrapper(_COLUMNS, subsequent_indent=indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(line)


def reference(root: Path) -> str:
    """Return the text of the page.

    Raises ConfigError where a symbol of the current page is gone and Kconfig.legacy does not say why.
    """
    tree = load_own_tree(root)
    _refuse_to_forget(tree, root)
    lines = [_HEAD]
    menu = None
    for node in tree.node_iter():
        is_choice = isinstance(node.item, kconfiglib.Choice)
        is_symbol = isinstance(node.item, kconfiglib.Symbol) and not node.item.choice
        if not node.prompt or not (is_choice or is_symbol):
            continue
        if (above := menu_of(node)) is not menu:
            menu = above
            lines.append(f"## {menu.prompt[0]}\n")
        lines += _entry(node, is_choice=is_choice)
    return "\n".join(lines)


def _refuse_to_forget(tree: Any, root: Path) -> None:
    path = root / PAGE
    known = set(_ENTRY.findall(path.read_text(encoding="utf-8"))) if path.is_file() else set()
    legacy = read_legacy(root).names()
    gone = sorted(name for name in known - legacy if find(tree, name) is None)
    if gone:
        raise ConfigError(
            f"{', '.join(gone)} left the Kconfig files without a word in {LEGACY_FILE}",
            todo="say there what it was renamed to, or why it was removed",
        )


def _entry(node: Any, *, is_choice: bool) -> Iterator[str]:
    item, title = node.item, node.prompt[0]
    yield f"### {title} (`{item.name}`)\n" if is_choice else f"### `{option(item)}`: {title}\n"
    facts = ["choice" if is_choice else _kind_in_page(item), *_defaults_in_page(item), *_needs_in_page(node)]
    yield f"{'; '.join(facts)}. In `{node.filename}`.\n"
    yield f"{_plain(help_text(node))}\n"
    for member in item.syms if is_choice else ():
        own = next(one for one in member.nodes if one.prompt)
        needs = "".join(f" ({text})" for text in _needs_in_page(own))
        yield f"- `{option(member)}`: {own.prompt[0]}{needs}. {_plain(help_text(own))}"
    if is_choice:
        yield ""


def _kind_in_page(symbol: Any) -> str:
    rule = rule_of(symbol)
    if rule is not None:
        return _plain(rule.text)
    bounds = symbol.orig_ranges
    ranges = [f"{low.str_value} to {high.str_value}{_while(when)}" for low, high, when, *_ in bounds]
    return ", ".join([str(kconfiglib.TYPE_TO_STR[symbol.orig_type]), *ranges])


def _defaults_in_page(item: Any) -> Iterator[str]:
    if is_logical(item) and not item.orig_defaults and isinstance(item, kconfiglib.Symbol):
        yield "default n"
    for value, condition in item.orig_defaults:
        text = expression(value) if is_logical(item) else value.str_value
        shown = f"`{text}`" if text else "empty"
        yield f"default {shown}{_while(condition)}"


def _while(condition: Any) -> str:
    text = expression(condition)
    return "" if text == "y" else f" if `{text}`"


def _needs_in_page(node: Any) -> Iterator[str]:
    """Yield the dependencies of the prompt, as written here and in enclosing menus."""
    item = node.item
    is_member = isinstance(item, kconfiglib.Symbol) and item.choice
    conditions = (node.dep if is_member else item.direct_dep, node.prompt[1])  # `int "Blocks" if CUSTOM`
    parts = [part for one in conditions for part in kconfiglib.split_expr(one, kconfiglib.AND)]
    needed = [part for part in parts if not isinstance(part, kconfiglib.Choice)]
    texts = dict.fromkeys(expression(part) for part in needed if part is not item.kconfig.y)
    if texts:
        each = [f"({text})" if " || " in text and len(texts) > 1 else text for text in texts]
        yield f"needs `{' && '.join(each)}`"


def _plain(text: str) -> str:
    """Escape text for Markdown."""
    return re.sub(r"([*<>`])", r"\\\1", text)

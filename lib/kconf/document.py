"""Generator of docs/options.md: every option that can be set, from the Kconfig files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kconfiglib

from lib.errors import ConfigError
from lib.kconf.legacy import FILE as LEGACY
from lib.kconf.legacy import read_legacy
from lib.kconf.spelling import expression
from lib.kconf.tree import find, is_logical, load_own_tree, option
from lib.kconf.values import is_machine_read, rule_of

FILE = "docs/options.md"

_HEAD = """# Options

Every option that can be set, in the order of the menu. `make kconfig-docs` writes this page from the Kconfig
files. `make explain SYM=NAME` tells of one option what it is now, why, and what depends on it;
`make searchconfig Q=WORD` finds options.
"""
_ENTRY = re.compile(r"^(?:###|-) `CONFIG_([A-Z0-9_]+)`", re.MULTILINE)


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
        if (above := _menu_of(node)) is not menu:
            menu = above
            lines.append(f"## {menu.prompt[0]}\n")
        lines += _choice(node) if is_choice else _symbol(node)
    return "\n".join(lines)


def _refuse_to_forget(tree: Any, root: Path) -> None:
    path = root / FILE
    known = set(_ENTRY.findall(path.read_text(encoding="utf-8"))) if path.is_file() else set()
    legacy = read_legacy(root).names()
    gone = sorted(name for name in known - legacy if find(tree, name) is None)
    if gone:
        raise ConfigError(
            f"{', '.join(gone)} left the Kconfig files without a word in {LEGACY}",
            todo="say there what it was renamed to, or why it was removed",
        )


def _menu_of(node: Any) -> Any:
    menu = node.parent
    while menu.item is not kconfiglib.MENU or not menu.prompt:
        menu = menu.parent
    return menu


def _symbol(node: Any) -> Iterator[str]:
    symbol = node.item
    facts = [_kind(symbol), *_defaults(symbol), *_needs(node)]
    yield f"### `{option(symbol)}`: {node.prompt[0]}\n"
    yield f"{'; '.join(facts)}. In `{node.filename}`.\n"
    yield f"{_help(node)}\n"


def _choice(node: Any) -> Iterator[str]:
    choice = node.item
    facts = ["choice", *_choice_defaults(choice), *_needs(node)]
    yield f"### {node.prompt[0]} (`{choice.name}`)\n"
    yield f"{'; '.join(facts)}. In `{node.filename}`.\n"
    yield f"{_help(node)}\n"
    for member in choice.syms:
        own = next(one for one in member.nodes if one.prompt)
        needs = "".join(f" ({text})" for text in _needs(own))
        yield f"- `{option(member)}`: {own.prompt[0]}{needs}. {_help(own)}"
    yield ""


def _kind(symbol: Any) -> str:
    rule = rule_of(symbol)
    if rule is not None:
        return _plain(rule.text)
    kind = str(kconfiglib.TYPE_TO_STR[symbol.orig_type])
    ranges = [
        f"{entry[0].str_value} to {entry[1].str_value}{_while(entry[2])}" for entry in symbol.orig_ranges
    ]
    return ", ".join([kind, *ranges])


def _defaults(symbol: Any) -> Iterator[str]:
    if is_logical(symbol) and not symbol.orig_defaults:
        yield "default n"
    for value, condition in symbol.orig_defaults:
        text = expression(value) if is_logical(symbol) else value.str_value
        shown = f"`{text}`" if text else "empty"
        yield f"default {shown}{_while(condition)}"


def _choice_defaults(choice: Any) -> Iterator[str]:
    for member, condition in choice.orig_defaults:
        yield f"default `{option(member)}`{_while(condition)}"


def _while(condition: Any) -> str:
    text = expression(condition)
    return "" if text == "y" else f" if `{text}`"


def _needs(node: Any) -> Iterator[str]:
    """Yield the dependencies of the prompt, as written here and in enclosing menus."""
    item = node.item
    condition = item.direct_dep
    if isinstance(item, kconfiglib.Symbol) and item.choice:
        condition = node.dep
    parts = [part for part in kconfiglib.split_expr(condition, kconfiglib.AND) if not _is_choice(part)]
    parts += [part for part in _prompt_conditions(node) if part not in parts]
    text = " && ".join(expression(part) for part in parts if part is not item.kconfig.y)
    if text:
        yield f"needs `{text}`"


def _prompt_conditions(node: Any) -> list[Any]:
    """Return the conditions of the prompt alone (`int "Blocks" if CUSTOM`)."""
    parts = kconfiglib.split_expr(node.prompt[1], kconfiglib.AND)
    return [part for part in parts if not _is_choice(part)]


def _is_choice(part: Any) -> bool:
    return isinstance(part, kconfiglib.Choice)


def _help(node: Any) -> str:
    lines = [line for line in (node.help or "").splitlines() if not is_machine_read(line)]
    return _plain(" ".join(" ".join(lines).split()))


def _plain(text: str) -> str:
    """Escape text for Markdown."""
    return re.sub(r"([*<>`])", r"\\\1", text)

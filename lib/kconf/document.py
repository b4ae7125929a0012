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
from lib.kconf.tree import find, is_logical, load_own_tree, menu_of, option
from lib.kconf.values import help_text, rule_of

FILE = "docs/options.md"

_HEAD = """# Options

Every option that you can set, in menu order. `make kconfig-docs` writes this page from the Kconfig
files. `make explain SYM=NAME` shows the value of one option, its origin, and what depends on it;
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
        if (above := menu_of(node)) is not menu:
            menu = above
            lines.append(f"## {menu.prompt[0]}\n")
        lines += _entry(node, is_choice=is_choice)
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


def _entry(node: Any, *, is_choice: bool) -> Iterator[str]:
    item = node.item
    if is_choice:
        yield f"### {node.prompt[0]} (`{item.name}`)\n"
    else:
        yield f"### `{option(item)}`: {node.prompt[0]}\n"
    facts = ["choice" if is_choice else _kind(item), *_defaults(item), *_needs(node)]
    yield f"{'; '.join(facts)}. In `{node.filename}`.\n"
    yield f"{_plain(help_text(node))}\n"
    for member in item.syms if is_choice else ():
        own = next(one for one in member.nodes if one.prompt)
        needs = "".join(f" ({text})" for text in _needs(own))
        yield f"- `{option(member)}`: {own.prompt[0]}{needs}. {_plain(help_text(own))}"
    if is_choice:
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


def _defaults(item: Any) -> Iterator[str]:
    if is_logical(item) and not item.orig_defaults and isinstance(item, kconfiglib.Symbol):
        yield "default n"
    for value, condition in item.orig_defaults:
        text = expression(value) if is_logical(item) else value.str_value
        shown = f"`{text}`" if text else "empty"
        yield f"default {shown}{_while(condition)}"


def _while(condition: Any) -> str:
    text = expression(condition)
    return "" if text == "y" else f" if `{text}`"


def _needs(node: Any) -> Iterator[str]:
    """Yield the dependencies of the prompt, as written here and in enclosing menus."""
    item = node.item
    is_member = isinstance(item, kconfiglib.Symbol) and item.choice
    conditions = (node.dep if is_member else item.direct_dep, node.prompt[1])  # `int "Blocks" if CUSTOM`
    parts = [part for one in conditions for part in kconfiglib.split_expr(one, kconfiglib.AND)]
    needed = [
        part for part in parts if not isinstance(part, kconfiglib.Choice) and part is not item.kconfig.y
    ]
    if needed:
        yield f"needs `{' && '.join(dict.fromkeys(map(expression, needed)))}`"


def _plain(text: str) -> str:
    """Escape text for Markdown."""
    return re.sub(r"([*<>`])", r"\\\1", text)

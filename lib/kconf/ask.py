"""Line-by-line configuration: make config and make oldconfig."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import kconfiglib

from lib.errors import ConfigError
from lib.kconf import spelling
from lib.kconf.tree import active_range, is_logical, menu_of, option, prompt_of
from lib.kconf.values import rule_of

_YES_NO = {"y": "y", "yes": "y", "n": "n", "no": "n"}


@dataclass(slots=True, kw_only=True, eq=False)
class Dialogue:
    """Questions about the options of `tree`, in the order of the menu.

    known: names of symbols to skip. An empty answer leaves an option unset, so that its default still follows
    its dependencies.
    """

    tree: Any
    known: Collection[str] = ()
    _done: set[Any] = field(default_factory=set, init=False)
    _menu: Any = field(default=None, init=False)

    def run(self) -> int:
        """Ask for all visible options, also for newly visible ones; returns the number of questions.

        Raises ConfigError where the answers end too early.
        """
        answered = -1
        while answered < len(self._done):
            answered = len(self._done)
            for node in self.tree.node_iter():
                if node.item not in self._done and self._is_open(node):
                    self._done.add(node.item)
                    self._ask(node)
        return answered

    def _is_open(self, node: Any) -> bool:
        """True if this menu entry offers a choice and was not answered yet."""
        item = node.item
        has_values = isinstance(item, kconfiglib.Symbol | kconfiglib.Choice)
        if not has_values or not node.prompt or not kconfiglib.expr_value(node.prompt[1]):
            return False
        if isinstance(item, kconfiglib.Choice):
            members = _members(item)
            return len(members) > 1 and not any(member.name in self.known for member in item.syms)
        if item.choice or item.name in self.known:
            return False
        return not is_logical(item) or len(item.assignable) > 1

    def _ask(self, node: Any) -> None:
        if (menu := menu_of(node)) is not self._menu:
            self._menu = menu
            print(f"*\n* {menu.prompt[0]}\n*")
        ask = self._ask_member if isinstance(node.item, kconfiglib.Choice) else self._ask_value
        while not ask(node):
            pass

    def _ask_value(self, node: Any) -> bool:
        """Ask one question; true if the answer was accepted."""
        symbol = node.item
        text = self._answer(f"{node.prompt[0]} ({symbol.name}) {_possible_answers(symbol)} ", symbol)
        if text == "?":
            self._show_help(node)
            return False
        if text == "":
            return True
        value = _YES_NO.get(text.lower(), text) if is_logical(symbol) else text
        if fault := spelling.fault_of(symbol, value):
            print(fault)
            return False
        symbol.set_value(value)
        return True

    def _ask_member(self, node: Any) -> bool:
        choice = node.item
        members = _members(choice)
        print(node.prompt[0])
        for number, member in enumerate(members, 1):
            mark = ">" if member is choice.selection else " "
            print(f"{mark} {number}. {prompt_of(member)} ({member.name})")
        text = self._answer(f"choice[1-{len(members)}?]: ", choice)
        if text == "":
            return True
        if text.isascii() and text.isdigit() and 1 <= int(text) <= len(members):
            members[int(text) - 1].set_value("y")
            return True
        if text == "?":
            for one in (node, *(member.nodes[0] for member in members)):
                self._show_help(one)
        else:
            print(f"'{text}' is not one of 1 to {len(members)}")
        return False

    def _answer(self, question: str, item: Any) -> str:
        print(question, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            name = option(item) if isinstance(item, kconfiglib.Symbol) else item.name
            raise ConfigError(
                f"the answers end at the question for {name}",
                why="no configuration was written",
                todo="make olddefconfig takes the defaults of all new options",
            )
        text = line.rstrip("\n")
        if not sys.stdin.isatty():
            print(text)  # a terminal echoes the input
        # Blanks may be part of a string.
        keeps_blanks = isinstance(item, kconfiglib.Symbol) and item.orig_type == kconfiglib.STRING
        return text if keeps_blanks else text.strip()

    def _show_help(self, node: Any) -> None:
        print(f"{prompt_of(node.item)}: {(node.help or 'no help').strip()}")


def _members(choice: Any) -> list[Any]:
    return [member for member in choice.syms if member.visibility]


def _possible_answers(symbol: Any) -> str:
    """Format the possible answers with the current value: `[Y/n/?]`, `(1..9) [3]`."""
    if is_logical(symbol):
        return "[Y/n/?]" if symbol.tri_value else "[y/N/?]"
    rule, limits = rule_of(symbol), active_range(symbol)
    kind = f"({rule.text}) " if rule else f"({limits[0]}..{limits[1]}) " if limits else ""
    return f"{kind}[{symbol.str_value}]"

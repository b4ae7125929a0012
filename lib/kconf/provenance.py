"""Where the value of a symbol comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kconfiglib

from lib.kconf import reasons
from lib.kconf.reader import Assignment, read_file
from lib.kconf.spelling import expression
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import has_prompt, option


class Provenance:
    """The origins of the values of one configuration, of which nothing is added any more."""

    def __init__(self, configuration: StrictLoad) -> None:
        self._configuration = configuration
        # A full configuration says of which shipped files it was made. A line that still is as there has
        # its origin there; what was changed since has it in the file itself.
        self._shipped: dict[tuple[str, str], str] = {}
        for name in configuration.made_from:
            path = Path(configuration.tree.srctree) / name
            for assignment in read_file(path).assignments if path.is_file() else ():
                self._shipped[assignment.name, assignment.text] = f"{name}:{assignment.line}"

    def origin(self, symbol: Any) -> str:
        """`file:line`, `command line`, `selected by CONFIG_X`, `default if CONFIG_X` or `default`.

        The name of a choice's member (MODEL) has the origin of that member.
        """
        assignment = self._configuration.assigned(symbol.name)
        if assignment is not None and has_prompt(symbol):
            return self._place(assignment)
        selecting = reasons.selecting(symbol)
        if selecting:
            return f"selected by {', '.join(option(one) for one in selecting)}"
        condition = _active_condition(symbol)
        if condition is None or condition is symbol.kconfig.y:
            return "default"
        if not _names_member(symbol, condition):
            return f"default if {expression(condition)}"
        member = self._configuration.assigned(condition.name)
        return self._place(member) if member is not None else "default"

    def _place(self, assignment: Assignment) -> str:
        if not assignment.line:
            return assignment.place
        return self._shipped.get((assignment.name, assignment.text), assignment.place)


def _names_member(symbol: Any, condition: Any) -> bool:
    """Whether `symbol` says in a word which member of its choice, `condition`, is on."""
    choice = condition.choice if isinstance(condition, kconfiglib.Symbol) else None
    return choice is not None and choice.name == f"{symbol.name}_CHOICE"


def _active_condition(symbol: Any) -> Any | None:
    """The condition, as written, of the default that is in force; None where there is no such default."""
    for (_, condition), (_, written) in zip(symbol.defaults, symbol.orig_defaults, strict=True):
        if kconfiglib.expr_value(condition):
            return written
    return None

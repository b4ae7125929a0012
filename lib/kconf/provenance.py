"""Origin of a symbol's value."""

from __future__ import annotations

from typing import Any

import kconfiglib

from lib.kconf import diagnostics
from lib.kconf.spelling import expression
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import has_prompt, option


def is_given(origin: str) -> bool:
    """True if a value with that origin was set by a user."""
    return origin != "default" and not origin.startswith(("default if ", "selected by "))


class Provenance:
    """Origins of the values of one configuration, which must not change any more."""

    def __init__(self, configuration: StrictLoad) -> None:
        self._configuration = configuration

    def origin(self, symbol: Any) -> str:
        """Return `file:line`, `command line`, `selected by CONFIG_X`, `default if CONFIG_X` or `default`.

        The string that names a choice's member (MODEL) has the origin of that member.
        """
        assignment = self._configuration.assigned(symbol.name)
        if assignment is not None and has_prompt(symbol):
            return assignment.place
        selecting = diagnostics.selecting(symbol)
        if selecting:
            return f"selected by {', '.join(option(one) for one in selecting)}"
        condition = _active_condition(symbol)
        if condition is None or condition is symbol.kconfig.y:
            return "default"
        if not _names_member(symbol, condition):
            return f"default if {expression(condition)}"
        member = self._configuration.assigned(condition.name)
        return member.place if member is not None else "default"


def _names_member(symbol: Any, condition: Any) -> bool:
    """True if `symbol` is the string that names the selected member of the choice of `condition`."""
    choice = condition.choice if isinstance(condition, kconfiglib.Symbol) else None
    return choice is not None and choice.name == f"{symbol.name}_CHOICE"


def _active_condition(symbol: Any) -> Any | None:
    """Return the condition, as written, of the default in force; None where there is none."""
    for (_, condition), (_, written) in zip(symbol.defaults, symbol.orig_defaults, strict=True):
        if kconfiglib.expr_value(condition):
            return written
    return None

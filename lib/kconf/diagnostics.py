"""Diagnostics: why a symbol cannot have a value, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import kconfiglib

from lib.kconf.reader import Assignment
from lib.kconf.spelling import expression
from lib.kconf.tree import find, has_prompt, is_logical, option, shown

_MAX_NAMES = 6
_MAX_ABSENT = 10  # limit for the undefined symbols that a file sets to n
_WORD = re.compile(r'CONFIG_(\w+)(?:=("(?:[^"\\]|\\.)*"|(?:[^\s;()]*[^\s;(),])?))?')
_GIVE = re.compile(r"; give ((?:CONFIG_\w+=[yn] )+)CONFIG_.*", re.DOTALL)


def in_notation(text: str, *, equals: str, yes: str, no: str) -> str:
    """Return a finding in the words of a user who writes NAME`equals``yes` in place of CONFIG_NAME=y."""

    def word(found: re.Match[str]) -> str:
        value = found[2]
        return found[1] + ("" if value is None else equals + {"y": yes, "n": no}.get(value, value.strip('"')))

    text = _GIVE.sub(lambda found: f"; add {', '.join(found[1].split())}", text)
    text = (
        _WORD.sub(word, text).replace("is not y or n", f"is not {yes} or {no}").replace(" =y:", f" to {yes}:")
    )
    return re.sub(r"\(now ([yn])\b", lambda found: f"(now {yes if found[1] == 'y' else no}", text)


def unknown_symbol(tree: Any, name: str, value: str, *, near: bool = True) -> str:
    """Return the error for an undefined `name` (without prefix); with a likely name if `near`."""
    meant = suggest(tree, name, value) if near else None
    hint = f"did you mean {meant}?" if meant else "leave it out"
    return f"{tree.config_prefix}{name} is not a symbol; {hint}"


def absent_symbols(tree: Any, assignments: Sequence[Assignment], *, near: bool) -> str:
    """Return the notice that undefined symbols set to n are off anyway; with likely names if `near`."""
    names = []
    for one in assignments[:_MAX_ABSENT]:
        meant = suggest(tree, one.name) if near else None
        names.append(f"{tree.config_prefix}{one.name}{f' (did you mean {meant}?)' if meant else ''}")
    more = f" and {len(assignments) - _MAX_ABSENT} more" if len(assignments) > _MAX_ABSENT else ""
    are = "is not a symbol" if len(assignments) == 1 else "are not symbols"
    return f"{assignments[0].place}: {', '.join(names)}{more} {are} here, and off anyway"


def suggest(tree: Any, name: str, value: str = "") -> str | None:
    """Return the symbol (with prefix) that `name` probably means; None if nothing is near.

    Tried: another spelling, an abbreviation (LR, EPOCHS), a choice member (MODEL=resnet18), the closest name.
    """
    wanted = name.upper()
    if (member := _member(tree, wanted, value)) is not None:
        return f"{option(member)}=y"
    names = [symbol.name for symbol in tree.unique_defined_syms if has_prompt(symbol)]
    plain = wanted.replace("_", "")
    same = [candidate for candidate in names if candidate.upper().replace("_", "") == plain]
    initials = [name for name in names if "".join(word[:1] for word in name.split("_")) == wanted]
    settings = [candidate for candidate in names if not tree.syms[candidate].choice]
    words = set(wanted.split("_"))
    with_words = sorted(
        (one for one in settings if words <= {*one.split("_")}), key=lambda one: (len(one), one)
    )
    meant = same or (initials if len(wanted) > 1 else []) or closest(wanted, names, 0.85)
    meant = meant or with_words or closest(wanted, names, 0.7)
    return f"{tree.config_prefix}{meant[0]}" if meant else None


def _member(tree: Any, name: str, value: str) -> Any | None:
    """Return the choice member that `name`=`value` means, as in MODEL=resnet18."""
    member = find(tree, f"{name}_{value.strip(chr(34)).upper()}")
    return member if member is not None and member.choice else None


def closest(wanted: str, names: list[str], cutoff: float) -> list[str]:
    """Return the name most similar to `wanted`, if any has a ratio of at least `cutoff` (difflib)."""
    import difflib  # only after an error: the import is slow

    return difflib.get_close_matches(wanted, names, n=1, cutoff=cutoff)


def close_names(name: str, names: list[str], *, cutoff: float = 0.75) -> list[str]:
    """Return at most three names that share a prefix with `name`, or else that differ by a typing error."""
    import difflib  # only after an error: the import is slow

    wanted = name.lower()
    related = [one for one in names if wanted and (one.startswith(wanted) or wanted.startswith(one))]
    return related[:3] or difflib.get_close_matches(wanted, names, n=3, cutoff=cutoff)


def no_prompt(symbol: Any) -> str:
    """Explain the source of the value of a symbol without a prompt."""
    defaults = [items_in(condition) + items_in(value) for value, condition in symbol.orig_defaults]
    for verb, sources in (
        ("is selected by", _selectors(symbol.rev_dep, symbol.kconfig)),
        ("is implied by", _selectors(symbol.weak_rev_dep, symbol.kconfig)),
        ("follows from", [item for items in defaults for item in items if _is_variable(item)]),
    ):
        if sources:
            return f"it {verb} {_names(sources)}"
    return "its value is fixed by the Kconfig files"


def instead(symbol: Any, value: str) -> str:
    """Return the end of a sentence that names the choice member to set instead of a promptless `symbol`."""
    member = _member(symbol.kconfig, symbol.name, value)
    return f"; set {option(member)}=y" if member is not None else ""


def items_in(expr: Any) -> list[Any]:
    """Return symbols and choices in `expr`, in the order in which they are written."""
    if expr.__class__ is not tuple:
        return [expr]
    return [item for part in expr[1:] for item in items_in(part)]


def unmet(item: Any) -> str:
    """Describe the unmet dependencies of an invisible symbol or choice: `needs CONFIG_A=y (now n)`."""
    parts = " and ".join(_describe(part) for part in _failing(item))
    return f"needs {parts}" if parts else "cannot be set by hand"


def why_hidden(item: Any) -> str:
    """Return what an invisible symbol or choice with a prompt needs, and what shows it; "" for others."""
    if item.visibility or not has_prompt(item):
        return ""
    words = remedy(item)
    return unmet(item) + (f"; {' '.join(words)} {'show' if words[1:] else 'shows'} it" if words else "")


def remedy(item: Any, seen: frozenset[str] = frozenset()) -> list[str] | None:
    """Return assignments that make a symbol or choice visible, outermost first; None if none is found."""
    found = [_remedy_of(part, seen) for part in _failing(item)]
    return None if None in found else [*dict.fromkeys(word for words in found for word in words or [])]


def selecting(symbol: Any) -> list[Any]:
    """Return the symbols that currently select `symbol`."""
    return _selectors(symbol.rev_dep, symbol.kconfig, active=True)


def not_taken(symbol: Any, value: str) -> str:
    """Explain why a visible symbol has another value than the valid one it was assigned."""
    now = f"{shown(symbol, value)} does not take: it is {symbol.str_value}"
    if symbol.choice and value == "n":
        others = _names(_others(symbol))
        return f"{shown(symbol, value)} leaves no member of the choice; set another =y: {others}"
    if symbol.choice:
        return f"{now}; the choice has {_chosen(symbol.choice)}"
    if selectors := selecting(symbol):
        return f"{now}, selected by {_names(selectors)}"
    return f"{now}; its dependencies allow no more"


def _failing(item: Any) -> list[Any]:
    """Return the unmet parts of the prompt's condition, of the definition with the fewest."""
    conditions = [kconfiglib.split_expr(node.prompt[1], kconfiglib.AND) for node in item.nodes if node.prompt]
    unmet_parts = [[part for part in one if not kconfiglib.expr_value(part)] for one in conditions]
    parts: list[Any] = []
    for part in min(unmet_parts, key=len, default=[]):
        # A member's condition contains its choice as a whole, so the choice's unmet parts are listed instead.
        inner = _failing(part) if isinstance(part, kconfiglib.Choice) else [part]
        parts += [one for one in inner if one not in parts]
    return parts


def _describe(part: Any) -> str:
    if isinstance(part, kconfiglib.Symbol):
        if part.is_constant:
            return "a condition that is never true"
        if not part.nodes:
            return f"{option(part)}=y (which no Kconfig file defines)"
        now = _chosen(part.choice) if part.choice else part.str_value or "without a value"
        return f"{option(part)}=y (now {now}{_origin(part)})"
    if part[0] is kconfiglib.NOT and isinstance(part[1], kconfiglib.Symbol):
        if others := _others(part[1]):  # a member cannot be set to n
            names = [f"{option(member)}=y" for member in others[:_MAX_NAMES]]
            names += ["another member"] * (len(others) > _MAX_NAMES)
            return f"{' or '.join(names)} (now {option(part[1])}=y)"
        return f"{option(part[1])}=n (now {part[1].str_value}{_origin(part[1])})"
    symbols = [item for item in items_in(part) if _is_variable(item)]
    visible = [item for item in symbols if not item.choice or item.choice.selection]
    state = ", ".join(dict.fromkeys(_state(item) for item in visible or symbols))
    return f"{expression(part)} (now {state})" if state else expression(part)


def _others(symbol: Any) -> list[Any]:
    """Return the members of the choice that can take the place of a member; none of another symbol."""
    members = symbol.choice.syms if symbol.choice else ()
    return [member for member in members if member is not symbol and member.visibility]


def _is_variable(item: Any) -> bool:
    return isinstance(item, kconfiglib.Symbol) and not item.is_constant and bool(item.nodes)


def _origin(symbol: Any) -> str:
    """Return, for a symbol without a prompt, the source of its value."""
    return "" if has_prompt(symbol) else f"; {no_prompt(symbol)}"


def _state(symbol: Any) -> str:
    if symbol.choice:
        return _chosen(symbol.choice)
    by = "" if has_prompt(symbol) or not selecting(symbol) else f" by {_names(selecting(symbol))}"
    return f"{shown(symbol, symbol.str_value)}{by}"


def _chosen(choice: Any) -> str:
    return f"{option(choice.selection)}=y" if choice.selection else "nothing"


def _remedy_of(part: Any, seen: frozenset[str]) -> list[str] | None:
    if isinstance(part, tuple):
        if part[0] is kconfiglib.OR:
            found = (_remedy_of(one, seen) for one in kconfiglib.split_expr(part, kconfiglib.OR))
            return next((words for words in found if words is not None), None)
        if part[0] is kconfiglib.AND:
            both = [_remedy_of(one, seen) for one in part[1:] if not kconfiglib.expr_value(one)]
            return None if None in both else [word for words in both for word in words or []]
        inner = part[1]
        if part[0] is not kconfiglib.NOT or not _is_variable(inner) or not inner.visibility:
            return None
        if not inner.choice:
            return [f"{option(inner)}=n"]
        others = _others(inner)  # which of several is the user's decision
        return [f"{option(others[0])}=y"] if len(others) == 1 else None
    if not _is_variable(part) or not is_logical(part) or part.name in seen:
        return None
    if not has_prompt(part):
        return _remedy_by_selector(part, seen | {part.name})
    before = [] if part.visibility else remedy(part, seen | {part.name})
    return None if before is None else [*before, f"{option(part)}=y"]


def _remedy_by_selector(symbol: Any, seen: frozenset[str]) -> list[str] | None:
    """Return assignments by which a symbol that is already on selects `symbol`; None if there are none.

    Turning on another symbol is the user's decision.
    """
    for part in kconfiglib.split_expr(symbol.rev_dep, kconfiglib.OR):
        selector, *conditions = kconfiglib.split_expr(part, kconfiglib.AND)
        if conditions and kconfiglib.expr_value(selector):
            found = [_remedy_of(one, seen) for one in conditions if not kconfiglib.expr_value(one)]
            if None not in found:
                return [word for words in found for word in words or []]
    return None


def _selectors(reverse: Any, tree: Any, *, active: bool = False) -> list[Any]:
    """Return symbols that select or imply, from kconfiglib's OR of their conditions."""
    if reverse is tree.n:
        return []
    parts = kconfiglib.split_expr(reverse, kconfiglib.OR)
    return [
        kconfiglib.split_expr(part, kconfiglib.AND)[0]
        for part in parts
        if part is not tree.n and (not active or kconfiglib.expr_value(part))
    ]


def _names(items: Iterable[Any]) -> str:
    is_symbol = kconfiglib.Symbol
    names = [*dict.fromkeys(option(one) if isinstance(one, is_symbol) else str(one.name) for one in items)]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more

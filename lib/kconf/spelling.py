"""Spelling of values by the type of their symbol: one spelling per value, none guessed."""

from __future__ import annotations

import re
from typing import Any

import kconfiglib

from lib.kconf.reader import Assignment
from lib.kconf.tree import active_range, is_logical, option, shown
from lib.kconf.values import is_plain_int, rule_of

_HEX = re.compile(r"0[xX][0-9a-fA-F]+")
_YES, _NO = ("y", "yes", "1", "true", "on"), ("n", "no", "0", "false", "off")


class Misspelled(Exception):
    """Text that is no value of the symbol; the message gives the reason, and the fix if clear."""


def read_value(symbol: Any, assignment: Assignment) -> str:
    """Return the value that `assignment` gives to `symbol`, in kconfiglib's form. Raises Misspelled."""
    text, name = assignment.text, option(symbol)
    if symbol.orig_type == kconfiglib.UNKNOWN:
        raise Misspelled(f"{name} has no type in the Kconfig files")
    if assignment.source.startswith("#") and not is_logical(symbol):
        kind = kconfiglib.TYPE_TO_STR[symbol.orig_type]
        raise Misspelled(f"{name} is of type {kind} and cannot be unset; give it a value or remove the line")
    if symbol.orig_type == kconfiglib.STRING and assignment.line:
        text = _unquoted(name, text)
    if fault := _spelling_fault(symbol, text):
        raise Misspelled(fault)
    return text


def fault_of(symbol: Any, value: str) -> str | None:
    """Explain why the unquoted `value` is malformed or outside the active range; None for a valid one."""
    return _spelling_fault(symbol, value) or range_fault(symbol, value)


def range_fault(symbol: Any, value: str) -> str | None:
    """Explain why a well-formed int or hex `value` is outside the active range; None for any other."""
    is_hex = symbol.orig_type == kconfiglib.HEX
    limits = active_range(symbol) if is_hex or symbol.orig_type == kconfiglib.INT else None
    if limits is None:
        return None
    low, high, condition = limits
    if low <= int(value, 16 if is_hex else 10) <= high:
        return None
    bounds = f"{hex(low)}..{hex(high)}" if is_hex else f"{low}..{high}"
    when = "" if condition is symbol.kconfig.y else f" (the range while {expression(condition)})"
    return f"{shown(symbol, value)} is outside {bounds}{when}"


def expression(expr: Any) -> str:
    """Format a Kconfig expression with prefixed symbol names."""
    return str(kconfiglib.expr_str(expr, _operand))


def _operand(item: Any) -> str:
    if isinstance(item, kconfiglib.Symbol) and item.nodes and not item.is_constant:
        return option(item)
    return str(kconfiglib.standard_sc_expr_str(item))


def _unquoted(name: str, text: str) -> str:
    if not text.startswith('"'):
        bare = text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text
        raise Misspelled(f'{name}={text} needs double quotes; write {name}="{kconfiglib.escape(bare)}"')
    body = text[1:-1]
    if wrong := re.search(r"\\[^\\\"]", re.sub(r"\\[\\\"]", "", body)):
        hint = 'only \\" and \\\\ exist, write \\\\ for a backslash'
        raise Misspelled(f"{name}={text} has the escape {wrong[0]}; {hint}")
    return str(kconfiglib.unescape(body))


def _spelling_fault(symbol: Any, value: str) -> str | None:
    """Explain why the unquoted `value` is malformed for the symbol's type and `Value:` line."""
    name = option(symbol)
    if symbol.orig_type == kconfiglib.STRING:
        return _string_fault(symbol, value)
    if symbol.orig_type == kconfiglib.INT:
        if is_plain_int(value):
            return None
        if re.fullmatch(r"-?[1-9][0-9]{19,}", value):
            return f"{name}={value[:12]}... has {len(value)} digits; an int has at most 19"
        kind, better = "a plain decimal number", _nearest_int(value)
    elif symbol.orig_type == kconfiglib.HEX:
        bare = value.strip("\"' \t")
        if _HEX.fullmatch(value):
            return None
        if re.fullmatch(r"[0-9a-fA-F]+", bare):
            return f"{name}={value} lacks 0x; write {name}=0x{bare} (which is {int(bare, 16)})"
        kind, better = "a hexadecimal number", bare if _HEX.fullmatch(bare) else None
    else:
        tristate = symbol.orig_type == kconfiglib.TRISTATE
        if value in (("n", "m", "y") if tristate else ("n", "y")):
            return None
        word = value.strip().strip("\"' \t").lower()  # also blanks other than spaces
        kind = "n, m or y" if tristate else "y or n"
        better = "y" if word in _YES else "n" if word in _NO else None
    return f"{name}={value} is not {kind}{f'; write {name}={better}' if better is not None else ''}"


def _string_fault(symbol: Any, value: str) -> str | None:
    for character, word in (("\n", "a line break"), ("\r", "a carriage return"), ("\0", "a NUL byte")):
        if character in value:
            return f"{option(symbol)} has {word} in its value; a string is a single line"
    if re.search("[\ud800-\udfff]", value):  # surrogates stand for undecodable bytes of argv
        return f"{option(symbol)} has a byte in its value that is not UTF-8"
    try:
        if (rule := rule_of(symbol)) is not None:
            rule.parse(value)
    except ValueError as error:
        return f"{shown(symbol, value)} {error}"
    return None


def _nearest_int(value: str) -> str | None:
    """Return the int meant by `0x200`, `1e3`, `+5`, `"512"`, `1_000`, `0064` or digits of other scripts."""
    bare = value.strip("\"' \t")
    for read in (
        int,
        lambda text: int(text, 16) if text.lower().startswith("0x") else None,
        lambda text: int(float(text)) if float(text).is_integer() else None,
    ):
        try:
            number = str(read(bare))
        except ValueError:
            continue
        if is_plain_int(number):
            return number
    return None

"""Spelling of values by the type of their symbol: one spelling per value, none guessed."""

from __future__ import annotations

import re
from typing import Any

import kconfiglib

from lib.kconf.reader import Assignment
from lib.kconf.tree import active_range, option, shown
from lib.kconf.values import is_plain_int, rule_of

_HEX = re.compile(r"0[xX][0-9a-fA-F]+")
_YES, _NO = ("y", "yes", "1", "true", "on"), ("n", "no", "0", "false", "off")


class Misspelled(Exception):
    """Text that is no value of the symbol; the message gives the reason, and the fix if clear."""


def read_value(symbol: Any, assignment: Assignment) -> str:
    """Return the value that `assignment` gives to `symbol`, in kconfiglib's form. Raises Misspelled."""
    text = assignment.text
    if symbol.orig_type == kconfiglib.UNKNOWN:
        raise Misspelled(f"{option(symbol)} has no type in the Kconfig files")
    if assignment.source.startswith("#") and symbol.orig_type not in (kconfiglib.BOOL, kconfiglib.TRISTATE):
        kind = kconfiglib.TYPE_TO_STR[symbol.orig_type]
        raise Misspelled(
            f"{option(symbol)} is of type {kind} and cannot be unset; give it a value or remove the line"
        )
    if symbol.orig_type == kconfiglib.STRING and assignment.line:
        text = _unquoted(symbol, text)
    check_spelling(symbol, text)
    return text


def check_spelling(symbol: Any, value: str) -> None:
    """Raise Misspelled unless `value` (unquoted) is well formed for the symbol's type and `Value:` line."""
    if symbol.orig_type == kconfiglib.STRING:
        _check_string(symbol, value)
    elif symbol.orig_type == kconfiglib.INT:
        _check_int(symbol, value)
    elif symbol.orig_type == kconfiglib.HEX:
        _check_hex(symbol, value)
    else:
        _check_logical(symbol, value)


def range_fault(symbol: Any, value: str) -> str | None:
    """Explain why the well-formed int or hex `value` is outside the active range; None if it is inside."""
    limits = active_range(symbol)
    if limits is None:
        return None
    low, high, condition = limits
    is_hex = symbol.orig_type == kconfiglib.HEX
    if low <= int(value, 16 if is_hex else 10) <= high:
        return None
    text = f"{shown(symbol, value)} is outside {hex(low)}..{hex(high)}" if is_hex else None
    text = text or f"{shown(symbol, value)} is outside {low}..{high}"
    if condition is symbol.kconfig.y:
        return text
    return f"{text} (the range while {expression(condition)})"


def expression(expr: Any) -> str:
    """Format a Kconfig expression with prefixed symbol names."""
    return str(kconfiglib.expr_str(expr, _operand))


def _operand(item: Any) -> str:
    if isinstance(item, kconfiglib.Symbol) and item.nodes and not item.is_constant:
        return option(item)
    return str(kconfiglib.standard_sc_expr_str(item))


def _unquoted(symbol: Any, text: str) -> str:
    name = option(symbol)
    if not text.startswith('"'):
        bare = text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text
        raise Misspelled(f'{name}={text} needs double quotes; write {name}="{kconfiglib.escape(bare)}"')
    body = text[1:-1]
    wrong = re.search(r"\\[^\\\"]", re.sub(r"\\[\\\"]", "", body))
    if wrong:
        raise Misspelled(
            f'{name}={text} has the escape {wrong[0]}; only \\" and \\\\ exist, write \\\\ for a backslash'
        )
    return str(kconfiglib.unescape(body))


def _check_string(symbol: Any, value: str) -> None:
    for character, word in (("\n", "a line break"), ("\r", "a carriage return"), ("\0", "a NUL byte")):
        if character in value:
            raise Misspelled(f"{option(symbol)} has {word} in its value; a string is a single line")
    if re.search("[\ud800-\udfff]", value):  # surrogates stand for undecodable bytes of argv
        raise Misspelled(f"{option(symbol)} has a byte in its value that is not UTF-8")
    rule = rule_of(symbol)
    if rule is None:
        return
    try:
        rule.parse(value)
    except ValueError as error:
        raise Misspelled(f"{shown(symbol, value)} {error}") from error


def _check_int(symbol: Any, value: str) -> None:
    if is_plain_int(value):
        return
    if re.fullmatch(r"-?[1-9][0-9]{19,}", value):
        raise Misspelled(f"{option(symbol)}={value[:12]}... has {len(value)} digits; an int has at most 19")
    better = _nearest_int(value)
    fix = f"; write {option(symbol)}={better}" if better is not None else ""
    raise Misspelled(f"{option(symbol)}={value} is not a plain decimal number{fix}")


def _nearest_int(value: str) -> int | None:
    """Return the int meant by `0x200`, `1e3`, `+5`, `"512"`, `1_000`, `0064` or digits of other scripts."""
    bare = value.strip("\"' \t")
    for read in (int, lambda text: int(text, 16) if text.lower().startswith("0x") else None, _whole_float):
        try:
            number = read(bare)
        except ValueError:
            continue
        if number is not None and is_plain_int(str(number)):
            return number
    return None


def _whole_float(text: str) -> int | None:
    number = float(text)
    return int(number) if number.is_integer() else None


def _check_hex(symbol: Any, value: str) -> None:
    if _HEX.fullmatch(value):
        return
    name, bare = option(symbol), value.strip("\"' \t")
    if re.fullmatch(r"[0-9a-fA-F]+", bare):
        raise Misspelled(f"{name}={value} lacks 0x; write {name}=0x{bare} (which is {int(bare, 16)})")
    fix = f"; write {name}={bare}" if _HEX.fullmatch(bare) else ""
    raise Misspelled(f"{name}={value} is not a hexadecimal number{fix}")


def _check_logical(symbol: Any, value: str) -> None:
    tristate = symbol.orig_type == kconfiglib.TRISTATE
    if value in (("n", "m", "y") if tristate else ("n", "y")):
        return
    word = value.strip().strip("\"' \t").lower()  # also blanks other than spaces
    better = "y" if word in _YES else "n" if word in _NO else None
    fix = f"; write {option(symbol)}={better}" if better else ""
    raise Misspelled(f"{option(symbol)}={value} is not {'n, m or y' if tristate else 'y or n'}{fix}")

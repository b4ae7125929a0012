"""Formatting of bytes and seconds in a readable unit, and of tables; variables of make."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from lib.errors import ConfigError

GB = 10**9  # bytes, decimal as GPU vendors print


def bytes_text(byte_count: float) -> str:
    """Format bytes as GB with two decimals, or as MB with one where GB would be near zero."""
    if byte_count >= 1e8 or not byte_count:
        return f"{byte_count / GB:.2f} GB"
    return f"{byte_count / 1e6:.1f} MB" if byte_count >= 1e5 else f"{byte_count / 1e3:.1f} kB"


def seconds_text(*seconds: float) -> str:
    """Format a time, or a range by its ends, in s, ms or us by the longest, or minutes or hours by all."""
    units = ((3600, "hour"), (60, "minute"), (1, "s"), (1e-3, "ms"))
    unit, name = next((unit for unit in units if seconds[-(unit[0] < 60)] >= unit[0]), (1e-6, "us"))
    text = range_text(seconds[0] / unit, seconds[-1] / unit)
    return f"{text} {name}{'s' if unit >= 60 and text != '1' else ''}"


def value_text(value: object, unknown: str = "-", *, words: Sequence[str] = ("no", "yes")) -> str:
    """Format a value: `unknown` for None, one of two `words` for a truth value."""
    return unknown if value is None else words[value] if isinstance(value, bool) else str(value)


def counted(count: int, noun: str) -> str:
    """Format `count` of a noun whose plural ends in s: 1 device, 2 devices, 2 processes."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{ending * (count != 1)}"


def some_of(names: Sequence[str], *, most: int = 4) -> str:
    """Format the first `most` names, and how many others there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def flop_text(flop: float) -> str:
    """Format floating-point operations as TFLOP, or in a smaller unit where they are fewer than one."""
    unit, name = next((unit for unit in ((1e12, "T"), (1e9, "G")) if flop >= unit[0]), (1e6, "M"))
    return f"{flop / unit:{',.0f' if flop >= 100 * unit else '.3g'}} {name}FLOP"


def whole_number(text: str, variable: str, *, least: int = 1, below: float = float("inf")) -> int:
    """Parse a variable of make. Raises ConfigError for anything but a whole number in [least, below)."""
    if not (text.isascii() and text.isdecimal() and least <= int(text) < below):
        upper = "" if below == float("inf") else f" below {below}"
        raise ConfigError(f"{variable}={text} is not a whole number from {least}{upper}")
    return int(text)


def non_negative(text: str, variable: str) -> float:
    """Parse a variable of make. Raises ConfigError for anything but a non-negative number."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{variable}={text} is not a non-negative number")
    return number


def setting(name: str, value: object) -> str:
    """Format NAME=VALUE as it is typed behind `make`: quoted for the shell, and a dollar sign doubled."""
    return f"{name}={shlex.quote(str(value).replace('$', '$$'))}"


def columns(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the columns of a head and the rows below it, without those that are empty below the head."""
    return [column for column in zip(*rows, strict=True) if any(column[1:])]


def aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns, strict=True)]


def range_text(low: float, high: float, *, whole: bool = False, least: float = 1e-3) -> str:
    """Format a range to three significant digits, or as whole numbers; one number where both are equal."""
    if high < least:
        return f"less than {least:g}"
    texts = [f"{end:{',.0f' if whole or end >= 100 else '.3g'}}" for end in (low, high)]
    return " to ".join(dict.fromkeys(texts)) if low >= least else f"up to {texts[1]}"

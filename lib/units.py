"""Formatting of bytes and seconds in a readable unit, and of tables; numbers in variables of make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lib.errors import ConfigError

GB = 10**9  # bytes, decimal as GPU vendors print


def bytes_text(byte_count: float) -> str:
    """Format bytes as GB with two decimals, or as MB with one where GB would be near zero."""
    if byte_count >= 1e8 or not byte_count:
        return f"{byte_count / GB:.2f} GB"
    return f"{byte_count / 1e6:.1f} MB" if byte_count >= 1e5 else f"{byte_count / 1e3:.1f} kB"


def seconds_text(seconds: float) -> str:
    """Format three significant digits of seconds, milliseconds or microseconds."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def seconds_span(fastest: float, slowest: float, *, least: float) -> str:
    """Format a range of seconds, without its figures if all of it is below `least`."""
    if slowest < least:
        return f"less than {seconds_text(least)}"
    return f"{seconds_text(fastest)} to {seconds_text(slowest)}"


def whole_number(text: str, variable: str, *, least: int = 1) -> int:
    """Parse a variable of make. Raises ConfigError for anything but a whole number from `least`."""
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise ConfigError(f"{variable}={text} is not a whole number from {least}")
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


def columns(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the columns of a head and the rows below it, without those that are empty below the head."""
    return [column for column in zip(*rows, strict=True) if any(column[1:])]


def aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in columns]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip(*columns, strict=True)]


def range_text(low: float, high: float, *, whole: bool = False) -> str:
    """Format a range to three significant digits, or as whole numbers; one number where both are equal."""
    formats = [",.0f" if whole or end >= 100 else ".3g" for end in (low, high)]
    texts = [
        f"{end:{text}}" if end >= 1e-3 else "less than 0.001"
        for end, text in zip((low, high), formats, strict=True)
    ]
    return " to ".join(dict.fromkeys(texts))


def duration_span(shortest: float, longest: float) -> str:
    """Format a range of seconds in the largest of hours, minutes and seconds of which it has one."""
    unit, name = (3600, "hours") if longest >= 3600 else (60, "minutes") if longest >= 60 else (1, "seconds")
    return f"{range_text(shortest / unit, longest / unit)} {name}"

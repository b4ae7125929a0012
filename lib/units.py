"""Formatting of bytes and seconds in a readable unit."""

from __future__ import annotations

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

"""Amounts for the reader, in the unit that shows them."""

from __future__ import annotations

GB = 10**9  # bytes, decimal as in what GPU vendors print


def bytes_text(byte_count: float) -> str:
    """Two decimals of a GB, or one of an MB where that would be next to nothing."""
    if byte_count >= 1e8 or not byte_count:
        return f"{byte_count / GB:.2f} GB"
    return f"{byte_count / 1e6:.1f} MB" if byte_count >= 1e5 else f"{byte_count / 1e3:.1f} kB"


def seconds_text(seconds: float) -> str:
    """Three digits of seconds, milliseconds or microseconds."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"

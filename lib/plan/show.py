"""Printed form of a plan: every value with its reason."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterator
from typing import TextIO

from lib.plan.types import Memory, Plan
from lib.units import bytes_text

NARROW_COLUMNS = 72  # below this a reason goes under its value, not beside it


def show(plan: Plan, stream: TextIO) -> None:
    """Print `plan`: a table on a terminal, plain aligned text otherwise."""
    columns = shutil.get_terminal_size().columns
    if stream.isatty() and columns >= NARROW_COLUMNS:
        _show_table(plan, stream, columns=columns)
    else:
        print(plain_text(plan, columns=columns), file=stream)


def plain_text(plan: Plan, *, columns: int = 100) -> str:
    """Format the plan in lines of at most `columns` characters."""
    rows = list(_rows(plan))
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    lines: list[str] = []
    for name, value, reason in rows:
        head = f"{name:<{name_width}}  {value:<{value_width}}  "
        if columns < NARROW_COLUMNS:
            lines.append(head.rstrip())
            lines += textwrap.wrap(reason, columns, initial_indent="  ", subsequent_indent="  ")
        else:
            lines += textwrap.wrap(head + reason, columns, subsequent_indent=" " * len(head))
    return "\n".join(lines)


def _show_table(plan: Plan, stream: TextIO, *, columns: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("Plan", "", "Why", box=SIMPLE_HEAD)
    for row in _rows(plan):
        table.add_row(*row)
    Console(file=stream, width=columns, highlight=False, markup=False).print(table)


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    for field in dataclasses.fields(plan):
        if field.name != "reasons":
            yield field.name.replace("_", " "), _text(getattr(plan, field.name)), plan.reasons[field.name]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "-"
    if isinstance(value, Memory):
        return bytes_text(value.need_bytes)
    return str(value)

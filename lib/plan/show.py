"""Printed form of a plan, every value with its reason, and of the strategies that it was chosen from."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from lib.plan.sizing import Candidate
from lib.plan.types import Memory, Plan
from lib.units import GB, bytes_text

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


def format_strategies(strategies: Sequence[Candidate], *, columns: int) -> Iterator[str]:
    """Format a line per strategy: batch, memory of the fullest device, seconds of a step, verdict."""
    yield "Parallelism strategies (seconds of a step are estimated, with assumed link rates):"
    widest = max(7, *(len(_name(row)) for row in strategies))
    for row in strategies:
        sizes = "" if row.split is None else f"{row.split.micro_batch} x {row.split.accumulation}"
        need = "" if row.memory is None else f"{row.memory.need_bytes / GB:.2f} GB"
        time = "" if row.seconds is None else f"{row.seconds[0]:.3g} to {row.seconds[1]:.3g} s"
        head = f"  {_name(row):<{widest}} {sizes:>10} {need:>10}  {time:<18} "
        if columns < NARROW_COLUMNS:
            yield head.rstrip()
            yield from textwrap.wrap(row.verdict, columns, initial_indent="    ", subsequent_indent="    ")
        else:
            yield from textwrap.wrap(
                head + row.verdict, columns, subsequent_indent=" " * len(head), drop_whitespace=True
            )


def _name(row: Candidate) -> str:
    layout = row.layout
    if layout.strategy == "split" and layout.world > 1:
        return "split+ddp"
    return layout.strategy + (f"/{layout.shard}" if layout.strategy == "hsdp" else "")

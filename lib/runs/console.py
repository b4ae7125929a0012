"""Console output of a run: lines to standard output and to log.txt, and one progress line.

On a terminal the progress line is redrawn in place, at most four times a second; elsewhere it is printed
every ten seconds. It is display only: the numbers themselves go to metrics.jsonl.
"""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from lib.atomic import naming
from lib.errors import os_error
from lib.units import bytes_text

if TYPE_CHECKING:
    import rich.console

TERMINAL_INTERVAL_SECONDS = 0.25
PLAIN_INTERVAL_SECONDS = 10.0
PLAIN_DOWNLOAD_INTERVAL_SECONDS = 5.0

# ASCII replacements for the characters that the project prints, for outputs that have only ASCII.
_PLAIN = {"×": "x", "→": "->", "≤": "<=", "≥": ">=", "…": "...", "–": "-", "—": "-", "·": "-"}
_ERRORS = "anneal.plain"  # the name of the codec error handler below
_SEPARATOR = "  "
_SHORT_BAR = 6  # columns


class Console:
    """Console output of one process.

    log_path: file for timestamped lines; None for none. memory_bytes: the peak so far, to show.
    """

    def __init__(
        self, log_path: Path | None = None, *, memory_bytes: Callable[[], int] | None = None
    ) -> None:
        self._log_path, self._memory_bytes = log_path, memory_bytes
        self._display: _Lines | _Bar | None = None
        self._next_seconds = float("inf")  # when the next progress line is due, on the monotonic clock

    def log(self, text: str) -> None:
        """Print one or more lines above the progress line, if there is one, and log them.

        A log that cannot be written is reported once and then skipped: it is a copy. Raises
        ToolkitError if standard output cannot be written, BrokenPipeError if its reader has closed it.
        """
        (self._display.print if self._display else _print)(text)
        self.write_log(text)

    def start(self, total_steps: int | None, *, description: str) -> None:
        """Start a progress line. `total_steps` is None if the budget is in seconds."""
        assert self._display is None, "started already"
        self._display, self._description, self._total_steps = _display(), description, total_steps
        self._next_seconds = time.monotonic()
        self._first: tuple[float, float] | None = None  # time and fraction of the first update

    def update(
        self, step: int, *, values: Mapping[str, float], fraction: float, samples_per_second: float
    ) -> None:
        """Show the progress of training. Cheap enough for every step: most calls only read the clock.

        values:    name -> number, such as loss and accuracy (0..1), the most important first.
        fraction:  of the budget, 0..1.
        samples_per_second: 0 while unknown.
        """
        if not self._is_due() or self._display is None:
            return
        now = time.monotonic()
        fraction = min(max(fraction, 0.0), 1.0)
        # Measured since the first update, so that the estimate of a resumed run is right.
        self._first = began, before = self._first or (now, fraction)
        rest = (now - began) * (1 - fraction) / (fraction - before) if fraction > before else None
        parts = [
            f"step {step}/{self._total_steps}" if self._total_steps else f"step {step}",
            *(
                f"accuracy {value:.2%}" if name == "accuracy" else f"{name.replace('_', ' ')} {value:.4g}"
                for name, value in values.items()
            ),
            f"{_short(samples_per_second)} samples/s" if samples_per_second else "",
            bytes_text(self._memory_bytes()) if self._memory_bytes is not None else "",
            f"{timedelta(seconds=round(rest))} left" if rest is not None else "",
        ]
        self._display.draw(self._description, fraction, parts)

    def evaluate(self, step: int, done: int, total: int) -> None:
        """Show that `done` of `total` samples are evaluated after `step` steps; as cheap as `update`."""
        if self._is_due() and self._display is not None:
            parts = [f"step {step}", f"evaluating {done:,} of {total:,} samples"]
            self._display.draw(self._description, done / total, parts)

    def count(self, done: int, total: int) -> None:
        """Show that `done` of `total` samples are done, of something without steps; as cheap as `update`."""
        if self._is_due() and self._display is not None:
            self._display.draw(self._description, done / total, [f"{done:,} of {total:,} samples"])

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_seconds or self._display is None:
            return False
        self._next_seconds = now + self._display.interval_seconds
        return True

    def stop(self) -> None:
        """End the progress line; does nothing if none was started."""
        if self._display is not None:
            self._display.close()
        self._display, self._next_seconds = None, float("inf")

    def write_log(self, text: str) -> None:
        """Log one or more lines without printing them."""
        if self._log_path is None:
            return
        stamp = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        lines = "".join(f"{stamp} {line}\n" for line in text.splitlines() or [""])
        try:
            path = self._log_path
            with naming(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
        except OSError as error:
            self._log_path = None
            print(f"warning: {os_error('write', error)}; continuing without the log", file=sys.stderr)


@contextmanager
def download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Display of downloads: yields a callback (file name, bytes so far, total bytes; 0 if unknown).

    On a terminal it is a line that is cleared when the block ends, elsewhere a plain line every five seconds.
    """
    display = _display()
    is_plain = isinstance(display, _Lines)
    interval = PLAIN_DOWNLOAD_INTERVAL_SECONDS if is_plain else TERMINAL_INTERVAL_SECONDS
    due = time.monotonic() + (interval if is_plain else 0.0)  # the caller has printed that it begins

    def show(name: str, done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        size = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
        display.draw(name, done / total if total else None, [size])
        due = time.monotonic() + interval

    try:
        yield show
    finally:
        display.close()


def _display() -> _Lines | _Bar:
    if sys.stdout.isatty():
        from rich.console import Console as RichConsole

        terminal = RichConsole(file=sys.stdout)
        if not terminal.is_dumb_terminal:
            return _Bar(terminal)
    return _Lines()


class _Lines:
    """Progress as plain lines, for a file, a pipe or a terminal that cannot move its cursor."""

    interval_seconds = PLAIN_INTERVAL_SECONDS

    def print(self, text: str) -> None:
        _print(text)

    def draw(self, head: str, fraction: float | None, parts: list[str]) -> None:
        _print(f"{head} {_SEPARATOR.join(filter(None, [_percent(fraction), *parts]))}")

    def close(self) -> None:
        """Do nothing: plain lines leave nothing open."""


class _Bar:
    """Progress as one line at the bottom of a terminal of any width."""

    interval_seconds = TERMINAL_INTERVAL_SECONDS

    def __init__(self, terminal: rich.console.Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._terminal = terminal
        self._bar = BarColumn()
        columns = (TextColumn("{task.description}", markup=False), self._bar)
        tail = TextColumn("{task.fields[tail]}", markup=False)
        # No refresh thread: it would compete with the training loop for the interpreter lock.
        self._progress = Progress(*columns, tail, console=terminal, auto_refresh=False, transient=True)
        self._progress.start()
        self._task = self._progress.add_task("", total=1.0, visible=False, tail="")

    def print(self, text: str) -> None:
        # soft_wrap leaves breaking lines to the terminal, so that they can be copied whole.
        shown = _encodable(text, self._terminal.encoding)
        self._terminal.print(shown, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def draw(self, head: str, fraction: float | None, parts: list[str]) -> None:
        width, head = self._terminal.width, head[: self._terminal.width // 4]
        # The time left comes first and the step last: parts that do not fit are dropped from the end.
        step, *rest = parts
        shown = [part for part in (_percent(fraction), *rest[-1:], *rest[:-1], step) if part]
        needed = len(_SEPARATOR.join(shown[:-1]))
        # Numbers are worth more than a long bar, and than the description.
        widest = min(max(width // 6, _SHORT_BAR), 30)
        for bar, name in ((widest, head), (_SHORT_BAR, head), (_SHORT_BAR, ""), (1, "")):
            room = width - len(name) - bar - 2
            if needed <= room:
                break
        self._bar.bar_width = bar
        while len(shown) > 1 and len(_SEPARATOR.join(shown)) > room:
            shown.pop()
        head, tail = (_encodable(text, self._terminal.encoding) for text in (name, _SEPARATOR.join(shown)))
        self._progress.update(
            self._task, completed=fraction or 0.0, description=head, tail=tail, visible=True, refresh=True
        )

    def close(self) -> None:
        self._progress.stop()


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:4.0%}"


def _short(number: float) -> str:
    for factor, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.3g}"


def _print(text: str) -> None:
    try:
        print(_encodable(text, sys.stdout.encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise os_error("write to standard output", error) from error


def _encodable(text: str, encoding: str) -> str:
    """Replace the characters of `text` that this encoding lacks."""
    return text.encode(encoding, errors=_ERRORS).decode(encoding)


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error(_ERRORS, _replace)

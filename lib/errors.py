"""User-facing errors: what is wrong, why, and what to do about it.

A `ToolkitError` is for the user and is shown as one line, without a traceback; `assert` is for our own
mistakes. Exit status: 2 for a configuration that is not possible, 1 for a run that failed.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_ERROR = "error: "
_RANK = re.compile(r"^\[rank\d+\]: ?")  # prefix that torch.distributed adds to traceback lines
MAX_LINES_SHOWN = 20  # of many faults: the first tell what is wrong, and all would push it off the screen
_LONG = re.compile(r"[^\s/]{99,}[^\s/.,;:'\"]")  # hardly a file has such a name
_PLUGINS = "models.", "train.tasks.", "lib.data.datasets."  # the packages of plug-ins, those of EXTERNAL= too
_TRACEBACK = "Traceback (most recent call last):"
# More specific than the error below it: a finding, or the exception that ended one of several processes.
_TELLING = re.compile(r".+:\d+: |[A-Za-z_][\w.]*(?:Error|Exception)\b")


class ToolkitError(Exception):
    """A failed run, reported in one line.

    what: the fact, with its place (``file:line`` or a ``CONFIG_`` name).
    why:  the reason, if the fact does not give it.
    todo: the remedy.
    """

    exit_code, label = 1, _ERROR

    def __init__(self, what: str, *, why: str = "", todo: str = "") -> None:
        self.what, self.why, self.todo = what, why, todo
        super().__init__(self.one_line())

    def one_line(self) -> str:
        """Format `what: why; todo`."""
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text}; {self.todo}" if self.todo else text


class ConfigError(ToolkitError):
    """A configuration, its data or a plug-in's code that cannot be used.

    Nothing was written, except where an evaluation finds it.

    findings: one line per fault (``file:line: reason``) where there are several.
    """

    exit_code = 2

    def __init__(self, what: str, *, why: str = "", todo: str = "", findings: Sequence[str] = ()) -> None:
        self.findings = tuple(findings)
        super().__init__(what, why=why, todo=todo)


class Suspended(ToolkitError):
    """A run stopped by a signal after saving: the same command resumes it."""

    exit_code = 75  # EX_TEMPFAIL: try again


class OutOfMemory(ToolkitError):
    """Memory ran out, and no retry with a smaller micro-batch was possible."""


class CompileError(ToolkitError):
    """torch.compile failed, or what it made cannot be used."""


class Diverged(ToolkitError):
    """A loss or weight that is not finite."""


class PlanError(ConfigError):
    """A well-formed configuration for which there is no plan on this hardware."""


class DataError(ConfigError):
    """A data set that is missing, damaged or unreadable.

    faults: all of them, of which `findings` has the first. train_size: the samples for training once they are
    mended, where that is known, so that what is wrong with their number is reported with them.
    """

    faults: Sequence[str] = ()
    train_size: int | None = None


class CheckpointError(ToolkitError):
    """A checkpoint that cannot be written, or none that can be read."""


def os_error(action: str, error: OSError, *, todo: str = "") -> ToolkitError:
    """Turn an `OSError` raised while doing `action` into a one-line error that names the file."""
    where = f" {error.filename}" if error.filename else ""
    return ToolkitError(f"cannot {action}{where}", why=error.strerror or str(error), todo=todo)


def foremost(lines: Sequence[str], what: str) -> list[str]:
    """Return the first MAX_LINES_SHOWN of `lines`, and the number of further `what`."""
    more = len(lines) - MAX_LINES_SHOWN
    return [*lines[:MAX_LINES_SHOWN], f"... and {more} more {what}"] if more > 0 else list(lines)


def raise_faults(what: str, faults: Sequence[str], *, todo: str = "", train_size: int | None = None) -> None:
    """Raise a DataError if there are `faults`, the first as findings. what: their subject or effect."""
    if not faults:
        return
    why, listed = faults[0], "which" if len(faults) <= MAX_LINES_SHOWN else "the first of which"
    if others := len(faults) - 1:
        why += f", and {others} more, {listed} are listed above"
    error = DataError(what, why=why, todo=todo, findings=foremost(faults, "faults") if others else ())
    error.faults, error.train_size = tuple(faults), train_size
    raise error


@contextmanager
def os_errors(action: str, *, todo: str = "") -> Iterator[None]:
    """Turn an `OSError` raised within into an error of `os_error`."""
    try:
        yield
    except OSError as error:
        raise os_error(action, error, todo=todo) from error


def close_to(name: object, known: Any, *, most: int = 1) -> list[str]:
    """Return the names in `known` that are like `name`, or else begin with it, the best first."""
    import difflib  # only after an error: the import is slow

    begun = [one for one in known if one.startswith(str(name))][:most]  # acc for accuracy
    return difflib.get_close_matches(str(name), known, n=most) or begun


def meant(name: object, known: Any, *, listed: str = "") -> str:
    """Return advice for a `name` that is none of `known`. listed: where they are, if too many to name."""
    close = " or ".join(close_to(name, known, most=3 if listed else 1))
    if listed:
        return f"did you mean {close}? {listed}" if close else listed
    return f"did you mean {close}?" if close else f"there are {', '.join(sorted(known))}"


def report(error: ToolkitError) -> int:
    """Print `error` to stderr and return its exit status. Values of a user that fill lines are shortened."""
    findings = error.findings if isinstance(error, ConfigError) else ()
    for line in (*findings, f"{error.label}{error}"):
        short = _LONG.sub(lambda word: f"{word[0][:60]}...({len(word[0])} characters)", line)
        print(short, file=sys.stderr)
    return error.exit_code


def error_in(output: str) -> str:
    """Return the error that one of our programs printed last; "" where there is none.

    The last line by `report`, or else the exception of the last traceback.
    """
    lines = [line for each in output.splitlines() if (line := _RANK.sub("", each, count=1).rstrip())]
    errors = [number for number, line in enumerate(lines) if line.startswith(_ERROR)]
    if errors:
        above, error = lines[max(0, errors[-1] - 1) : errors[-1]], lines[errors[-1]].removeprefix(_ERROR)
        return " / ".join([*filter(_TELLING.match, above), error])
    traces = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    below = lines[traces[-1] + 1 :] if traces else []
    return next((line for line in below if not line[0].isspace()), "")


def signal_name(status: int) -> str:
    """Name the signal that ended a process, by its negative exit status: signal 9 (Killed)."""
    return f"signal {-status} ({signal.strsignal(-status)})"


def end_at_interrupt() -> None:
    """Let SIGINT end a program that is still importing, without a traceback, until `run_main` begins."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # neither ignored nor handled
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interrupted_as(text: str) -> Iterator[None]:
    """Say `text` where a KeyboardInterrupt within says nothing itself."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(str(error) or text) from error


def run_main(main: Callable[[], int], *, is_listing: bool = False) -> int:
    """Run a command line `main` and return its exit status; users see one-line errors.

    is_listing: it does nothing but print, so that a reader that leaves early (head, less) is no failure.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an unencodable character must not end a run
            stream.reconfigure(errors="replace")
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of `end_at_interrupt`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main()
        sys.stdout.flush()
        return status
    except ToolkitError as error:
        return report(error)
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:
        if not (place := _place_of_exit(error)):
            raise
        todo = "raise an exception that says what is wrong, or return"
        return report(ToolkitError(f"{place} ends the process by SystemExit({error.code})", todo=todo))
    except BrokenPipeError:
        return 0 if is_listing else 128 + signal.SIGPIPE
    except OSError as error:
        # A missing permission or a full disk is no bug. Code that knows more raises a better error earlier.
        unknown = "" if error.filename else " standard output or an unnamed file"
        status = report(os_error(f"read or write{unknown}", error))
        return ConfigError.exit_code if error.errno == errno.ENAMETOOLONG else status  # a name that was given
    finally:
        _leave_stdout()
        atexit.register(end_at_interrupt)  # what is left, libraries tear down


def _place_of_exit(error: SystemExit) -> str:
    """Return file and line of what ended the program, in a plug-in if one did; "" for our own argparse."""
    import traceback

    named = [
        (frame.f_globals.get("__name__", ""), f"{frame.f_code.co_filename}:{line}")
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    of_plugins = [place for module, place in named if module.startswith(_PLUGINS)]
    if not of_plugins and named[-1][0] == "argparse":  # after --help, or an argument that it refuses
        return ""
    return (of_plugins or [place for module, place in named if module != "_sitebuiltins"])[-1]


def _open_closed_streams() -> None:
    """Open missing standard streams on /dev/null, so that the next opened file does not take their place."""
    for name, flag, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_WRONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flag), mode))


def outlast_readers() -> None:
    """Let this process continue where the reader of its output (head) ends; further output is dropped."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            stream.flush()
            raw = io.BufferedWriter(_Outlasting(stream.fileno(), "wb", closefd=False))
            new = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
            vars(sys).update({name: new, f"__{name}__": new})


class _Outlasting(io.FileIO):
    """A standard stream that becomes /dev/null where nobody reads it any more."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1:
                print("note: nobody reads standard output any more; the run continues", file=sys.stderr)
            return len(data)


def _leave_stdout() -> None:
    """Flush stdout, and discard what cannot be written, so that the interpreter does not fail at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

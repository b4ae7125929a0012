"""Errors that speak to the reader: what is wrong, why, and what to do about it.

A `ToolkitError` is for the user and is shown as one line, without a traceback;
`assert` is for our own mistakes. Exit status: 2 for a configuration that cannot
be honoured, 1 for a run that failed.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Sequence

_ERROR = "error: "
_RANK = re.compile(r"^\[rank\d+\]: ?")  # which torch.distributed puts before each line of a traceback
_TRACEBACK = "Traceback (most recent call last):"
# What tells more than the error below it: a finding, or the exception that ended one of several processes.
_TELLING = re.compile(r".+:\d+: |[A-Za-z_][\w.]*(?:Error|Exception)\b")


class ToolkitError(Exception):
    """A failed run, told in one line.

    what: the fact, with its place (``file:line`` or a ``CONFIG_`` name).
    why:  the reason, if the fact does not carry it.
    todo: what the reader can do now.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", todo: str = "") -> None:
        self.what, self.why, self.todo = what, why, todo
        super().__init__(self.one_line())

    def one_line(self) -> str:
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text}; {self.todo}" if self.todo else text


class ConfigError(ToolkitError):
    """Something asked for cannot be honoured. Nothing was written.

    findings: one line per fault (``file:line: reason``) where there is more than one to tell.
    """

    exit_code = 2

    def __init__(self, what: str, *, why: str = "", todo: str = "", findings: Sequence[str] = ()) -> None:
        self.findings = tuple(findings)
        super().__init__(what, why=why, todo=todo)


class Suspended(ToolkitError):
    """A signal asked for an end: what there is was kept, and the same command goes on from there."""

    exit_code = 75  # EX_TEMPFAIL: try again


class OutOfMemory(ToolkitError):
    """Memory ran out, and could not be made to suffice."""


class Diverged(ToolkitError):
    """The loss or a weight is not finite."""


class PlanError(ConfigError):
    """The configuration is well formed, but no plan on this machine honours it."""


class DataError(ToolkitError):
    """A data set is missing, damaged or unreadable."""


class CheckpointError(ToolkitError):
    """A checkpoint cannot be written, or none can be read."""


def os_error(action: str, error: OSError, *, todo: str = "") -> ToolkitError:
    """Turn an `OSError` met while doing `action` into a one-line error that names the file."""
    where = f" {error.filename}" if error.filename else ""
    return ToolkitError(f"cannot {action}{where}", why=error.strerror or str(error), todo=todo)


def report(error: ToolkitError) -> int:
    """Print `error` to stderr and return its exit status."""
    if isinstance(error, ConfigError):
        for finding in error.findings:
            print(finding, file=sys.stderr)
    print(f"{_ERROR}{error}", file=sys.stderr)
    return error.exit_code


def told_in(output: str) -> str:
    """The error in what a program of ours has written, whatever it wrote after it; "" where there is none.

    That is what `report` wrote last, or else the exception of the last traceback.
    """
    lines = [line for each in output.splitlines() if (line := _RANK.sub("", each, count=1).rstrip())]
    errors = [number for number, line in enumerate(lines) if line.startswith(_ERROR)]
    if errors:
        above, error = lines[max(0, errors[-1] - 1) : errors[-1]], lines[errors[-1]].removeprefix(_ERROR)
        return " / ".join([*filter(_TELLING.match, above), error])
    traces = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    below = lines[traces[-1] + 1 :] if traces else []
    return next((line for line in below if not line[0].isspace()), "")


def run_main(main: Callable[[], int]) -> int:
    """Run a command line `main`; users see one-line errors, a closed pipe is no error."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a sign that the terminal lacks must not end a run
            stream.reconfigure(errors="replace")
    try:
        status = main()
        sys.stdout.flush()
        return status
    except ToolkitError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0  # the reader (head, less) went away
    except OSError as error:
        # A right that is missing, a full disk: never a mistake of ours. Who knows more says more before it
        # comes here.
        unknown = "" if error.filename else " standard output or an unnamed file"
        return report(os_error(f"read or write{unknown}", error))
    finally:
        _leave_stdout()


def _open_closed_streams() -> None:
    """Where a program is started without a standard stream, the next file opened would take its place."""
    for name, flag, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_WRONLY, "w"),
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flag), mode))


def _leave_stdout() -> None:
    """What cannot be written is given up, lest the interpreter complains of it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

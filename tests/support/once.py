"""What each worker of pytest-xdist would make at the cost of seconds is made by the first that needs it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The directory `name` of this call of pytest, filled by `make`; who comes meanwhile waits for it.

    Where `make` fails, so does each test that needs it, with its error.
    """
    together = "PYTEST_XDIST_WORKER" in os.environ  # then the parent is of this call and of no other
    base = factory.getbasetemp().parent if together else factory.getbasetemp()
    directory, finished, failed = base / name, base / f"{name}.made", base / f"{name}.failed"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if failed.exists():
            pytest.fail(f"another test could not make {name}: {failed.read_text()}")
        if not finished.exists():
            directory.mkdir()
            try:
                make(directory)
            except BaseException as error:
                failed.write_text(str(error))
                raise
            finished.touch()
    return directory

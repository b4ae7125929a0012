"""Where a file may grow no further (ulimit -f) the error says which file that was."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lib import atomic
from lib.data.cache import cached_folder
from lib.errors import ToolkitError
from lib.runs.console import Console

ROOT = Path(__file__).resolve().parents[2]
BYTES = 4096


@contextmanager
def limited() -> Iterator[None]:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_file_that_is_written_whole_is_named(tmp_path: Path) -> None:
    with limited(), pytest.raises(OSError, match="File too large") as caught:
        atomic.write_new(tmp_path / "file", bytes(2 * BYTES))
    assert caught.value.filename == str(tmp_path / "file")


def text(folder: Path) -> None:
    (folder / "x").write_text("x" * 2 * BYTES)


def array(folder: Path) -> None:
    np.save(folder / "x.npy", np.zeros(2 * BYTES))


def memory_map(folder: Path) -> None:
    np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.uint8, shape=(2 * BYTES,))


@pytest.mark.parametrize("fill", [text, array, memory_map])
def test_what_is_made_of_data_is_named(fill: Callable[[Path], None], tmp_path: Path) -> None:
    with (
        limited(),
        pytest.raises(ToolkitError, match=f"cannot write the data cache {tmp_path}/set.*: .*; free"),
    ):
        cached_folder(tmp_path / "set", identity="", fill=fill, log=print)


def test_a_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(tmp_path / "log.txt")
    with limited():
        console.log("x" * 2 * BYTES)
    assert f"warning: cannot write {tmp_path}/log.txt: File too large" in capsys.readouterr().err


def test_what_is_left_is_standard_output(tmp_path: Path) -> None:
    code = f"from lib.errors import run_main; run_main(lambda: print('x' * {2 * BYTES}) or 0)"
    with limited(), (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "error: cannot read or write standard output or an unnamed file: " in done.stderr

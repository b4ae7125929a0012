"""What a user sees of a command that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lib.errors import ToolkitError, run_main

ROOT = Path(__file__).resolve().parents[2]
LISTING = "import sys; from lib.errors import run_main; sys.exit(run_main(lambda: print('line') or 0))"
KCONF = [sys.executable, "scripts/kconf.py", "list-defconfigs"]


def test_a_missing_right_is_one_line_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise PermissionError(13, "Permission denied", "/data/mnist/train-images-idx3-ubyte")

    assert run_main(main) == 1
    expected = "error: cannot read or write /data/mnist/train-images-idx3-ubyte: Permission denied\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("command", [[sys.executable, "-c", LISTING], KCONF])
def test_a_full_disk_behind_standard_output_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: cannot read or write standard output or an unnamed file: No space left on device\n",
    )


@pytest.mark.parametrize(
    ("command", "status"),
    [(KCONF, 0), ([sys.executable, "-c", LISTING], 128 + signal.SIGPIPE)],
)
def test_a_reader_that_left_is_an_error_of_all_but_listings(command: list[str], status: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, b"")


def test_a_file_does_not_become_standard_output_where_there_is_none(tmp_path: Path) -> None:
    program = f"""
import sys
from lib.errors import run_main
def main():
    with open({str(tmp_path / "kept")!r}, "w") as file:
        assert not sys.stdout.isatty()
        print("a listing", flush=True)
        file.write("metrics")
    return 0
sys.exit(run_main(main))
"""
    command = f'exec "{sys.executable}" -c "$PROGRAM" >&-'
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=ROOT,
        env=os.environ | {"PROGRAM": program},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "kept").read_text() == "metrics"


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("config", "the answers end at the question for MODEL_CHOICE"),
        ("menuconfig", "menuconfig needs a terminal"),
    ],
)
def test_a_closed_standard_input_is_an_end_of_answers(tmp_path: Path, command: str, error: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" scripts/kconf.py {command} <&-'],
        cwd=ROOT,
        env=os.environ | {"KCONFIG_CONFIG": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: {error}") and done.stderr.count("\n") == 1


def test_mistakes_of_ours_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)


def test_a_toolkit_error_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ToolkitError("no", why="reason", todo="way out")

    assert run_main(main) == 1
    assert capsys.readouterr().err == "error: no: reason; way out\n"

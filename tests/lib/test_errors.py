"""What a user sees of a command that fails."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ConfigError, ToolkitError, interrupted_as, run_main

ROOT = Path(__file__).resolve().parents[2]
LISTING = "import sys; from lib.errors import run_main; sys.exit(run_main(lambda: print('line') or 0))"
KCONF = [sys.executable, "scripts/kconf.py", "list-defconfigs"]


def test_a_missing_right_is_one_line_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise PermissionError(13, "Permission denied", "/data/mnist/train-images-idx3-ubyte")

    assert run_main(main) == 1
    expected = "error: cannot read or write /data/mnist/train-images-idx3-ubyte: Permission denied\n"
    assert capsys.readouterr().err == expected


def test_code_that_ends_the_process_is_a_failure_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    for status in (0, None, "done"):
        assert run_main(lambda: sys.exit(status)) == 1  # noqa: B023
        place = f"{__file__}:{sys._getframe().f_lineno - 1} ends the process by SystemExit({status})"
        assert capsys.readouterr().err == (
            f"error: {place}; raise an exception that says what is wrong, or return\n"
        )
    with pytest.raises(SystemExit):
        run_main(lambda: argparse.ArgumentParser().parse_args(["--help"]) and 0)


@pytest.mark.parametrize("text", ["exit()", "argparse.ArgumentParser().parse_args(['x'])"])
def test_a_plugin_that_ends_the_process_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    own: dict[str, Any] = {"__name__": "models.mine.model", "argparse": argparse}
    exec(compile(f"def build():\n    {text}", "models/mine/model.py", "exec"), own)
    assert run_main(lambda: own["build"]()) == 1
    assert "error: models/mine/model.py:2 ends the process by SystemExit(" in capsys.readouterr().err


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


@pytest.mark.parametrize("both", [False, True])
def test_a_program_that_outlasts_its_readers_ends_as_without_them(both: bool, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from typing import Any
from lib.errors import outlast_readers, run_main
def main():
    outlast_readers()
    for number in range(3):
        print(number, flush=True)
        print(number, file=sys.stderr)
    print("x" * 100_000)
    Path({str(tmp_path / "kept")!r}).write_text("whole")
    return 7
sys.exit(run_main(main))
"""
    reading, writing = os.pipe()
    os.close(reading)
    errors = writing if both else subprocess.PIPE
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=writing, stderr=errors, check=False
    )
    os.close(writing)
    assert done.returncode == 7 and (tmp_path / "kept").read_text() == "whole"
    said = b"note: nobody reads standard output any more; the run continues\n0\n1\n2\n"
    assert done.stderr == (None if both else said)


@pytest.mark.parametrize("value", ["x" * 300, "x" * 150, "=".join(["RUN", "y" * 99])])
def test_a_long_value_is_shortened_wherever_it_is_named(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise ConfigError(f"RUN='{value}': no run", findings=[f".config:1: /tmp/{value}/x is odd"])

    assert run_main(main) == 2
    finding, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: RUN='{value[:40]}") and error.endswith(" characters)': no run")
    assert finding.endswith(" characters)/x is odd") and max(map(len, (finding, error))) < 150


def test_what_a_file_may_be_called_is_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/".join(["a" * 90] * 5)
    run_main(lambda: (_ for _ in ()).throw(ConfigError(f"{path}: no run")))
    assert capsys.readouterr().err == f"error: {path}: no run\n"


def test_a_name_that_is_too_long_for_a_file_is_a_fault_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_main(lambda: Path("x" * 300).stat() and 0) == 2
    assert capsys.readouterr().err.endswith("...(300 characters): File name too long\n")


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


# Interrupts a program when it imports the module of this name, which comes before its main.
INTERRUPTS = """
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if name == "{name}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["-m", "train", "plan"], "lib.kconf"),
        (["-m", "scripts.runs"], "argparse"),
        (["-m", "scripts.bench.throughput"], "argparse"),
        (["scripts/kconf.py", "list-defconfigs"], "lib.kconf.cli"),
    ],
)
def test_an_interrupt_of_imports_has_no_traceback(tmp_path: Path, command: list[str], name: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS.format(name=name))
    ends_interrupted([sys.executable, *command], PYTHONPATH=str(tmp_path))


def test_an_interrupt_while_libraries_end_has_no_traceback() -> None:
    program = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); "
    ends_interrupted([sys.executable, "-c", program + LISTING.replace("'line'", "end=''")])


def ends_interrupted(command: list[str], **variables: str) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        # A program in the background, as tests may be, inherits that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_every_program_ends_through_run_main() -> None:
    """Or else an interrupt would end it without its clean-up: end_at_interrupt leaves that to run_main."""
    programs = [path for room in ("scripts", "train") for path in (ROOT / room).rglob("*.py")]
    programs = [path for path in programs if '__name__ == "__main__"' in path.read_text()]
    assert len(programs) > 30
    without = {path.name for path in programs if "run_main(" not in path.read_text()}
    assert without == {"kconf.py", "bootstrap_probe.py"}, "one calls lib.kconf.cli, one is called by a path"


def test_an_interrupt_says_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    @interrupted_as("interrupted while planning")
    def main(text: str) -> int:
        raise KeyboardInterrupt(text) if text else KeyboardInterrupt

    def bare() -> int:
        raise KeyboardInterrupt

    assert [run_main(each) for each in (bare, lambda: main(""), lambda: main("the run is done"))] == [130] * 3
    assert capsys.readouterr().err == "interrupted\ninterrupted while planning\nthe run is done\n"


def test_mistakes_of_ours_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)


def test_a_toolkit_error_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ToolkitError("no", why="reason", todo="way out")

    assert run_main(main) == 1
    assert capsys.readouterr().err == "error: no: reason; way out\n"

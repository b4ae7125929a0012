import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from lib.errors import ToolkitError
from lib.runs import console
from lib.runs.console import Console
from tests.support.work import calls

ROOT = Path(__file__).parents[3]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A monotonic clock that shows [0]."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def update(shown: Console, step: int, fraction: float = 0.5) -> None:
    shown.update(
        step, values={"loss": 0.12345678, "accuracy": 0.5}, fraction=fraction, samples_per_second=21_345.6
    )


# Lines and the log


def test_lines_are_printed_and_logged_with_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    Console(log).log("64 × 8 → 512\nsecond")
    Console(log).log("[bold]as it is[/bold]")
    assert capsys.readouterr().out == "64 × 8 → 512\nsecond\n[bold]as it is[/bold]\n"
    lines = log.read_text(encoding="utf-8").splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["64 × 8 → 512", "second", "[bold]as it is[/bold]"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line.split()[0]) for line in lines)


def test_a_log_that_fails_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Console(tmp_path)  # a directory
    shown.log("one")
    shown.log("two")
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\n"
    assert captured.err.count("\n") == 1 and "Is a directory; continuing without the log" in captured.err


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", "64 x 8 -> 512 ? ?\nmod?le "),
        ("latin-1", "64 × 8 -> 512 ? ?\nmodèle "),
        ("utf-8", "64 × 8 → 512 \N{SNOWMAN} ?\nmodèle "),
    ],
)
def test_any_encoding_of_the_output_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, expected: str
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    text = "64 × 8 → 512 \N{SNOWMAN} \udcff"  # the last one is a byte of a file name that is not UTF-8
    shown = Console(tmp_path / "log.txt")
    shown.log(text)
    shown.start(10, description="modèle")
    update(shown, 1)
    shown.stop()
    assert raw.getvalue().startswith(expected.encode(encoding))
    assert "64 × 8 → 512 \N{SNOWMAN} \\udcff" in (tmp_path / "log.txt").read_text(encoding="utf-8")


def test_a_full_standard_output_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(ToolkitError, match=r"cannot write to standard output: No space left"):
            Console().log("text")


def test_a_reader_that_left_is_not_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, write_through=True))
        with pytest.raises(BrokenPipeError):
            Console().log("text")


# Progress where there is no terminal


def test_plain_lines_come_at_most_every_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Console()
    shown.start(200, description="lenet5")
    for step in range(1, 101):
        update(shown, step, step / 200)
        clock[0] += 0.25
    shown.stop()
    update(shown, 101)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # after 0, 10 and 20 seconds
    assert lines[0] == "lenet5   0%  step 1/200  loss 0.1235  accuracy 50.00%  21.3k samples/s"
    assert lines[1].startswith("lenet5  20%  step 41/200") and lines[1].endswith("  0:00:40 left")


def test_the_peak_of_memory_is_read_only_for_a_line(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    read = []

    def memory_bytes() -> int:
        read.append(clock[0])
        return 3 * 10**9

    shown = Console(memory_bytes=memory_bytes)
    shown.start(100, description="lenet5")
    for step in range(1, 51):
        shown.update(step, values={}, fraction=step / 100, samples_per_second=0)
        clock[0] += 0.25
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lenet5   1%  step 1/100  3.00 GB" and "  3.00 GB  0:00:" in lines[1]
    assert len(read) == len(lines) == 2


def test_an_evaluation_shows_how_far_it_is(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    shown = Console()
    shown.start(100, description="lenet5")
    for done in (64, 128, 192):
        shown.evaluate(40, done, 4000)
        clock[0] += 6
    assert capsys.readouterr().out.splitlines() == [
        "lenet5   2%  step 40  evaluating 64 of 4,000 samples",
        "lenet5   5%  step 40  evaluating 192 of 4,000 samples",
    ]


def test_a_resumed_run_estimates_from_where_it_began(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Console()
    shown.start(None, description="x")
    update(shown, 800, 0.8)
    clock[0] += 3600
    update(shown, 900, 0.9)
    shown.stop()
    first, second = capsys.readouterr().out.splitlines()
    assert "left" not in first and "step 800 " in first
    assert second.endswith("1:00:00 left")


@pytest.mark.slow
def test_a_progress_line_between_two_updates_is_nearly_free(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Console()
    shown.start(10, description="x")
    values = {"loss": 0.1}
    shown.update(0, values=values, fraction=0.5, samples_per_second=1.0)
    between = calls(lambda: shown.update(1, values=values, fraction=0.5, samples_per_second=1.0))
    shown.stop()
    assert capsys.readouterr().out.count("\n") == 1
    assert between <= 5


def test_a_download_is_a_plain_line_every_five_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with console.download_progress() as progress:
        for done in range(0, 12_000_000, 1_000_000):
            progress("train.gz", done, 20_000_000)
            clock[0] += 1
        clock[0] += 5
        progress("test.gz", 2_500_000, 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "train.gz  25%  5.0 of 20.0 MB",
        "train.gz  50%  10.0 of 20.0 MB",
        "test.gz 2.5 MB",
    ]


def test_rich_is_left_alone_without_a_terminal() -> None:
    code = (
        "import sys; from lib.runs.console import Console; c = Console();"
        "c.start(1, description='x'); c.log('x');"
        "c.update(1, values={}, fraction=1.0, samples_per_second=1.0); c.stop();"
        "assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


# Progress on a terminal


SHORT_RUN = """if True:
        import sys, threading, time
        from lib.runs.console import Console
        shown = Console()
        shown.start(500, description="resnet18")
        for step in range(500):
            values = {"loss": 0.0123456, "accuracy": 0.98765, "learning_rate": 0.001}
            shown.update(step, values=values, fraction=step / 500, samples_per_second=21345.0)
            if step == 250:
                shown.log("evaluation × [b] " + "long " * 12)
                shown.log(f"{threading.active_count()} thread")
            time.sleep(0.0006)
        shown.stop()
        shown.log("the end")
"""

DOWNLOAD = """if True:
        from lib.runs.console import download_progress
        try:
            with download_progress() as progress:
                progress("train.gz", 5_000_000, 20_000_000)
                print("a line [b] above")
                raise ValueError
        except ValueError:
            print("the end")
"""


def on_a_terminal(columns: int, *, code: str = SHORT_RUN, **environment: str) -> str:
    """What a terminal receives from a program, with escape sequences."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
    }
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=slave,
        stderr=slave,
        env=kept | {"TERM": "xterm"} | environment,
    )
    os.close(slave)
    received = b""
    try:
        while data := os.read(master, 65536):
            received += data
    except OSError:
        pass  # how the kernel says that the other end is closed
    os.close(master)
    assert child.wait(timeout=30) == 0, received.decode()
    return received.decode()


def drawn(received: str) -> list[str]:
    """The progress lines among what the terminal received."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", received)
    return [line for line in re.split(r"[\r\n]+", text) if "%" in line]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [20, 40, 80, 140])
def test_the_line_fits_the_terminal(columns: int) -> None:
    received = on_a_terminal(columns)
    lines = drawn(received)
    assert all(len(line) <= columns for line in lines)
    assert ("loss 0.01235" in lines[-1]) == (columns >= 40)
    assert ("resnet18" in lines[-1]) == (columns >= 140)
    assert ("step" in lines[-1]) == (columns >= 140)
    assert "\r\x1b[2Kevaluation × [b] " + "long " * 12 in received and "the end\r\n" in received
    assert "1 thread\r\n" in received, "none may compete with training"
    assert received.count("\x1b[?25h") == received.count("\x1b[?25l") == 1, "the cursor is back"


@pytest.mark.slow
def test_eighty_columns_show_what_a_run_is_watched_for() -> None:
    code = SHORT_RUN.replace(', "learning_rate": 0.001', "").replace(
        "Console()", "Console(memory_bytes=lambda: 370_000_000)"
    )
    last = drawn(on_a_terminal(80, code=code))[-1]
    for part in (" left", "loss 0.01235", "accuracy 98.77%", "21.3k samples/s", "0.37 GB"):
        assert part in last, last


@pytest.mark.slow
def test_a_terminal_is_redrawn_at_most_four_times_a_second() -> None:
    # 0.3 s of sleep, more on a busy machine; one redraw for the line above it and one at the end
    began = time.perf_counter()
    lines = drawn(on_a_terminal(80))
    assert 2 <= len(lines) <= (time.perf_counter() - began) / 0.25 + 4


@pytest.mark.slow
def test_a_terminal_without_unicode() -> None:
    received = on_a_terminal(80, PYTHONIOENCODING="ascii")
    assert received.isascii()
    assert "evaluation x [b]" in received and "loss 0.01235" in received


@pytest.mark.slow
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    received = on_a_terminal(80, TERM="dumb")
    assert "\x1b" not in received
    assert len(drawn(received)) == 1


def test_a_download_is_a_line_that_goes() -> None:
    received = on_a_terminal(80, code=DOWNLOAD)
    assert [line.split()[0] for line in drawn(received)] == ["train.gz"] * len(drawn(received))
    assert "25%  5.0 of 20.0 MB" in drawn(received)[0] and "a line [b] above" in received
    assert received.rstrip().endswith("the end")
    assert received.count("\x1b[?25h") == received.count("\x1b[?25l") == 1, "the cursor is back"

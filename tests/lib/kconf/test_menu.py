"""The menu in a pseudo-terminal: keys in, screen out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import menuconfig
import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (
    "import sys, pathlib; from lib.kconf.cli import main;sys.exit(main(['menuconfig'], root=pathlib.Path()))"
)
ESCAPES = re.compile(rb"\x1b(?:[()][A-Z0-9]|\[[0-9;?]*[A-Za-z]|[=>])")
DOWN, ENTER, BACKSPACE = b"j", b"\r", b"\x7f"


class Terminal:
    """A menu that runs in a terminal of 100 x 40 characters."""

    def __init__(self, directory: Path, terminal: str = "xterm") -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        environment = {
            "PATH": "/usr/bin:/bin",
            "TERM": terminal,
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C.UTF-8",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND],
            cwd=directory,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self.seen = b""

    def expect(self, text: str, seconds: float = 20) -> str:
        """Read until `text` is shown; gives all that was shown since the last call."""
        deadline = time.monotonic() + seconds
        while text.encode() not in ESCAPES.sub(b"", self.seen):
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} was not shown, but {ESCAPES.sub(b'', self.seen)!r}"
            if select.select([self.master], [], [], left)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:  # the other end is closed: the menu has ended
                    raise AssertionError(f"ended after {ESCAPES.sub(b'', self.seen)!r}") from None
        shown, self.seen = ESCAPES.sub(b"", self.seen).decode(errors="replace"), b""
        return shown

    def type(self, *keys: bytes) -> None:
        for key in keys:
            os.write(self.master, key)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def project(tmp_path):
    shutil.copy(ROOT / "tests/fixtures/kconf/tree/Kconfig", tmp_path)
    return tmp_path


@pytest.fixture
def terminal(project) -> Iterator[Terminal]:
    opened = Terminal(project)
    yield opened
    opened.close()


def test_names_that_the_front_replaces_are_there():
    for name in (
        "_check_valid",
        "_range_info",
        "_needs_save",
        "_error",
        "_getch_compat",
        "_node_str",
        "_info_str",
    ):
        assert callable(getattr(menuconfig, name))


def test_choose_and_save(project, terminal):
    terminal.expect("Model (LeNet-5)")
    terminal.type(ENTER)
    terminal.expect("MLP")
    terminal.type(DOWN, b" ")  # selecting a member goes back to the menu
    terminal.expect("Model (GPT-2)")
    terminal.type(b"q")
    terminal.expect("Save configuration?")
    terminal.type(b"y")
    terminal.expect("Saved .config")
    assert terminal.process.wait(20) == 0
    lines = (project / ".config").read_text().splitlines()
    assert "CONFIG_MODEL_GPT2=y" in lines and 'CONFIG_MODEL="gpt2"' in lines
    assert sorted(path.name for path in project.iterdir()) == [".config", "Kconfig"]


def test_dialog_obeys_the_value_line(project, terminal):
    terminal.expect("Model (LeNet-5)")
    terminal.type(b"/")
    terminal.expect("Jump to")
    terminal.type(b"LEARNING_RATE", ENTER)
    terminal.expect("Learning rate")
    terminal.type(ENTER)
    terminal.expect("Value: float, 0 < x <= 10")
    terminal.type(BACKSPACE * 5, b"abc", ENTER)
    terminal.expect('CONFIG_LEARNING_RATE="abc" is not a number')
    terminal.type(b" ")
    terminal.expect("Value: float, 0 < x <= 10")
    terminal.type(BACKSPACE * 3, b"0.5", ENTER)
    terminal.type(b"q")
    terminal.expect("Save configuration?")
    terminal.type(b"y")
    terminal.expect("Saved .config")
    assert terminal.process.wait(20) == 0
    assert 'CONFIG_LEARNING_RATE="0.5"' in (project / ".config").read_text().splitlines()


def test_the_save_dialog_does_not_write_over_other_files(project, terminal):
    (project / "LICENSE").write_text("Permission is hereby granted\n")
    terminal.expect("Model (LeNet-5)")
    terminal.type(b"s")
    terminal.expect("Filename to save configuration to")
    terminal.type(BACKSPACE * 80, b"LICENSE", ENTER)
    terminal.expect("LICENSE is not a configuration")
    assert (project / "LICENSE").read_text() == "Permission is hereby granted\n"


def test_only_what_a_loaded_file_lacks_is_new(project):
    fresh = Terminal(project)
    shown = fresh.expect("Model (LeNet-5)")
    fresh.type(b"q")
    shown += fresh.expect("Save configuration?")
    fresh.type(b"y")
    shown += fresh.expect("Saved .config")
    fresh.close()
    assert "Epochs" in shown and "(NEW)" not in shown
    lines = (project / ".config").read_text().splitlines(keepends=True)
    (project / ".config").write_text("".join(line for line in lines if "NUM_EPOCHS" not in line))
    older = Terminal(project)
    assert re.findall(r"(\w+) \(NEW\)", older.expect("(NEW)")) == ["Epochs"]
    older.close()


def test_a_hidden_option_says_what_shows_it(terminal):
    terminal.expect("Model (LeNet-5)")
    terminal.type(b"/")
    terminal.expect("Jump to")
    terminal.type(b"BATCH_SIZE", ENTER)
    needs = "needs CONFIG_HYPER_PARAM_MANUAL=y (now"
    terminal.expect(f"(hidden: {needs}")
    terminal.type(b"?")
    assert f"Hidden: {needs}" in terminal.expect("CONFIG_HYPER_PARAM_MANUAL=y shows it")


def test_leaving_an_unchanged_file_asks_nothing(project, terminal):
    terminal.expect("Model (LeNet-5)")
    terminal.type(b"q")
    terminal.expect("Save configuration?")  # there is none yet
    terminal.type(b"y")
    terminal.process.wait(20)
    os.utime(project / ".config", (1, 1))
    again = Terminal(project)
    again.expect("Model (LeNet-5)")
    again.type(b"q")
    again.expect("No changes to save")
    assert again.process.wait(20) == 0
    again.close()
    assert (project / ".config").stat().st_mtime == 1


def test_faulty_file_opens_only_without_its_faults(project):
    faulty = "CONFIG_NUM_EPOCHS=0\nCONFIG_DEBUG=y\n"
    (project / ".config").write_text(faulty)
    refused = Terminal(project)
    shown = refused.expect("Edit the rest?")
    assert ".config:1: CONFIG_NUM_EPOCHS=0 is outside 1..1000000" in shown
    refused.type(b"n\n")
    refused.expect("nothing was changed")
    assert refused.process.wait(20) == 2
    refused.close()
    assert (project / ".config").read_text() == faulty
    opened = Terminal(project)
    opened.expect("Edit the rest?")
    opened.type(b"y\n")
    opened.expect("Model (LeNet-5)")
    opened.type(b"q")
    opened.expect("Save configuration?")
    opened.type(b"y")
    opened.expect("Saved .config")
    assert opened.process.wait(20) == 0
    opened.close()
    lines = (project / ".config").read_text().splitlines()
    assert "CONFIG_DEBUG=y" in lines and "CONFIG_NUM_EPOCHS=10" in lines
    assert (project / ".config.old").read_text() == faulty


def test_file_of_which_nothing_can_be_read_does_not_open(project):
    (project / ".config").write_bytes(b"\xff\xfe")
    opened = Terminal(project)
    shown = opened.expect("nothing was changed")
    assert "is not UTF-8" in shown and "Edit the rest?" not in shown
    assert opened.process.wait(20) == 2
    opened.close()


def test_faulty_file_in_the_load_dialog_changes_nothing(project, terminal):
    (project / "bad").write_text("CONFIG_DEBUG=y\nCONFIG_NUM_EPOCHS=0\n")
    terminal.expect("Model (LeNet-5)")
    terminal.type(b"o")
    terminal.expect("You have unsaved changes")  # there is no file yet
    terminal.type(b"o")
    terminal.expect("File to load")
    terminal.type(BACKSPACE * 80, b"bad", ENTER)
    terminal.expect("bad:2: CONFIG_NUM_EPOCHS=0 is outside 1..1000000")
    terminal.type(b" ")
    terminal.expect("File to load")
    terminal.type(b"\x1b")
    terminal.type(b"q")
    terminal.expect("Save configuration?")
    terminal.type(b"y")
    terminal.expect("Saved")
    assert terminal.process.wait(20) == 0
    assert "# CONFIG_DEBUG is not set" in (project / ".config").read_text()


@pytest.mark.parametrize("name", ["no-such-terminal", "dumb"])
def test_a_terminal_that_cannot_show_a_menu_is_one_line(project, name):
    opened = Terminal(project, terminal=name)
    shown = opened.expect("set TERM, say to xterm")
    assert f"error: menuconfig cannot use the terminal TERM='{name}'" in shown
    assert "Traceback" not in shown
    assert opened.process.wait(20) == 2
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["menuconfig", "nconfig", "guiconfig", "xconfig"])
def test_without_a_terminal_or_a_display_is_one_line(project, command):
    """That names the command as it was called, and no file that is not there."""
    done = without_a_terminal(project, command)
    assert done.returncode == 2
    if command in ("menuconfig", "nconfig"):
        assert done.stderr == f"error: {command} needs a terminal; use make defconfig-NAME\n"
        (project / ".config").write_text("CONFIG_NUM_EPOCHS=3\n")
        done = without_a_terminal(project, command)
        assert done.stderr == f"error: {command} needs a terminal; use make setconfig\n"
    else:
        assert done.stderr.startswith(f"error: {command} ") and done.stderr.count("\n") == 1


def without_a_terminal(project: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND.replace("menuconfig", command)],
        cwd=project,
        env={"PATH": "/usr/bin:/bin", "TERM": "xterm", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_terminal_that_has_gone_ends_the_menu(project):
    opened = Terminal(project)
    opened.expect("Model (LeNet-5)")
    os.close(opened.master)
    try:
        assert opened.process.wait(20) != 0
    finally:
        opened.process.kill()
    assert not (project / ".config").exists()

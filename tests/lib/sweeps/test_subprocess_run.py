"""Concurrent training processes: how they end, by themselves and by signals, and what is reported."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.errors import Suspended, error_in
from lib.sweeps.subprocess_run import Children, ChildRun

# What stands for `python -m train`, which takes seconds to begin: its configuration is what it does.
PROGRAM = """
import json, os, pathlib, signal, sys, time
place = pathlib.Path(sys.argv[2])
todo = pathlib.Path(os.environ["KCONFIG_CONFIG"]).read_text()

def stop(number, _):
    print("error: stopped by SIGTERM after step 7; make resume continues from there", file=sys.stderr)
    sys.exit(75)

if todo == "waits":
    signal.signal(signal.SIGTERM, stop)
elif todo == "is deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif todo == "begins slowly":
    pass
elif todo == "is interrupted":
    print("interrupted", file=sys.stderr)
    sys.exit(130)
elif todo == "fails":
    print("error: training has diverged", file=sys.stderr)
    print("  12 % of 5 steps, loss 3.1", flush=True)
    sys.exit(1)
elif todo == "dies":
    print("  12 % of 5 steps", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    number = len(list(place.glob("m/*"))) + 1
    run = place / "m" / f"20260101T00000{number}Z-00000000"
    run.mkdir(parents=True)
    (run / "config").touch()
    (run / "status.json").write_text(json.dumps({"state": "done"}))
    if todo != "ends slowly":
        sys.exit()
(place / "ready").touch()
time.sleep(60)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A source tree whose training is PROGRAM."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__main__.py").write_text(PROGRAM)
    return tmp_path


def trained(root: Path, *todos: str, workers: int = 2) -> tuple[Children, list[ChildRun]]:
    with Children() as children:

        def train(number: int) -> ChildRun:
            return children.train(root / str(number), todos[number], root=root)

        return children, children.map(train, range(len(todos)), workers=workers)


def when(root: Path, *numbers: int, do: Callable[[], object]) -> threading.Thread:
    """Do that once these are in the middle of it."""

    def wait() -> None:
        while not all((root / str(number) / "ready").exists() for number in numbers):
            time.sleep(0.005)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_what_went_well_and_what_failed(root: Path) -> None:
    children, (done, failed, killed) = trained(root, "", "fails", "dies")
    children.check(todo="")
    assert done.run is not None and not done.reason and done.peak_memory_mb > 1
    assert failed.reason == "exit status 1: training has diverged", (
        "not the progress that was written after it"
    )
    assert killed.reason == "ended by signal 9 (Killed) without an error; its last output: 12 % of 5 steps"
    assert not any(each.stopped for each in (done, failed, killed))


def test_an_error_of_an_earlier_attempt_is_no_reason(root: Path) -> None:
    trained(root, "fails")
    _, (killed,) = trained(root, "dies")
    assert "without an error" in killed.reason


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_nothing_is_begun_after_it(root: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    when(root, 0, 1, do=lambda: os.kill(os.getpid(), number))
    children, found = trained(root, "waits", "waits", "")
    assert [each.reason for each in found] == [
        *["stopped by SIGTERM after step 7"] * 2,
        "",
    ]
    assert all(each.stopped and each.run is None for each in found) and not (root / "2" / "m").exists()
    with pytest.raises(Suspended, match=f"stopped by {number.name}; and so on") as error:
        children.check(todo="and so on")
    assert error.value.exit_code == 75 and signal.getsignal(number) is before


def test_a_signal_before_and_after_training_is_no_failure(root: Path) -> None:
    when(root, 0, 1, do=lambda: os.kill(os.getpid(), signal.SIGINT))
    _, (done, begun) = trained(root, "ends slowly", "begins slowly")
    assert done.run is not None and not done.reason and not done.stopped, "its result counts"
    assert begun.run is None and begun.stopped
    assert begun.reason == "stopped before it could save"


def test_what_was_done_before_is_no_outcome(root: Path) -> None:
    """Neither where training begins again, nor where it is stopped."""
    for number in (1, 2):
        _, (done,) = trained(root, "")
        assert done.run is not None and done.run.name.startswith(f"20260101T00000{number}Z")
    _, (begun,) = trained(root, "is interrupted")
    assert begun.run is None and begun.stopped and begun.reason == "stopped before it could save"


def test_a_run_that_somebody_else_stopped_stops_them_all(root: Path) -> None:
    def stop_one() -> None:
        os.kill(int((root / "0" / "pid").read_text()), signal.SIGTERM)

    (root / "train" / "__main__.py").write_text(
        PROGRAM.replace(
            '(place / "ready")', '(place / "pid").write_text(str(os.getpid()))\n(place / "ready")'
        )
    )
    when(root, 0, 1, do=stop_one)
    children, found = trained(root, "waits", "waits", "")
    assert all(each.stopped for each in found) and children.stopped_by == "a signal to one of the runs"


def test_a_run_that_an_interrupt_ended_stops_them_all_in_plain_words(root: Path) -> None:
    children, found = trained(root, "is interrupted", "", workers=1)
    assert found[0].reason == "stopped before it could save" and all(each.stopped for each in found)
    assert children.stopped_by == "a signal to one of the runs" and not (root / "1" / "m").exists()


def test_a_second_sigint_kills(root: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers send it again, and it changes nothing
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    when(root, 0, do=twice)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trained(root, "is deaf")
    assert time.monotonic() - began < 30


TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1\n    x\nRuntimeError: {}\n'


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("step 1\nerror: it broke\nstep 2\n", "it broke"),
        ("a b/x:3: no such thing\nerror: 1 fault\n", "a b/x:3: no such thing / 1 fault"),
        ("step 1: loss\nerror: it broke\n", "it broke"),
        (TRACE.format("first") + TRACE.format("then") + "step 2\n", "RuntimeError: then"),
        (TRACE.format("why") + "error: process 1 of 2 ended\n", "RuntimeError: why / process 1 of 2 ended"),
        ("".join(f"[rank1]: {line}\n" for line in TRACE.format("why").splitlines()), "RuntimeError: why"),
        ("Epoch 3\rEpoch 4\n", ""),
        ("", ""),
    ],
)
def test_the_error_in_what_was_written(output: str, error: str) -> None:
    assert error_in(output) == error

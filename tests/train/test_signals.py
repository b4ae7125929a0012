"""Signals: the first is a wish, and SIGINT after it is an order."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.errors import CompileError, Diverged, run_main
from train import signals
from train.signals import Stopped, StopRequest, ended_once, importing

ROOT = Path(__file__).resolve().parents[2]
SWALLOWS = """
import os, signal, sys, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    sys.exit("went on")
"""
NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def outer() -> Iterator[list[int]]:
    """Signals that come to the handlers which were there before."""
    seen: list[int] = []

    def handler(number: int, _: types.FrameType | None) -> None:
        seen.append(number)

    previous = {number: signal.signal(number, handler) for number in NUMBERS}
    yield seen
    for number, old in previous.items():
        signal.signal(number, old)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("second", NUMBERS)
def test_the_first_is_remembered_and_an_interrupt_after_it_goes_through(
    number: int, second: int, outer: list[int]
) -> None:
    with StopRequest() as stop:
        assert stop.signal == 0
        send(number)
        assert stop.signal == number and outer == []
        send(second)
        assert stop.signal == number and outer == ([second] if second == signal.SIGINT else [])


def test_the_first_is_answered_where_that_is_wanted(capfd: pytest.CaptureFixture[str]) -> None:
    for told in (True, False):
        with StopRequest(announce=told):
            send(signal.SIGTERM)
        assert ("stopping after this step" in capfd.readouterr().err) == told


def test_handlers_are_restored_at_the_end(outer: list[int]) -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with StopRequest():
        assert [signal.getsignal(number) for number in NUMBERS] != before
    assert [signal.getsignal(number) for number in NUMBERS] == before
    with pytest.raises(ValueError, match="inside"), StopRequest() as stop:
        send(signal.SIGTERM)
        raise ValueError("inside")
    assert stop.signal == signal.SIGTERM
    assert [signal.getsignal(number) for number in NUMBERS] == before
    assert outer == []


def test_a_second_interrupt_is_a_keyboard_interrupt() -> None:
    # What a program in the background inherits is a SIGINT that is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), StopRequest():
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_what_ends_by_itself_is_not_ended_twice(outer: list[int]) -> None:
    with pytest.raises(ValueError, match="else"), ended_once():
        raise ValueError("something else")
    send(signal.SIGTERM)
    assert outer == [signal.SIGTERM]
    with pytest.raises(Stopped), ended_once():
        raise Stopped(15, 7)
    send(signal.SIGTERM)
    assert outer == [signal.SIGTERM]


def test_a_run_that_continues_by_itself_says_so(
    outer: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @ended_once()
    def stopped() -> int:
        raise Stopped(15, 7)

    monkeypatch.setattr(signals, "restarts_by_itself", lambda: True)
    assert run_main(stopped) == 75
    told = "a node joins or leaves: stopping after step 7, from which training resumes\n"
    assert capsys.readouterr().err == told
    send(signal.SIGTERM)
    assert not outer, "it ends"


def test_an_import_is_ended_by_an_interrupt_and_collects_nothing() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(ValueError, match="inside"), importing():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL and not gc.isenabled()
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and gc.isenabled()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with importing():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_a_library_swallows_ends_the_program(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(SWALLOWS)
    done = subprocess.run(
        [sys.executable, "-m", "train", "eval"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        check=False,
    )
    assert done.returncode == -signal.SIGINT


def test_a_stopped_run_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> int:
        raise Stopped(15, 7)

    assert run_main(stopped) == 75
    told = capsys.readouterr().err
    assert told == "error: stopped by SIGTERM after step 7; make resume continues from there\n"


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.usefixtures("outer")
def test_a_signal_that_ends_a_compiler_stops_the_run(number: signal.Signals) -> None:
    with pytest.raises(Stopped, match=f"stopped by {number.name} after step 5"), StopRequest() as stop:
        stop.saved_step = 5
        send(number)
        raise CompileError("the compiler was ended")


@pytest.mark.usefixtures("outer")
def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(CompileError), StopRequest():
        raise CompileError("the compiler failed")
    with pytest.raises(Diverged), StopRequest():
        send(signal.SIGTERM)
        raise Diverged("the loss is not finite")

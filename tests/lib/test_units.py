"""Times in words: one form for plans, reports and benchmarks."""

from __future__ import annotations

import pytest

from lib.errors import ConfigError
from lib.units import counted, flop_text, range_text, seconds_text, some_of, whole_number


def test_one_of_something_is_singular() -> None:
    assert counted(2, "process") == "2 processes"
    assert [counted(count, "device") for count in (0, 1, 2)] == ["0 devices", "1 device", "2 devices"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((2.71e-5,), "27.1 us"),
        ((1.38e-3,), "1.38 ms"),
        ((0.999,), "999 ms"),
        ((12.345,), "12.3 s"),
        ((90.0,), "1.5 minutes"),
        ((3600.0, 3600.0), "1 hour"),
        ((7200.0,), "2 hours"),
        ((2.6e-3, 13e-3), "2.6 to 13 ms"),
        ((0.202, 1.01), "0.202 to 1.01 s"),
        ((40.0, 90.0), "40 to 90 s"),
        ((3000.0, 5400.0), "50 to 90 minutes"),
        ((3600.0, 7200.0), "1 to 2 hours"),
        ((0.5, 7200.0), "0.5 to 7,200 s"),
        ((0.0, 0.0), "less than 0.001 us"),
        ((0.0, 2.0), "up to 2 s"),
    ],
)
def test_a_time_has_one_unit_that_both_ends_can_be_read_in(seconds: tuple[float, ...], text: str) -> None:
    assert seconds_text(*seconds) == text


@pytest.mark.parametrize(
    ("flop", "text"),
    [
        (3.87e8, "387 MFLOP"),
        (2.5e9, "2.5 GFLOP"),
        (3.059e14, "306 TFLOP"),
        (1.83e15, "1,830 TFLOP"),
        (20, "2e-05 MFLOP"),
    ],
)
def test_operations_have_a_unit(flop: float, text: str) -> None:
    assert flop_text(flop) == text


def test_what_is_below_the_least_has_no_figures() -> None:
    assert range_text(0.001, 0.02, least=0.01) == "up to 0.02"


def test_of_many_names_the_first_are_shown() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    assert [some_of(names[:count]) for count in (0, 1, 4)] == ["", "a", "a, b, c, d"]
    assert some_of(names) == "a, b, c, d and 2 more" and some_of(names, most=1) == "a and 5 more"


def test_a_number_that_is_too_large_is_refused() -> None:
    assert whole_number("7", "SEED", least=0, below=8) == 7
    with pytest.raises(ConfigError, match="SEED=8 is not a whole number from 0 below 8"):
        whole_number("8", "SEED", least=0, below=8)

"""Times in words: one form for plans, reports and benchmarks."""

from __future__ import annotations

import pytest

from lib.units import range_text, seconds_text


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
        ((40.0, 90.0), "0.667 to 1.5 minutes"),
        ((0.0, 0.0), "less than 0.001 us"),
        ((0.0, 2.0), "less than 0.001 to 2 s"),
    ],
)
def test_a_time_has_the_unit_of_its_longer_end(seconds: tuple[float, ...], text: str) -> None:
    assert seconds_text(*seconds) == text


def test_what_is_below_the_least_has_no_figures() -> None:
    assert range_text(0.001, 0.02, least=0.01) == "less than 0.01 to 0.02"

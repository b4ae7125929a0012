"""The `Value:` line: its grammar, and what it lets through."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.kconf.values import is_plain_int, parse_rule

GOOD = [
    ("float, 0 < x <= 10", "1e-4", 0.0001),
    ("float, 0 < x <= 10", ".5", 0.5),
    ("float, 0 < x <= 10", "1", 1.0),
    ("float, 0 < x <= 10", "1.", 1.0),
    ("float, 0 < x <= 10", "10", 10.0),
    ("float, 0 <= x < 1", "0", 0.0),
    ("float", "-1E+3", -1000.0),
    ("float, x >= -1", "-1", -1.0),
    ("float, x < 3", "-7", -7.0),
    ("int, 1 <= x <= 99", "99", 99),
    ("int list, 1 <= x <= 99", "75,50", (75, 50)),
    ("int list, rising, 1 <= x <= 99", "9,50,75", (9, 50, 75)),
    ("int list, rising", "7", (7,)),
    ("float list, rising, x >= 0", "0.5,10", (0.5, 10.0)),
    ("float list, x >= 0", "1,.5", (1.0, 0.5)),
    ("path", "a b/c", "a b/c"),
    ("text", "", ""),
    ("text", '$HOME "#', '$HOME "#'),
]


@pytest.mark.parametrize(("rule", "text", "value"), GOOD)
def test_value_is_typed(rule, text, value):
    parsed = parse_rule(rule).parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


BAD = [
    ("float, 0 < x <= 10", "0"),
    ("float, 0 < x <= 10", "10.1"),
    ("float, 0 <= x < 1", "1"),
    ("float, 0 <= x < 1", "-0.1"),
    ("float", "1_0"),
    ("float", "٣"),
    ("float", "nan"),
    ("float", "-inf"),
    ("float", "1e999"),
    ("float", "1e-999"),
    ("float", "0x10"),
    ("float", "."),
    ("float", "e5"),
    ("float", "1 "),
    ("float, x > 0", "0"),
    ("int, 1 <= x <= 99", "1.0"),
    ("int, 1 <= x <= 99", "007"),
    ("int list, 1 <= x <= 99", "1,,2"),
    ("int list, rising, 1 <= x <= 99", "75,50"),
    ("int list, rising, 1 <= x <= 99", "50,50"),
    ("float list, rising", "0.5,0.50"),
    ("path", ""),
]


@pytest.mark.parametrize(("rule", "text"), BAD)
def test_value_is_refused_with_its_rule(rule, text):
    with pytest.raises(ValueError) as caught:
        parse_rule(rule).parse(text)
    assert f"(Value: {rule})" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "number",
        "float 0 < x",
        "float, 0 > x",
        "int list,1 <= x",
        "path, x > 1",
        "Float",
        "int, rising",
        "int list rising",
    ],
)
def test_rule_that_is_not_in_the_grammar(text):
    with pytest.raises(ValueError, match="not understood"):
        parse_rule(text)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_its_own_spelling(number):
    parsed = parse_rule("float").parse(repr(number))
    assert parsed == number
    assert math.copysign(1, parsed) == 1 or number < 0  # there is no negative zero


@given(st.integers(-(10**18), 10**18))
def test_every_integer_has_one_spelling(number):
    assert is_plain_int(str(number))
    assert not is_plain_int(f"{number:+05d}" if number >= 0 else f"-0{-number}")

"""What was recorded before the tree was rebuilt still holds: configurations, plans and lib.hyperparams."""

from __future__ import annotations

import pytest

from tests import record


@pytest.mark.slow
@pytest.mark.parametrize("part", ["plans", "hyperparams"])
def test_the_record_compares_equal(part: str) -> None:
    """Those of weights and of resumed runs take minutes: python -m tests.record compare."""
    known = record.read(part)
    assert known and record.changed(record.PARTS[part](), known) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers", [range(0, record.RANDOM, 5), pytest.param(range(record.RANDOM), marks=pytest.mark.long)]
)
def test_configurations_compare_equal(numbers: range) -> None:
    """All that are shipped, and so many random ones."""
    left_out = {f"random-{number:03}" for number in range(record.RANDOM) if number not in numbers}
    known = {name: lines for name, lines in record.read("configurations").items() if name not in left_out}
    assert len(known) > len(numbers)
    assert record.changed(record.configurations(numbers), known) == {}


@pytest.mark.slow
def test_options_newer_than_the_record_leave_identities_as_they_were() -> None:
    """Else no run from before would be resumed, and a sweep would train all its runs again."""
    assert record.newer_in_identities(range(0, record.RANDOM, 10)) == {}


@pytest.mark.parametrize(
    ("found", "different"),
    [
        ({"a": ["x=1"], "new": ["x=9"]}, []),
        ({"a": ["x=2"]}, ["a"]),
        ({"a": []}, ["a"]),
        ({}, ["a"]),
        ({"a": ["x=1", "y=1"]}, ["a"]),
    ],
)
def test_a_change_of_what_was_recorded_is_told(found: dict[str, list[str]], different: list[str]) -> None:
    assert list(record.changed(found, {"a": ["x=1"]})) == different


def test_only_options_newer_than_the_record_are_left_out() -> None:
    written = {"a": ["CONFIG_X=1", "CONFIG_Y=y"], "b": ["CONFIG_X=1"]}
    lines = ["# CONFIG_Y is not set", "CONFIG_NEW=3", "CONFIG_X=2", *record.WIDENED]
    assert record.of_the_record("b", lines, written) == ["# CONFIG_Y is not set", "CONFIG_X=2"]

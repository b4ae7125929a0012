"""`make test-faults` counts, and every test that it names is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import faults


def test_it_counts_and_fails_where_one_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requested: list[str] = []
    failing = list(faults.TESTS)[1]

    def passes(test: str) -> bool:
        requested.append(test)
        return (test, requested.count(test)) != (failing, 2)

    monkeypatch.setattr(faults, "_passes", passes)
    assert faults.main() == 1
    assert {test: requested.count(test) for test in requested} == dict(faults.TESTS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        f"{times - (test == failing)} of {times}" for test, times in faults.TESTS.items()
    ]
    monkeypatch.setattr(faults, "_passes", lambda _: True)
    assert faults.main() == 0


def test_each_is_tried_often_enough() -> None:
    assert min(faults.TESTS.values()) >= 5 and max(faults.TESTS.values()) == 20


@pytest.mark.parametrize(
    ("last", "was_run"),
    [
        ("1 passed in 3.21s", True),
        ("2 passed in 61.02s (0:01:01)", True),
        ("1 skipped in 0.02s", False),
        ("1 passed, 1 skipped in 3.21s", False),
        ("no tests ran in 0.01s", False),
        ("", False),
    ],
)
def test_a_test_that_is_skipped_does_not_count(last: str, was_run: bool) -> None:
    assert faults.was_run(f".\n{last}") == was_run


@pytest.mark.parametrize("test", faults.TESTS)
def test_what_it_runs_exists(test: str) -> None:
    file, _, function = test.partition("::")
    assert f"def {function}(" in (Path(faults.ROOT) / file).read_text()

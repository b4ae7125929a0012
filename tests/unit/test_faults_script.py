"""`make test-faults` counts, and every test that it names is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import faults


def test_it_counts_and_fails_where_one_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter([True] * 6 + [False] + [True] * 100)
    monkeypatch.setattr(faults, "_passes", lambda _: next(outcomes))
    assert faults.main() == 1
    assert [line[:6] for line in capsys.readouterr().out.splitlines()][:3] == ["5 of 5", "4 of 5", "5 of 5"]
    monkeypatch.setattr(faults, "_passes", lambda _: True)
    assert faults.main() == 0


@pytest.mark.parametrize("test", faults.TESTS)
def test_what_it_runs_exists(test: str) -> None:
    file, _, function = test.partition("::")
    assert f"def {function}(" in (Path(faults.ROOT) / file).read_text()

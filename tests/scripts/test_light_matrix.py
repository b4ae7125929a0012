"""make test-light names what is missing, and fails where a test does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lib.errors import ToolkitError
from scripts import light_matrix

HERE = "{}.{}".format(*sys.version_info)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(Python, kconfiglib) of the pairs that are tried; nothing is installed and no test run."""
    found: list[tuple[str, str]] = []

    def environment(_: Path, version: str, kconfiglib: str) -> Path:
        found.append((version, kconfiglib))
        return Path(kconfiglib)

    monkeypatch.setattr(light_matrix, "environment", environment)
    monkeypatch.setattr(light_matrix, "run_tests", lambda _: "")
    monkeypatch.setattr(light_matrix, "PYTHONS", (HERE, "3.99"))
    return found


def test_every_pair_is_tried_and_a_missing_python_named(
    calls: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert light_matrix.main() == 0
    assert calls == [(HERE, "14.1.0"), (HERE, "14.1.1a4")]
    assert capsys.readouterr().out.splitlines() == [
        f"Python {HERE}, kconfiglib 14.1.0: ok",
        f"Python {HERE}, kconfiglib 14.1.1a4: ok",
        "Python 3.99: missing; install it, for example with pyenv install 3.99",
    ]


@pytest.mark.usefixtures("calls")
def test_a_failure_names_its_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light_matrix, "run_tests", lambda python: "1 failed" * (python == Path("14.1.1a4")))
    with pytest.raises(ToolkitError, match=rf"fail on Python {HERE}, kconfiglib 14.1.1a4$"):
        light_matrix.main()


def test_the_tests_are_there_and_need_no_torch() -> None:
    for name in light_matrix.TESTS:
        text = (light_matrix.ROOT / name).read_text(encoding="utf-8")
        assert "import torch" not in text and "import numpy" not in text
    assert len(light_matrix.TESTS) > 10


def test_a_command_that_fails_is_one_line() -> None:
    with pytest.raises(ToolkitError, match="failed: lost"):
        light_matrix.call(sys.executable, "-c", "raise SystemExit('lost')")

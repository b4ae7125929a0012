"""The table of rooms in docs/architecture.md is that of the tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lib.errors import ToolkitError
from scripts import architecture


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the page, to be looked at in place of the real one."""
    copy = tmp_path / "architecture.md"
    copy.write_text(architecture.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(architecture, "PAGE", copy)
    monkeypatch.setattr(sys, "argv", ["architecture", "check"])
    return copy


@pytest.mark.slow
def test_the_page_has_the_rooms_of_the_tree(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert architecture.main() == 0
    page.write_text(text.replace("| `lib/memory` |", "| `lib/memories` |"), encoding="utf-8")
    with pytest.raises(ToolkitError, match="has not the rooms of the tree"):
        architecture.main()


def test_rooms_that_import_each_other_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"lib/a": {"lib/b"}, "lib/b": {"lib/a"}}
    monkeypatch.setattr(architecture, "imports_of_rooms", lambda: wanted)
    with pytest.raises(ToolkitError, match="rooms import each other: lib/a, lib/b"):
        architecture.table()


def test_modules_are_of_rooms() -> None:
    rooms = {
        name: architecture.room_of(name) for name in ("lib.plan.sizing", "lib.config", "lib.errors", "os")
    }
    assert rooms == {
        "lib.plan.sizing": "lib/plan",
        "lib.config": "lib/config.py",
        "lib.errors": None,
        "os": None,
    }
    assert architecture.room_of("train.loop.train") == "train"

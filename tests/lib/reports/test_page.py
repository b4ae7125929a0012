"""The page: one file, everything escaped, series that a program can read back."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ToolkitError
from lib.reports.page import GEOMETRY, Section, curve, render, table, write_page

EVIL = "</script><script>alert('x')</script><img src=//x.example/y>"
TEMPLATES = Path(__file__).parents[3] / "lib/reports/templates"
SCRIPT_LINES = 200


class Elements(html.parser.HTMLParser):
    """The elements of a page and the content of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag

    def handle_endtag(self, _: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open == "script" else self.texts).append(data)


def page_of(*blocks: Any, title: str = "a title", note: str = "a note") -> str:
    return render(title=title, summary="summary", sections=[Section("Section", [note], blocks)])


def evil_page() -> str:
    rows = table(EVIL, (EVIL,), [(EVIL, EVIL)], note=EVIL)
    text = {"kind": "text", "title": "text", "text": EVIL}
    line = curve(EVIL, {EVIL: [(0, 1), (1, 2)]}, x=EVIL, y=EVIL)
    return page_of(rows, text, line, title=EVIL, note=EVIL)


def test_nothing_that_a_run_says_becomes_markup() -> None:
    found = Elements(evil_page())
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert not [tag for tag, _ in found.tags if tag == "img"]
    assert any(EVIL in text for text in found.texts), "it is shown as it is"
    (chart,) = json.loads(found.scripts[0])["charts"]
    assert chart["title"] == EVIL and chart["lines"][0]["name"] == EVIL


def test_the_page_asks_for_nothing() -> None:
    found = Elements(evil_page())
    links = [
        value for _, attributes in found.tags for key, value in attributes.items() if key in ("src", "href")
    ]
    assert all(link is not None and link.startswith(("#", "data:")) for link in links)
    (policy,) = [str(each["content"]) for tag, each in found.tags if each.get("http-equiv") and tag == "meta"]
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


def test_headings_go_down_one_level_at_a_time() -> None:
    levels = [int(tag[1]) for tag, _ in Elements(evil_page()).tags if re.fullmatch("h[1-6]", tag)]
    assert levels == [1, 2, 3, 3, 3]


def test_our_script_is_short_and_alone() -> None:
    (script,) = TEMPLATES.glob("*.js")
    (_,) = TEMPLATES.glob("*.css")
    assert len(script.read_text().splitlines()) <= SCRIPT_LINES


def test_both_axes_are_named_without_a_script() -> None:
    """The one upwards by the title."""
    page = page_of(curve("memory, in MB", {"a": [(0, 1)]}, x="step"))
    assert ">step</text>" in page and "memory, in MB" in page
    assert json.loads(Elements(page).scripts[0])["geometry"] == GEOMETRY, "the script draws alike"


def test_controls_are_only_where_they_apply() -> None:
    assert "<form" not in page_of(curve("c", {"a": [(0, 1)]}, x="x"))


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ToolkitError, match="cannot write"):
        write_page(tmp_path / "file" / "page.html", title="", summary="", sections=[])

"""A page: sections of blocks, as one HTML file with its styles, script and series inside.

A block is a dictionary that JSON can hold. Beside "title" and "note" its "kind" says what it has:

    table     head, rows: texts; the first cell of a row names it. folded: shown on request
    matrix    names: of the classes; counts: by true class (rows) and predicted class (columns)
    pictures  pictures: png, a file in base64, and caption
    text      text, with its line breaks
    boards    boards: caption, and rows of cells: the text, and one of given, right, wrong and empty
    chart     axes: horizontal axes that the reader can choose, key -> label; y: what the values are, may be
              missing; controls: true where choice, smoothing and logarithms apply; lines: name, style (its
              number), value, and for each axis either the coordinates under its key, or in "factors" what to
              multiply those of the first axis by
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jinja2

from lib import atomic
from lib.reports.series import MOST_POINTS, extremes
from lib.units import aligned

Block: TypeAlias = Mapping[str, Any]

# Of a drawing, about pixels on a phone. STYLES: colours in page.css; after those, dashes.
GEOMETRY = {"WIDTH": 420, "HEIGHT": 240, "LEFT": 58, "RIGHT": 10, "TOP": 8, "BOTTOM": 38, "STYLES": 6}
_DRAWN = 600  # points of a line before the script draws all
_TEMPLATES = Path(__file__).resolve().parent / "templates"


class Section(NamedTuple):
    """A heading, paragraphs of text, and what is shown below them."""

    title: str
    notes: Sequence[str]
    blocks: Sequence[Block]


def section(title: str, *parts: str | Block) -> Section:
    """Return a section of texts and blocks, without empty texts and tables."""
    notes = [part for part in parts if isinstance(part, str) and part]
    return Section(
        title, notes, [part for part in parts if not isinstance(part, str) and part.get("rows") != []]
    )


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], **more: Any) -> Block:
    """Return a table."""
    return {"kind": "table", "title": title, "head": [*head], "rows": [[*row] for row in rows], **more}


def curve(title: str, lines: Mapping[str, Iterable[tuple[float, float]]], *, x: str, **more: Any) -> Block:
    """Return a chart of lines of (x, y) points by name, thinned to MOST_POINTS, without controls."""
    drawn = list[Block]()
    for style, (name, points) in enumerate(lines.items()):
        pairs = [*points]
        kept = [pairs[at] for at in extremes([y for _, y in pairs], MOST_POINTS)]
        drawn.append({"name": name, "style": style, "x": [x for x, _ in kept], "value": [y for _, y in kept]})
    return {"kind": "chart", "title": title, "axes": {"x": x}, "lines": drawn, "controls": False, **more}


def charts(lines: Iterable[tuple[str, Block]], axes: Mapping[str, str]) -> list[Block]:
    """Return a chart with controls for each title, with the lines of that title."""
    found: dict[str, list[Block]] = {}
    for title, line in lines:
        found.setdefault(title.replace("_", " "), []).append(line)
    return [
        {"kind": "chart", "title": title, "axes": axes, "lines": own, "controls": True}
        for title, own in found.items()
    ]


def as_text(sections: Iterable[Section]) -> str:
    """Return the notes and the tables of sections as text."""
    lines = list[str]()
    for title, notes, blocks in sections:
        lines += ["", title, *(f"  {note}" for note in notes)]
        for block in blocks:
            if block["kind"] == "table":
                lines += ["", *aligned([*zip(block["head"], *block["rows"], strict=True)])]
    return "\n".join([*lines[1:], ""])


def write_page(path: Path, *, title: str, summary: str, sections: Sequence[Section]) -> None:
    """Write a page. Raises ToolkitError if it cannot be written."""
    page = render(title=title, summary=summary, sections=sections)
    atomic.save(path, page, todo="OUT= names another file")


@functools.cache
def _page() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # not sorted: the first axis counts
    environment.globals |= {
        "drawn": functools.partial(extremes, most=_DRAWN),
        "geometry": GEOMETRY,
        **GEOMETRY,
    }
    return environment.get_template("page.html.j2")


def render(*, title: str, summary: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML. All texts are escaped: they come from runs."""
    script = (_TEMPLATES / "chart.js").read_text(encoding="utf-8")
    return _page().render(
        title=title,
        summary=summary,
        sections=sections,
        charts=[block for section in sections for block in section.blocks if block["kind"] == "chart"],
        css=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )

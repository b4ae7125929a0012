"""A page: sections of exhibits and charts, as one HTML file with its styles, script and series inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jinja2

from lib import atomic
from lib.errors import os_errors
from lib.reports import charts
from lib.reports.exhibits import Exhibit, to_json

_TEMPLATES = Path(__file__).resolve().parent / "templates"

Block: TypeAlias = Mapping[str, Any]  # an exhibit of `to_json`, or a chart


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, paragraphs of text, and what is shown below them."""

    title: str
    notes: Sequence[str]
    blocks: Sequence[Block | Exhibit]


def write_page(path: Path, *, title: str, summary: str, sections: Sequence[Section]) -> None:
    """Write a page. Raises ToolkitError if it cannot be written."""
    with os_errors("write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, render(title=title, summary=summary, sections=sections))


def render(*, title: str, summary: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML. All texts are escaped: they come from runs."""
    drawn: list[charts.Chart] = []

    def block(each: Block | Exhibit) -> Block:
        """Return what the template shows; a curve becomes a chart with a number."""
        content = each if isinstance(each, Mapping) else to_json(each)
        if "lines" not in content:
            return content
        drawn.append(content if "axes" in content else charts.of_curve(content))
        return {**drawn[-1], "kind": "Chart", "number": len(drawn) - 1}

    shown = [
        {"title": section.title, "notes": section.notes, "blocks": [block(each) for each in section.blocks]}
        for section in sections
    ]
    script = (_TEMPLATES / "chart.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # not sorted: the first axis counts
    environment.globals |= {"draw": charts.draw, "style": charts.style}
    return environment.get_template("page.html.j2").render(
        title=title,
        summary=summary,
        sections=shown,
        has_controls=any(chart["controls"] for chart in drawn),
        axes={key: label for chart in drawn if chart["controls"] for key, label in chart["axes"].items()},
        series={"charts": drawn},
        css=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=script,
        digest=digest,
    )

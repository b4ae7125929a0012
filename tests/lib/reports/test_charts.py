"""Charts as the page has them without a script: lines where their numbers are."""

from __future__ import annotations

import re
from itertools import product
from xml.etree import ElementTree

import pytest

from lib.reports.page import GEOMETRY, Block, Section, render


def a_chart(*lines: list[float], name: str = "training") -> Block:
    made = [
        {"name": name, "style": number, "step": list(range(len(line))), "value": line}
        for number, line in enumerate(lines)
    ]
    return {
        "kind": "chart",
        "title": "loss",
        "axes": {"step": "optimizer step"},
        "lines": made,
        "controls": True,
    }


def drawn(chart: Block) -> str:
    page = render(title="", summary="", sections=[Section("", [], [chart])])
    found = re.search(r'<svg id="chart-0".*?</svg>', page, re.DOTALL)
    return found[0] if found else ""


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    drawn = re.findall(r'<polyline class="[^"]*" points="([^"]*)"', svg)
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in drawn]  # type: ignore[misc]


def test_a_line_is_where_its_numbers_are() -> None:
    svg = drawn(a_chart([0.0, 10.0, 5.0]))
    left, right = GEOMETRY["LEFT"], GEOMETRY["WIDTH"] - GEOMETRY["RIGHT"]
    top, bottom = GEOMETRY["TOP"], GEOMETRY["HEIGHT"] - GEOMETRY["BOTTOM"]
    assert points_of(svg) == [[(left, bottom), ((left + right) / 2, top), (right, (top + bottom) / 2)]]
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root.get("id") == "chart-0"
    assert root.get("aria-label") == "loss over optimizer step, from 0 to 2: training"
    assert [text.text for text in root.iter("text")] == ["0", "10", "0", "2", "optimizer step"]


def test_lines_share_the_scale_and_differ_in_style() -> None:
    svg = drawn(a_chart([0.0, 10.0], [5.0, 5.0]))
    _, second = points_of(svg)
    middle = (GEOMETRY["TOP"] + GEOMETRY["HEIGHT"] - GEOMETRY["BOTTOM"]) / 2
    assert [y for _, y in second] == [middle, middle]
    count = 3 * GEOMETRY["STYLES"]
    styles = re.findall(r'<polyline class="(.*?)"', drawn(a_chart(*[[0.0, 1.0]] * count)))
    wanted = product(range(3), range(GEOMETRY["STYLES"]))
    assert styles == [f"line-{colour} dash-{dash}" for dash, colour in wanted]


@pytest.mark.parametrize("line", [[], [3.0], [2.0, 2.0]])
def test_few_or_equal_numbers_are_drawn(line: list[float]) -> None:
    svg = drawn(a_chart(line))
    assert ("<circle" in svg) == (len(line) == 1) and ("nan" not in svg)
    assert (svg == "") == (not line)


def test_a_name_is_escaped() -> None:
    svg = drawn(a_chart([1.0, 2.0], name='"><script>x</script>'))
    assert "<script" not in svg
    label = ElementTree.fromstring(svg).get("aria-label")
    assert label is not None and label.endswith('"><script>x</script>')

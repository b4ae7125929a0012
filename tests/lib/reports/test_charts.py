"""Charts as the page has them without a script: lines where their numbers are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from lib.reports import charts


def a_chart(*lines: list[float], name: str = "training") -> charts.Chart:
    made = [
        {"name": name, "style": number, "step": list(range(len(line))), "value": line}
        for number, line in enumerate(lines)
    ]
    return {
        "title": "loss",
        "note": "",
        "y": "loss",
        "axes": {"step": "optimizer step"},
        "lines": made,
        "controls": True,
    }


def points_of(svg: str) -> list[list[tuple[float, float]]]:
    drawn = re.findall(r'<polyline class="[^"]*" points="([^"]*)"', svg)
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in drawn]  # type: ignore[misc]


def test_a_line_is_where_its_numbers_are() -> None:
    svg = charts.draw(a_chart([0.0, 10.0, 5.0]), 3)
    left, right = charts.LEFT, charts.WIDTH - charts.RIGHT
    top, bottom = charts.TOP, charts.HEIGHT - charts.BOTTOM
    assert points_of(svg) == [[(left, bottom), ((left + right) / 2, top), (right, (top + bottom) / 2)]]
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root.get("id") == "chart-3"
    assert root.get("aria-label") == "loss over optimizer step, from 0 to 2: training"
    assert [text.text for text in root.iter("text")] == ["0", "10", "0", "2", "optimizer step"]


def test_lines_share_the_scale_and_differ_in_style() -> None:
    svg = charts.draw(a_chart([0.0, 10.0], [5.0, 5.0]), 0)
    _, second = points_of(svg)
    middle = (charts.TOP + charts.HEIGHT - charts.BOTTOM) / 2
    assert [y for _, y in second] == [middle, middle]
    assert len({charts.style(number) for number in range(3 * charts.STYLES)}) == 3 * charts.STYLES


@pytest.mark.parametrize("line", [[], [3.0], [2.0, 2.0]])
def test_few_or_equal_numbers_are_drawn(line: list[float]) -> None:
    svg = charts.draw(a_chart(line), 0)
    assert ("<circle" in svg) == (len(line) == 1) and ("nan" not in svg)
    assert (svg == "") == (not line)


def test_a_name_is_escaped() -> None:
    svg = charts.draw(a_chart([1.0, 2.0], name='"><script>x</script>'), 0)
    assert "<script" not in svg
    label = ElementTree.fromstring(svg).get("aria-label")
    assert label is not None and label.endswith('"><script>x</script>')

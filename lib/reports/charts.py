"""Charts: lines as inline SVG, which templates/chart.js replaces by one with ticks, controls and a cursor.

A chart is a dictionary that JSON can hold, because the page embeds it:

    title, note, y    texts
    axes              horizontal axes that the reader can choose: key -> label
    lines             name; style: its number; value; and for each axis either the coordinates under its key,
                      or under "factors" what to multiply those of the first axis by
    controls          true where smoothing, logarithmic axes and the choice of axes apply
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from markupsafe import Markup

from lib.reports.series import LINES, Series, extremes

Chart: TypeAlias = Mapping[str, Any]

WIDTH, HEIGHT = 420, 240  # units of the drawing, about pixels on a phone
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 38
_DRAWN = 600  # points of a line before the script draws all that are embedded
STYLES = 6  # colours in templates/page.css; after those, dashes


def of_curve(curve: Mapping[str, Any]) -> Chart:
    """Return the chart of an exhibit `Curve` in JSON."""
    lines = [
        {"name": name, "style": place, "x": [x for x, _ in points], "value": [y for _, y in points]}
        for place, (name, points) in enumerate(curve["lines"])
    ]
    return {**curve, "axes": {"x": curve["x"]}, "lines": lines, "controls": False}


def of_series(series: Sequence[Series]) -> list[Chart]:
    """Return a chart for each column of a run, with its training and evaluation as lines."""
    columns = dict.fromkeys(each.column for each in series)
    return [
        {
            "title": column.replace("_", " "),
            "note": "",
            "y": column.replace("_", " "),
            "axes": {"step": "optimizer step", "seconds": "seconds of training"},
            "lines": [
                each.to_json(name=LINES[each.kind], style=int(each.kind == "eval"))
                for each in series
                if each.column == column
            ],
            "controls": True,
        }
        for column in columns
    ]


def draw(chart: Chart, number: int) -> Markup:
    """Return the chart as an SVG element over its first axis."""
    axis, label = next(iter(chart["axes"].items()))
    lines = chart["lines"]
    xs, ys = ([value for line in lines for value in line[key]] for key in (axis, "value"))
    if not xs:
        return Markup("")
    x_span, y_span = _span(xs), _span(ys)
    parts = [
        Markup('<text class="{}" x="{}" y="{}">{:.6g}</text>').format(*each)
        for each in (
            *(("y", LEFT - 6, _down(value, y_span) + 4, value) for value in y_span),
            *(("x", _across(value, x_span), HEIGHT - BOTTOM + 15, value) for value in x_span),
        )
    ]
    for line in lines:
        x, y, classes = line[axis], line["value"], style(line["style"])
        points = [(_across(x[at], x_span), _down(y[at], y_span)) for at in extremes(y, _DRAWN)]
        path = " ".join(f"{left:.1f},{down:.1f}" for left, down in points)
        parts.append(Markup('<polyline class="{}" points="{}"/>').format(classes, path))
        if len(points) == 1:
            ends = Markup('<circle class="{}" cx="{}" cy="{}" r="3"/>')
            parts.append(ends.format(classes, *(f"{value:.1f}" for value in points[0])))
    parts.append(
        Markup('<text class="label" x="{}" y="{}">{}</text>').format(
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, label
        )
    )
    names = ", ".join(line["name"] for line in chart["lines"])
    return Markup(
        '<svg id="chart-{}" viewBox="0 0 {} {}" role="img" tabindex="0" aria-label="{}">{}</svg>'
    ).format(
        number,
        WIDTH,
        HEIGHT,
        f"{chart['title']} over {label}, from {min(xs):g} to {max(xs):g}: {names}",
        Markup("").join(parts),
    )


def style(number: int) -> str:
    """Return the classes of lines of style `number`."""
    return f"line-{number % STYLES} dash-{number // STYLES % 3}"


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _across(value: float, span: tuple[float, float]) -> float:
    return LEFT + (value - span[0]) / (span[1] - span[0]) * (WIDTH - LEFT - RIGHT)


def _down(value: float, span: tuple[float, float]) -> float:
    return HEIGHT - BOTTOM - (value - span[0]) / (span[1] - span[0]) * (HEIGHT - TOP - BOTTOM)

"""Pages as a browser shows them: quiet, without a request, readable at each width, and accessible.

Screenshots of every page are kept in build/pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pages.chromium import Chromium

SHOTS = Path(__file__).parents[2] / "build" / "pages"
WIDTHS = (400, 1400)
LEAST_PIXELS = 10  # of the smallest text
SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("body *")]
  .filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()))
  .filter((one) => one.getClientRects().length && !["SCRIPT", "STYLE"].includes(one.tagName))
  .map((one) => {
    const svg = one.closest("svg[viewBox]");
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    return parseFloat(getComputedStyle(one).fontSize) * scale;
  }))
"""
CUT_TEXT = """
[...document.querySelectorAll("svg[viewBox] text")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.left < 0 || box.right > innerWidth;
}).map((one) => one.textContent)
"""
FIRST_LINE = "document.querySelector('#chart-0 polyline').getAttribute('points')"
READOUT = "document.getElementById('readout-0').textContent.trim()"


def faults(browser: Chromium, page: Path, axe: str, *, width: int, dark: bool = False) -> Iterator[str]:
    """Yield what is wrong with a page at a width."""
    browser.open(page, width=width, dark=dark)
    overflow = browser.evaluate("document.documentElement.scrollWidth") - width
    if overflow > 0:
        yield f"overflow: {overflow} pixels"
    if (size := browser.evaluate(SMALLEST_TEXT)) < LEAST_PIXELS:
        yield f"small text: {size:.1f} pixels"
    yield from (f"cut text: {text}" for text in browser.evaluate(CUT_TEXT))
    browser.evaluate(f"{axe};0")
    violations = browser.evaluate(
        "axe.run().then((found) => found.violations.map((one) => [one.impact, one.id, one.nodes[0].html]))"
    )
    yield from (f"axe: {one}" for one in violations if one[0] in ("serious", "critical"))
    for event in browser.events:
        yield from _reported(event, page)


def _reported(event: dict[str, Any], page: Path) -> Iterator[str]:
    method, content = event["method"], event["params"]
    if method == "Network.requestWillBeSent":
        url = content["request"]["url"]
        if url != page.resolve().as_uri() and not url.startswith("data:"):
            yield f"request: {url}"
    elif method == "Runtime.exceptionThrown":
        yield f"exception: {content['exceptionDetails']['text']}"
    elif (method == "Runtime.consoleAPICalled" and content["type"] == "error") or (
        method == "Log.entryAdded" and content["entry"]["level"] == "error"
    ):
        yield f"console: {json.dumps(content)[:300]}"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "empty", "compare", "sweep"])
def test_a_page_has_no_fault(
    browser: Chromium, pages: dict[str, Path], axe: str, name: str, width: int, dark: bool
) -> None:
    found = list(faults(browser, pages[name], axe, width=width, dark=dark))
    browser.screenshot(SHOTS / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    assert found == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<div style='width: 900px'>wide</div>", "overflow"),
        ("<p style='font-size: 6px'>small</p>", "small text"),
        ("<svg viewBox='0 0 9 9' width='9'><text x='-90'>12345</text></svg>", "cut text: 12345"),
        ("<img src='file:///nothing.png' alt='x'>", "request"),
        ("<script>console.error('x')</script>", "console"),
        ("<script>throw new Error('x')</script>", "exception"),
        ("<p style='color: #bbb; background: #fff'>pale</p>", "axe: ['serious', 'color-contrast'"),
        ("<svg role='img'></svg>", "axe: ['serious', 'svg-img-alt'"),
    ],
)
def test_a_fault_is_found(browser: Chromium, tmp_path: Path, axe: str, body: str, fault: str) -> None:
    page = tmp_path / "page.html"
    head = "<!doctype html><html lang='en'><head><meta name='viewport' content='width=device-width'>"
    page.write_text(f"{head}<title>x</title></head><body><main><h1>x</h1>{body}</main></body></html>")
    assert any(found.startswith(fault) for found in faults(browser, page, axe, width=400))


def test_the_controls_draw_the_curves_again(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["compare"], width=1400, dark=False)
    drawn = [browser.evaluate(FIRST_LINE)]
    event = "dispatchEvent(new Event('input', {bubbles: true}))"
    for change in (
        "elements.axis.value = 'flop'",
        "elements.smoothing.value = 0.9",
        "elements.log_y.checked = true",
        "elements.log_x.checked = true",
    ):
        browser.evaluate(f"document.forms[0].{change}; document.forms[0].{event}; 0")
        drawn.append(browser.evaluate(FIRST_LINE))
        assert "NaN" not in drawn[-1]
    # The batch is the same: over operations the line is where it is over steps.
    assert drawn[0] == drawn[1] and len(set(drawn)) == 4
    labels = browser.evaluate("[...document.querySelectorAll('text.label')].map((one) => one.textContent)")
    assert set(labels) == {"floating-point operations, forward and backward"}


def test_the_script_and_python_draw_the_same_line(browser: Chromium, pages: dict[str, Path]) -> None:
    by_script, by_python = [], []
    for is_off, found in ((False, by_script), (True, by_python)):
        browser.call("Emulation.setScriptExecutionDisabled", value=is_off)
        browser.open(pages["report"], width=1400, dark=False)
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
        lines = browser.evaluate(
            "[...document.querySelectorAll('polyline')].map((one) => one.getAttribute('points'))"
        )
        found += [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
    assert len(by_python) == len(by_script) >= 6
    for one, other in zip(by_script, by_python, strict=True):
        assert len(one) == len(other)
        for (x, y), (left, top) in zip(one, other, strict=True):
            assert (x, y) == (pytest.approx(left, abs=0.11), pytest.approx(top, abs=0.11))


def test_pointer_and_keys_read_the_values(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.open(pages["report"], width=1400, dark=False)
    assert browser.evaluate(READOUT) == ""
    browser.evaluate("document.getElementById('chart-0').focus()")
    browser.key("End")
    last = browser.evaluate(READOUT)
    rows = json.loads(browser.evaluate("document.getElementById('series').textContent"))["charts"][0]
    assert f"training {rows['lines'][0]['value'][-1]:.5g}" in last and last.endswith("at 300")
    browser.key("ArrowLeft")
    assert browser.evaluate(READOUT).endswith("at 299")
    box = browser.evaluate("JSON.stringify(document.getElementById('chart-0').getBoundingClientRect())")
    place = json.loads(box)
    browser.evaluate(f"scrollTo(0, {place['top']}); 0")
    top = browser.evaluate("document.getElementById('chart-0').getBoundingClientRect().top")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place["left"] + 60, y=top + 50)
    assert browser.evaluate(READOUT).rpartition("at ")[2] in map(str, range(1, 20))

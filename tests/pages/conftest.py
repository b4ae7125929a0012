"""A browser, the accessibility checker axe-core, and the pages: of runs that are made without training."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from lib.reports.page import Section, table, write_page
from lib.reports.run_report import write_report
from lib.scaling.judge import judge
from lib.scaling.results import points_of
from lib.scaling.sweep_report import sections
from scripts.compare import curves, differences
from tests.lib.scaling.test_sweep_report import results_of
from tests.pages.chromium import NAMES, Chromium, find_chromium
from tests.support.reported import all_findings, reported_run, write_rows

AXE = "4.14.1"
NAMES_OF_RUNS = ("20261121T093620Z-a1f5e51b", "20261122T101112Z-0badcafe")


def missing(what: str) -> NoReturn:
    """Skip, and say why; in CI fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, installed by npm in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anneal" / f"axe-core-{AXE}"
    source = cache / "node_modules" / "axe-core" / "axe.min.js"
    if not source.exists():
        npm = shutil.which("npm")
        if npm is None:
            missing("pages are not checked: npm is not installed, which installs axe-core")
        cache.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--no-fund", "--no-audit", "--prefix", str(cache), f"axe-core@{AXE}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            missing(f"pages are not checked: npm cannot install axe-core: {done.stderr.strip()[-300:]}")
    return source.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A running Chromium."""
    program = find_chromium()
    if program is None:
        missing(f"pages are not checked: there is none of {', '.join(NAMES)}; apt-get install chromium")
    with Chromium(program, tmp_path_factory.mktemp("chromium")) as chromium:
        yield chromium


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report with every kind of exhibit, one of a run without anything, a comparison, a scaling sweep."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [reported_run(folder / "runs", number, EMA=number > 1) for number in (1, 2)]
    for number, run in enumerate(runs, start=1):
        write_rows(run, 300 * number)
        run.write("data", {"name": "digits", "synthetic": True, "flop_per_sample": 2e9})
    write_report(runs[0], all_findings(), folder / "report.html")
    empty = reported_run(folder / "runs", 3, rows=0)
    write_report(empty, all_findings(step=None, problem="no checkpoint", exhibits=[]), folder / "empty.html")
    first = table("Selected runs", ("state", "run"), [("done", "one"), ("done", "two")])
    shown = [
        Section("Runs", [], [first]),
        curves(runs, NAMES_OF_RUNS),
        *differences(runs, NAMES_OF_RUNS),
    ]
    write_page(folder / "compare.html", title="2 runs compared", summary="lenet5", sections=shown)
    results = results_of(floor=1.0)
    verdict = judge(points_of(results), starts=8, samples=8)
    sweep = sections(results, {"resnet_bk": verdict}, "a text", {"counting 1-grams": 1.0})
    write_page(folder / "sweep.html", title="Scaling sweep", summary="here", sections=sweep)
    return {path.stem: path for path in folder.glob("*.html")}

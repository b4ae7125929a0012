"""The examples of docs/tutorials/python.md, run in a folder of a user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.anneal.test_api import ROOT, script

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tutorials/python.md").read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int, tmp_path: Path) -> None:
    shown = script(tmp_path, EXAMPLES[number])
    assert ("Done: " in shown and "micro batch" in shown) if number == 0 else shown == "True\n"


def test_the_first_example_has_ten_lines() -> None:
    assert len([line for line in EXAMPLES[0].splitlines() if line]) <= 10

"""The page about memory of any module: its examples run, and what they import is light until used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lib.memory

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_room_imports_nothing_until_it_is_used() -> None:
    program = (
        "import sys, lib.memory; assert 'torch' not in sys.modules; lib.memory.estimate; sys.modules['torch']"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lib.memory.nothing  # noqa: B018


def page_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/memory-any-module.md").read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_the_examples_of_the_page_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    examples = [text for text in page_examples() if "transformers" not in text and "timm" not in text]
    assert len(examples) == 5
    exec(examples[number], {"__name__": "example"})
    assert capsys.readouterr().out

"""Published runs of fine-tuning are predicted by a command: here the smallest of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

COMPARISON = Path(__file__).resolve().parents[2] / "docs/benchmarks/comparison"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(COMPARISON))
    import published_memory  # type: ignore[import-not-found]

    return published_memory


def test_a_published_figure_is_printed_beside_ours(
    published: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["published_memory.py", "bert-large,", "accumulated,", "fp16"])
    published.main()
    (row,) = capsys.readouterr().out.splitlines()[2:]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:3] == ["BERT-large, accumulated, recomputed, fp16", "7275 MiB", "device"]
    assert abs(float(cells[4].strip("%"))) < 4

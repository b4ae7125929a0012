"""What the tests of the Makefile share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.making import Make, recording_make


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Runs make with a recorder for PYTHON."""
    return recording_make(tmp_path)

"""What the tests of the Makefile share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import BUILT, copy_tree
from tests.contract.making import Make, recording_make


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Runs make with a recorder for PYTHON."""
    return recording_make(tmp_path)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("readme") / "tree")


@pytest.fixture
def unused(copied: Path) -> Path:
    """A copy of the tree without what the command before has left."""
    for name in BUILT:
        if (copied / name).is_dir():
            shutil.rmtree(copied / name)
        else:
            (copied / name).unlink(missing_ok=True)
    return copied

"""What every test stands on: one thread, an environment that no outer make reaches, a copy of the tree."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports torch: pytest-xdist already uses the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Until all is collected: modules and items live to the end, and to search them for garbage, then and in every
# test, took a sixth of the time.
gc.disable()
# Bytecode of what is collected is kept also where the environment has turned this off, for else every worker
# and every program that a test starts compiles it anew; what tests themselves import is theirs to decide.
_WRITES_NO_BYTECODE, sys.dont_write_bytecode = sys.dont_write_bytecode, False

# No test cuts the power, and to wait for the disk takes a tenth of the time of those that write.
os.fsync = os.fstat  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parents[1]
OF_MAKE = {
    "MAKEFLAGS",
    "MFLAGS",
    "MAKELEVEL",
    "MAKEOVERRIDES",
    "GNUMAKEFLAGS",
    "V",
    "O",
    "VENV",
    "PYTHON",
    "FILE",
}
BUILT = {".git", ".venv", ".config", ".config.old", "data", "runs", "build", ".hypothesis"}  # at the top only


def pytest_itemcollected(item: pytest.Item) -> None:
    """What is long, or starts a SLURM, is slow, too."""
    if item.get_closest_marker("long") or item.get_closest_marker("slurm"):
        item.add_marker(pytest.mark.slow)


def pytest_configure() -> None:
    for name in list(os.environ):
        if name in OF_MAKE or name.startswith(("KCONFIG_", "CONFIG_")):
            del os.environ[name]


@pytest.hookimpl(trylast=True)  # after what is not asked for was left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, for pytest-xdist deals out halves of all and what is left at the end should be short.

    Those of whole programs begin; the files of slow tests take turns between the halves.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    files = sorted({item.path for item in slow}, key=lambda path: (path.parent.name != "e2e", path))
    first, second = (
        [item for path in files[start::2] for item in slow if item.path == path] for start in (0, 1)
    )
    filled = max(0, len(items) // 2 - len(first))
    items[:] = first + fast[:filled] + second + fast[filled:]


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = _WRITES_NO_BYTECODE
    del sys.argv[1:]  # those of pytest are not for programs whose main() a test calls
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tests that use torch share the processors; those that don't must not pay for importing it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree that a test may change, without what was built or trained in it."""
    return copy_tree(tmp_path / "tree")


@pytest.fixture
def tree_at() -> Callable[[Path], Path]:
    """Like `tree`, at a place of the test's choice: `tree_at(directory) -> directory`."""
    return copy_tree


def copy_tree(destination: Path) -> Path:
    def left_out(directory: str, names: list[str]) -> set[str]:
        built = BUILT if Path(directory) == ROOT else set()
        return {name for name in names if name in built or name.endswith(("__pycache__", "_cache"))}

    shutil.copytree(ROOT, destination, ignore=left_out)
    return destination

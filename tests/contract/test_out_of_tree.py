"""O= and KCONFIG_CONFIG with every configuration target: nothing is written anywhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In an order in which each finds what it needs; goals that one make is called with follow each other.
COMMANDS = (
    "defconfig-lenet5",
    "resnet18_defconfig",
    "defconfig DEFCONFIG=lenet5+debug",
    "fp32.config",
    "mergeconfig FRAGMENT=defconfigs/fragments/debug",
    "setconfig SET=EMA=y",
    "olddefconfig syncconfig oldconfig listnewconfig helpnewconfig checkconfig",
    "explain SYM=EMA",
    "searchconfig Q=ema",
    "diffconfig savedefconfig alldefconfig",
    *("allnoconfig", "allyesconfig", "allmodconfig", "tinyconfig"),
    "randconfig KCONFIG_SEED=1",
    "defconfig list-defconfigs kconfig-lint",
)
PLACES = {"O=out": {"out"}, "KCONFIG_CONFIG=out/my.config": {"out", "defconfig", "include"}}


def content(tree: Path) -> dict[str, int]:
    """File -> time of its last change, without what Python keeps for itself."""
    files = (path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(tree)): path.stat().st_mtime_ns for path in files}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_written_elsewhere(tree: Path, place: str) -> None:
    (tree / "out").mkdir()
    before = content(tree)
    for command in COMMANDS:
        call = ["make", "-s", "VENV=", f"PYTHON={sys.executable}", place, *command.split()]
        done = subprocess.run(call, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        after = content(tree)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert {name.split("/")[0] for name in changed} <= PLACES[place], command


@pytest.mark.slow
def test_verbose_shows_commands_and_origins(tree: Path) -> None:
    call = ["make", "VENV=", f"PYTHON={sys.executable}", "V=1", "O=out", "defconfig-lenet5+debug"]
    done = subprocess.run(call, cwd=tree, capture_output=True, text=True, check=True)
    assert "scripts/kconf.py defconfig 'lenet5+debug'" in " ".join(done.stdout.split())
    assert "note: CONFIG_DETERMINISTIC=y from defconfigs/fragments/debug:3" in done.stderr.splitlines()

"""The tree gets no larger without a reason, and a command imports what it runs and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runner import TINY, Runner
from tests.support.configs import ROOT

PRODUCT = ("anneal", "lib", "models", "train", "scripts")
# Lines of Python in the product. A ratchet: lower it with the lines; raise it only in a commit that says why.
LINES, SLACK = 57_273, 120
MAKEFILE_LINES, REGISTRY_LINES = 250, 150
LENET_MODULES = 90
CONFIG_FIELDS = 70
LIST_MODULES = """
import atexit, sys
def note():
    names = sorted(name for name in sys.modules if name.split(".")[0] in {packages!r})
    if "train.loop" in names:
        open({file!r}, "w").write("\\n".join(names))
atexit.register(note)
"""


def test_the_product_has_as_many_lines_as_it_says() -> None:
    files = [file for room in PRODUCT for file in (ROOT / room).rglob("*.py")]
    found = sum(len(file.read_text().splitlines()) for file in files)
    assert found <= LINES
    if (ROOT / ".git").exists():  # a copy without an experiment has fewer
        assert found >= LINES - SLACK, "lower LINES"


def test_makefile_and_registry_are_short() -> None:
    assert len((ROOT / "Makefile").read_text().splitlines()) <= MAKEFILE_LINES
    assert len((ROOT / "lib" / "plugins.py").read_text().splitlines()) <= REGISTRY_LINES


def test_config_has_few_fields() -> None:
    from lib.config import Config

    assert len(Config.__dataclass_fields__) <= CONFIG_FIELDS


@pytest.mark.slow
def test_lenet_imports_few_modules(tmp_path: Path) -> None:
    runner, file = Runner(tmp_path), tmp_path / "modules"
    runner.configure("lenet5", TINY | {"CONFIG_DEVICE_CPU": "y", "CONFIG_MAX_STEPS": "2"})
    settings = {"KCONFIG_CONFIG": str(tmp_path / ".config"), "OMP_NUM_THREADS": "1"}
    (tmp_path / "sitecustomize.py").write_text(LIST_MODULES.format(packages=PRODUCT, file=str(file)))
    command = [sys.executable, "-m", "train", "--runs", str(tmp_path / "more"), "train"]
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", **settings}
    subprocess.run(command, cwd=ROOT, env=paths, check=True, capture_output=True)
    names = file.read_text().splitlines()
    assert len(names) <= LENET_MODULES, "\n".join(names)


def test_no_merge_is_left_half_done() -> None:
    rooms = (*PRODUCT, "tests", "docs", "defconfigs")
    files = [*ROOT.glob("*"), *(file for room in rooms for file in (ROOT / room).rglob("*"))]
    marked = [
        file
        for file in files
        if file.is_file() and re.search(rb"^(<{7}|>{7}) ", file.read_bytes(), re.MULTILINE)
    ]
    assert marked == []

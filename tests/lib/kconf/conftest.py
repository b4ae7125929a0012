"""A small project of its own for the tests of configuration commands."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.kconf.cli import main

ROOT = Path(__file__).resolve().parents[3]
DEFCONFIGS = {
    "lenet5": "# Small and quick\nCONFIG_NUM_EPOCHS=3\n",
    "gpt2": '# Large\nCONFIG_MODEL_GPT2=y\nCONFIG_EMA=y\nCONFIG_EMA_DECAY="0.5"\n',
    "broken": "# Does not hold\nCONFIG_BATCH_SIZE=3\n",
    "quiet": "CONFIG_DEBUG=y\n",
    "fragments/debug": "# For looking inside\nCONFIG_DEBUG=y\n",
    "fragments/long": "# More epochs\nCONFIG_NUM_EPOCHS=90\n",
    "fragments/plain": "# CONFIG_EMA is not set\n",
}

Kconf = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def kconf_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test tree with a few configurations and fragments; the current directory."""
    shutil.copy(ROOT / "tests/fixtures/kconf/tree/Kconfig", tmp_path)
    (tmp_path / "defconfigs" / "fragments").mkdir(parents=True)
    (tmp_path / "defconfigs" / "sweeps").mkdir()
    for name, text in DEFCONFIGS.items():
        (tmp_path / "defconfigs" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("KCONFIG_", "CONFIG_", "ANNEAL_")):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def kconf(kconf_project: Path, capsys: pytest.CaptureFixture[str]) -> Kconf:
    """Run a command; gives status, lines of stdout, lines of stderr."""

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        status = main(arguments, root=kconf_project)
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err.splitlines()

    return run

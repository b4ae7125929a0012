"""The commands of the README, word by word, each with a budget of a few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.examples import told_of

pytestmark = pytest.mark.slow

# What MAKEFLAGS holds counts as if it stood on the command line of every make.
SHORT = "CONFIG_BUDGET_STEPS=y CONFIG_MAX_STEPS=2 CONFIG_DATA_LIMIT=512 CONFIG_TARGET_EFFECTIVE_BATCH=32"
SMALL_TEXT = "CONFIG_GPT2_SIZE_CUSTOM=y CONFIG_GPT2_LAYERS=1 CONFIG_GPT2_HEADS=2 CONFIG_GPT2_WIDTH=16"
PICTURES = [
    ("make defconfig-lenet5 && make train", SHORT, "Done: "),
    ("make plots", "", "loss.png"),
    ("make report", "", "report.html"),
    ("make eval", "", "accuracy "),
    ("make eval BEST=1", "", "accuracy "),
    ("make plan", "", "effective batch"),
    ("make plan GPU=h100-80gx4", "", "(estimate)"),
    ("make train", SHORT, "Done: "),
    ("make preflight", SHORT, "averages of 2 ranks"),
    ("make train CONFIG_SEED=7", SHORT, "Done: "),
]
WORDS = [
    ("make defconfig-resnet18 && make train", f"{SHORT} CONFIG_RESNET18_WIDTH=8", "Done: "),
    ("make train-resnet50", f"{SHORT} CONFIG_RESNET50_WIDTH=8", "Run: build/resnet50/runs/"),
    (
        "make defconfig-gpt2-tiny && make train",
        f"{SHORT} {SMALL_TEXT} CONFIG_HOLDOUT=64",
        "N-gram baseline: ",
    ),
    ("make sample PROMPT=import", "TOKENS=5", "import"),
    ("make new-model NAME=my_net TASK=classify", "", "my_net"),
    ("make defconfig-my_net && make train", SHORT, "Done: "),
]
EXAMPLES = [
    (command, flags.format(short=SHORT), expected)
    for commands in told_of("README_END_TO_END")
    for command, flags, expected in commands
]


@pytest.mark.long
@pytest.mark.parametrize("commands", [WORDS, EXAMPLES], ids=["words", "examples"])
def test_every_command_does_what_it_says(
    commands: list[tuple[str, str, str]], tree_at: Callable[[Path], Path], tmp_path: Path
) -> None:
    carry_out(commands, tree_at(tmp_path / "a tree"))


@pytest.mark.long
def test_a_run_has_the_seed_of_the_command_line(tree_at: Callable[[Path], Path], tmp_path: Path) -> None:
    tree = tree_at(tmp_path / "a tree")
    carry_out(PICTURES, tree)
    seeds = {
        (run.parent / "config").read_text().count("CONFIG_SEED=7")
        for run in tree.glob("runs/*/*/status.json")
    }
    assert seeds == {0, 1}, "the seed of the command line is in the run"
    assert "CONFIG_SEED=7" not in (tree / ".config").read_text(), "and not in .config"


def carry_out(commands: list[tuple[str, str, str]], tree: Path) -> None:
    """Each command in `tree`, one after the other: it ends well and says what is expected."""
    for command, flags, expected in commands:
        overrides = f"{flags} PYTHON={sys.executable} VENV="
        environment = {**os.environ, "MAKEFLAGS": f" -- {overrides}"}
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert expected in done.stdout, f"{command}\n{done.stdout}"

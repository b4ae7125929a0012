"""The commands of the README, word by word, each with a budget of a few steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imsave

from tests.support.examples import told_of

ROOT = Path(__file__).resolve().parents[2]
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
    (
        "make train CONFIG_INITIAL_WEIGHTS=runs/resnet18/20261121T093620Z-a1f5e51b CONFIG_RESET_HEAD=y",
        f"{SHORT} CONFIG_RESNET18_WIDTH=8",
        "Done: ",
    ),
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
SHORT_TEXT = f"{SMALL_TEXT} CONFIG_BLOCK_SIZE=64"
PLANS = [
    ("make defconfig-lenet5", "", "lenet5"),
    ("make plan GPU=all", "", "Sorted by time"),
    ("make plan GPU=all PRICE=2.5", "", "Money: PRICE=2.5"),
    ("make plan GPU=all PRICE=list", "", "Sorted by money"),
    ("make defconfig-gpt2", "", "gpt2"),
    ("make plan GPU=h100-80gx3 PRICE=12", SHORT_TEXT, "PRICE=12"),
    ("make plan GPU=rtx4090", SHORT_TEXT, "GeForce RTX 4090"),
    ("make plan GPU=h100-80gx4:70G", SHORT_TEXT, "of 70.00 GB usable"),
    ("make plan GPU=rtx4090 CONFIG_GRAD_CHECKPOINT_BLOCKS=y", SHORT_TEXT, "GRAD_CHECKPOINT = blocks"),
    ("make plan GPU=rtx4090 CONFIG_PRECISION_FP32=y", SHORT_TEXT, "PRECISION = fp32"),
    ("make plan GPU=h100-80gx8", SHORT_TEXT, "128 on each of 8 devices"),
    (
        "make plan GPU=a100-40gx16 CONFIG_DIST_NETWORK_GBIT=25",
        SHORT_TEXT,
        "and 25 Gbit/s of network for each",
    ),
    ("make plan GPU=h100-80g:70G CONFIG_AUTO_METHOD_TABLE=y", SHORT_TEXT, "from the table of free memory"),
    ("make sbatch", "", "run.sbatch"),
    (
        "make launch-print CONFIG_DIST_NNODES=2 CONFIG_DIST_ENDPOINT=10.0.0.1:29500",
        "",
        "--rdzv-endpoint=10.0.0.1:29500",
    ),
    ("make kconfig-docs", "", "is up to date"),
]
# With the defconfig cut short, as no experiment takes CONFIG_ of the command line.
LOOKS = [
    ("make defconfig-lenet5 && make train", "", "Done: "),
    ("make profile", "STEPS=2", "summary.txt"),
    ("make data-check", "", "Contact sheet"),
    ("make curve", "", "0.85 was "),
    ("make curve THRESHOLD=0.9", "", "0.9 was "),
    ("make rerun", "", "Done: "),
    ("make train CONFIG_BEST_METRIC=loss CONFIG_EARLY_STOP_EVALS=3 CONFIG_HOLDOUT=5000", "", "Done: "),
    ("make train CONFIG_METRICS=macro_f1,roc_auc CONFIG_CLASS_WEIGHTS=balanced", "", "roc auc"),
    ('make compare RUNS="20261121 20261122"', "", "compare.html"),
    ("make export FORMAT=pt2 DIRECTORY=out-pt2 BEST=1", "", "from the run's own outputs"),
    ("make predict INPUT=photos", "", "digit.png"),
    ("make predict INPUT=../photos", "", "digit.png"),
    ('find photos -name "*.png" ! -name broken.png | make predict INPUT=-', "", "digit.png"),
    ('make predict INPUT="a.jpg b.png" OUT=found.csv', "", "found.csv"),
    ("make ab A=lenet5+fp32 B=lenet5+bf16", "SEEDS=3", "after 3 pairs"),
    ("make sweep SWEEP=my.yaml", "", "EMA=n"),
    ("make elastic-demo", "", "The same training on both"),
    ("make scaling-plan QUICK=1", "", "resnet_bk"),
]
CLASSES = (
    "CONFIG_DATASET_TABULAR=y CONFIG_DATA_DIR=../texts CONFIG_TABULAR_FILE=kinds.csv CONFIG_DATA_LIMIT=0 "
    "CONFIG_TABULAR_TARGETS=kind CONFIG_TABULAR_TARGET_CLASSES=y"
)
TABLES = [
    ("make defconfig-tabular-regression && make train", SHORT, "Done: "),
    ("make defconfig-tabular-regression && make train", f"{SHORT} {CLASSES}", "Done: "),
    ("make predict RUN=20261121T093620Z BEST=1 INPUT=rows.csv OUT=found.jsonl TOP=3", "", "found.jsonl"),
]
TAGGED = "CONFIG_DATASET_TAGGED=y CONFIG_DATA_DIR=../texts CONFIG_JSONL_FILE=train.jsonl CONFIG_DATA_LIMIT=0"
TEXTS = [
    ("make defconfig-gpt2-tiny && make train", f"{SHORT} {SMALL_TEXT}", "Done: "),
    ('make sample PROMPT="Once upon"', "TOKENS=5", "Once upon"),
    ("make train CONFIG_BEST_METRIC=entity_f1", f"{SHORT} {SMALL_TEXT} {TAGGED}", "entity f1"),
]
FROM_NOTHING = "CONFIG_INITIAL_WEIGHTS= CONFIG_ADAPT_FULL=y"  # a base is trained in a minute
CHATS = [
    ("make defconfig-chat-tiny", "", "chat-tiny"),
    ("make train CONFIG_BEST_METRIC=exact_match", f"{SHORT} {FROM_NOTHING}", "exact match"),
    ('make sample PROMPT="Capital of Chile?" TEMPERATURE=0', "TOKENS=5", ""),
    ("make predict INPUT=questions.jsonl OUT=answers.jsonl TOKENS=100", "", "answers.jsonl"),
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
def test_plans_and_job_files_are_as_the_pages_say(tree_at: Callable[[Path], Path], tmp_path: Path) -> None:
    carry_out(PLANS, tree_at(tmp_path / "tree"))


@pytest.mark.long
def test_what_the_pages_show_of_runs(tree_at: Callable[[Path], Path], tmp_path: Path) -> None:
    tree = tree_at(tmp_path / "tree")
    with (tree / "defconfigs" / "lenet5").open("a", encoding="utf-8") as defconfig:
        defconfig.writelines(f"CONFIG_{line}\n" for line in ("BUDGET_STEPS=y", "MAX_STEPS=4"))
    for folder in (tree, tmp_path):
        (folder / "photos").mkdir()
    for name in ("photos/digit.png", "../photos/digit.png", "a.jpg", "b.png"):
        imsave(tree / name, np.full((28, 28, 3), 128, np.uint8))
    (tree / "my.yaml").write_text(example(ROOT / "docs/tutorials/compare.md", "yaml"), encoding="utf-8")
    carry_out(LOOKS, tree)
    (runs_of(tree)[-1] / "status.json").unlink()  # as of a run that was killed
    carry_out([("make resume RUN=20261121T093620Z", "", "Done: ")], tree)
    assert (tree / "found.csv").read_text().startswith("input,prediction,")


@pytest.mark.long
def test_tables_and_texts_are_used_as_the_pages_say(tree_at: Callable[[Path], Path], tmp_path: Path) -> None:
    tree, texts = tree_at(tmp_path / "tree"), tmp_path / "texts"
    texts.mkdir()
    tagged = example(ROOT / "docs/tutorials/task.md", "", start='{"tokens"')
    lines = [tagged.replace("Ada", f"Ada{number}") for number in range(99)]
    (texts / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    kinds = [f"{number},{'abcd'[number % 4]}" for number in range(99)]
    (texts / "kinds.csv").write_text("\n".join(["size,kind", *kinds]), encoding="utf-8")
    (tree / "rows.csv").write_text("size\n7\n", encoding="utf-8")
    carry_out(TABLES, tree)
    assert len((tree / "found.jsonl").read_text().splitlines()) == 1
    carry_out(TEXTS, tree)
    (tree / "questions.jsonl").write_text('{"prompt": "Capital of Chile?"}\n', encoding="utf-8")
    carry_out(CHATS, tree)
    assert '"answer"' in (tree / "answers.jsonl").read_text()


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


def example(page: Path, language: str, *, start: str = "") -> str:
    """The first block of `page` in `language`, or ("") its first code span that begins with `start`."""
    text = page.read_text(encoding="utf-8")
    pattern = rf"^```{language}\n(.*?)^```" if language else f"`({re.escape(start)}.*?)`"
    found = re.search(pattern, text, flags=re.M | re.S)
    assert found, f"{page} has no such example"
    return found[1]


def runs_of(tree: Path) -> list[Path]:
    return sorted((path.parent for path in tree.glob("runs/*/*/values.json")), key=lambda run: run.name)


def of_this_tree(command: str, tree: Path) -> str:
    """`command` with runs of `tree` in place of those of the pages: the newest ones."""
    runs = runs_of(tree)
    for name in ("20261121T093620Z-a1f5e51b", "20261121T093620Z", "20261122", "20261121"):
        if name in command:
            command = command.replace(name, runs.pop().name)
    return command


def carry_out(commands: list[tuple[str, str, str]], tree: Path) -> None:
    """Each command in `tree`, one after the other: it ends well and says what is expected."""
    for command, flags, expected in commands:
        overrides = f"{flags} PYTHON={sys.executable} VENV="
        environment = {**os.environ, "MAKEFLAGS": f" -- {overrides}"}
        done = subprocess.run(
            ["sh", "-c", of_this_tree(command, tree)],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert expected in done.stdout, f"{command}\n{done.stdout}"

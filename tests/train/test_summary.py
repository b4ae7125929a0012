"""What a run says at its end: commands that make knows, for the run that has ended."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lib.data.tokenizers import ByteTokenizer, CharTokenizer
from lib.data.types import Dataset, TokenPart
from tests.contract.making import ROOT, table
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import random_data, small_config
from train.summary import next_commands, resume_command

ROWS = {row.target: row.variables for row in table()}
NAME = "lenet5/20260101T000000Z-01234567"


def strange(command: str) -> list[str]:
    """Words of a command of make that its table does not have."""
    program, target, *words = shlex.split(command)
    known = {**ROWS["*"], **ROWS.get(target, {})}
    names = [word.partition("=")[0] for word in words]
    missing = [name for name in names if name not in known]
    return [program] * (program != "make") + [target] * (target not in ROWS) + missing


def images() -> Dataset:
    return random_data(small_config(), shape=(1, 28, 28), train_size=4).dataset


def commands(dataset: Dataset, *, runs: Path = ROOT / "runs", **changes: object) -> list[str]:
    config = small_config(**changes)
    first, *lines = next_commands(runs / NAME, config, dataset, root=ROOT).splitlines()
    assert first == "Next:"
    return [re.split("  +", line.strip())[0] for line in lines]


@pytest.fixture(autouse=True)
def without_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAKEFLAGS", raising=False)


def test_commands_take_the_environment_that_make_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEFLAGS", r"s -- V=1 O=x$$$$y PYTHON=/a\ b/py SET=it's VENV=")
    given = [*commands(images()), resume_command(ROOT / "runs" / NAME)]
    assert given[0] == "make report 'PYTHON=/a b/py' VENV=" and not any(map(strange, given))
    assert all(command.endswith(" 'PYTHON=/a b/py' VENV=") for command in given)
    monkeypatch.setenv("MAKEFLAGS", "s")
    assert commands(images())[0] == "make report"


def test_the_next_commands_suit_the_task() -> None:
    assert commands(images()) == ["make report", "make eval BEST=1", "make runs"]
    assert commands(images(), keep_best=False) == ["make report", "make eval", "make runs"]
    text = text_data(small_lm_config()).dataset
    assert "sample" not in " ".join(commands(replace(text, tokenizer=None)))
    assert commands(replace(text, tokenizer=ByteTokenizer()))[1] == "make sample PROMPT=The"


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("The end", "PROMPT=The"),
        ("\nden der", "PROMPT=den"),
        ("«да», нет", "PROMPT='да'"),
        ("日本語の文章は空白がない長い文", "PROMPT='日本語の文章は空白がない'"),
        (" $# 'x", "PROMPT=x"),
        (" $# '-", "PROMPT='$$#'"),
    ],
)
def test_the_prompt_is_one_that_the_tokenizer_takes(text: str, prompt: str) -> None:
    tokenizer = CharTokenizer("".join(sorted({*text})))
    data = text_data(small_lm_config()).dataset
    part = TokenPart(tokenizer.encode_all((text * 9).encode()), len(text) + 1)
    dataset = replace(data, test=part, tokenizer=tokenizer)
    command = next_commands(ROOT / "runs" / NAME, small_config(), dataset, root=ROOT).partition(
        "make sample "
    )[2]
    assert command.startswith(f"{prompt}  ")
    (word,) = shlex.split(prompt)
    tokenizer.encode(word.removeprefix("PROMPT=").replace("$$", "$"))


@pytest.mark.parametrize("folder", ["build/lenet5", "my runs", "a$b", "it's"])
def test_every_command_is_one_that_make_takes(folder: str, tmp_path: Path) -> None:
    runs = tmp_path / folder / "runs"
    given = [*commands(images(), runs=runs), resume_command(runs / NAME)]
    assert [strange(command) for command in given] == [[], [], [], []]
    assert [shlex.split(command)[-1] for command in given] == [
        *["O={}".format(str(tmp_path / folder).replace("$", "$$"))] * 3,
        "RUN={}".format(str(runs / NAME).replace("$", "$$")),
    ]
    assert strange("make plot O=x") == ["plot"] and strange("make runs BEST=1") == ["BEST"]


def test_a_program_elsewhere_is_given_commands_for_the_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ANNEAL_CALLER", str(tmp_path))
    given = [*commands(images()), resume_command(ROOT / "runs" / NAME)]
    assert all(command.startswith(f"make -C {ROOT} ") for command in given)
    monkeypatch.setenv("ANNEAL_CALLER", str(ROOT))
    assert commands(images())[0] == "make report"

"""Texts become the tokens of a directory's weights, or that they would not is told before they are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from lib.config import Config, config_from_values
from lib.errors import ConfigError
from lib.kconf import Resolved, load_written
from tests.extras.text_classifiers import LABELS, folder_of, lines, write_lines
from tests.support.configs import ROOT
from train import training_data
from train.data_check import data_check
from train.training_data import describe_training_data, open_to_train

CAUSAL = {"DATASET_PYSOURCE", "DATASET_CHAT"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_lines(tmp_path / "train.jsonl", lines())
    folder_of("gpt2", tmp_path / "model", labels=LABELS)
    return tmp_path


def resolved_of(place: Path, **changes: str) -> Resolved:
    given = {
        "MODEL_HUGGINGFACE": "y",
        "HUGGINGFACE_INPUT_CAUSAL" if changes.keys() & CAUSAL else "HUGGINGFACE_INPUT_TEXT": "y",
        "HUGGINGFACE_DIR": str(place / "model"),
        "TARGET_EFFECTIVE_BATCH": "8",
        "BLOCK_SIZE": "16",
        **({} if changes.keys() & CAUSAL else {"DATASET_JSONL": "y"}),
        **({} if "DATASET_PYSOURCE" in changes else {"DATA_DIR": str(place)}),
    }
    overrides = {f"CONFIG_{name}": value for name, value in (given | changes).items()}
    return load_written("", root=ROOT, overrides=overrides)


def quiet(_: str) -> None:
    """Log nothing."""


def with_tokens(place: Path, **changed: int) -> Path:
    """A copy of the tokenizer with other ids of some tokens: those of two letters change places."""
    folder = place / "other"
    shutil.copytree(place / "model", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= changed
    file.write_text(json.dumps(content))
    return folder


def refused(resolved: Resolved, root: Path) -> set[str]:
    """What training, a plan and a check of the data say."""
    config, told = config_from_values(resolved.values), set[str]()
    for command in (
        lambda: open_to_train(config, root=ROOT, log=quiet),
        lambda: describe_training_data(config, root=ROOT, log=quiet),
        lambda: data_check(resolved, root=root, out=None),
    ):
        with pytest.raises(ConfigError) as caught:
            command()
        told.add(str(caught.value))
    return told


def accepted(resolved: Resolved) -> Config:
    config = config_from_values(resolved.values)
    open_to_train(config, root=ROOT, log=quiet)
    return config


def test_another_tokenizer_of_the_same_size_is_refused(place: Path) -> None:
    known = json.loads((place / "model/tokenizer.json").read_text())["model"]["vocab"]
    other = with_tokens(place, a=known["b"], b=known["a"])
    (told,) = refused(resolved_of(place, TOKENIZER_DIR=str(other)), place)
    first = min(known["a"], known["b"])
    assert told.startswith(
        f'CONFIG_TOKENIZER_DIR="{other}" is another tokenizer than that of CONFIG_HUGGINGFACE_'
    )
    assert f"2 of {len(known)} tokens differ: token {first} is 'b' in place of 'a'; leave" in told
    for file in (place / "model").glob("*.safetensors"):  # weights that are random know no tokens
        file.unlink()
    accepted(resolved_of(place, TOKENIZER_DIR=str(other)))


def test_one_with_the_same_tokens_or_more_is_taken(place: Path) -> None:
    other = with_tokens(place)
    accepted(resolved_of(place, TOKENIZER_DIR=str(other)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    config = accepted(resolved_of(place, TOKENIZER_DIR=str(other)))
    assert config.tokenizer_dir == str(other)


@pytest.mark.parametrize("name", ["BYTE", "CHAR", "GPT2"])
@pytest.mark.parametrize("kind", ["TEXT", "CAUSAL"])
def test_a_tokenizer_of_this_toolkit_is_refused_before_texts_are_read(
    name: str, kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any) -> None:
        raise AssertionError("the texts were read")

    monkeypatch.setattr(training_data, "open_dataset", opened)
    monkeypatch.setattr(training_data, "describe_dataset", opened)
    changes = {f"TOKENIZER_{name}": "y"}
    changes |= {"DATASET_PYSOURCE": "y"} if kind == "CAUSAL" else {}
    (told,) = refused(resolved_of(place, **changes), place)
    assert told.startswith(f'CONFIG_TOKENIZER_{name}=y is not the tokenizer of CONFIG_HUGGINGFACE_DIR="')
    assert "; set CONFIG_TOKENIZER_HUGGINGFACE=y" in told
    assert ("and CONFIG_DATASET_CHAT=y" in told) == (kind == "CAUSAL")


@pytest.mark.parametrize("directory", ["", "gone"])
def test_a_directory_that_is_not_there_is_named_with_its_symbol(directory: str, place: Path) -> None:
    (told,) = refused(resolved_of(place, HUGGINGFACE_DIR=directory), place)
    assert told.startswith("CONFIG_HUGGINGFACE_DIR") and "make fetch REPO=owner/name DIRECTORY=..." in told
    (told,) = refused(resolved_of(place, TOKENIZER_DIR="gone", HUGGINGFACE_DIR=str(bare(place))), place)
    assert told.startswith('CONFIG_TOKENIZER_DIR="gone" is no local directory') and "make fetch REPO=" in told


def bare(place: Path) -> Path:
    """The model's directory without weights."""
    for file in (place / "model").glob("*.safetensors"):
        file.unlink()
    return place / "model"


def test_longer_texts_than_the_model_takes_are_refused_by_a_check_of_the_data(place: Path) -> None:
    assert data_check(resolved_of(place, BLOCK_SIZE="64"), root=place, out=None) == 0
    (told,) = refused(resolved_of(place, BLOCK_SIZE="65"), place)
    assert told.startswith("CONFIG_BLOCK_SIZE=65 is too long for ") and told.endswith("CONFIG_BLOCK_SIZE=64")


def test_an_answer_without_a_token_for_its_end_names_the_cure(place: Path) -> None:
    row = {"prompt": "good?", "completion": "bad"}
    write_lines(place / "chat.jsonl", [{**row, "prompt": f"{n}"} for n in range(40)])
    size = len(transformers.AutoTokenizer.from_pretrained(place / "model"))
    folder = folder_of("gpt2", place / "lm", auto="AutoModelForCausalLM", labels=[], vocab_size=size)
    changes = {"DATASET_CHAT": "y", "HUGGINGFACE_DIR": str(folder), "BLOCK_SIZE": "32"}
    accepted(resolved_of(place, **changes))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    (told,) = refused(resolved_of(place, **changes), place)
    assert told.endswith(f"; name its eos_token in {folder}/tokenizer_config.json: answers end with it")
    padded = folder_of("gpt2", place / "padded", auto="AutoModelForCausalLM", labels=[])
    for name, told in (("padded", False), ("bare", True)):
        if name == "bare":
            (padded / "tokenizer_config.json").write_text(file.read_text())
        config = config_from_values(resolved_of(place, **changes | {"HUGGINGFACE_DIR": str(padded)}).values)
        source = open_to_train(config, root=ROOT, log=quiet).dataset.source
        assert (
            "; NOTE: the tokenizer has no eos_token, so answers end with a token that it" in source
        ) == told

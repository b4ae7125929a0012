"""Questions, the tokens of two language models, and the rows that they become."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data.datasets.key_values import TEST_SIZE, TRAIN_SIZE
from lib.data.datasets.question_answering.data import (
    ANCHOR,
    Options,
    Question,
    pack,
    packed,
    questions,
    read_published,
    truncated,
)
from lib.data.datasets.question_answering.huggingface import sizes
from lib.data.datasets.question_answering.spec import AnswerSpec
from lib.data.huggingface_tokenizer import HuggingFaceTokenizer
from lib.data.tokenizers import ByteTokenizer, learned
from lib.data.types import ArrayPart
from lib.errors import ConfigError, DataError
from lib.nn import IGNORED
from tests.models.latentwire.answers import answer_set, some_questions
from tests.support import datasets

FACT = re.compile(r"([a-d])=([a-p]{2}) ([a-d])=([a-p]{2}) \?([a-d])")


@pytest.mark.slow
def test_every_answer_is_the_value_of_its_key() -> None:
    for question in [*some_questions(2000), *questions("test")]:
        found = FACT.fullmatch(question.source)
        assert found is not None
        first, value, second, other, requested = found.groups()
        assert first != second
        assert question.answer == f"{({first: value, second: other})[requested]}\n"


@pytest.mark.slow
def test_questions_are_the_same_everywhere_and_none_is_trained_and_tested_on() -> None:
    train, test = questions("train"), questions("test")
    assert (len(train), len(test)) == (TRAIN_SIZE, TEST_SIZE)
    assert not {one.source for one in train} & {one.source for one in test}
    answers = [question.answer for question in test]
    most = max(answers.count(answer) for answer in set(answers))
    assert most <= 0.03 * TEST_SIZE, "one answer for all would be right too often"


def test_pairs_are_merged_by_how_frequent_they_are() -> None:
    tokenizer = learned(["abab abab cd"], merges=3)
    content = {number: bytes(tokenizer.decode([number]), "utf-8") for number in (256, 257, 258)}
    assert content == {256: b"ab", 257: b"abab", 258: b" abab"}
    assert tokenizer.encode("abab abc") == [257, 32, 256, 99]
    assert learned(["aa"], merges=9).vocab_size == 257, "no pair is left"


@pytest.mark.slow
def test_pairs_write_what_they_read_in_fewer_tokens() -> None:
    texts = [one.source + ANCHOR + one.answer for one in some_questions(300)]
    tokenizer = learned(texts, merges=64)
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text and len(tokens) < len(text)
    assert max(max(tokenizer.encode(text)) for text in texts) < tokenizer.vocab_size


def test_a_source_is_cut_between_characters() -> None:
    assert [truncated("aéb", source_bytes=count) for count in (1, 2, 3, 4)] == ["a", "a", "aé", "aéb"]


def test_rows_hold_source_anchor_and_answer_in_the_tokens_of_each() -> None:
    rows = [Question("key=value", " v\n"), Question("longer than that", " w x\n")]
    contents, [(answers, texts)] = pack(rows, [ByteTokenizer()], anchor=" A", source_bytes=12)
    assert contents.tobytes() == b"key=value\0\0\0longer than "
    assert [bytes(row[row != IGNORED].astype(np.uint8)) for row in answers] == [b" v\n", b" w x\n"]
    told = [bytes(row[row != IGNORED].astype(np.uint8)) for row in texts]
    assert told == [b"key=value A v\n", b"longer than  A w x\n"], "nobody sees more of a source"


@pytest.mark.slow
def test_targets_are_cut_by_their_columns_and_end_with_another_source() -> None:
    dataset = answer_set(5, 3)
    spec, part = dataset.spec, dataset.test
    assert isinstance(spec, AnswerSpec) and isinstance(part, ArrayPart)
    assert part.targets.shape == (3, sum(spec.columns))
    edges = np.cumsum(spec.columns)[:-1]
    answer_a, text_a, answer_b, text_b, others = np.split(part.targets, edges, axis=1)
    assert (others[:2] == part.inputs[1:]).all() and (others[2] == part.inputs[0]).all()
    for answers, texts, side in ((answer_a, text_a, spec.sides[0]), (answer_b, text_b, spec.sides[1])):
        for answer, text in zip(answers, texts, strict=True):
            kept = answer[answer != IGNORED].tolist()
            assert text[text != IGNORED].tolist()[-len(kept) - len(side.anchor) :] == [*side.anchor, *kept]
            assert max(text) < side.vocab_size
    assert spec.sides[0].anchor != spec.sides[1].anchor, "the two do not share their tokens"


def options(*models: str) -> dict[str, Any]:
    first, second = models
    return {"frozen_model_a": first, "frozen_model_b": second, "source_bytes": 16}


def opened(*models: str, root: Path) -> None:
    packed("x", some_questions(4), some_questions(2), Options(**options(*models)), root=root, anchor=" A",
           source="", synthetic=True)  # fmt: skip


@pytest.mark.slow
def test_a_model_that_is_not_known_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'toolkit:words'; name toolkit:bytes, toolkit:pairs or hf:DIR"):
        opened("toolkit:bytes", "toolkit:words", root=tmp_path)


@pytest.mark.slow
def test_a_missing_package_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="the package transformers is needed here") as found:
        opened("toolkit:bytes", "hf:model", root=tmp_path)
    assert "\n" not in str(found.value)


def test_sizes_are_those_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 11, "n_embd": 6}))
    assert sizes(tmp_path) == (11, 6)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 11, "hidden_size": 8}))
    assert sizes(tmp_path) == (11, 8)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"has no config\.json with vocab_size"):
        sizes(tmp_path)


def test_a_directory_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    with pytest.raises(ConfigError, match="has no tokenizer that can be read"):
        HuggingFaceTokenizer(tmp_path)
    with pytest.raises(ConfigError, match="model is not a directory; name one"):
        HuggingFaceTokenizer(tmp_path / "model")


SQUAD = {"data": [{"paragraphs": [{"context": "It rained in\nBergen.", "qas": [
    {"question": "Where did it rain?", "answers": [{"text": "Bergen"}, {"text": "in Bergen"}]},
    {"question": "Where did it snow?", "answers": [], "is_impossible": True},
]}]}]}  # fmt: skip
HOTPOT = [{"question": "Who came first?", "answer": "Ann", "context": [
    ["Ann", ["Ann was first. ", "She won."]], ["Bob", ["Bob was second."]],
]}]  # fmt: skip


def test_squad_and_hotpot_are_read(tmp_path: Path) -> None:
    for folder, content, *names in (
        ("squad", SQUAD, "train-v2.0.json", "dev-v1.1.json"),
        ("hotpot", HOTPOT, "hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json"),
    ):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(json.dumps(content))
    train, test, origin = read_published("squad", tmp_path)
    assert train == test == [Question("Where did it rain?\nIt rained in Bergen.", " Bergen\n")]
    files = [tmp_path / "squad" / name for name in ("train-v2.0.json", "dev-v1.1.json")]
    without = "(without 1 questions that have no answer)"
    assert origin == f"from {files[0]} {without} and {files[1]} {without}"
    found, _, _ = read_published("hotpot", tmp_path)
    assert found == [
        Question("Who came first?\nAnn was first. She won. Bob was second.", " Ann\n"),
    ]
    dataset = datasets.opened("hotpot", options("toolkit:bytes", "toolkit:pairs"), data_dir=tmp_path)
    assert dataset.train.take()[0].tobytes() == b"Who came first?\n" and not dataset.spec.synthetic


def test_what_is_no_file_of_questions_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train-v1\.1\.json or train-v2\.0\.json in .*KEY_VALUES"):
        read_published("squad", tmp_path)
    for content, reason in (({"data": [{}]}, "KeyError"), ({"data": []}, "no question"), ([1], "TypeError")):
        (tmp_path / "train-v1.1.json").write_text(json.dumps(content))
        (tmp_path / "dev-v1.1.json").write_text(json.dumps(SQUAD))
        with pytest.raises(DataError, match=reason):
            read_published("squad", tmp_path)

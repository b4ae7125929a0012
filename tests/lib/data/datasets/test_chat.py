"""Conversations: three formats, what counts of them, what is too long, and how they share rows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data.datasets.chat.conversations import (
    key_values,
    read_conversations,
    with_other_answers,
)
from lib.data.datasets.chat.data import pack, show
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.inputs import stored_dataset
from lib.data.types import ArrayPart, Dataset
from lib.errors import ConfigError
from lib.nn import IGNORED
from lib.plugins import DATASETS
from tests.support.datasets import opened

DEFAULTS = {
    "source": "file",
    "backwards": False,
    "shuffle_answers": False,
    "file": "chat.jsonl",
    "validation": "other",
    "validation_pct": None,
    "validation_file": "other.jsonl",
    "packing": False,
    "bucketing": False,
}
SHORT = {"prompt": "Hi", "completion": "Ho"}


def written(folder: Path, *lines: object, name: str = "chat.jsonl") -> Path:
    (folder / name).write_text("\n".join(map(json.dumps, lines)))
    return folder / name


def chat_of(folder: Path, *lines: object, size: int = 64, tokenizer: str = "byte", **options: Any) -> Dataset:
    """`lines` for training, and SHORT for validation."""
    written(folder, *lines)
    written(folder, SHORT, name="other.jsonl")
    values: Mapping[str, Any] = DEFAULTS | {"too_long": "error"} | options
    requested = {"data_dir": folder, "block_size": size, "tokenizer": tokenizer}
    return opened("chat", values, **requested)


def learned(dataset: Dataset, row: int = 0) -> list[str]:
    """The tokens of a row that count, and where they are predicted, each run as a text."""
    assert isinstance(dataset.train, ArrayPart) and isinstance(dataset.spec, ChatSpec)
    inputs, targets = dataset.train.take()
    tokens, wanted = (inputs[row, 0] if dataset.spec.packed else inputs[row]), targets[row]
    places = np.flatnonzero(wanted != IGNORED)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    found = []
    for run in runs:
        assert (tokens[run[1:]] == wanted[run[:-1]]).all(), "targets are the next tokens"
        ends = "$" if wanted[run[-1]] == dataset.spec.end else ""
        found.append(bytes(wanted[run][: len(run) - len(ends)].astype("u1")).decode() + ends)
    return found


def test_three_formats_are_read(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "and?"},
    ]
    ((place, kept),), unread = read_conversations(written(tmp_path, {"messages": messages, "id": 3}))
    assert place.endswith("chat.jsonl:1") and kept == messages[:3] and unread == {"id"}
    pair = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert read_conversations(written(tmp_path, SHORT))[0][0].messages == pair
    alpaca = {"instruction": "Add.", "input": "1 2", "output": "3"}
    (whole, without, empty), unread = read_conversations(
        written(tmp_path, alpaca, {"instruction": "Add.", "output": "3"}, alpaca | {"input": ""})
    )
    assert whole.messages[0]["content"] == "Add.\n\n1 2" and unread == set()
    assert without.messages == empty.messages and without.messages[0]["content"] == "Add."


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (r'{"prompt": "a \ud800", "completion": "b"}', "surrogates not allowed"),
        ('{"prompt": "a", "completion": "b", "completion": "c"}', "a key twice"),
        ('{"messages": [{"role": "user", "role": "assistant", "content": "b"}]}', "a key twice"),
    ],
)
def test_no_text_and_no_key_is_changed_or_lost_by_reading(line: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=rf"chat\.jsonl:1 is no JSON object: .*{told}"):
        read_conversations(tmp_path / "chat.jsonl")
    written(tmp_path, SHORT | {"prompt": "a \U0001f600"})  # a whole pair
    assert read_conversations(tmp_path / "chat.jsonl")[0][0].messages[0]["content"] == "a \U0001f600"


def test_answers_with_their_ends_count_and_nothing_else(tmp_path: Path) -> None:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    messages = [{"role": role, "content": f"{role[0]}{n}"} for n, role in enumerate(roles)]
    dataset = chat_of(tmp_path, {"messages": messages, "source": "x"}, SHORT | {"messages": messages})
    assert learned(dataset) == [" a2$", " a4$"]
    whole = "system: s0\nuser: u1\nassistant: a2$user: u3\nassistant: a4$"
    assert isinstance(dataset.train, ArrayPart)
    row = dataset.train.take()[0][0].tolist()
    assert row == [*(255 if letter == "$" else ord(letter) for letter in whole), *[255] * (64 - len(whole))]
    assert "keys that are not read: completion, prompt, source" in dataset.source
    assert "2 + 1 conversations" in dataset.source and "by the plain template" in dataset.source
    (line,) = show(dataset, dataset.train, np.arange(1))
    assert line == f"{len(whole)} tokens, 8 count: " + repr(
        "system: s0\nuser: u1\nassistant:[[ a2<end>]]user: u3\nassistant:[[ a4<end>]]"
    )


def test_characters_are_those_of_the_template_too(tmp_path: Path) -> None:
    dataset = chat_of(tmp_path, {"prompt": "é", "completion": "ü"}, tokenizer="char")
    assert dataset.tokenizer is not None
    characters = dataset.tokenizer.to_json()["characters"]
    assert {*"user: é\nassistant: ü"} <= {*characters}
    assert isinstance(dataset.spec, ChatSpec) and dataset.spec.end == dataset.spec.pad == len(characters)
    assert dataset.spec.vocab_size == len(characters) + 1


def test_gpt2_ends_answers_with_its_own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lib.data.tokenizers import GPT2Tokenizer

    ids = {bytes((byte,)): byte for byte in range(256)}
    tokenizer = GPT2Tokenizer(ids, [], end=256)
    monkeypatch.setattr("lib.data.datasets.chat.data.tokenizer_of", lambda *_, **__: tokenizer)
    dataset = chat_of(tmp_path, SHORT)
    assert isinstance(dataset.spec, ChatSpec) and dataset.spec.vocab_size == 257 and dataset.spec.end == 256
    assert " Ho<end>]]" in show(dataset, dataset.train, np.arange(1))[0] and learned(dataset) == [" Ho$"]


LONG = {"prompt": "x" * 30, "completion": "y" * 9}  # 48 of 58 tokens are before the answer


def test_what_is_too_long_is_an_error_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as found:
        chat_of(tmp_path, SHORT, LONG, LONG | {"completion": "y" * 19}, size=50)
    assert str(found.value) == (
        f"{tmp_path}/chat.jsonl:2 takes 58 tokens, CONFIG_BLOCK_SIZE is 50: 2 of 4 conversations are longer; "
        "the longest takes 68; "
        "set CONFIG_BLOCK_SIZE=68, CONFIG_CHAT_TOO_LONG_DROP=y or CONFIG_CHAT_TOO_LONG_CUT=y"
    )
    assert chat_of(tmp_path, SHORT, LONG, size=58).train.size == 2


def test_the_size_that_is_advised_is_enough_for_both_parts(tmp_path: Path) -> None:
    lines = [LONG | {"completion": "y" * (number + 1)} for number in range(40)]
    split = {"validation": "split", "validation_pct": 30, "validation_file": None}
    with pytest.raises(
        ConfigError, match=r"40 of 40 conversations are longer; the longest takes (\d+)"
    ) as found:
        chat_of(tmp_path, *lines, size=40, **split)
    advised = int(str(found.value).partition("CONFIG_BLOCK_SIZE=")[2].partition(",")[0])
    dataset = chat_of(tmp_path, *lines, size=advised, **split)
    assert (dataset.train.size + dataset.test.size, dataset.test.size > 0) == (40, True)
    with pytest.raises(ConfigError, match="1 of 40 conversations are longer"):
        chat_of(tmp_path, *lines, size=advised - 1, **split)


def test_what_is_lost_is_told(tmp_path: Path) -> None:
    dropped = chat_of(tmp_path, SHORT, LONG, size=50, too_long="drop")
    lost = (
        "1 of 2 conversations for training are longer than 50: 1 are left out and 0 cut, "
        "73.3% of the tokens that count"
    )
    assert dropped.train.size == 1 and lost in dropped.source and learned(dropped) == [" Ho$"]
    cut = chat_of(tmp_path, SHORT, LONG, LONG | {"prompt": "x" * 40}, size=50, too_long="cut")
    lost = (
        "2 of 3 conversations for training are longer than 50: 1 are left out and 1 cut, "
        "73.1% of the tokens that count"
    )
    assert cut.train.size == 2 and lost in cut.source and learned(cut, 1) == [" yy"]
    with pytest.raises(
        ConfigError, match="no answer for training is within CONFIG_BLOCK_SIZE=10 tokens; raise it"
    ):
        chat_of(tmp_path, LONG, size=10, too_long="cut")


def test_questions_need_no_answer(tmp_path: Path) -> None:
    asks, says = ({"role": role, "content": role} for role in ("user", "assistant"))
    for lines, kept in (
        ([{"messages": [asks]}, {"messages": [asks, says]}, {"messages": [asks, says, asks]}], [1, 2, 3]),
        ([{"prompt": "a"}, {"prompt": "a", "completion": "b"}], [1, 2]),
        ([{"instruction": "a", "input": "b"}, {"instruction": "a", "output": "b"}], [1, 2]),
    ):
        found, unread = read_conversations(written(tmp_path, *lines), open_ended=True)
        assert [len(each.messages) for each in found] == kept and not unread
    for line, told in (
        ({"messages": [says]}, "begins with an answer"),
        ({"prompt": "a", "completion": ""}, '"completion" is empty'),
        ({"instruction": "a", "output": 3}, '"output" is no text'),
        ({"input": "a"}, "no conversation of the format"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_conversations(written(tmp_path, line), open_ended=True)
    line = b'{"prompt": "from a pipe"}\n'
    ((place, _),), _ = read_conversations(Path("standard input"), open_ended=True, content=line)
    assert place == "standard input:1"
    with pytest.raises(ConfigError, match="has no message of the assistant"):
        read_conversations(written(tmp_path, {"messages": [asks]}))


def test_a_stored_run_knows_its_spec_without_data(tmp_path: Path) -> None:
    dataset = chat_of(tmp_path, SHORT, bucketing=True)
    content = {
        "kind": "ChatSpec", "spec": dataclasses.asdict(dataset.spec), "source": dataset.source,
        "class_names": [], "tokenizer": dataset.tokenizer and dataset.tokenizer.to_json(),
        "fills_missing": False,
    }  # fmt: skip
    stored = stored_dataset(content, plugin=vars(DATASETS.load("chat")))
    assert stored is not None and stored.spec == dataset.spec and stored.train.size == 1
    assert isinstance(stored.spec, ChatSpec) and stored.spec.lengths(stored.train).tolist() == [64]
    assert stored_dataset(content | {"kind": "Path"}, plugin={"Path": Path}) is None
    assert stored_dataset(content, plugin={}) is None


def test_validation_follows_the_content_alone(tmp_path: Path) -> None:
    lines = [{"prompt": str(n), "completion": "a"} for n in range(80)]
    options = {"validation": "split", "validation_pct": 25, "validation_file": None}

    def held_out(*given: object) -> set[bytes]:
        dataset = chat_of(tmp_path, *given, **options)
        return {row.tobytes() for row in dataset.test.take()[0]}

    first = held_out(*lines[:40], lines[3])
    assert 3 <= len(first) <= 20
    later = held_out(*({"x": 1} | line for line in reversed(lines)))
    assert first < later and len(later) <= 35


@pytest.mark.parametrize("size", [1, 7, 64])
def test_rows_are_filled_by_first_fit(size: int) -> None:
    lengths = np.random.default_rng(size).integers(1, size + 1, 300).tolist()
    rows = pack(lengths, size)
    assert sorted(number for row in rows for number in row) == [*range(300)]
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert max(filled) <= size
    for later, row in enumerate(rows):
        assert all(size - total < min(lengths[n] for n in row) for total in filled[:later]), "it fits before"
    assert sum(filled) / size <= len(rows) <= 1.25 * sum(filled) / size + 1
    assert pack([], size) == []


def test_packed_rows_number_their_conversations(tmp_path: Path) -> None:
    lines = [{"prompt": "p" * n, "completion": "c" * n} for n in (1, 2, 9, 3)]
    dataset = chat_of(tmp_path, *lines, size=64, packing=True)
    assert isinstance(dataset.train, ArrayPart) and dataset.spec.input_shape == (2, 64)
    inputs, targets = dataset.train.take()
    assert inputs.shape == (2, 2, 64) and "packed into 2 + 1 rows" in dataset.source
    assert learned(dataset, 0) == [" ccccccccc$", " ccc$"] and learned(dataset, 1) == [" cc$", " c$"]
    for tokens, documents, wanted in zip(inputs[:, 0], inputs[:, 1], targets, strict=True):
        assert documents[0] == 0 and (np.diff(documents[documents >= 0]) >= 0).all()
        assert ((documents == -1) <= (tokens == 255)).all() and (wanted[documents == -1] == IGNORED).all()
        last_of_each = np.flatnonzero(np.diff(documents, append=-2))
        assert (wanted[last_of_each] == IGNORED).all(), "no conversation predicts the next one"


def test_equal_lengths_are_packed_in_their_order() -> None:
    assert pack([2, 2, 2, 2, 2], 4) == [[0, 1], [2, 3], [4]]
    assert pack([1, 3, 2, 2], 4) == [[1, 0], [2, 3]]


@pytest.mark.slow
def test_questions_of_both_directions_differ_in_a_letter_and_share_no_text() -> None:
    plain, reverse = (key_values("test", backwards=each) for each in (False, True))
    for one, other in zip(plain, reverse, strict=True):
        (asks, answers), (asks_again, answers_again) = (
            [message["content"] for message in each.messages] for each in (one, other)
        )
        facts, key = asks.split(" ?")
        assert f"{key}={answers}" in facts.split() and asks_again == f"{facts} <{key}"
        assert answers_again == answers[::-1]
    trained = {each.messages[0]["content"] for each in key_values("train", backwards=False)}
    assert not trained & {each.messages[0]["content"] for each in plain} and len(plain) == 512


@pytest.mark.slow
def test_each_conversation_gets_the_answer_of_another_one() -> None:
    whole = key_values("train", backwards=False)[:100]
    changed = with_other_answers(whole)
    assert [each.messages[0] for each in changed] == [each.messages[0] for each in whole]
    given, own = ([id(each.messages[-1]) for each in part] for part in (changed, whole))
    assert sorted(given) == sorted(own)
    assert not [place for place in range(100) if given[place] == own[place]]


def test_exchanged_answers_are_for_training_alone(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n}", "completion": f"answer {n}"} for n in range(8)]
    changed = chat_of(tmp_path, *lines, shuffle_answers=True)
    assert "CONTROL: the last answers for training are exchanged" in changed.source
    found = [learned(changed, row) for row in range(8)]
    assert sorted(found) == [[f" answer {n}$"] for n in range(8)]
    assert not [n for n in range(8) if found[n] == [f" answer {n}$"]]
    plain = chat_of(tmp_path, *lines)
    assert (changed.test.take(np.arange(1))[1] == plain.test.take(np.arange(1))[1]).all()

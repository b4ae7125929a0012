"""Labelled texts in JSON Lines: their classes, their parts, and what is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data import ArrayPart, Dataset, TextClassSpec
from lib.errors import DataError
from tests.support.datasets import opened

TEXTS = [{"text": f"text number {row}", "label": ("good", "bad", "odd")[row % 3]} for row in range(60)]


def labelled(folder: Path, rows: list[Any], *, other: list[Any] | None = None, **requested: Any) -> Dataset:
    for name, texts in (("train", rows), ("validation", other or [])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, texts)), encoding="utf-8")
    options = {
        "file": "train.jsonl",
        "validation": "other" if other else "split",
        "validation_pct": None if other else 20,
        "validation_file": "validation.jsonl" if other else None,
    }
    settings = {"data_dir": folder, "block_size": 32, "tokenizer": "byte", **requested}
    return opened("jsonl", options, **settings)


def texts_of(dataset: Dataset, part: ArrayPart) -> dict[str, str]:
    """Each text with its class."""
    assert dataset.tokenizer is not None and isinstance(dataset.spec, TextClassSpec)
    tokens, labels = part.take()
    shown = (dataset.tokenizer.decode(row[row != dataset.spec.pad]) for row in tokens)
    return {text: dataset.class_names[label] for text, label in zip(shown, labels, strict=True)}


def both(dataset: Dataset) -> tuple[dict[str, str], dict[str, str]]:
    assert isinstance(dataset.train, ArrayPart) and isinstance(dataset.test, ArrayPart)
    return texts_of(dataset, dataset.train), texts_of(dataset, dataset.test)


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_every_text_has_its_class_and_added_ones_move_none(tokenizer: str, tmp_path: Path) -> None:
    train, test = both(dataset := labelled(tmp_path, TEXTS, tokenizer=tokenizer))
    assert dataset.class_names == ("bad", "good", "odd") and dataset.spec.name == "jsonl"
    assert train | test == {row["text"]: row["label"] for row in TEXTS}
    assert 5 < len(test) < 20 and not train.keys() & test.keys()
    more = [{"text": f"another {row}", "label": "odd"} for row in range(30)]
    later_train, later_test = both(labelled(tmp_path, more + TEXTS[::-1], tokenizer=tokenizer))
    assert train.items() < later_train.items() and test.items() <= later_test.items()


def test_a_file_of_its_own_is_evaluated(tmp_path: Path) -> None:
    train, test = both(labelled(tmp_path, TEXTS, other=TEXTS[:5]))
    assert (len(train), len(test)) == (60, 5)


def test_whole_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    rows = [{"text": f"t{row}", "label": (10, 9, "x", True)[row % 4]} for row in range(80)]
    assert labelled(tmp_path, rows).class_names == ("9", "10", "true", "x")


def test_texts_that_are_longer_are_cut_and_counted(tmp_path: Path) -> None:
    long = [{"text": f"{row} {'long ' * 20}", "label": "odd"} for row in range(10)]
    dataset = labelled(tmp_path, TEXTS + long, other=[*TEXTS[:3], *long[:2]])
    assert "10 + 2 texts are longer than 32 bytes, and cut" in dataset.source
    tokens, _ = dataset.train.take()
    assert tokens.shape == (70, 32) and tokens.dtype == np.int64
    assert dataset.tokenizer is not None
    assert dataset.tokenizer.decode(tokens[60]) == f"0 {'long ' * 20}"[:32]


def test_keys_that_are_not_read_are_told_once(tmp_path: Path) -> None:
    assert "not read" not in labelled(tmp_path, TEXTS).source
    rows = [row | {"tags": ["x"], "id": 1} for row in TEXTS]
    assert labelled(tmp_path, rows).source.endswith("and cut; keys that are not read: id, tags")


def test_all_lines_that_cannot_be_used_are_listed(tmp_path: Path) -> None:
    bad: list[Any] = [
        {"text": "", "label": "odd"},
        {"txt": "a", "label": "odd"},
        {"text": "a", "label": []},
        3,
    ]
    with pytest.raises(DataError, match=r"^4 of 64 lines cannot be used: .*:61: .*, and 3 more") as error:
        labelled(tmp_path, TEXTS + bad)
    assert [line.partition(".jsonl:")[2] for line in error.value.findings] == [
        '61: "text" is no text; write {"text": "...", "label": "..."}',
        '62 has no "text": its keys are txt, label; rename txt to text',
        '63: "label" is []; make it a name, a whole number, true or false',
        '64 is no JSON object: it is int; write {"key": "value", ...} on a line of its own, or remove it',
    ]


def test_of_very_many_lines_the_first_are_listed(tmp_path: Path) -> None:
    bad: list[Any] = [{"text": "", "label": "odd"}] * 20_000
    with pytest.raises(DataError, match=r"and 19999 more, the first of which are listed above") as error:
        labelled(tmp_path, TEXTS + bad)
    *first, last = error.value.findings
    assert [line.partition(".jsonl:")[2].partition(":")[0] for line in first] == [*map(str, range(61, 81))]
    assert last == "... and 19980 more faults" and len(error.value.faults) == 20_000


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ((1, "positive", 0), "; NOTE: numbers (0, 1) and texts (positive) are classes side by side"),
        (("Good", "good", "bad"), "; NOTE: classes that differ in spelling alone: Good and good"),
        (("1.0", 1, "3"), "; NOTE: classes that differ in spelling alone: 1 and 1.0"),
        (("good", "bad", "nan"), ""),
        ((0, 1, "2"), ""),
    ],
)
def test_labels_of_two_spellings_are_told(labels: tuple[Any, ...], told: str, tmp_path: Path) -> None:
    rows = [{"text": f"t{row}", "label": labels[row % 3]} for row in range(80)]
    assert labelled(tmp_path, rows).source.rpartition("and cut")[2] == told

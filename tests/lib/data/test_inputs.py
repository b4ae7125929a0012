"""Inputs to predict that hold no sample, whatever the run was trained on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lib.data.inputs import read_inputs, split_inputs
from lib.data.jsonl import read_objects
from lib.data.tokenizers import ByteTokenizer
from lib.data.types import ArrayPart, Column, Dataset, ImageSpec, Spec, TableClassSpec, TextClassSpec
from lib.errors import ConfigError, DataError

SPECS: tuple[Spec, ...] = (
    ImageSpec(name="i", channels=1, height=8, width=8, classes=2, mean=(0.5,), std=(0.5,), synthetic=True),
    TableClassSpec(name="t", columns=(Column(name="x"),), classes=2),
    TextClassSpec(name="s", classes=2, vocab_size=257, block_size=8, pad=256),
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize(
    ("given", "named"),
    [(torch.zeros(2, 3), "Tensor"), ({1, 2}, "set"), (["a.csv", 3], "int"), (None, "NoneTy")],
)
def test_other_types_than_names_and_arrays_are_refused(spec: Spec, given: Any, named: str) -> None:
    none = ArrayPart(np.zeros((1, 8), np.int64), np.zeros(1, np.int64))
    with pytest.raises(
        ConfigError, match=f"inputs of type {named}.* cannot be predicted; give a list of names"
    ):
        read_inputs(given, Dataset(spec, none, none, "", ByteTokenizer()), rows=8, log=print)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("given", ["-", "new.txt"])
def test_empty_inputs_are_refused(
    spec: Spec, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Given:
        buffer = io.BytesIO()

    monkeypatch.setattr("sys.stdin", Given)
    (tmp_path / "new.txt").touch()
    none = ArrayPart(np.zeros((1, 8), np.int64), np.zeros(1, np.int64))
    path = given if given == "-" else tmp_path / given
    with pytest.raises(ConfigError, match=r"is empty|has no rows|is no file for this run"):
        read_inputs(path, Dataset(spec, none, none, "", ByteTokenizer()), rows=8, log=print)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_text_in_the_place_of_a_file_names_standard_input(spec: Spec) -> None:
    none = ArrayPart(np.zeros((1, 8), np.int64), np.zeros(1, np.int64))
    with pytest.raises(
        ConfigError, match=r"^INPUT=a is not there; name a file or a folder; INPUT=-"
    ) as error:
        read_inputs(
            split_inputs("a fine film"), Dataset(spec, none, none, "", ByteTokenizer()), rows=8, log=print
        )
    assert str(error.value).endswith('echo "a text" | make predict INPUT=-') == hasattr(spec, "pad")


def predicted(
    given: Any, spec: Spec, log: Callable[[str], None] = lambda _: None, **fields: Any
) -> tuple[list[str], Any]:
    none = ArrayPart(np.zeros((1, 8), np.int64), np.zeros(1, np.int64))
    dataset = Dataset(spec, none, none, "", ByteTokenizer(), **fields)
    total, chunks = read_inputs(given, dataset, rows=2, log=log)
    parts = [*chunks]
    names = [name for part in parts for name in part.names]
    assert len(names) == total
    return names, np.concatenate([part.inputs for part in parts])


@pytest.mark.parametrize("name", ["text", "sentence"])
def test_columns_of_texts_are_encoded_like_a_file_of_them(name: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    _, expected = predicted(file, SPECS[2])
    names, found = predicted({name: ["one", "two", "three"], "id": np.arange(3)}, SPECS[2])
    assert names == [f"table row {row}" for row in (1, 2, 3)] and (found == expected).all()


TWO = TableClassSpec(name="t", columns=(Column(name="x"), Column(name="y")), classes=2)
BAD_COLUMNS: dict[str, tuple[Spec, Mapping[Any, Any], str]] = {
    "unequal": (TWO, {"x": [1, 2], "y": [1]}, "^columns are not of one length: x has 2, y has 1; give each"),
    "one is empty": (TWO, {"x": [], "y": [1]}, "^columns are not of one length: x has 0, y has 1; give each"),
    "a number": (TWO, {"x": 1.5, "y": 2}, r"^column 'x' is float, .*: \{'x': \[\.\.\.\]\}"),
    "a text": (SPECS[2], {"text": "fine"}, "^column 'text' is str, not a list of values; give a"),
    "null": (TWO, {"x": None, "y": [1]}, "^column 'x' is NoneType, not a list"),
    "a scalar array": (TWO, {"x": np.float32(3), "y": np.array(1)}, "^column 'x' is float32, not a list"),
    "a scalar tensor": (TWO, {"x": [1], "y": torch.tensor(3)}, "^column 'y' is Tensor, not a list"),
    "a set": (TWO, {"x": {1}, "y": [1]}, "^column 'x' is set, not a list"),
    "a table of its own": (TWO, {"x": np.zeros((2, 2)), "y": [1, 2]}, "^column 'x', row 1 is ndarray"),
    "empty": (TWO, {"x": [], "y": []}, "^there is nothing to predict: the columns have no rows; give each"),
    "nothing": (TWO, {}, "^there is nothing to predict: there are no columns; give each"),
    "a number as name": (
        TWO,
        {0: [1], 1: [1]},
        "^a column is called 0, of type int; call it by a text, such as '0'",
    ),
    "lacking": (TWO, {"x": [1]}, "^table has no column 'y', an input of the run; there are x"),
    "other texts": (SPECS[2], {"words": ["a"]}, "^table has no column text or sentence: it has words; "),
    "images": (SPECS[0], {"x": [1]}, "^columns by name are for tables and texts, .* i; name files"),
}


@pytest.mark.parametrize("fault", BAD_COLUMNS)
def test_columns_that_are_none_are_refused_in_a_line(fault: str) -> None:
    spec, given, told = BAD_COLUMNS[fault]
    with pytest.raises(ConfigError, match=told) as caught:
        predicted(given, spec)
    assert "\n" not in str(caught.value)


def test_unknown_categories_are_counted_where_missing_values_are_filled() -> None:
    columns = (Column(name="size", mean=3.0), Column(name="city", values=("Oslo", "Rome")))
    spec, said = TableClassSpec(name="t", columns=columns, classes=2), list[str]()
    cities = ["Rome", "Bern", "", "Paris", "Bern"]
    given = {"size": [3, 3, None, 3, 3], "city": cities}
    _, inputs = predicted(given, spec, said.append, fills_missing=True)
    told = "categories unknown to the run count as missing: city 3 (the first is 'Bern' in row 2)"
    assert said == [f"table: {told}"] and inputs.tolist() == [[0, 0, 1], *[[0, 0, 0]] * 4]
    with pytest.raises(ConfigError, match=r"row 3: 'size' is missing: .*; write a value, or remove the row$"):
        predicted(given, spec)
    given["size"][2] = 3
    with pytest.raises(ConfigError, match=r"row 3: 'city' is missing: .*; write a value"):
        predicted(given, spec)
    cities[2] = "Oslo"
    with pytest.raises(ConfigError, match=r"row 2: 'city' is 'Bern': .*; there are Oslo, Rome$"):
        predicted(given, spec)
    cities[:] = ["Rome"] * 5
    predicted(given, spec, said.append, fills_missing=True)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("spec", "name", "content", "told"),
    [
        (SPECS[2], "a.txt", "one\n \ntwo\n", r"a\.txt, row 2 has no text; write one, or remove it$"),
        (SPECS[2], "a.jsonl", '{"text": "a"}\n\n', r"a\.jsonl, line 2 is blank; .* or remove the line$"),
        (SPECS[1], "a.jsonl", '{"x": 1}\nx\n', r"a\.jsonl, line 2 is no JSON: .* or remove the line$"),
        (SPECS[1], "a.jsonl", "[1]\n", r"a\.jsonl, line 1 is no JSON object; write .* or remove the line$"),
        (SPECS[1], "a.csv", "X1,xx\n1,2\n", r"has no column 'x', an input of the run; rename xx to x$"),
        (SPECS[1], "a.csv", "X1,b\n1,2\n", r"has no column 'x', an input of the run; there are X1, b$"),
        (
            SPECS[0],
            "a.png",
            "no image",
            r"^1 of 1 images .*; replace them, or leave them out: INPUT=- reads names",
        ),
        (SPECS[0], "-", "a.png\n\nb.png\n", "^standard input, line 2 is blank; remove blank lines$"),
    ],
)
def test_faults_of_an_input_say_how_to_mend_them(
    spec: Spec, name: str, content: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Given:
        buffer = io.BytesIO(content.encode())

    monkeypatch.setattr("sys.stdin", Given)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=told):
        predicted("-" if name == "-" else tmp_path / name, spec)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (
            np.zeros((2, 8, 8)),
            r"^the array is float64 \(2, 8, 8\): the run was trained on uint8 \(N, 1, 8, 8\); .* as uint8",
        ),
        (
            np.full((2, 8), 300),
            r"^the array has numbers outside 0\.\.256; give tokens as the training data have them",
        ),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_its_own_shape(array: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        predicted(array, SPECS[0 if array.ndim == 3 else 2])


ODD = "\u2028\u0085\x0b\x0c\x1c"  # where str.splitlines cuts, too


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_at_line_feeds_alone(mark: str, tmp_path: Path) -> None:
    spec = TextClassSpec(name="s", classes=2, vocab_size=257, block_size=20, pad=256)
    texts = [f"a{ODD}b", "c"]
    (tmp_path / "a.txt").write_bytes((mark + "\r\n".join(texts)).encode())
    rows = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_bytes((mark + "\r\n".join(rows) + "\r\n").encode())
    _, expected = predicted({"text": texts}, spec)
    for name in ("a.txt", "a.jsonl"):
        names, found = predicted(tmp_path / name, spec)
        assert names == [f"{tmp_path / name} row {number}" for number in (1, 2)]
        assert found.tolist() == expected.tolist()


def test_blanks_around_a_cell_do_not_count(tmp_path: Path) -> None:
    spec = TableClassSpec(name="t", columns=(Column(name="city", values=("Oslo", "Rome")),), classes=2)
    cities = [" Oslo", "Rome\n"]
    np.savez(tmp_path / "a.npz", city=np.array(cities))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"city": city}) for city in cities))
    for given in ({"city": cities}, tmp_path / "a.npz", tmp_path / "a.jsonl"):
        assert predicted(given, spec)[1].tolist() == [[1, 0], [0, 1]]


BAD_JSON = {
    "half a pair": (r'{"text": "\ud83d"}', "surrogates not allowed; write the character whole"),
    "nested": ('{"text": ' + "[" * 100_000, "it is nested too deeply; write"),
    "a key twice": ('{"text": "a", "text": "b"}', "it has a key twice; its keys are text, text; name each"),
    "long number": ('{"text": ' + "1" * 5000 + "}", "Exceeds the limit .*; write"),
}


@pytest.mark.parametrize("fault", BAD_JSON)
def test_json_that_cannot_be_used_is_one_line(fault: str, tmp_path: Path) -> None:
    line, told = BAD_JSON[fault]
    (file := tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=f"line 2 is no JSON: .*{told}"):
        predicted(file, SPECS[2])
    with pytest.raises(DataError, match=f"a.jsonl:2 is no JSON object: .*{told}"):
        read_objects(file, lambda _, read: read)

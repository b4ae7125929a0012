"""Model cards: the lines of Python in them do what the run did."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lib.data.datasets.image_folder.data import decode
from lib.data.datasets.tabular.data import encoded
from lib.data.datasets.tabular.table_files import Table
from lib.data.datasets.text_files import padded
from lib.data.tokenizers import ByteTokenizer, CharTokenizer
from lib.data.types import Column, ImageSpec, TableClassSpec, TextClassSpec, Tokenizer
from train import export_card
from train.export_graph import Graph
from train.export_inputs import reading
from train.tasks.answers import Answers


def code_of(facts: dict[str, Any]) -> dict[str, Any]:
    """What the lines of Python in the section of a card define."""
    code: dict[str, Any] = {}
    exec(reading(facts).split("```python")[1].split("```")[0], code)
    return code


def write(facts: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write model.json where the lines of the card look for it; return the section."""
    (folder / "model.json").write_text(json.dumps(facts))
    monkeypatch.chdir(folder)
    return reading(facts)


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_read_as_in_a_folder_of_images(channels: int, tmp_path: Path) -> None:
    spec = ImageSpec.square("photos", 20, 2, mean=(0.5,) * channels, std=(0.2,) * channels)
    wanted = export_card._preprocessing(spec)
    assert wanted and wanted["resize"] == [20, 20]
    code = code_of({"format": "onnx", "preprocessing": wanted, "spec": dataclasses.asdict(spec)})
    generator = np.random.default_rng(1)
    colours, grey = (generator.integers(0, 256, shape, np.uint8) for shape in ((161, 190, 4), (161, 190)))
    deep = Image.fromarray(generator.integers(0, 65536, (161, 190), np.uint16))
    images = {"deep.png": deep, "deep.tif": deep, "grey.png": Image.fromarray(grey)}
    if channels == 3:
        images |= {"clear.png": Image.fromarray(colours), "plain.jpg": Image.fromarray(colours[..., :3])}
    for name, image in images.items():
        for orientation in (1, 6):  # as it is, and a quarter turn
            exif, file = Image.Exif(), tmp_path / name
            exif[0x0112] = orientation
            image.save(file, exif=exif)
            assert np.array_equal(code["read"](file), decode(file, spec.width)[:channels]), (
                name,
                orientation,
            )


def test_other_data_and_oblong_images_have_no_such_section() -> None:
    spec = ImageSpec.square("photos", 20, 2, mean=(0.5,), std=(0.2,))
    for other in (dataclasses.replace(spec, width=spec.height + 1), object()):
        assert export_card._preprocessing(other) is None
    assert reading({"format": "onnx", "preprocessing": None, "spec": {}}) == ""


ROWS = [
    {"area": "65.5", "zip|code": "0123", "city": " Bern "},
    {"area": "NA", "zip|code": "99", "city": "Aarau"},
    {"area": "7", "zip|code": "?", "city": "Bern"},
]


def test_a_row_is_read_as_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (
        Column(name="zip|code", values=("0123", "99")),
        Column(name="area", mean=50.0, std=20.0),
        Column(name="city", values=("Aarau", "Bern")),
    )
    spec = TableClassSpec(name="houses", columns=columns, classes=2)
    facts = {"format": "onnx", "preprocessing": None, "spec": dataclasses.asdict(spec)}
    text = write(facts, tmp_path, monkeypatch)
    for line in (
        r'| 0 | zip\|code | "0123", "99" |',
        "| 1 | area | a number |",
        '| 2 | city | "Aarau", "Bern" |',
    ):
        assert line in text.splitlines()
    rows = code_of(facts)["read"](ROWS)
    assert rows.dtype == np.float64 and rows.shape == (3, 3)
    graph = Graph(
        torch.nn.Identity(),
        spec,
        Answers(lambda outputs, _: outputs, lambda *_: pytest.fail("it is not asked")),
    )
    table = Table(Path("t.csv"), {name: [row[name].strip() for row in ROWS] for name in ROWS[0]}, "")
    assert np.array_equal(graph(torch.from_numpy(rows)).numpy(), encoded(columns, table, np.arange(3)))
    with pytest.raises(ValueError, match="Genf"):
        code_of(facts)["read"]([{**ROWS[0], "city": "Genf"}])
    assert reading(facts | {"format": "safetensors"}) == "", "its inputs are normalised"


def test_a_long_list_of_columns_and_values_is_counted() -> None:
    columns = [{"name": f"c{number}", "values": [*"abcdefghijklmnopqrstuvwxyz"]} for number in range(130)]
    text = reading({"format": "pt2", "spec": {"columns": columns}})
    assert '"t" and 6 more |' in text and "| ... | 30 more | in model.json |" in text and "c100" not in text


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("\n abelmnotz|ä"), None])
def test_a_text_is_read_as_in_the_run(
    tokenizer: Tokenizer | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, own = ["zo", "  name bottle at tome  ", "\tä|a\n"], tokenizer or ByteTokenizer()
    pad = own.vocab_size if own.name == "char" else 255
    spec = TextClassSpec(name="reviews", vocab_size=pad + 1, block_size=7, pad=pad, classes=2)
    facts = {
        "format": "onnx",
        "preprocessing": None,
        "spec": dataclasses.asdict(spec),
        "tokenizer": tokenizer and tokenizer.to_json(),
    }
    assert f"truncated, a shorter one padded at the end with {pad}." in write(facts, tmp_path, monkeypatch)
    assert export_card._input(spec, "onnx") == f"int64 (N, 7) tokens, padded at the end with {pad}"
    given = texts if tokenizer else [own.encode(text.strip()) for text in texts]
    found = code_of(facts)["read"](given)
    wanted, truncated = padded([text.strip() for text in texts], tokenizer=own, block_size=7, pad=pad)
    assert truncated == 1 and found.dtype == wanted.dtype and np.array_equal(found, wanted)


def test_a_model_of_language_that_classifies_says_so() -> None:
    facts = {"task": "lm", "labels": ["bad", "good"]}
    assert export_card._task(facts) == "classify (by lm)"
    assert export_card._task(facts | {"labels": []}) == "lm"
    assert export_card._task(facts | {"task": "my_task"}) == "my_task"

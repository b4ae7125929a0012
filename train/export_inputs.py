"""Sections of model cards: how an image, a row or a text becomes an input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lib.data.datasets.tabular.table_files import MISSING

# As image_folder/data.py decodes a file.
READ_IMAGE = """import numpy
from PIL import Image, ImageOps

def read(file):
    image = Image.open(file)
    image.draft("RGB", ({width}, {height}))  # JPEG: decode at the lowest sufficient resolution
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of grey
        values = (numpy.asarray(image).astype("uint32") * 255 + 32767) // 65535
        image = Image.fromarray(values.astype("uint8"))
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    square = ImageOps.fit(image.convert("RGB"), ({width}, {height}), Image.Resampling.BILINEAR)
    return numpy.asarray(square.convert("{mode}")).reshape({height}, {width}, {channels}).transpose(2, 0, 1)
"""

# As tabular/data.py reads a row: MISSING of table_files.py, and categories by their place.
READ_ROWS = """import json, numpy, pathlib

columns = json.loads(pathlib.Path("model.json").read_text("utf-8"))["spec"]["columns"]
missing = {missing}

def number(column, cell):
    text = str(cell).strip()
    if text in missing:
        return float("nan")
    return column["values"].index(text) if column["values"] else float(text)

def read(rows):  # each a dict with a cell for each column
    return numpy.array([[number(each, row[each["name"]]) for each in columns] for row in rows], "float64")
"""
# As text_files.py:padded.
READ_TEXTS = """import numpy
{encode}
def read(texts):  # {given}
    inputs = numpy.full((len(texts), {length}), {pad}, "int64")
    for row, text in zip(inputs, texts):
        ids = {ids}[:{length}]
        row[:len(ids)] = ids
    return inputs
"""
READ_CHARACTERS = """import json, pathlib

characters = json.loads(pathlib.Path("model.json").read_text("utf-8"))["tokenizer"]["characters"]
"""
_COLUMNS, _VALUES = 100, 20  # of a card; model.json has all


def reading(facts: Mapping[str, Any]) -> str:
    """Return the section that tells how an image, a row or a text becomes an input, "" for other data."""
    spec, is_graph = facts["spec"], facts["format"] in ("pt2", "onnx")
    if "columns" in spec and is_graph:
        return _reading_rows(spec["columns"])
    if "pad" in spec and "unit" not in spec and facts["format"] != "huggingface":
        return _reading_texts(spec, facts["tokenizer"])
    if (wanted := facts["preprocessing"]) is None:
        return ""
    (height, width), mode = wanted["resize"], wanted["colours"]
    code = READ_IMAGE.format(mode=mode, width=width, height=height, channels=facts["spec"]["channels"])
    return f"""
## Read an image

Images were cropped to their centre square and resized to {height}x{width}:

```python
{code}```
"""


def _reading_rows(columns: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for place, column in enumerate(columns[:_COLUMNS]):
        shown = [json.dumps(value, ensure_ascii=False) for value in column["values"][:_VALUES]]
        more = len(column["values"]) - len(shown)
        values = ", ".join(shown) + f" and {more} more" * bool(more) if shown else "a number"
        lines.append(f"| {place} | {_cell(column['name'])} | {_cell(values)} |")
    if more := len(columns) - len(lines):
        lines.append(f"| ... | {more} more | in model.json |")
    table = "\n".join(lines)
    return f"""
## Read a row

An input has these columns in this order. A category is its place among its values, from 0.

| place | column | values |
|---|---|---|
{table}

```python
{READ_ROWS.format(missing=sorted(MISSING))}```
"""


def _reading_texts(spec: Mapping[str, Any], tokenizer: Mapping[str, Any] | None) -> str:
    kind = (tokenizer or {}).get("name") if "classes" in spec else None  # a tag is for a word, not a text
    encode, given, ids = {
        "byte": ("", "a list of texts", "[*text.strip().encode()]"),
        "char": (READ_CHARACTERS, "a list of texts", "[characters.index(each) for each in text.strip()]"),
    }.get(str(kind), ("", "a list of the tokens of each text", "text"))
    length, pad = spec["block_size"], spec["pad"]
    code = READ_TEXTS.format(encode=encode, given=given, ids=ids, length=length, pad=pad)
    how = " Its tokens are those of the run's tokenizer, with its special tokens, truncated by it." * (
        ids == "text"
    )
    return f"""
## Read a text

A text has {length} tokens: a longer one is truncated, a shorter one padded at the end with {pad}.{how}

```python
{code}```
"""


def _cell(text: str) -> str:
    """Return a text for a cell of a table in Markdown."""
    return " ".join(text.split()).replace("|", "\\|")

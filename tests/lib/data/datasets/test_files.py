"""Code of an own data set that is wrong: one line with its file, status 2, before anything is made of it."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lib import plugin_folders
from lib.data import ArrayPart, Dataset, datasets
from lib.data.datasets.files import check_dataset, check_described, describe_images
from lib.data.types import (
    Column,
    ImageSpec,
    TableClassSpec,
    TableLabelsSpec,
    TableSpec,
    TextClassSpec,
    TextSpec,
    TokenPart,
    TokenTagSpec,
)
from lib.errors import DataError
from tests.support.datasets import looked, opened

Write = Callable[..., None]
SPEC = ImageSpec.square("own", 4, 10, mean=(0.5,), std=(0.5,))
DATA = """\
import numpy as np

from lib.data import ArrayPart, Dataset, ImageSpec
from lib.data.datasets.files import describe_images
from lib.plugins import NoOptions as Options

SPEC = ImageSpec.square("own", 4, 10, mean=(0.5,), std=(0.5,))
pixels, labels = np.zeros((10, 1, 4, 4), np.uint8), np.arange(10)


def describe(options, location):
    return describe_images(SPEC, (10, 10), "drawn")


def open_set(options, location):
    part = ArrayPart(pixels, labels)
    return Dataset(SPEC, part, part, "own: drawn")
"""
PART = "ArrayPart(pixels, labels)"
OPEN = "    part = "
RETURN = "    return Dataset(SPEC, part, part"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes data/own/data.py of EXTERNAL=, with one text in place of another."""
    file = tmp_path / "data" / "own" / "data.py"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(tmp_path))
    monkeypatch.setattr(datasets, "__path__", [*datasets.__path__])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(old: str = "", new: str = "") -> None:
        assert old in DATA
        file.write_text(DATA.replace(old, new))

    yield write
    for module in [name for name in sys.modules if name.startswith("lib.data.datasets.own.")]:
        del sys.modules[module]


def test_a_set_without_fault_is_opened(write: Write) -> None:
    write()
    assert opened("own").train.size == 10
    assert looked("own") is not None


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (OPEN, f"    raise ValueError('my boom')\n{OPEN}", r"own/data\.py:16: ValueError: my boom; correct"),
        (OPEN, f"    raise MemoryError\n{OPEN}", r"own/data\.py:16: MemoryError$"),
        (OPEN, f"    raise KeyError(3)\n{OPEN}", r"own/data\.py:16: KeyError: 3"),
        (OPEN, f"    open('/nowhere/x')\n{OPEN}", r"own/data\.py:16: FileNotFoundError: .*/nowhere/x"),
        ("import numpy as np", "import nowhere", r"own/data\.py:1: ModuleNotFoundError: No module named"),
        ("import numpy as np", "import numpy as", r"own/data\.py:1: SyntaxError: "),
        ("open_set(options, location)", "open_set(options)", r"own/data\.py: TypeError: open_set\(\) takes"),
        (RETURN, RETURN.replace("return ", ""), "data.py: open_set returns NoneType, not a Dataset"),
        (
            RETURN,
            RETURN.replace("part, part", "part, [part]"),
            "open_set returns test list of ArrayPart, not Part; correct",
        ),
        (
            PART,
            "ArrayPart(pixels.tolist(), labels)",
            "py: open_set returns inputs list of list, not uint8",
        ),
        (PART, "ArrayPart(pixels / 255, labels)", r"inputs float64 \(10, 1, 4, 4\), not uint8"),
        (PART, "ArrayPart(pixels[:, 0], labels)", r"data\.py: .* inputs uint8 \(10, 4, 4\), not"),
        (PART, "ArrayPart(pixels, labels[:7])", "open_set returns 10 inputs and 7 targets in train"),
        (PART, "ArrayPart(pixels, labels.astype(float))", r"targets float64 \(10,\), not int64"),
        (PART, "ArrayPart(pixels[:, :, :3], labels)", r"inputs uint8 \(10, 1, 3, 4\), for samples \(1, 4"),
        (PART, "ArrayPart(pixels[:0], labels[:0])", "open_set returns ArrayPart without samples for train"),
        (PART, "ArrayPart(pixels, labels + 4)", r"returns label 13 at \[9\], not in 0\.\.9, in train"),
        (PART, "ArrayPart(pixels, labels - 1)", r"returns label -1 at \[0\], not in 0\.\.9, in train"),
        (PART, f"{PART[:-1]}, labels > 4)", r"rows bool \(10,\), not int64 \(N,\) or None, in train"),
        (PART, f"{PART[:-1]}, labels + 1)", r"row 10 at \[9\], not in 0\.\.9, in train"),
        ("mean=(0.5,)", "mean=()", r"data\.py:7: ValueError: 0 channels"),
        ("std=(0.5,)", "std=(0.0,)", r"data\.py:7: ValueError: std \(0\.0,\) is not above 0"),
    ],
)
def test_a_fault_of_the_code_is_one_line_with_its_place(write: Write, old: str, new: str, told: str) -> None:
    write(old, new)
    with pytest.raises(DataError, match=told) as raised:
        opened("own")
    assert raised.value.exit_code == 2 and "\n" not in str(raised.value)
    assert str(raised.value).startswith("data set own: ")


def test_a_fault_of_metadata_is_too(write: Write) -> None:
    write("describe_images(SPEC, (10, 10)", "describe_images(SPEC, (10,)")
    with pytest.raises(DataError, match=r"data set own: .*own/data\.py:12: ValueError: "):
        looked("own")


def test_what_is_planned_with_is_what_is_opened() -> None:
    opened = describe_images(SPEC, (10, 5), "drawn")
    other = ImageSpec.square("another", 4, 10, mean=(0.0,), std=(1.0,))  # for which contents are read
    check_described(describe_images(other, (10, 5), "by files"), opened, "digits")
    for known, fault in (
        (describe_images(SPEC, (70, 5), ""), "train.size 70, and open_set 10"),
        (describe_images(SPEC, (10, 4), ""), "test.size 4, and open_set 5"),
        (describe_images(dataclasses.replace(SPEC, classes=9), (10, 5), ""), "classes 9, and open_set 10"),
        (
            describe_images(dataclasses.replace(SPEC, width=5), (10, 5), ""),
            r"input_shape \(1, 4, 5\), and open",
        ),
    ):
        with pytest.raises(DataError, match=f"digits/data.py: describe returns {fault}.*; correct that$"):
            check_described(known, opened, "digits")
    check_described(describe_images(SPEC, (70, 5), ""), dataclasses.replace(opened, skipped=("x",)), "digits")


def test_what_the_toolkit_itself_does_wrong_keeps_its_traceback(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        {}["no frame of a data set is here"]

    write()
    monkeypatch.setattr("lib.data.datasets.files.check_dataset", wrong)
    with pytest.raises(KeyError):
        opened("own")


def test_a_closed_standard_output_is_no_fault_of_the_code(write: Write) -> None:
    write(OPEN, f"    raise BrokenPipeError\n{OPEN}")
    with pytest.raises(BrokenPipeError):
        opened("own")


@pytest.mark.parametrize("has_external", [False, True])
@pytest.mark.parametrize("call", [opened, looked])
def test_a_file_that_a_shipped_set_may_not_read_is_no_fault_of_its_code(
    call: Callable[..., object],
    has_external: bool,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "mnist/file")

    write()
    if not has_external:
        monkeypatch.delenv(plugin_folders.EXTERNAL)
    monkeypatch.setattr("lib.data.datasets.mnist.data.first_file", refused)
    with pytest.raises(PermissionError):
        call("mnist", data_dir=tmp_path)


TOKENS = {"name": "own", "vocab_size": 5, "block_size": 3}
TEXT = TextSpec(**TOKENS, unit="token")  # type: ignore[arg-type]
CLASSES, TAGS = TextClassSpec(**TOKENS, pad=4, classes=1), TokenTagSpec(**TOKENS, pad=4, tags=("a",))  # type: ignore[arg-type]
TABLE = {"name": "own", "columns": (Column(name="x"), Column(name="y"))}
TABLE_CLASSES = TableClassSpec(**TABLE, classes=2)
ROWS, LABELS = np.zeros((4, 2), np.float32), np.zeros(4, np.int64)
WORDS = np.ones((4, 3), np.int64)


def for_training(part: Any) -> Any:
    return dataclasses.replace(part, shifted=True) if isinstance(part, TokenPart) else part


def test_windows_are_shifted_in_training_alone() -> None:
    part = TokenPart(np.zeros(9, np.uint16), 3)
    for train, test, told in (
        (part, part, r"returns TokenPart with shifted=False, not True, in train"),
        (for_training(part), for_training(part), r"returns TokenPart with shifted=True, not False, in test"),
    ):
        with pytest.raises(DataError, match=told):
            check_dataset(Dataset(TEXT, train, test, "own"), "own", "open_set")


@pytest.mark.parametrize(
    ("spec", "part", "told"),
    [
        (TEXT, ArrayPart(WORDS, WORDS.astype(np.int32)), "ArrayPart, not TokenPart, in train"),
        (TEXT, TokenPart(np.full(9, 4, np.uint16), 3), ""),
        (TEXT, TokenPart(np.full(9, 5, np.uint16), 3), r"token 5 at \[0\], not in 0\.\.4, in train"),
        (TEXT, TokenPart([4] * 9, 3), r"tokens list of int, not uint8, uint16 or uint32 \(n,\), in train"),
        (CLASSES, TokenPart(np.full(9, 4, np.uint16), 3), r"windows of 3 tokens, .* of TextClassSpec"),
        (TEXT, TokenPart(np.full(9, 4, np.uint16), 4), r"windows of 4 tokens, for samples \(3,\)"),
        (CLASSES, ArrayPart(WORDS, LABELS), ""),
        (CLASSES, ArrayPart(WORDS, LABELS + 1), r"label 1 .* not in 0\.\.0"),
        (CLASSES, ArrayPart(5 * WORDS, LABELS), r"token 5 at \[0, 0\], not in"),
        (TAGS, ArrayPart(WORDS, (WORDS - 101).astype(np.int32)), ""),
        (TAGS, ArrayPart(WORDS, (WORDS - 2).astype(np.int32)), "tag -1 at"),
        (TABLE_CLASSES, ArrayPart(ROWS, LABELS), ""),
        (TABLE_CLASSES, ArrayPart(ROWS, LABELS + 2), r"label 2 at \[0\]"),
        (TABLE_CLASSES, ArrayPart(ROWS.astype(np.int64), LABELS), r"inputs int64 \(4, 2\)"),
        (TABLE_CLASSES, ArrayPart(ROWS, ROWS), r"targets float32 \(4, 2\), not int64"),
        (TableLabelsSpec(**TABLE, classes=3), ArrayPart(ROWS, ROWS), r"\(4, 2\), not float32 \(4, 3\)"),
        (TableSpec(**TABLE, targets=(Column(name="z"),)), ArrayPart(ROWS, ROWS), r"not float32 \(4, 1\)"),
    ],
)
def test_texts_tokens_and_tables_are_checked_alike(spec: object, part: object, told: str) -> None:
    dataset = Dataset(spec, for_training(part), part, "own")  # type: ignore[arg-type]
    if not told:
        check_dataset(dataset, "own", "open_set")
        return
    with pytest.raises(DataError, match=told):
        check_dataset(dataset, "own", "open_set")


PIXELS = ArrayPart(np.zeros((2, 1, 4, 4), np.uint8), np.zeros(2, np.int64), np.arange(2))
WHOLE = [
    (SPEC, PIXELS),
    (TEXT, TokenPart(np.zeros(9, np.uint16), 3)),
    (TABLE_CLASSES, ArrayPart(ROWS, LABELS)),
]
WHOLE += [(TAGS, ArrayPart(WORDS, (WORDS - 101).astype(np.int32))), (CLASSES, ArrayPart(WORDS, LABELS))]
WHOLE += [(TABLE_CLASSES, ArrayPart(ROWS, LABELS))]
NULLABLE = "tokenizer", "rows", "validation_bytes"
FIT_NOTHING = [
    {},
    {"a": 1},
    b"odd",
    object(),
    ImageSpec,
    [None],
    ({},),
    np.array(["a"]),
    np.float32(1),
    np.int64(3),
]
FIT_SOME = [
    [],
    (),
    (1,),
    ["a"],
    True,
    -1,
    0,
    99,
    1.5,
    "",
    "odd",
    SPEC,
    TEXT,
    np.zeros((2, 3)),
    np.zeros(2, bool),
]
FIT_SOME += [np.arange(-3, 9), np.arange(2), np.array(3), np.zeros(0, np.uint16)]


def with_(value: Any, field: str, odd: object) -> Any:
    """A copy with another value, also where its class would refuse it."""
    object.__setattr__(changed := copy.copy(value), field, odd)
    return changed


@pytest.mark.parametrize(("spec", "part"), WHOLE)
def test_any_value_of_any_field_is_used_or_refused_in_one_line(spec: Any, part: Any) -> None:
    whole = Dataset(spec, for_training(part), part, "own", skipped=("a",))
    check_dataset(whole, "own", "open_set")
    column, *others = getattr(spec, "columns", (None,))
    places: list[tuple[Any, Callable[[Any], Dataset]]] = [
        (whole, lambda changed: changed),
        (spec, lambda changed: with_(whole, "spec", changed)),
        (part, lambda changed: with_(whole, "test", changed)),
        (column, lambda changed: with_(whole, "spec", with_(spec, "columns", (changed, *others)))),
    ]
    for value, in_place in places if others else places[:3]:
        for field in (each.name for each in dataclasses.fields(value)):
            for odd in (None, *FIT_NOTHING, *FIT_SOME):
                refused = ""
                try:
                    check_dataset(in_place(with_(value, field, odd)), "own", "open_set")
                except DataError as error:
                    refused = str(error)
                    assert re.fullmatch(r"data set own: \S*data\.py: open_set returns .+", refused), refused
                fits = (odd is None and field in NULLABLE) or any(odd is each for each in FIT_SOME)
                assert refused or fits, (type(value), field, odd)


@dataclasses.dataclass(frozen=True)
class Values:
    """A spec of a plug-in's own."""

    input_shape: Any = (4,)
    classes: Any = None
    name: str = "own"
    synthetic: Any = False
    input_dtype: str = "float32"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"classes": 3}, ""),
        ({"classes": 0}, r"Values with classes \(0,\), not above 0; correct"),
        ({"input_shape": [4]}, "Values with input_shape list of int, not a tuple; correct"),
    ],
)
def test_a_spec_of_a_plug_in_has_a_shape_and_perhaps_classes(changes: dict[str, Any], told: str) -> None:
    part = ArrayPart(np.zeros((5, 4), np.float32), np.zeros((5, 1), np.float32))
    dataset = Dataset(cast(Any, Values(**changes)), part, part, "own")
    with pytest.raises(DataError, match=told) if told else nullcontext():
        check_dataset(dataset, "own", "open_set")


def test_numbers_of_numpy_are_named_as_such() -> None:
    part = ArrayPart(np.zeros((2, 1, 4, 4), np.uint8), np.zeros(2, np.int64))
    with pytest.raises(DataError, match=r"synthetic numpy\.bool_?, not bool"):
        check_dataset(Dataset(with_(SPEC, "synthetic", np.True_), part, part, "own"), "own", "open_set")


def test_names_of_classes_are_counted() -> None:
    part = ArrayPart(np.zeros((2, 1, 4, 4), np.uint8), np.zeros(2, np.int64))
    with pytest.raises(DataError, match="2 class_names for 10 classes of the spec"):
        check_dataset(Dataset(SPEC, part, part, "own", class_names=("a", "b")), "own", "open_set")


def test_values_of_files_are_not_read(tmp_path: Path) -> None:
    """A memory map stays on the disk, and the one zero of metadata is not looked at."""
    tokens = np.memmap(tmp_path / "tokens.bin", np.uint16, mode="w+", shape=(9,))
    tokens[:] = 7
    part = TokenPart(tokens, 3)
    check_dataset(Dataset(TEXT, for_training(part), part, "own"), "own", "open_set")
    labels = np.memmap(tmp_path / "labels.bin", np.int64, mode="w+", shape=(4,))
    labels[:] = 7
    chosen = ArrayPart(ROWS, labels, np.arange(3))
    check_dataset(Dataset(TABLE_CLASSES, chosen, chosen, "own"), "own", "open_set")
    pixels = np.broadcast_to(np.uint8(0), (10**12, 1, 4, 4))
    huge = ArrayPart(pixels, np.broadcast_to(np.int64(0), (10**12,)))
    check_dataset(Dataset(SPEC, huge, huge, "own"), "own", "describe")

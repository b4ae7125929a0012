"""Tables of users: what is read, how rows are split and encoded, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data.datasets.tabular import table_files
from lib.data.datasets.tabular.table_files import read_table
from lib.data.types import Column, TableClassSpec, TableSpec
from lib.errors import ConfigError, DataError, ToolkitError
from tests.support.datasets import opened

DEFAULTS: dict[str, Any] = {
    "file": "table.csv",
    "validation": "split",
    "validation_file": None,
    "validation_pct": 25,
    "group": "",
    "targets": "price",
    "target": "numbers",
    "inputs": "",
    "categories": "",
    "missing": "error",
}
HEADING = "size,city,year,price"


def lines(count: int) -> list[str]:
    cities = ("Oslo", "Paris", "Rome")
    return [f"{30 + row},{cities[row % 3]},{1900 + row % 50},{1000 * row + 7}" for row in range(count)]


def table(folder: Path, rows: list[str], *, heading: str = HEADING, name: str = "table.csv") -> Path:
    (folder / name).write_text("\n".join([heading, *rows]) + "\n")
    return folder


def read(folder: Path, **options: Any) -> Any:
    return opened("tabular", {**DEFAULTS, **options}, data_dir=folder)


def test_numbers_are_normalised_and_categories_are_zeros_and_ones(tmp_path: Path) -> None:
    dataset = read(table(tmp_path, lines(200)))
    spec = dataset.spec
    assert isinstance(spec, TableSpec) and spec.input_shape == (5,)
    assert [column.name for column in spec.columns] == ["size", "city", "year"]
    assert spec.columns[1].values == ("Oslo", "Paris", "Rome")
    inputs, targets = dataset.train.take()
    assert np.abs(inputs[:, [0, 4]].mean(axis=0)).max() < 1e-6
    assert set(np.unique(inputs[:, 1:4])) == {0, 1} and (inputs[:, 1:4].sum(axis=1) == 1).all()
    sizes = inputs[:, 0] * spec.columns[0].std + spec.columns[0].mean
    prices = targets[:, 0] * spec.targets[0].std + spec.targets[0].mean
    assert np.allclose(prices, 1000 * (sizes - 30) + 7, atol=1)
    assert (inputs[:, 1:4].argmax(axis=1) == np.rint(sizes - 30).astype(int) % 3).all()
    assert dataset.train.size + dataset.test.size == 200 and 30 <= dataset.test.size <= 70
    assert "SHA-256" in dataset.source


def test_added_rows_and_another_order_move_no_row(tmp_path: Path) -> None:
    def held_out(rows: list[str]) -> set[float]:
        dataset = read(table(tmp_path, rows))
        column = dataset.spec.columns[0]
        return {*np.rint(dataset.test.take()[0][:, 0] * column.std + column.mean).tolist()}

    before, after = held_out(lines(100)), held_out([*reversed(lines(200))])
    assert before == {size for size in after if size < 130} and len(after) > len(before)


def test_rows_of_a_group_stay_together_and_the_group_is_no_input(tmp_path: Path) -> None:
    rows = [f"{row},patient{row // 10},{row % 7},{row}" for row in range(300)]
    dataset = read(table(tmp_path, rows, heading="a,who,b,price"), group="who")
    assert [column.name for column in dataset.spec.columns] == ["a", "b"]
    column = dataset.spec.columns[0]
    found = np.rint(dataset.test.take()[0][:, 0] * column.std + column.mean).astype(int)
    groups, counts = np.unique(found // 10, return_counts=True)
    assert len(groups) > 2 and (counts == 10).all()


def test_a_file_for_validation_is_normalised_by_the_training_part(tmp_path: Path) -> None:
    table(tmp_path, lines(50))
    dataset = read(
        table(tmp_path, ["30,Bern,1900,7"], name="new.csv"), validation="other", validation_file="new.csv"
    )
    inputs, _ = dataset.test.take()
    column = dataset.spec.columns[0]
    assert dataset.train.size == 50 and inputs.shape == (1, 5)
    assert inputs[0, 0] == pytest.approx((30 - column.mean) / column.std)
    assert not inputs[0, 1:4].any()  # a city that training does not have


def test_classes_are_the_texts_of_the_target(tmp_path: Path) -> None:
    options = {"targets": "city", "target": "classes", "categories": "year"}
    dataset = read(table(tmp_path, lines(200)), **options)
    assert isinstance(dataset.spec, TableClassSpec) and dataset.spec.classes == 3
    assert dataset.class_names == ("Oslo", "Paris", "Rome")
    inputs, labels = dataset.train.take()
    size = dataset.spec.columns[0]
    assert labels.dtype == np.int64
    assert (labels == np.rint(inputs[:, 0] * size.std + size.mean - 30).astype(int) % 3).all()
    assert len(dataset.spec.columns[1].values) == 50  # numbers that are categories
    assert "NOTE" not in dataset.source
    rows = [line.replace("Rome", "oslo") for line in lines(200)]
    dataset = read(table(tmp_path, rows), **options)
    assert dataset.source.endswith("; NOTE: classes that differ in spelling alone: Oslo and oslo")
    assert "NOTE" not in read(table(tmp_path, rows), targets="price").source


def test_semicolons_quotes_and_a_byte_order_mark(tmp_path: Path) -> None:
    rows = [f'{row};"a; b";{row}' for row in range(40)]
    (tmp_path / "table.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["a;b;price", *rows]).encode())
    dataset = read(tmp_path)
    assert dataset.spec.columns[1].values == ("a; b",)


def test_npz_is_read_by_column(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.float32)
    np.savez(tmp_path / "t.npz", place=np.stack([values, -values], axis=1), price=values)
    dataset = read(tmp_path, file="t.npz")
    assert [column.name for column in dataset.spec.columns] == ["place_0", "place_1"]
    inputs, targets = dataset.train.take()
    assert np.allclose(inputs[:, 0], targets[:, 0]) and np.allclose(inputs[:, 1], -targets[:, 0])


@pytest.mark.parametrize(("missing", "train"), [("mean", 39), ("drop", 37)])
def test_missing_values(tmp_path: Path, missing: str, train: int) -> None:
    rows = [*lines(40), ",Oslo,1900,5", "31,,1900,5", "31,Oslo,1900,NA"]
    table(tmp_path, lines(20), name="new.csv")
    said: list[str] = []
    options = {**DEFAULTS, "missing": missing, "validation": "other", "validation_file": "new.csv"}
    folder = table(tmp_path, rows[3:])
    dataset = opened("tabular", options, data_dir=folder, log=said.append)
    assert dataset.train.size == train
    (line,) = said
    assert line.startswith(f"{folder / 'table.csv'}: values are missing: size 1, city 1, price 1; ")
    replaced = "those of inputs are replaced by the mean (of a category: by none), and "
    assert line.partition("price 1; ")[2] == (
        f"{replaced if missing == 'mean' else ''}{40 - train} of 40 rows are left out"
    )
    if missing == "mean":
        inputs, _ = dataset.train.take()
        assert inputs[37, 0] == 0 and not inputs[38, 1:4].any()


@pytest.mark.parametrize(
    ("row", "replaces"), [(",Oslo,1900,5", True), ("31,,1900,5", True), ("31,a,1900,", False)]
)
@pytest.mark.parametrize("missing", ["mean", "drop"])
def test_missing_values_are_reported_with_what_becomes_of_them(
    row: str, replaces: bool, missing: str, tmp_path: Path
) -> None:
    table(tmp_path, lines(20), name="new.csv")
    options = {**DEFAULTS, "missing": missing, "validation": "other", "validation_file": "new.csv"}
    said: list[str] = []
    opened("tabular", options, data_dir=table(tmp_path, [*lines(20), row]), log=said.append)
    is_replaced = missing == "mean" and replaces
    effect = "those of inputs are replaced by the mean (of a category: by none)"
    assert said[0].partition(" 1; ")[2] == (effect if is_replaced else "1 of 21 rows are left out")


@pytest.mark.parametrize(
    ("text", "options", "error", "message"),
    [
        (
            "size,city,price\n1,a,2\n3,b,NA\n",
            {},
            DataError,
            "values are missing: price 1: .*'price' of row 2",
        ),
        ("size,price\n1,2\n1,2,3\n", {}, DataError, "1 of 2 rows do not have the 2 fields.*row 2 has 3"),
        ("size,size,price\n1,1,1\n", {}, DataError, "'size' is there twice"),
        ("size,price\n", {}, DataError, "has no rows: the first line is the heading; add"),
        ("", {}, DataError, "has no rows: it is empty; add rows below a heading"),
        ("size,price\n1,inf\n2,3\n", {}, DataError, "column 'price' is infinite in row 1; write a finite"),
        (
            "size,price\n1,cheap\n2,3\n",
            {},
            DataError,
            "'price' is predicted and no column of n.*'cheap' in row 1",
        ),
        (
            "size,price\n1,2\n",
            {},
            DataError,
            "no row is left for .*TABULAR_VALIDATION_OTHER=y",
        ),
        (
            "size,price\n" + "1,2\n" * 50,
            {},
            DataError,
            "no row is left for .*: a hash of its content .*rows of equal content are in one.*add rows that",
        ),
        (
            "size,year,price\n" + "".join(f"1,{year},2\n" for year in range(50)),
            {"group": "size"},
            DataError,
            "no row is left for .*: a hash of its group .*rows of equal group are in one part",
        ),
        (
            "size,price\n" + "".join(f",{row}\n" for row in range(40)),
            {"missing": "drop"},
            DataError,
            r"no row is left for training: all (\d+) lack a value .*: size \1; fill them in, or",
        ),
        (
            "size,price\n" + "".join(f"{row},\n" for row in range(40)),
            {"missing": "mean"},
            DataError,
            r"no row is left for training: all (\d+) lack .*: price \1; fill",
        ),
        (f"{HEADING}\n1,a,1,1\n", {"targets": "pricee"}, ConfigError, "TABULAR_TARGETS.*did you mean price"),
        (f"{HEADING}\n1,a,1,1\n", {"inputs": "price"}, ConfigError, "both name 'price'; leave it out of"),
        (f"{HEADING}\n1,a,1,1\n", {"targets": ""}, ConfigError, "CONFIG_TABULAR_TARGETS names no column"),
        (f"{HEADING}\n1,a,1,1\n", {"targets": "city,year", "target": "classes"}, ConfigError, "only one can"),
        ('size,price\n"1,2\n', {}, DataError, "is no table: row 1 or below: .*; close each"),
        (None, {}, DataError, "is not there"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    tmp_path: Path, text: str | None, options: dict[str, Any], error: type[ToolkitError], message: str
) -> None:
    if text is not None:
        (tmp_path / "table.csv").write_text(text)
    with pytest.raises(error, match=message) as caught:
        read(tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_a_number_with_a_mistake_is_no_category(tmp_path: Path) -> None:
    rows = [f"{row},{row}" for row in range(40)]
    rows[1], rows[20], rows[30] = "NA,1", "2O,20", "3k,30"
    folder = table(tmp_path, rows, heading="size,price")
    with pytest.raises(
        DataError, match=r"column 'size' has values that are no numbers, 2 of 40: .*'2O' in row 21;"
    ) as caught:
        read(folder, missing="mean")
    assert "CONFIG_TABULAR_CATEGORIES" in str(caught.value)
    assert len(read(folder, missing="mean", categories="size").spec.columns[0].values) > 2
    table(tmp_path, [*rows, *(f"a{row},{row}" for row in range(50))], heading="size,price")
    assert read(folder, missing="mean").spec.columns[0].values  # most are texts


@pytest.mark.parametrize("text", ["-nan", "+nan", "NAN", "Nan", "-NaN"])
def test_every_spelling_of_nan_is_missing(text: str, tmp_path: Path) -> None:
    rows = [f"{row},{row}" for row in range(40)]
    rows[7] = f"{text},7"
    with pytest.raises(DataError, match="values are missing: size 1: the first is 'size' of row 8"):
        read(table(tmp_path, rows, heading="size,price"))
    rows[7] = f"7,{text}"
    with pytest.raises(DataError, match="values are missing: price 1"):
        read(table(tmp_path, rows, heading="size,price"))


def test_a_text_with_an_underscore_is_no_number(tmp_path: Path) -> None:
    rows = [f"{row},{row}" for row in range(40)]
    rows[7] = "57_8,7"
    with pytest.raises(DataError, match="values that are no numbers, 1 of 40: the first is '57_8' in row 8"):
        read(table(tmp_path, rows, heading="size,price"))


def test_equal_fractions_have_a_deviation_of_one() -> None:
    column = Column.of_numbers("size", np.full(7, 0.1))
    assert column.std == 1 and column.normalised(np.array([1.1])) == pytest.approx(1)


def test_a_field_may_be_long(tmp_path: Path) -> None:
    text = "a" * 200_000
    assert read_table(tmp_path / "t.csv", f"x,y\n{text},1\n".encode()).columns["x"][0] == text


COMMAS = {
    "decimal": (lambda row: f"{row},{row % 7}", "'0,0' in row 1; write 0.0 with a decimal point"),
    "few of them": (lambda row: f"{row},5" if row % 9 == 4 else f"{row}", "'4,5' in row 5; write 4.5 with"),
    "thousands": (lambda row: f"1.{row + 100},5", "'1.100,5' in row 1; write 1100.5 with"),
    "spaces": (lambda row: f"1\u202f{row + 100},5", "in row 1; write 1100.5 with"),
    "signs": (lambda row: f"-{row},5e-1", "'-0,5e-1' in row 1; write -0.5e-1 with"),
    "comma of thousands": (lambda row: f"1,{row + 100},000.5", "write 1100000.5 with"),
    "either": (lambda row: f"1,{row + 100}", "'1,100' in row 1; write 1.100 or 1100 with"),
    "with others": (lambda row: "odd" if row % 3 == 1 else f"{row},5", "27 of 40 values: such as '0,5'"),
    "with missing": (lambda row: f"{row},5" if row % 3 == 1 else "NA", "13 of 13 values: such as '1,5'"),
}


@pytest.mark.parametrize("written", COMMAS)
@pytest.mark.parametrize("kind", ["csv", "npz", "target", "validation"])
def test_numbers_with_a_comma_are_no_categories(written: str, kind: str, tmp_path: Path) -> None:
    number, told = COMMAS[written]
    rows = [number(row) for row in range(40)]
    file, options = "table.csv", {"missing": "mean"}
    if kind == "npz":
        file = "table.npz"
        np.savez(tmp_path / file, size=np.array(rows), price=np.arange(40))
    elif kind == "target":
        table(tmp_path, [f"{row};{text}" for row, text in enumerate(rows)], heading="size;price")
    else:
        table(tmp_path, [f"{text};{row}" for row, text in enumerate(rows)], heading="size;price")
    options["file"] = file
    if kind == "validation":
        file = "other.csv"
        (tmp_path / "table.csv").rename(tmp_path / file)
        table(tmp_path, [f"{row};{row}" for row in range(40)], heading="size;price")
        options |= {"validation": "other", "validation_file": file}
    said: list[str] = []
    with pytest.raises(DataError) as caught:
        opened("tabular", {**DEFAULTS, **options}, data_dir=tmp_path, log=said.append)
    assert kind not in ("csv", "npz") or "in each of" not in "".join(said)
    column = "price" if kind == "target" else "size"
    assert str(caught.value).startswith(f"{tmp_path / file}: column {column!r} has numbers with a comma, ")
    assert told in str(caught.value)
    assert ("CONFIG_TABULAR_CATEGORIES" in str(caught.value)) == (kind in ("csv", "npz"))
    if kind == "csv":
        assert read(tmp_path, categories="size", **options).spec.columns[0].values


@pytest.mark.parametrize("text", ["1,2,3", "A,5", "1;5", "12,345,6", "3 1/2", "1,5 m"])
def test_texts_with_commas_that_are_no_numbers_are_categories(text: str, tmp_path: Path) -> None:
    rows = [f'"{text}",{row}' if row % 2 else f'"{text}x",{row}' for row in range(40)]
    assert read(table(tmp_path, rows, heading="size,price")).spec.columns[0].values == (text, f"{text}x")


def test_a_column_of_too_many_texts_is_an_error(tmp_path: Path) -> None:
    rows = [f"a{row},{row}" for row in range(1500)]
    with pytest.raises(DataError, match=r"column 'size' has 1\d\d\d different texts, more than 1000; leave"):
        read(table(tmp_path, rows, heading="size,price"))


def test_a_class_that_training_lacks_is_an_error(tmp_path: Path) -> None:
    table(tmp_path, lines(20))
    table(tmp_path, ["1,Bern,1900,5"], name="new.csv")
    options = {"targets": "city", "target": "classes", "validation": "other", "validation_file": "new.csv"}
    with pytest.raises(DataError, match="class 'Bern' of row 1 is not in the training part; leave its"):
        read(tmp_path, **options)
    options["targets"] = "price"
    with pytest.raises(
        DataError, match=r"class '5' of row 1 is not in .*: column 'price' has numbers"
    ) as caught:
        read(tmp_path, **options)
    assert (
        "20 different ones for training; if they are no classes, set CONFIG_TABULAR_TARGET_NUMBERS=y"
        in str(caught.value)
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"targets": "price,year"}, r"column 'price' is 0\.1 in all 20 rows for training, and 1 more"),
        ({"targets": "city", "target": "classes"}, "column 'city' is 'Oslo' in all 20 rows for training"),
        ({"targets": "new,old", "target": "labels"}, "column 'new' is 1 in all 20 rows for training, and 1"),
    ],
)
def test_a_target_with_one_value_is_an_error(options: dict[str, str], told: str, tmp_path: Path) -> None:
    heading = f"{HEADING},new,old"
    table(tmp_path, [f"{row},Oslo,1900,0.1,1,0" for row in range(20)], heading=heading)
    others = [f"{line},{row % 2},1" for row, line in enumerate(lines(10))]
    table(tmp_path, others, heading=heading, name="new.csv")  # other values that are not trained on
    with pytest.raises(DataError, match=f"table.csv has nothing to predict: {told}") as caught:
        read(tmp_path, validation="other", validation_file="new.csv", **options)
    assert "CONFIG_TABULAR_TARGETS" in str(caught.value)
    (tmp_path / "table.csv").write_text((tmp_path / "table.csv").read_text() + "30,Rome,1901,0.2,0,1\n")
    if options.get("target") != "classes":
        read(tmp_path, validation="other", validation_file="new.csv", **options)


def test_a_table_of_several_chunks_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With line ends within fields, and an error that names the row of the file, not of a chunk."""
    monkeypatch.setattr(table_files, "_CHUNK", 3)
    rows = [(f"{row}", f'"a\n{row}"' if row == 4 else f"a{row}") for row in range(8)]
    text = "x,y\r\n" + "\r\n".join(",".join(row) for row in rows)
    (tmp_path / "t.csv").write_bytes(text.encode())
    found = read_table(tmp_path / "t.csv")
    assert [*found.columns["x"]] == [row[0] for row in rows]
    assert [*found.columns["y"]] == [row[1].strip('"') for row in rows]
    assert found.columns["x"].dtype == np.dtypes.StringDType()  # type: ignore[attr-defined]  # a str takes more
    (tmp_path / "t.csv").write_bytes(f"{text}\r\n8\r\n".encode())
    with pytest.raises(DataError, match=r"1 of 9 rows do not have the 2 fields.*row 9 has 1"):
        read_table(tmp_path / "t.csv")

"""Notes about inputs of tables: names of rows, dates, and very many categories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.data.datasets.tabular.data import FEWEST_ROW_NAMES, MANY_CATEGORIES
from lib.errors import DataError
from tests.lib.data.datasets.test_tabular import DEFAULTS, read, table
from tests.support.datasets import opened


def notes(folder: Path, **options: Any) -> list[str]:
    said: list[str] = []
    opened("tabular", {**DEFAULTS, **options}, data_dir=folder, log=said.append)
    return said


def test_inputs_that_may_only_name_their_rows_are_told(tmp_path: Path) -> None:
    names, heading = "row{0},{0},{0}.5,{1},{0}", "name,id,size,rooms,price"
    rows = [names.format(row, row % 7) for row in range(FEWEST_ROW_NAMES)]

    def told(count: int, **options: Any) -> list[str]:
        said = notes(table(tmp_path, rows[:count], heading=heading), **options)
        return [line.split("input ")[1].split()[0] for line in said if "input " in line]

    assert told(FEWEST_ROW_NAMES) == ["'name'", "'id'"]  # not the measurement, which differs everywhere, too
    assert not told(FEWEST_ROW_NAMES, inputs="id,rooms")  # chosen by name
    assert not told(FEWEST_ROW_NAMES - 1)


DATES = [
    *("2024-05-{:02}", "2024-05-{:02}T12:30:00Z", "2024-05-{:02} 12:30", "2024/05/{:02}", "{:02}.05.2024"),
    *("5/{}/24", "5/{}/2024 1:30 pm", "{:02}-May-2024", "{} May 2024", "May {}, 2024", "20{:02}-05"),
    *("{:02}:30", "2024-05-{:02}T12:30:00.123456+02:00", "12:30:{:02}", "{:02}-05-2024"),
]


@pytest.mark.parametrize("date", DATES)
def test_dates_are_told(date: str, tmp_path: Path) -> None:
    texts = [date.format(row % 11 + 10) for row in range(80)]
    folder = table(tmp_path, [f'"{text}",{row}' for row, text in enumerate(texts)], heading="day,price")
    for options in ({}, {"inputs": "day"}):
        assert notes(folder, **options) == [
            f"{folder / 'table.csv'}: input 'day' has dates or times, such as {texts[0]!r} in row 1, which "
            "are 11 categories, and none of them is a later one; make numbers of the dates in the table, "
            "such as year, month and weekday, or the days since the first, or leave it out by naming the "
            "others in CONFIG_TABULAR_INPUTS"
        ]
    assert not notes(folder, categories="day")  # chosen by name


@pytest.mark.parametrize(
    "text", ["v{}", "{}.0.1", "{}-A", "A 5/{}", "2024-{}-1-2", "1.2.{}.4", "room {}:30", "Mayer {}"]
)
def test_texts_that_are_no_dates_are_not(text: str, tmp_path: Path) -> None:
    rows = [f"{text.format(row % 11 + 10)},{row}" for row in range(80)]
    assert not notes(table(tmp_path, rows, heading="day,price"))


def test_dates_that_differ_in_every_row_are_no_names_of_rows(tmp_path: Path) -> None:
    days = [f"20{row // 300 + 10}-{row // 25 % 12 + 1:02}-{row % 25 + 1:02}" for row in range(1500)]
    folder = table(tmp_path, [f"{day},{n}" for n, day in enumerate(days[:200])], heading="day,price")
    (said,) = notes(folder)
    assert "has dates or times" in said
    folder = table(tmp_path, [f"{day},{n}" for n, day in enumerate(days)], heading="day,price")
    with pytest.raises(
        DataError, match=r"1\d\d\d different texts.*: they are dates or times.*; make numbers"
    ):
        read(folder)
    rows = [f"{n},{day}" for n, day in enumerate(days[:200])]
    with pytest.raises(DataError, match=r"'price' is predicted and no column of n.*; make numbers of"):
        read(table(tmp_path, rows, heading="size,price"))


@pytest.mark.parametrize("missing", ["error", "mean"])
def test_categories_that_only_validation_has_are_counted(missing: str, tmp_path: Path) -> None:
    folder = table(tmp_path, ["Oslo,1", "Rome,2", "Oslo,3"], heading="city,price")
    texts = ["Rome,1", "Bern,2", "Bern,3", "Kiel,4", *[",5"] * (missing == "mean")]
    table(tmp_path, texts, heading="city,price", name="new.csv")
    said = notes(folder, validation="other", validation_file="new.csv", missing=missing)[-1]
    effect = "they count as missing" + ", and predictions refuse them" * (missing == "error")
    assert said == (
        f"{folder / 'new.csv'}: validation has categories that training lacks: city 3 (the first is 'Bern' "
        f"in row 2); {effect}"
    )


def test_very_many_categories_are_told(tmp_path: Path) -> None:
    """More than MANY_CATEGORIES, and than a tenth of the rows for training."""

    def told(count: int, rows: int, **options: Any) -> list[str]:
        texts = [f"a{row % count},{row % 9},{row}" for row in range(rows)]
        folder = table(tmp_path, texts, heading="name,rooms,price")
        table(tmp_path, texts, heading="name,rooms,price", name="new.csv")
        return notes(folder, validation="other", validation_file="new.csv", **options)

    many = MANY_CATEGORIES + 1
    (said,) = told(many, 500)
    assert said.endswith(
        f"input 'name' has {many} categories in 500 rows for training, one input each; leave it out by "
        "naming the others in CONFIG_TABULAR_INPUTS, make numbers of it, or name it in "
        "CONFIG_TABULAR_CATEGORIES"
    )
    assert not told(many - 1, 400) and not told(many, 10 * many) and told(many, 10 * many - 1)
    assert told(many, 500, inputs="name,rooms") and not told(many, 500, categories="name")

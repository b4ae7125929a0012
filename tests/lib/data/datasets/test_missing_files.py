"""Data sets whose files are not there: what is there instead, and which option names another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.errors import DataError
from tests.lib.data.datasets.test_tabular import DEFAULTS
from tests.support.datasets import IMAGE_FOLDER, looked, opened

TEXTS = {"file": "a.jsonl", "validation": "split", "validation_pct": 20, "validation_file": None}
SETS: dict[str, dict[str, Any]] = {
    "tabular": DEFAULTS,
    "jsonl": TEXTS,
    "image_folder": dict(IMAGE_FOLDER),
    "mnist": {},
    "cifar10": {},
    "token_bins": {"vocab_size": 256},
}


def refused(name: str, data_dir: Path, **options: Any) -> str:
    more: dict[str, Any] = {"image_size": 8, "block_size": 8, "tokenizer": "byte"}
    with pytest.raises(DataError) as caught:
        opened(name, {**SETS[name], **options}, data_dir=data_dir, cache_dir=data_dir / "cache", **more)
    return str(caught.value)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("below", ["", "folder"])
def test_a_file_in_the_place_of_the_folder_is_named(name: str, below: str, tmp_path: Path) -> None:
    (tmp_path / "data.csv").touch()
    assert f": {tmp_path}/data.csv is a file, not a folder; " in refused(name, tmp_path / "data.csv" / below)
    if name in ("tabular", "jsonl"):
        told = refused(name, tmp_path / "data.csv" / below)
        assert told.endswith("not a folder; point CONFIG_DATA_DIR to the folder of the file")
    assert "not a folder" not in refused(name, tmp_path / below)


def test_a_plan_for_a_folder_of_images_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data.csv").touch()
    with pytest.raises(DataError, match=r"data\.csv is a file, not a folder; point CONFIG_DATA_DIR to a fo"):
        looked("image_folder", IMAGE_FOLDER, data_dir=tmp_path / "data.csv", image_size=8)
    assert looked("image_folder", IMAGE_FOLDER, data_dir=tmp_path / "none", image_size=8)


def test_a_missing_table_lists_those_that_are_there(tmp_path: Path) -> None:
    where, symbol = "put it there, or name another by CONFIG_DATA_DIR and", "CONFIG_TABULAR_FILE"
    nothing = refused("tabular", tmp_path)
    assert nothing.endswith(f"not there: {tmp_path} has no *.csv, *.tsv, *.npz; {where} {symbol}")
    assert f"there is no folder {tmp_path}/no;" in refused("tabular", tmp_path / "no")
    for name in ("a.csv", "c.npz", "b.tsv", "b.txt"):
        (tmp_path / name).write_text("x,price\n1,2\n")
    (tmp_path / "folder.csv").mkdir()
    there = f": {tmp_path} has a.csv, b.tsv, c.npz; {where}"
    assert refused("tabular", tmp_path) == f"{tmp_path}/table.csv is not there{there} {symbol}"
    assert refused("tabular", tmp_path, file="folder.csv").startswith(f"{tmp_path}/folder.csv is a folder: ")
    other: dict[str, Any] = {"file": "a.csv", "validation": "other", "validation_file": "new.csv"}
    symbol = "CONFIG_TABULAR_VALIDATION_FILE"
    assert refused("tabular", tmp_path, **other) == f"{tmp_path}/new.csv is not there{there} {symbol}"

"""Types of the weights in a directory, read from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lib.errors import ConfigError
from lib.nn.model_directory import open_directory, stored_dtypes

OFFSETS = ("b", 4), ("a", 0)  # not in the order of their names


def write(file: Path, header: object, numbers: bytes = b"") -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def test_types_are_those_of_all_files(tmp_path: Path) -> None:
    for named, dtype in (({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        (tmp_path / "config.json").write_text(json.dumps(named))
        assert stored_dtypes(tmp_path) == {dtype}  # of weights that are to come
    for name, kind in {"a": "BF16", "b": "F16"}.items():
        entry = {"dtype": kind, "shape": [1], "data_offsets": [0, 2]}
        write(tmp_path / f"{name}.safetensors", {"__metadata__": {"format": "pt"}, "weight": entry}, b"ab")
    assert stored_dtypes(tmp_path) == {torch.bfloat16, torch.float16}


@pytest.mark.parametrize(
    "header", [[1], {"weight": 3}, {"weight": {"dtype": "F9", "shape": [], "data_offsets": [0, 0]}}]
)
def test_a_damaged_header_is_told_with_its_file(header: object, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", header)
    with pytest.raises(
        ConfigError, match=f"{tmp_path}/a.safetensors is damaged or not complete: .*make fetch"
    ):
        stored_dtypes(tmp_path)


@pytest.mark.parametrize("lost", [0, 1, 7, 8])
def test_a_file_that_was_cut_off_is_refused_by_its_header(lost: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]} for name, at in OFFSETS}
    write(tmp_path / "a.safetensors", entries, bytes(8 - lost))
    size = (tmp_path / "a.safetensors").stat().st_size
    if not lost:
        assert open_directory(str(tmp_path), symbol="CONFIG_X")[1:] == ("llama", ("a.safetensors",))
        return
    told = (
        f"{tmp_path}/a.safetensors is damaged or not complete: it has {size} of {size + lost} bytes; copy it"
    )
    with pytest.raises(ConfigError, match=told):
        open_directory(str(tmp_path), symbol="CONFIG_X")

"""Types of the weights in a directory, read from headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lib.errors import ConfigError
from lib.nn.model_directory import stored_dtypes


def write(file: Path, header: object) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def test_types_are_those_of_all_files(tmp_path: Path) -> None:
    for named, dtype in (({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        (tmp_path / "config.json").write_text(json.dumps(named))
        assert stored_dtypes(tmp_path) == {dtype}  # of weights that are to come
    for name, kind in {"a": "BF16", "b": "F16"}.items():
        entry = {"dtype": kind, "shape": [1], "data_offsets": [0, 2]}
        write(tmp_path / f"{name}.safetensors", {"__metadata__": {"format": "pt"}, "weight": entry})
    assert stored_dtypes(tmp_path) == {torch.bfloat16, torch.float16}


@pytest.mark.parametrize(
    "header", [[1], {"weight": 3}, {"weight": {"dtype": "F9", "shape": [], "data_offsets": [0, 0]}}]
)
def test_a_damaged_header_is_told_with_its_directory(header: object, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", header)
    with pytest.raises(ConfigError, match=f"the weights in {tmp_path} cannot be read"):
        stored_dtypes(tmp_path)

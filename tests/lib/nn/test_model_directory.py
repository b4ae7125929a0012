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


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04" + bytes(60), "a zip archive; write it by safetensors"),
        (b"\x80\x02}q\x00." + bytes(60), "a pickle; write it by"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "a Git LFS pointer without the weights.*; write it by",
        ),
        (b"GGUF\x03" + bytes(60), "a GGUF file, whose weights are quantized; "),
    ],
)
def test_a_file_of_another_format_is_called_by_it(content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}/a.safetensors is no safetensors file but {kind}"):
        stored_dtypes(tmp_path)


def test_a_header_as_long_as_a_pickle_begins_is_read(tmp_path: Path) -> None:
    """640 bytes: the length begins with the bytes of a pickle."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    names = {"__metadata__": {"pad": ""}, "weight": entry}
    names["__metadata__"] = {"pad": "x" * (640 - len(json.dumps(names)))}
    write(tmp_path / "a.safetensors", names, bytes(4))
    assert (tmp_path / "a.safetensors").read_bytes()[:2] == b"\x80\x02"
    assert stored_dtypes(tmp_path) == {torch.float32}

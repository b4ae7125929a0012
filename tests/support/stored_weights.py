"""Files of weights as other programs write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "int64": "I64", "float16": "F16"}


def header(names: Mapping[str, Any], *, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of safetensors with that header."""
    text = json.dumps(names).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def safetensors(tensors: Mapping[str, Tensor], *, pad: bool = True) -> bytes:
    """`tensors` in a file of safetensors; without `pad` their numbers may be at odd places."""
    names: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        own = bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
        kind = NAMES[str(tensor.dtype).removeprefix("torch.")]
        offsets = [len(data), len(data) + len(own)]
        names[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        data += own
    text = json.dumps(names).encode()
    text += b" " * (-len(text) % 8 if pad else (1 - len(text)) % 8)
    return len(text).to_bytes(8, "little") + text + data


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> None:
    """A folder of Hugging Face with one file per shard, and their index."""
    folder.mkdir()
    for file, tensors in shards.items():
        (folder / file).write_bytes(safetensors(tensors))
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

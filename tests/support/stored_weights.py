"""Files of weights as other programs write them, and runs that start from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.runs import checkpoint
from lib.runs.directory import RunDir
from lib.runs.weight_files import find_weights
from tests.support.training import random_data, small_config, small_job, small_plan
from train import loop
from train.initial_weights import load_weights
from train.job import Progress
from train.training_data import built

NAMES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16", "int64": "I64", "float16": "F16"}


def header(names: Mapping[str, Any], *, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of safetensors with that header."""
    text = json.dumps(names).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def safetensors(tensors: Mapping[str, Tensor], *, pad: bool = True, **metadata: str) -> bytes:
    """`tensors` in a file of safetensors; without `pad` their numbers may be at odd places."""
    names: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
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


SHAPE = (1, 28, 28)


def lenet(*, seed: int = 7, classes: int = 10) -> nn.Module:
    """Of digits, or with another number of classes."""
    config = small_config(seed=seed)
    model = built(config, random_data(config, shape=SHAPE, train_size=16).dataset.spec)
    if classes != 10:
        model.linear3 = nn.Linear(84, classes)
    return model


def state(**changes: Tensor | None) -> dict[str, Tensor]:
    found = {**lenet().state_dict(), **changes}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def loaded(path: Path, **options: Any) -> tuple[nn.Module, str]:
    """LeNet-5 of another seed, started from `path`, and what is said about it."""
    said: list[str] = []
    config = small_config(initial_weights=str(path), **options)
    found = find_weights(str(path), root=path.parent)
    load_weights(model := lenet(seed=1), found, config, log=said.append)
    (line,) = said
    return model, line


def a_run(
    folder: Path, *, ema: bool = False, steps: int = 2, done: bool = True, name: str = "00000001"
) -> RunDir:
    """A run of LeNet-5 that has made `steps` steps, and evaluates its averages if it has some."""
    config = small_config(seed=7, ema=ema, ema_decay=0.5 if ema else None)
    job = small_job(
        config, small_plan(8), random_data(config, shape=SHAPE, train_size=16), dtype=torch.float32
    )
    run, progress = RunDir.create(folder, model="lenet5", identity=name, files={"config": ""}), Progress()
    for _ in range(steps):
        loop.optimizer_step(job, progress)
        progress.step += 1
        kept = {"keep_last": 3, "best": progress.step == 1}
        checkpoint.save(run.checkpoints, step=progress.step, state=loop.state_dict(job, progress), **kept)
    run.set_status("done" if done else "running", step=steps)
    run.release()
    return run


def as_file(write: Callable[[Path], object], name: str = "w") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write(folder / name)
        return folder / name

    return make


def saved(make: Callable[[Mapping[str, Tensor]], Any], **options: Any) -> Callable[[Path], Path]:
    return as_file(lambda path: torch.save(make(state()), path, **options))


def shards(folder: Path) -> Path:
    items = list(state().items())
    write_shards(folder / "hf", {"a.safetensors": dict(items[:4]), "b.safetensors": dict(items[4:])})
    return folder / "hf"


def other_classes(path: Path, **more: Tensor) -> Path:
    path.write_bytes(safetensors({**lenet(classes=1000).state_dict(), **more}))
    return path

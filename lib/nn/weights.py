"""Reading of stored weights, and matching of their names and shapes with those of a model."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.errors import CheckpointError, ConfigError
from lib.runs import checkpoint
from lib.runs.weight_files import WeightFiles, kind_of

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = {**_FLOATS, **_INTS, "BOOL": torch.bool}
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # keys under which programs save weights
_COMPILED, _PARALLEL = "_orig_mod.", "module."  # that torch.compile and DistributedDataParallel add to names
_LISTED = 20


def read_weights(found: WeightFiles) -> dict[str, Tensor]:
    """Return the tensors of `found` by name, on the CPU; those of files are mapped, not read.

    Of a run that averages its weights those are the averages. Raises ConfigError where a file is damaged, or
    holds no weights or more than that.
    """
    if found.checkpoint is not None:
        try:
            return _of_checkpoint(*found.checkpoint)
        except CheckpointError as error:
            what, why = f"CONFIG_INITIAL_WEIGHTS={found.path} cannot be used", f"{error.what}: {error.why}"
            raise ConfigError(what, why=why, todo="name another checkpoint of it: RUN/ckpt/NAME") from error
    tensors: dict[str, Tensor] = {}
    for file in found.files:
        fault = f"CONFIG_INITIAL_WEIGHTS={file}"
        read = _read_safetensors if kind_of(file, fault) == "safetensors" else _read_torch
        try:
            tensors |= read(file, fault)
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, AttributeError) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(f"{fault} is damaged", why=why, todo="copy it again") from error
    return tensors


def _of_checkpoint(folder: Path, step: int) -> dict[str, Tensor]:
    found = checkpoint.load(folder, which=step, log=lambda _: None)
    assert found is not None, "it was there"
    state = found[1]["model"] | (found[1].get("ema") or {})  # the averages have the names of parameters
    return {name: each if isinstance(each, Tensor) else each.read() for name, each in state.items()}


def _read_safetensors(file: Path, fault: str) -> dict[str, Tensor]:
    """Read a file of the safetensors format: length of the header in 8 bytes, header in JSON, raw numbers."""
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(start - 8))
    header.pop("__metadata__", None)
    data = torch.from_file(str(file), shared=False, size=size_bytes, dtype=torch.uint8)
    tensors = {}
    for name, entry in header.items():
        (first, last), shape = entry["data_offsets"], entry["shape"]
        if entry["dtype"] not in _DTYPES:
            why = f"{name} has the unknown type {entry['dtype']}"
            raise ConfigError(f"{fault} cannot be read", why=why, todo="store it in float32")
        dtype = _DTYPES[entry["dtype"]]
        if not 0 <= first <= last <= size_bytes - start or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is not within its {size_bytes:,} bytes")
        part = data[start + first : start + last]
        if part.storage_offset() % dtype.itemsize:  # of older files; a view needs aligned numbers
            part = part.clone()
        tensors[name] = part.view(dtype).view(shape)
    return tensors


def _read_torch(file: Path, fault: str) -> dict[str, Tensor]:
    """Read the tensors of a file of torch.save. Code in it is not run."""
    todo = f"save the weights alone: torch.save(model.state_dict(), {file.name!r})"
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        why = "it holds more than tensors and numbers, and code of a file is not run"
        raise ConfigError(f"{fault} cannot be used", why=why, todo=todo) from error
    while isinstance(loaded, Mapping) and (inner := _wrapped(loaded)) is not None:
        loaded = inner
    named = loaded.items() if isinstance(loaded, Mapping) else ()
    tensors = {str(name): each.detach() for name, each in named if isinstance(each, Tensor)}
    if not tensors:
        raise ConfigError(f"{fault} holds no weights", why="no tensor has a name in it", todo=todo)
    tensors = {name.replace(_COMPILED, ""): each for name, each in tensors.items()}
    if all(name.startswith(_PARALLEL) for name in tensors):
        tensors = {name.removeprefix(_PARALLEL): each for name, each in tensors.items()}
    return tensors


def _wrapped(loaded: Mapping[Any, Any]) -> Mapping[Any, Any] | None:
    return next((loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)), None)


def matching(patterns: str, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that each of the patterns matches, itself or what is below it."""
    every = list(names)
    return {
        pattern: [name for name in every if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        for pattern in patterns.split()
    }


def head_of(model: nn.Module, declared: str | None) -> str:
    """Return the head's name: `declared`, or the last module with weights if that is linear; "" for none."""
    if declared is not None:
        return declared
    layers = [(name, each) for name, each in model.named_modules() if [*each.parameters(recurse=False)]]
    return layers[-1][0] if layers and isinstance(layers[-1][1], nn.Linear) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Comparison of stored weights with those of a model.

    weights: to load, by the model's names. head: names that keep their initial values, as requested.
    missing, unexpected, misshapen: names; of those in `allowed` the model's initial values stay.
    """

    weights: Mapping[str, Tensor]
    head: Sequence[str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    misshapen: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # stored shape, and the model's
    allowed: frozenset[str]

    def faults(self) -> dict[str, str]:
        """Return a line for each weight that differs and may not."""
        return {name: line for name, line in self._lines() if name not in self.allowed}

    def report(self) -> str:
        """Return the counts in one line, and what was allowed."""
        text = f"{len(self.weights)} of {len(self.weights) + len(self.missing) + len(self.misshapen)} match"
        if self.head:
            text = f"{len(self.weights)} match; new head, not read: {', '.join(self.head)}"
        allowed = [line for name, line in self._lines() if name in self.allowed]
        more = f", and {len(allowed) - _LISTED} more" if len(allowed) > _LISTED else ""
        return text + (f"; allowed: {', '.join(allowed[:_LISTED])}{more}" if allowed else "")

    def _lines(self) -> Iterator[tuple[str, str]]:
        for name, (stored, own) in self.misshapen.items():
            yield name, f"{name} is {stored}, and the model has {own}"
        yield from ((name, f"{name} is missing") for name in self.missing)
        yield from ((name, f"{name} is not of the model") for name in self.unexpected)


def match(model: nn.Module, given: Mapping[str, Tensor], *, head: str, allow: str) -> Match:
    """Compare `given` weights with those of `model`, which may be on the meta device.

    head: module whose weights stay as they are; "" for none. allow: patterns of names that may differ. Of
    tied weights one name is enough. Raises ConfigError for a pattern that matches nothing.
    """
    own = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(weight), name) for name, weight in own.items()}
    stored: dict[str, Tensor] = {}
    for name, tensor in given.items():
        stored.setdefault(names.get(name, name), tensor)
    own = {name: own[name] for name in names.values()}
    new = [name for name in own if head and (name == head or name.startswith(f"{head}."))]
    found = {pattern: {*of_one} for pattern, of_one in matching(allow, {**own, **stored}).items()}
    for pattern in (pattern for pattern, of_one in found.items() if not of_one):
        what = f"CONFIG_INITIAL_WEIGHTS_ALLOW: no weight matches {pattern}"
        raise ConfigError(what, why=close_text(pattern, {**own, **stored}), todo="correct or remove it")
    common = [name for name in own if name in stored and name not in new]
    shapes = {name: (tuple(stored[name].shape), tuple(own[name].shape)) for name in common}
    misshapen = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    return Match(
        weights={name: stored[name] for name in common if name not in misshapen},
        head=new,
        missing=[name for name in own if name not in stored and name not in new],
        unexpected=[name for name in stored if name not in own and name not in new],
        misshapen=misshapen,
        allowed=frozenset().union(*found.values()),
    )


def close_text(pattern: str, names: Iterable[str]) -> str:
    """Return the names of weights, or of modules that have some, that are close to `pattern`."""
    import difflib

    parts = [name.split(".") for name in names]
    known = sorted({".".join(each[:length]) for each in parts for length in range(1, len(each) + 1)})
    close = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5) or known[:3]
    return f"there {'are' if len(close) > 1 else 'is'} {', '.join(close)}"


@torch.no_grad()
def load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into those of `model` with the same names and shapes."""
    own = model.state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)

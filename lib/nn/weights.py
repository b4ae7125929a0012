"""Stored weights: reading them, matching them with those of a model, and freezing."""

from __future__ import annotations

import difflib
import functools
import json
import math
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lib.errors import CheckpointError, ConfigError
from lib.nn.batch_norm import FrozenNorm
from lib.runs import checkpoint
from lib.runs.weight_files import OPTION, WeightFiles, kind_of, of_torch_save, other_format
from lib.units import some_of

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES = {**_FLOATS, **_INTS, "BOOL": torch.bool}
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # keys under which programs save weights
_COMPILED, _PARALLEL = "_orig_mod.", "module."  # that torch.compile and DistributedDataParallel add to names


def read_weights(found: WeightFiles) -> dict[str, Tensor]:
    """Return the tensors of `found` by name, on the CPU; those of files are mapped, not read.

    Of a run that averages its weights those are the averages. Raises ConfigError where a file is damaged, or
    holds no weights or more than that.
    """
    if found.checkpoint is not None:
        return _of_checkpoint(found, *found.checkpoint)
    tensors: dict[str, Tensor] = {}
    for file in found.files:
        if kind_of(file) == "safetensors":
            try:
                tensors |= read_safetensors(file)
            except (OSError, RuntimeError, ValueError) as error:
                raise _damaged(file, error) from error
        else:
            tensors |= _read_torch(file)
    return tensors


def _damaged(file: Path, error: Exception) -> ConfigError:
    # The sentences of torch after the first one are advice.
    first = re.split(r"(?<=[.!?]) ", " ".join(str(error).split()))[0].rstrip(".")
    why = first if 0 < len(first) <= 200 else type(error).__name__
    return ConfigError(f"{OPTION}={file} is damaged", why=why, todo="copy it again, or write it in float32")


def _of_checkpoint(source: WeightFiles, folder: Path, step: int) -> dict[str, Tensor]:
    try:
        found = checkpoint.load(folder, which=step, log=lambda _: None)
        assert found is not None, "it was there"
        state = found[1]["model"] | (found[1].get("ema") or {})  # the averages have the names of parameters
        return {name: each if isinstance(each, Tensor) else each.read() for name, each in state.items()}
    except CheckpointError as error:
        todo = "name another checkpoint of it: RUN/ckpt/NAME"
        raise ConfigError(f"{OPTION}={source.path}: {error.what}", why=error.why, todo=todo) from error


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Read a file of the safetensors format: length of the header in 8 bytes, header in JSON, raw numbers.

    Tensors are mapped. Raises ValueError for a damaged file, OSError or RuntimeError where it cannot be read.
    """
    size_bytes, (start, header) = file.stat().st_size, _header(file)
    header.pop("__metadata__", None)
    data, tensors = torch.from_file(str(file), shared=False, size=size_bytes, dtype=torch.uint8), {}
    for name, entry in header.items():
        dtype, shape, first, last = _entry(name, entry)
        if not all(isinstance(length, int) and length >= 0 for length in shape):
            raise ValueError(f"{name} has the shape {shape}")
        if not 0 <= first <= last <= size_bytes - start or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is not within its {size_bytes:,} bytes")
        part = data[start + first : start + last]
        if part.storage_offset() % dtype.itemsize:  # of older files; a view needs aligned numbers
            part = part.clone()
        tensors[name] = part.view(dtype).view(shape)
    return tensors


def header_facts(file: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and shape of each tensor by the header of a safetensors file.

    Raises OSError, ValueError if it is damaged or cut off.
    """
    start, header = _header(file)
    read = {name: _entry(name, entry) for name, entry in header.items() if name != "__metadata__"}
    whole, size_bytes = start + max((last for *_, last in read.values()), default=0), file.stat().st_size
    if whole > size_bytes:
        raise ValueError(f"it has {size_bytes:,} of {whole:,} bytes")
    return {name: (dtype, tuple(shape)) for name, (dtype, shape, *_) in read.items()}


def _entry(name: str, entry: object) -> tuple[torch.dtype, list[Any], int, int]:
    """Return type, shape and place of a tensor in a header. Raises ValueError."""
    match entry:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(first), int(last)]}:
            if kind not in _DTYPES:
                raise ValueError(f"{name} has the unknown type {kind}")
            return _DTYPES[kind], shape, first, last
    raise ValueError(f"{name} is without type, shape or place")


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the numbers of a safetensors file start, and its header.

    Raises ConfigError for a file of another format, OSError, ValueError.
    """
    with file.open("rb") as opened:
        first = opened.read(32)
        if first[8:9] != b"{" and (kind := other_format(first) or of_torch_save(first)):
            what = f"{file} is no safetensors file but {kind}"
            raise ConfigError(what, todo="write it by safetensors.torch.save_file, or download it again")
        opened.seek(8)
        start = 8 + int.from_bytes(first[:8], "little")
        if start > file.stat().st_size:
            raise ValueError(f"its header would have {start - 8:,} bytes")
        header: dict[str, Any] = json.loads(opened.read(start - 8))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return start, header


def read_metadata(file: Path) -> dict[str, str]:
    """Return what a safetensors file, which can be read, tells beside its tensors; {} for other files."""
    found: dict[str, str] = _header(file)[1].get("__metadata__", {}) if kind_of(file) == "safetensors" else {}
    return found


def _read_torch(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of torch.save. Code in it is not run."""
    todo = f"save the weights alone: torch.save(model.state_dict(), {file.name!r})"
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, AttributeError) as error:
        raise _damaged(file, error) from error  # torch lets pass whatever its reader runs into
    except pickle.UnpicklingError as error:
        why = "it holds more than tensors and numbers, and code of a file is not run"
        raise ConfigError(f"{OPTION}={file} cannot be used", why=why, todo=todo) from error
    while isinstance(loaded, Mapping):
        inner = next((loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
        if inner is None:
            break
        loaded = inner
    named = loaded.items() if isinstance(loaded, Mapping) else ()
    tensors = {str(name).replace(_COMPILED, ""): each for name, each in named if isinstance(each, Tensor)}
    if not tensors:
        raise ConfigError(f"{OPTION}={file} holds no weights", why="no tensor has a name in it", todo=todo)
    if all(name.startswith(_PARALLEL) for name in tensors):
        tensors = {name.removeprefix(_PARALLEL): each for name, each in tensors.items()}
    return {name: each.detach() for name, each in tensors.items()}


def named_by(patterns: str, names: Collection[str], *, option: str, within: bool = False) -> set[str]:
    """Return those of `names` that a pattern matches, itself or what is below it. Blanks separate patterns.

    within: a pattern may begin within a path, after a dot. Raises ConfigError, with close names, for a
    pattern of CONFIG_`option` that matches nothing.
    """
    found: set[str] = set()
    for pattern in patterns.split():
        forms = (pattern, f"*.{pattern}")[: 1 + within]
        own = {name for form in forms for name in _matched(form, names)}
        if not own:
            for form in (f"*.{pattern}", f"*{pattern}*"):
                if further := sorted(_matched(form, names)):
                    what = f"CONFIG_{option}: no weight matches {pattern}"
                    why = f"a pattern is for the whole name, as of {some_of(further)}"
                    raise ConfigError(what, why=why, todo=f"{form} would match {len(further)}")
            parts = [name.split(".") for name in names]
            known = sorted(
                {
                    ".".join(each[start : n + 1])
                    for each in parts
                    for n in range(len(each))
                    for start in (range(n + 1) if within else [0])
                }
            )
            close = ", ".join(difflib.get_close_matches(pattern, known, n=3, cutoff=0.5) or known[:3])
            what = f"CONFIG_{option}: no weight matches {pattern}"
            raise ConfigError(what, why=f"close to it: {close}", todo="correct or remove it")
        found |= own
    return found


def _matched(pattern: str, names: Collection[str]) -> set[str]:
    """Return the names that `pattern` matches, or whose beginning up to a dot it does."""
    return {name for name in names if any(fnmatchcase(name, pattern + below) for below in ("", ".*"))}


def is_adapter(name: str) -> bool:
    """Return True for the name of a weight of an adapter (`lib.nn.lora`)."""
    return name.rpartition(".")[2] in ("lora_A", "lora_B")


def head_of(model: nn.Module, declared: str | None) -> str:
    """Return the head's name: `declared`, or the last module with weights if that is linear; "" for none."""
    if declared is not None:
        return declared
    layers = [(name, each) for name, each in model.named_modules() if [*each.parameters(recurse=False)]]
    return layers[-1][0] if layers and isinstance(layers[-1][1], nn.Linear) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Comparison of stored weights with those of a model.

    weights: to load, by the model's names. new: names of the head that is not read. allowed, faults: a line
    for each other name that is missing, unexpected or of another shape; what is allowed keeps its values.
    """

    weights: Mapping[str, Tensor]
    new: Sequence[str]
    allowed: Sequence[str]
    faults: Mapping[str, str]

    def __str__(self) -> str:
        new = f"; new head, not read: {', '.join(self.new)}" if self.new else ""
        return f"{len(self.weights)} weights match{new}" + "".join(
            f"; allowed: {line}" for line in self.allowed
        )


def match(
    model: nn.Module,
    given: Mapping[str, Tensor],
    *,
    head: str,
    allow: str,
    only: Collection[str] | None = None,
) -> Match:
    """Compare `given` weights with those of `model`, which may be on the meta device.

    head: module whose weights stay as they are; "" for none. allow: patterns of names that may differ. Of
    tied weights one name is enough. only: weights of `model` to compare; None for all but those of adapters.
    Raises ConfigError for a pattern that matches nothing.
    """
    held, stored, first = model.state_dict(keep_vars=True), dict[str, Tensor](), dict[int, str]()
    own = {n: each for n, each in held.items() if (not is_adapter(n) if only is None else n in only)}
    names = {name: first.setdefault(id(weight), name) for name, weight in own.items()}
    for name, tensor in given.items():
        stored.setdefault(names.get(name, name), tensor)
    weights, lines = dict[str, Tensor](), dict[str, str]()
    every = dict.fromkeys([*names.values(), *stored])
    new = [name for name in every if head and (name == head or name.startswith(f"{head}."))]
    for name in (name for name in every if name not in new):
        if name not in stored:
            lines[name] = f"{name} is missing"
        elif name not in own:
            lines[name] = f"{name} is not of the model"
        elif (shape := tuple(stored[name].shape)) != (expected := tuple(own[name].shape)):
            lines[name] = f"{name} is {shape}, and the model has {expected}"
        else:
            weights[name] = stored[name]
    may = named_by(allow, every, option="INITIAL_WEIGHTS_ALLOW")
    faults = {name: line for name, line in lines.items() if name not in may}
    allowed = [line for name, line in lines.items() if name in may]
    return Match(weights=weights, new=[name for name in new if name in own], allowed=allowed, faults=faults)


@torch.no_grad()
def load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into those of `model` with the same names and shapes."""
    own = model.state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)


def freeze(model: nn.Module, patterns: str) -> None:
    """Freeze the weights whose names `patterns` match (`named_by`), in place.

    A batch normalisation is frozen with all its weights, or by its name if it has none. Raises ConfigError
    for a pattern that matches nothing, and where no weight is left to train.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    norms = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
    freeze_named(model, named_by(patterns, {**weights, **norms}, option="FREEZE"))
    if not any(weight.requires_grad for weight in weights.values()):
        why = f"{patterns} matches all {len(weights)} weights"
        raise ConfigError("CONFIG_FREEZE leaves nothing to train", why=why, todo="do not freeze the head")


def freeze_named(model: nn.Module, named: Collection[str]) -> None:
    """Freeze the weights that `named` has, and batch normalisation with all its weights or by its name."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    norms = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
    for name in weights.keys() & named:
        weights[name].requires_grad_(False)
    for name, norm in norms.items():
        own = [weight.requires_grad for weight in norm.parameters()]
        if not any(own) if own else name in named:
            kind: Any = type(norm)
            norm.__class__ = _frozen(kind)
            norm.eval()


@functools.cache
def _frozen(kind: Any) -> Any:
    return type(f"Frozen{kind.__name__}", (FrozenNorm, kind), {})

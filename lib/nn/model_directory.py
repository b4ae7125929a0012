"""Local directories of models of Hugging Face transformers."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lib.errors import ConfigError, os_errors
from lib.nn.packages import import_extra
from lib.nn.weights import header_facts, read_safetensors
from lib.plugin_folders import ROOT

FETCH = "make fetch REPO=owner/name DIRECTORY=..."
MEND = "mend or copy it again"
AGAIN = f"copy it again; {FETCH} downloads the model to a new directory"
HOST = torch.device("cpu")  # where weights are read
# Files of a tokenizer.
_VOCABULARY = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
_TOKENIZER = (*_VOCABULARY, "chat_template*")


def path_of(name: str) -> Path:
    """Return the path of a directory, which starts at the source tree if it is relative."""
    return (ROOT / Path(name).expanduser()).resolve()


def open_directory(name: str, *, symbol: str) -> tuple[Path, str, tuple[str, ...]]:
    """Return the directory called `name`, the model type in its config.json, and its files of weights.

    symbol: that has the name. A relative path starts at the source tree. Raises ConfigError where there is no
    such model, for one that needs code of its own, and for quantized weights.
    """
    requested = f'{symbol}="{name}"'
    if not name:
        todo = f"set it to a local directory with a config.json; {FETCH} downloads one"
        raise ConfigError(f"{symbol} is empty", todo=todo)
    folder = path_of(name)
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "it does not exist, and models are not downloaded"
        todo = f"give one that has a config.json; {FETCH} downloads one"
        raise ConfigError(f"{requested} is no local directory", why=why, todo=todo)
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{requested} has no config.json", todo="give the directory that has it")
    with os_errors("read"):
        text = file.read_text(encoding="utf-8", errors="replace")
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        others = sorted(path.name for path in folder.glob("*.bin"))
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON", why=str(error), todo=MEND) from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{file} has no model_type", todo="give the directory of a model of transformers")
    if "auto_map" in values:
        why = f"auto_map names code for {kind}, and code of a model directory is never run"
        raise ConfigError(f"{file} asks for code", why=why, todo="use a model whose class is in transformers")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(f"{folder} has an adapter", todo="give the directory of its base model")
    if "quantization_config" in values:
        raise ConfigError(f"{file} is of quantized weights", todo="give the directory of the full weights")
    if others and not files:
        todo = "convert it to safetensors, or remove it to start from random weights"
        raise ConfigError(
            f"{folder / others[0]} is a pickle, and weights are read from safetensors", todo=todo
        )
    stored_shapes(str(folder), files)  # transformers does not name a damaged file
    return folder, kind, tuple(files)


def read_configuration(place: Path | str) -> Any:
    """Return transformers' object of the config.json `place`, or of the one in that folder.

    Raises ConfigError without it, and where transformers does not understand it.
    """
    file = Path(place) if Path(place).is_file() else Path(place) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{place} has no config.json", todo="give the directory that has it")
    transformers = import_extra("transformers")
    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        return transformers.AutoConfig.from_pretrained(str(place), **options)
    except faults_of_values() as error:
        what, why = f"{file} is not understood by transformers {transformers.__version__}", in_a_line(error)
        raise ConfigError(what, why=why, todo=MEND) from error


def faults_of_values() -> tuple[type[Exception], ...]:
    """Return what transformers raises for the values of a configuration that it cannot use."""
    found = [ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError]
    found += [RuntimeError, TypeError, ValueError]
    checks = sys.modules.get("huggingface_hub.errors")  # its error of a value is no ValueError
    return (*found, *([] if checks is None else [checks.StrictDataclassError]))


@contextlib.contextmanager
def values_of(file: Path | str) -> Iterator[None]:
    """Turn what is raised for the values of the configuration `file` into a ConfigError that names it."""
    try:
        yield
    except faults_of_values() as error:
        if "memory" in str(error):  # it is short, whatever the values are
            raise
        raise ConfigError(f"{file} makes no model", why=in_a_line(error), todo=MEND) from error


def in_a_line(error: Exception) -> str:
    """Format the beginning of a message of another package, which may have many lines."""
    text = " ".join(str(error).split())[:200]
    return (
        f"{type(error).__name__} {text}" if isinstance(error, LookupError) else text or type(error).__name__
    )


def widest_dtype(folder: str, files: Sequence[str]) -> torch.dtype:
    """Return the widest type of the weights in `files`: read in it they stay there until they are used.

    config.json may name a narrower one. Raises ConfigError for files that cannot be read, and other types.
    """
    weights = list[torch.Tensor]()
    for name in files:
        with _readable(Path(folder) / name):
            weights += read_safetensors(Path(folder) / name).values()
    if others := [str(each.dtype) for each in weights if not each.is_floating_point()]:
        raise ConfigError(f"{folder} has weights of {others[0]}", todo="give them in bf16, fp16 or fp32")
    return functools.reduce(torch.promote_types, {each.dtype for each in weights} or {torch.float32})


def stored_dtypes(folder: Path) -> set[torch.dtype]:
    """Return the types of the weights in `folder`, by headers alone; what config.json names without files.

    Raises ConfigError for damaged files, and an unknown type in config.json.
    """
    if files := [path.name for path in folder.glob("*.safetensors")]:
        return {dtype for facts in _headers(folder, files) for dtype, _ in facts.values()}
    with _readable(folder / "config.json"):
        values = json.loads((folder / "config.json").read_bytes())
    named = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = getattr(torch, named, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"{folder / 'config.json'} has weights of {named}", todo="write dtype=bfloat16")
    return {dtype}


def stored_shapes(folder: str, files: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in `files` by their headers. Raises ConfigError for damaged files."""
    headers = _headers(Path(folder), files)
    return {name: shape for header in headers for name, (_, shape) in header.items()}


def _headers(folder: Path, files: Sequence[str]) -> Iterator[dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    for name in files:
        with _readable(folder / name):
            facts = header_facts(folder / name)
        yield facts


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file} is damaged or not complete", why=why, todo=AGAIN) from error


def copy_tokenizer(source: str, target: Path) -> None:
    """Copy the files of the tokenizer in the directory `source` to `target`. A relative path: see above."""
    for pattern in _TOKENIZER:
        for found in path_of(source).glob(pattern):
            shutil.copy(found, target)

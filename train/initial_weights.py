"""The file of weights that training starts from: CONFIG_INITIAL_WEIGHTS."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from lib.config import Config
from lib.data.types import Spec
from lib.errors import ConfigError
from lib.nn.model_code import ModelCode, build_model, load_layout

_ACCEPTED = "give one safetensors file in the layout of Hugging Face transformers, as make export writes it"
# First bytes of other weight formats.
_OTHERS = (
    (b"PK\x03\x04", "an archive as torch.save writes it (.pt, .pth, .bin)"),
    (b"\x80\x02", "a pickle as old versions of torch.save wrote it (.pt, .pth, .bin)"),
    (b"version https://git-lfs", "a Git LFS pointer without the weights: git lfs pull"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
)
_CONVERT = (
    "convert it, for example with .venv/bin/python -c 'import sys, torch, safetensors.torch as s; "
    "s.save_file({n: t.clone() for n, t in torch.load(sys.argv[1], weights_only=True).items()}, sys.argv[2])'"
    " IN.pt OUT.safetensors"
)


def initial_weights(config: Config, root: Path) -> Path | None:
    """Return the file that training starts from, None for random ones. A relative path starts at `root`."""
    if not config.initial_weights:
        return None
    return (root / Path(config.initial_weights).expanduser()).resolve()


def check_file(config: Config, root: Path) -> None:
    """Check the beginning of the file.

    Raises ConfigError where it is not a safetensors file, or the package that reads them is not installed.
    """
    file = initial_weights(config, root)
    if file is None:
        return
    requested = f"CONFIG_INITIAL_WEIGHTS={file}"
    if file.is_dir():
        found = sorted(path.name for path in file.glob("*.safetensors"))
        todo = f"name the file in it: {file / found[0]}" if len(found) == 1 else _ACCEPTED
        why = "" if len(found) < 2 else f"its {len(found)} shards ({found[0]}, ...) have to be merged first"
        raise ConfigError(f"{requested} is a directory", why=why, todo=todo)
    try:
        with file.open("rb") as opened:
            start = opened.read(32)
            size_bytes = file.stat().st_size
    except OSError as error:
        raise ConfigError(f"{requested} cannot be read", why=error.strerror or str(error)) from error
    # A file of safetensors: the length of its header in 8 bytes, and the header, which is JSON.
    if start[8:9] == b"{" and 8 + int.from_bytes(start[:8], "little") <= size_bytes:
        load_layout(config.model).require_package()
        return
    if not start:
        raise ConfigError(f"{requested} is empty", todo=_ACCEPTED)
    for number, (magic, kind) in enumerate(_OTHERS):
        if start.startswith(magic):
            raise ConfigError(f"{requested} is {kind}", why=_ACCEPTED, todo=_CONVERT if number < 2 else "")
    raise ConfigError(f"{requested} is not a safetensors file, or damaged", todo=_ACCEPTED)


def check_weights(config: Config, spec: Spec, root: Path) -> None:
    """Check that the weights fit the model. Raises ConfigError where they cannot be read or do not fit."""
    file = initial_weights(config, root)
    if file is not None:
        model = build_model(config.model, config.model_options, spec, seed=config.seed)
        load_weights(model, file, name=config.model, log=lambda _: None)


def load_weights(model: torch.nn.Module, file: Path, *, name: str, log: Callable[[str], None]) -> None:
    """Load the weights in `file` into `model`, called `name`. Raises ConfigError where they do not fit."""
    requested = f"CONFIG_INITIAL_WEIGHTS={file}"
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{requested} cannot be read", why=error.strerror or str(error)) from error
    try:
        with ModelCode(name):
            load_layout(name).load(model, str(file))
    except ConfigError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        raise ConfigError(
            f"{requested} cannot be used", why=why, todo=error.todo, findings=error.findings
        ) from error
    log(f"Weights: {file}, SHA-256 {digest[:16]}")

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

_ACCEPTED = (
    "give one file of safetensors in the layout of Hugging Face transformers, as make export writes it"
)
# What other files of weights begin with.
_OTHERS = (
    (b"PK\x03\x04", "an archive as torch.save writes it (.pt, .pth, .bin)"),
    (b"\x80\x02", "a pickle as old versions of torch.save wrote it (.pt, .pth, .bin)"),
    (b"version https://git-lfs", "a pointer of Git LFS, and the weights are not here: git lfs pull"),
    (b"GGUF", "a file of GGUF"),
    (b"\x89HDF", "a file of HDF5"),
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
    """Look at the beginning of the file.

    Raises ConfigError where it is no file of safetensors, or the package that reads them is not installed.
    """
    file = initial_weights(config, root)
    if file is None:
        return
    asked = f"CONFIG_INITIAL_WEIGHTS={file}"
    if file.is_dir():
        found = sorted(path.name for path in file.glob("*.safetensors"))
        todo = f"name the file in it: {file / found[0]}" if len(found) == 1 else _ACCEPTED
        parts = "" if len(found) < 2 else f"its {len(found)} parts ({found[0]}, ...) have to be merged first"
        raise ConfigError(f"{asked} is a directory", why=parts, todo=todo)
    try:
        with file.open("rb") as opened:
            start = opened.read(32)
            size_bytes = file.stat().st_size
    except OSError as error:
        raise ConfigError(f"{asked} cannot be read", why=error.strerror or str(error)) from error
    # A file of safetensors: the length of its header in 8 bytes, and the header, which is JSON.
    if start[8:9] == b"{" and 8 + int.from_bytes(start[:8], "little") <= size_bytes:
        load_layout(config.model).require_package()
        return
    if not start:
        raise ConfigError(f"{asked} is empty", todo=_ACCEPTED)
    for number, (magic, kind) in enumerate(_OTHERS):
        if start.startswith(magic):
            raise ConfigError(f"{asked} is {kind}", why=_ACCEPTED, todo=_CONVERT if number < 2 else "")
    raise ConfigError(f"{asked} is no file of safetensors, or damaged", why="", todo=_ACCEPTED)


def check_weights(config: Config, spec: Spec, root: Path) -> None:
    """Read the weights and match them with the model, before anything is made for the run.

    Raises ConfigError where they cannot be read or are not the model's.
    """
    file = initial_weights(config, root)
    if file is not None:
        model = build_model(config.model, config.model_options, spec, seed=config.seed)
        load_weights(model, file, name=config.model, say=lambda _: None)


def load_weights(model: torch.nn.Module, file: Path, *, name: str, say: Callable[[str], None]) -> None:
    """Give `model`, which is called `name`, the weights in `file`. Raises ConfigError where it cannot."""
    asked = f"CONFIG_INITIAL_WEIGHTS={file}"
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{asked} cannot be read", why=error.strerror or str(error)) from error
    try:
        with ModelCode(name):
            load_layout(name).load(model, str(file))
    except ConfigError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        raise ConfigError(
            f"{asked} cannot be taken", why=why, todo=error.todo, findings=error.findings
        ) from error
    say(f"Weights: {file}, SHA-256 {digest[:16]}")

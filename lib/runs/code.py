"""Code that runs depend on: its files, their hash, and the plug-ins of a run that have other code now."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lib import plugin_folders, plugins

_IMPORT = re.compile(r"^\s*from models\.(\w+)\.", re.MULTILINE)


def sources_of(root: Path, *models: str) -> list[Path]:
    """Return the sorted sources of the tree at `root` that training `models` may run, without other models.

    Models that are imported by shared code or by one of `models` are included, and all of EXTERNAL=.
    """
    shared = [path for folder in ("lib", "train") for path in _sources(root / folder)]
    shared += [*root.glob("Kconfig"), *(root / "models").glob("*.py")]
    own = [path for model in models for path in _sources(root / "models" / model)]
    own += _sources(base) if (base := plugin_folders.external()) else []
    text = "".join(path.read_text(encoding="utf-8") for path in [*shared, *own] if path.suffix == ".py")
    imported = set(_IMPORT.findall(text)) - set(models)
    return sorted({*shared, *own, *(path for name in imported for path in _sources(root / "models" / name))})


def _sources(folder: Path) -> list[Path]:
    return [path for kind in ("*.py", "Kconfig") for path in folder.rglob(kind)]


def digest_of(files: Iterable[Path], *, root: Path) -> str:
    """Return the SHA-256 in hexadecimal digits of `files`: their names below `root`, and their contents."""
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(root) if file.is_relative_to(root) else file
        digest.update(name.as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def folder_digest(folder: Path) -> str:
    """Return the SHA-256 in hexadecimal digits of the Python and Kconfig files in `folder`."""
    return digest_of(sorted(_sources(folder)), root=folder)


def folders_of(model: str, task: str, dataset: str) -> dict[str, Path]:
    """Return the folders of a run's plug-ins, by their kind: model, task and data set."""
    chosen = ((plugins.MODELS, model), (plugins.TASKS, task), (plugins.DATASETS, dataset))
    return {kind.noun: kind.home(name) for kind, name in chosen}


@functools.cache
def plugin_digests(model: str, task: str, dataset: str) -> Mapping[str, str]:
    """Return the SHA-256 of the code of a run's plug-ins, by their kind, when first asked for."""
    return {kind: folder_digest(folder) for kind, folder in folders_of(model, task, dataset).items()}


def stored_digests(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what `plugin_digests` was for a run with plugins.json `facts`; empty for an older run's."""
    return {kind: facts[kind]["sha256"] for kind in (each.noun for each in plugins.KINDS) if kind in facts}


def changed(known: Mapping[str, str], digests: Mapping[str, str]) -> str:
    """Name the kinds of plug-ins whose code is not as `known`: "model and task"; "" if none or unknown."""
    return " and ".join(kind for kind, digest in known.items() if digests.get(kind, digest) != digest)

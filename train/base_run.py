"""Weights of a shipped configuration as initial weights: it is trained first where that has not been done.

CONFIG_INITIAL_WEIGHTS="defconfig:NAME" names defconfigs/NAME. Its run is kept in the data cache, where all
runs that start from it find it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lib.config import Config
from lib.data.cache import cached_folder
from lib.errors import ToolkitError
from lib.kconf import Resolved
from lib.runs.weight_files import OPTION, kept_run, shipped


class Base(NamedTuple):
    """A shipped configuration, and the folder for its run."""

    name: str
    resolved: Resolved
    folder: Path


def base_of(config: Config, root: Path) -> Base | None:
    """Return the shipped configuration that the initial weights are of; None for other weights.

    Raises ConfigError where there is no such configuration.
    """
    name = config.weights.initial_weights
    resolved, folder = shipped(name, root=root), kept_run(name, root=root)
    return None if resolved is None or folder is None else Base(name, resolved, folder)


def train_base(base: Base, root: Path, *, log: Callable[[str], None]) -> None:
    """Train the configuration, unless its run is kept as it was written. Other processes that need it wait.

    Raises ToolkitError where training fails, Suspended if a signal stops it.
    """
    from lib.sweeps.subprocess_run import Children  # most runs start from no such configuration

    def fill(folder: Path) -> None:
        log(f"{OPTION}={base.name}: trained first, and kept; its output: {folder / 'output.txt'}")
        with Children() as children:
            child = children.train(folder, base.resolved.text, root=root, threads=None)
            children.check(todo="make train begins with it again")
        if child.run is None:
            raise ToolkitError(f"{OPTION}={base.name} cannot be trained", why=child.reason)
        log(f"{OPTION}={base.name}: trained in {child.seconds_cpu:.0f} s of CPU time")

    cached_folder(base.folder, identity=base.folder.name, fill=fill, log=log)

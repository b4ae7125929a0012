"""Weights of a shipped configuration as initial weights: it is trained first where that has not been done.

CONFIG_INITIAL_WEIGHTS="defconfig:NAME" names defconfigs/NAME. Its run is kept in the data cache, where all
runs that start from it find it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lib.config import Config, config_from_values
from lib.data.cache import cached_folder
from lib.data.types import Spec
from lib.errors import ToolkitError
from lib.kconf import Resolved
from lib.runs.weight_files import OPTION, kept_run, shipped


class Describe(Protocol):
    """`train.training_data.describe_training_data`, which imports this file."""

    def __call__(self, config: Config, *, log: Callable[[str], None]) -> Any:
        """Return the training data of a configuration, by their metadata where they suffice."""


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


def check_base(base: Base, config: Config, spec: Spec, *, describe: Describe) -> None:
    """Check that the weights will fit the configured model, before they are trained for it.

    spec: of the data of `config`. Raises ConfigError where they do not.
    """
    if not base.folder.exists():
        from train.initial_weights import check_untrained

        own = config_from_values(base.resolved.values)
        theirs = describe(own, log=lambda _: None).dataset.spec
        check_untrained(base.name, own, theirs, config, spec)


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

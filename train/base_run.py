"""Weights of a shipped configuration as initial weights: it is trained first where that has not been done.

CONFIG_INITIAL_WEIGHTS="defconfig:NAME" names defconfigs/NAME. Its run is kept in the data cache, where all
runs that start from it find it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lib.config import Config
from lib.data.cache import cached_folder
from lib.errors import ToolkitError
from lib.runs.weight_files import OPTION, kept_run, shipped
from lib.sweeps.subprocess_run import Children


def is_untrained(config: Config, root: Path) -> bool:
    """Return True if the initial weights are those of a shipped configuration that is still to be trained.

    Raises ConfigError where there is no such configuration.
    """
    place = kept_run(config.weights.initial_weights, root=root)
    return place is not None and not place.exists()


def train_base(config: Config, root: Path, *, log: Callable[[str], None]) -> None:
    """Train the shipped configuration that the initial weights are of, unless its run is kept.

    Other processes that need it wait. Raises ToolkitError where training fails, Suspended if a signal stops
    it, ConfigError where there is no such configuration.
    """
    name = config.weights.initial_weights
    resolved, place = shipped(name, root=root), kept_run(name, root=root)
    if resolved is None or place is None:
        return

    def fill(folder: Path) -> None:
        log(f"{OPTION}={name}: trained first, and kept in {place}")
        with Children() as children:
            child = children.train(folder, resolved.text, root=root, threads=None)
            children.check(todo="make train begins with it again")
        if child.run is None:
            raise ToolkitError(f"{OPTION}={name} cannot be trained", why=child.reason)
        log(f"{OPTION}={name}: trained in {child.seconds_cpu:.0f} s of CPU time")

    cached_folder(place, identity=place.name, fill=fill, log=log)

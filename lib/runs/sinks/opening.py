"""Construction of the sinks that a configuration selects."""

from __future__ import annotations

import importlib.util

from lib.config import Config
from lib.errors import ConfigError
from lib.runs.directory import RunDir
from lib.runs.sinks.base import Sink


def check_packages(config: Config) -> None:
    """Check the packages of the selected sinks. Raises ConfigError if one is not installed."""
    for name in _services(config):
        found = importlib.util.find_spec(name)
        # A plain directory of that name, such as the one that wandb writes, is importable but is no package.
        if found is None or found.origin is None:
            raise ConfigError(
                f"the package {name} is not installed",
                why=f"CONFIG_SINK_{name.upper()}=y needs it",
                todo=f"install the extra {name}, for example with .venv/bin/pip install {name}",
            )


def open_sinks(config: Config, run: RunDir) -> list[Sink]:
    """Open the selected sinks; their files are in the run directory. Their packages are imported only here.

    Raises ToolkitError if one of them cannot be used.
    """
    sinks: list[Sink] = []
    if chosen := _services(config):
        from lib.runs.sinks.services import OPENING

        sinks += [OPENING[name](run, project=project) for name, project in chosen.items()]
    if config.sink_tensorboard:
        from lib.runs.sinks.tensorboard import EventFile

        sinks.append(EventFile(run.sinks, began=run.began))
    return sinks


def _services(config: Config) -> dict[str, str]:
    """Selected sinks that need a third-party package: name -> project to log to."""
    chosen = {"wandb": config.sink_wandb, "trackio": config.sink_trackio}
    if not any(chosen.values()):
        return {}
    assert config.sink_project is not None
    return {name: config.sink_project for name, wanted in chosen.items() if wanted}

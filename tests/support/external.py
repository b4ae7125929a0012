"""A folder of EXTERNAL= with a model and a configuration of it."""

from __future__ import annotations

from pathlib import Path

KCONFIG = """\
choice MODEL_CHOICE

config MODEL_{NAME}
\tbool "{name}"
\tselect MODEL_PREDICTS_ROWS
\tselect MODEL_DATA_GRAY
\thelp
\t  Two linear layers.

endchoice

config MODEL
\tstring
\tdefault "{name}" if MODEL_{NAME}

config RECOMMENDED_TARGET
\tint
\tdefault 64 if MODEL_{NAME}

config {NAME}_WIDTH
\tint "Width of {name}"
\tdepends on MODEL_{NAME}
\trange 1 4096
\tdefault 16
\thelp
\t  Of the hidden layer.
"""
MODEL = '''\
"""Two linear layers."""

from dataclasses import dataclass

from torch import nn

from models.{name}.layers import hidden

TASK = "classify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    width: int


def build(options, spec):
    size = spec.channels * spec.height * spec.width
    return nn.Sequential(nn.Flatten(), hidden(size, options.width), nn.Linear(options.width, spec.classes))
'''
LAYERS = '''\
"""A layer that the model imports by the name of its folder."""

from torch import nn

from lib.nn.dropout import Dropout


def hidden(size, width):
    return nn.Sequential(nn.Linear(size, width), nn.ReLU(), Dropout(0.0, site=1))
'''
DEFCONFIG = """\
# Two linear layers on the embedded digits.
CONFIG_MODEL_{NAME}=y
CONFIG_AUTO_METHOD_PREDICT=y
"""


def write_model(home: Path, name: str) -> None:
    """Write the model `name` into the folder `home`."""
    home.mkdir(parents=True, exist_ok=True)
    for file, text in (("Kconfig", KCONFIG), ("model.py", MODEL), ("layers.py", LAYERS)):
        (home / file).write_text(text.replace("{name}", name).replace("{NAME}", name.upper()))


def write_external(folder: Path, name: str = "tiny_net") -> Path:
    """Write a folder of EXTERNAL= with the model `name` and defconfigs/`name`."""
    write_model(folder / "models" / name, name)
    (folder / "defconfigs").mkdir()
    (folder / "defconfigs" / name).write_text(DEFCONFIG.replace("{NAME}", name.upper()))
    return folder

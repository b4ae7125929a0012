"""Scaffold a model: make new-model NAME=x TASK=classify, or TASK=lm.

Writes models/x/, defconfigs/x and tests/golden/x.json: a small network that trains and passes every
test of models, to be changed from there. Nothing outside these files knows of a model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import keyword
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kconfiglib

from lib.errors import ConfigError, os_error, run_main
from scripts.model_templates import KCONFIG, MODEL

if TYPE_CHECKING:
    from lib.data import Spec

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("classify", "lm")
WIDTH = 16  # the default of the scaffolded CONFIG_<NAME>_WIDTH

DEFCONFIG = """\
# {name}, {parameters:,} parameters, on the data set that its Kconfig makes the default.
CONFIG_MODEL_{NAME}=y
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", help="a directory of models/ to be: a-z, 0-9 and _")
    parser.add_argument("task", metavar="TASK", help=f"the kind of learning: {', '.join(TASKS)}")
    arguments = parser.parse_args()
    check(arguments.name, task=arguments.task)
    for path in scaffold(arguments.name, task=arguments.task):
        print(f"wrote {path.relative_to(ROOT)}")
    print(f"next: make defconfig-{arguments.name} && make train")
    return 0


def check(name: str, *, task: str) -> None:
    """Raise ConfigError for a name or a task that cannot be scaffolded. Writes nothing."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]|[a-z]", name) or keyword.iskeyword(name) or "__" in name:
        raise ConfigError(
            f"{name!r} cannot be the name of a model",
            why="it becomes a Python package and the start of CONFIG_ names",
            todo="give NAME= as lower-case letters, digits and single underscores, such as NAME=my_net",
        )
    if task not in TASKS:
        raise ConfigError(f"there is no task {task!r}", todo=f"give TASK= as one of: {', '.join(TASKS)}")
    for path in files(name):
        if path.exists():
            raise ConfigError(f"{path.relative_to(ROOT)} exists", todo="choose another NAME= or remove it")
    _check_symbols(name)


def files(name: str) -> tuple[Path, ...]:
    """What belongs to a model, the directory first."""
    return ROOT / "models" / name, ROOT / "defconfigs" / name, ROOT / "tests" / "golden" / f"{name}.json"


def scaffold(name: str, *, task: str) -> list[Path]:
    """Write the files of a new model and return them. Raises ToolkitError where they cannot be written."""
    directory, defconfig, golden = files(name)
    texts = {
        directory / "__init__.py": "",
        directory / "Kconfig": KCONFIG[task],
        directory / "model.py": MODEL[task],
    }
    try:
        directory.mkdir()
        for path, text in texts.items():
            filled = text.format(name=name, NAME=name.upper(), task=task, width=WIDTH)
            path.write_text(filled, encoding="utf-8")
        cases = _counted(name, task=task)
        lines = ",\n".join(f"    {json.dumps(case)}" for case in cases)
        golden.write_text(f'{{\n  "cases": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
        filled = DEFCONFIG.format(name=name, NAME=name.upper(), parameters=cases[0]["parameters"])
        defconfig.write_text(filled, encoding="utf-8")
    except OSError as error:
        raise os_error("write the new model", error) from error
    return [*texts, defconfig, golden]


def _check_symbols(name: str) -> None:
    """A model owns the symbols that start with its name: they must be free, in both directions."""
    tree = kconfiglib.Kconfig(str(ROOT / "Kconfig"), warn_to_stderr=False)
    taken = [symbol for symbol in tree.syms if symbol.startswith(f"{name.upper()}_")]
    taken += [symbol for symbol in tree.syms if symbol == f"MODEL_{name.upper()}"]
    taken += [tree.named_choices[key].name for key in tree.named_choices if key == f"MODEL_{name.upper()}"]
    models = [path.parent.name for path in (ROOT / "models").glob("*/Kconfig")]
    inside = [model for model in models if name.startswith(f"{model}_")]
    if taken or inside:
        clash = f"CONFIG_{taken[0]}" if taken else f"those of models/{inside[0]}"
        raise ConfigError(
            f"{name!r} cannot be the name of a model",
            why=f"its symbols would mix with {clash}",
            todo="choose another NAME=",
        )


def _counted(name: str, *, task: str) -> list[dict[str, Any]]:
    """The reference parameter counts of the scaffolded network, counted without memory for them. The first is
    that of the data set by default."""
    import torch

    module = importlib.import_module(f"models.{name}.model")
    cases = []
    for shape, spec in _specs(task):
        with torch.device("meta"):
            model = module.build(module.Options(width=WIDTH), spec)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        cases.append({"options": {"width": WIDTH}, **shape, "parameters": parameters})
    return cases


def _specs(task: str) -> Iterator[tuple[dict[str, int], Spec]]:
    """Two data sets for a model of `task`: their sizes as tests/golden has them, and what a model is told."""
    from lib.data import ImageSpec, TextSpec

    if task == "lm":
        for vocab_size, block_size in ((256, 32), (50, 8)):
            spec = TextSpec(
                name="golden",
                vocab_size=vocab_size,
                block_size=block_size,
                unit="token",
                validation_tokens=1,
                validation_bytes=None,
            )
            yield {"vocab_size": vocab_size, "block_size": block_size}, spec
        return
    for channels, size, classes in ((3, 32, 10), (1, 28, 10)):
        half = (0.5,) * channels
        shape = {"channels": channels, "height": size, "width": size, "classes": classes}
        yield shape, ImageSpec(name="golden", mean=half, std=half, synthetic=True, **shape)


if __name__ == "__main__":
    sys.exit(run_main(main))

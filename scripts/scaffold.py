"""Scaffold a plug-in: make new-model NAME=x TASK=classify, make new-task NAME=x, make new-data NAME=x.

A model is models/x/, defconfigs/x and tests/golden/x.json: a small network that trains and passes every
test of models. A data set is lib/data/datasets/x/ and defconfigs/x. A task is train/tasks/x/, for a model
that is made with TASK=x. All are to be changed from there; nothing outside these files knows of them.
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
from lib.plugins import DATASETS, MODELS, TASKS, Kind, meant
from scripts.scaffold_templates import DATA, DATA_KCONFIG, KCONFIG, MODEL, TASK, TASK_KCONFIG

if TYPE_CHECKING:
    from lib.data import Spec

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"model": MODELS, "task": TASKS, "data": DATASETS}
WIDTH = 16  # the default of the scaffolded CONFIG_<NAME>_WIDTH

DEFCONFIG = """\
# {name}, {parameters:,} parameters, on the data set that its Kconfig makes the default.
CONFIG_MODEL_{NAME}=y
"""
DATA_DEFCONFIG = """\
# LeNet-5 on {name}.
CONFIG_DATASET_{NAME}=y
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name", metavar="NAME", help="a directory to be: a-z, 0-9 and _")
    parser.add_argument("task", metavar="TASK", nargs="?", default="", help="of a model: what it learns")
    arguments = parser.parse_args()
    name = arguments.name
    check(arguments.kind, name, task=arguments.task)
    for path in scaffold(arguments.kind, name, task=arguments.task):
        print(f"wrote {path.relative_to(ROOT)}")
    made_by = f"make new-model NAME=my_{name} TASK={name}" if arguments.kind == "task" else ""
    print(f"next: {made_by or f'make defconfig-{name} && make train'}")
    return 0


def check(kind: str, name: str, *, task: str = "") -> None:
    """Raise ConfigError for a name or a task that cannot be scaffolded. Writes nothing."""
    noun = KINDS[kind].noun
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]|[a-z]", name) or keyword.iskeyword(name) or "__" in name:
        raise ConfigError(
            f"{name!r} cannot be the name of a {noun}",
            why="it becomes a Python package and the start of CONFIG_ names",
            todo="give NAME= as lower-case letters, digits and single underscores, such as NAME=my_net",
        )
    if kind == "model":
        template_of(task)
    for path in files(kind, name):
        if path.exists():
            raise ConfigError(f"{path.relative_to(ROOT)} exists", todo="choose another NAME= or remove it")
    _check_symbols(kind, name)


def template_of(task: str) -> str:
    """Which of the templates of models is for `task`. Raises ConfigError where none is."""
    if task not in TASKS.names():
        raise ConfigError(f"there is no task {task!r}", todo=f"give TASK=: {meant(task, TASKS.names())}")
    if task in MODEL:
        return task
    from lib.data import ImageSpec, TextSpec

    _, kinds = TASKS.load(task).DATA
    found = "classify" if ImageSpec in kinds else "lm" if TextSpec in kinds else ""
    if not found:
        raise ConfigError(
            f"there is no template of a model for the task {task!r}",
            why="it learns neither from images nor from text",
            todo="start from a model that has the task",
        )
    return found


def files(kind: str, name: str) -> tuple[Path, ...]:
    """What belongs to a plug-in, the directory first."""
    home = _folder(KINDS[kind]) / name
    defconfig, golden = ROOT / "defconfigs" / name, ROOT / "tests" / "golden" / f"{name}.json"
    return {"model": (home, defconfig, golden), "data": (home, defconfig), "task": (home,)}[kind]


def _folder(kind: Kind) -> Path:
    return ROOT / kind.package.replace(".", "/")


def scaffold(kind: str, name: str, *, task: str = "") -> list[Path]:
    """Write the files of a new plug-in and return them. Raises ToolkitError where they cannot be written."""
    directory, *others = files(kind, name)
    filled = {"name": name, "NAME": name.upper(), "task": task, "width": WIDTH, "selects": ""}
    filled["Name"] = name.title().replace("_", "")
    if kind == "model":
        template = template_of(task)
        selects = vars(TASKS.load(task)).get("SELECTS") if task != template else None
        filled["selects"] = f"\tselect {selects}\n" if selects else ""
        kconfig, code = KCONFIG[template], MODEL[template]
    else:
        kconfig, code = {"task": (TASK_KCONFIG, TASK), "data": (DATA_KCONFIG, DATA)}[kind]
    texts = {
        directory / "__init__.py": "",
        directory / "Kconfig": kconfig,
        directory / f"{KINDS[kind].file}.py": code,
    }
    try:
        directory.mkdir()
        for path, text in texts.items():
            path.write_text(text.format(**filled), encoding="utf-8")
        if kind == "data":
            others[0].write_text(DATA_DEFCONFIG.format(**filled), encoding="utf-8")
        if kind == "model":
            defconfig, golden = others
            cases = _counted(name, task=template)
            lines = ",\n".join(f"    {json.dumps(case)}" for case in cases)
            golden.write_text(f'{{\n  "cases": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
            text = DEFCONFIG.format(**filled, parameters=cases[0]["parameters"])
            defconfig.write_text(text, encoding="utf-8")
    except OSError as error:
        raise os_error(f"write the new {KINDS[kind].noun}", error) from error
    return [*texts, *others]


def _check_symbols(kind: str, name: str) -> None:
    """Symbols that start with the name must be free, in both directions: readers take them for its own."""
    tree = kconfiglib.Kconfig(str(ROOT / "Kconfig"), warn_to_stderr=False)
    chosen = {"model": "MODEL_", "task": "MODEL_LEARNS_", "data": "DATASET_"}[kind] + name.upper()
    taken = [symbol for symbol in tree.syms if symbol.startswith(f"{name.upper()}_")]
    taken += [symbol for symbol in tree.syms if symbol == chosen]
    taken += [tree.named_choices[key].name for key in tree.named_choices if key == chosen]
    folder = _folder(KINDS[kind])
    homes = [path.parent.name for path in folder.glob("*/Kconfig")]
    inside = [home for home in homes if name.startswith(f"{home}_")]
    if taken or inside:
        other = f"{folder.relative_to(ROOT)}/{inside[0]}" if inside else ""
        clash = f"CONFIG_{taken[0]}" if taken else f"those of {other}"
        raise ConfigError(
            f"{name!r} cannot be the name of a {KINDS[kind].noun}",
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

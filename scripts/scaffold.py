"""Scaffold a plug-in: make new-model NAME=x TASK=classify, make new-task NAME=x, make new-data NAME=x.

A model is models/x/, defconfigs/x and tests/golden/x.json: a small network that trains and passes every
test of models. A data set is lib/data/datasets/x/ and defconfigs/x. A task is train/tasks/x/, for a model
that is made with TASK=x. The files come from scripts/templates/; edit the copies from there.
With EXTERNAL=DIR they are DIR/models/x, DIR/data/x, DIR/tasks/x and DIR/defconfigs/x; DIR is made if it is
not there.
"""

from __future__ import annotations

import argparse
import json
import keyword
import re
import shutil
import sys
from pathlib import Path
from string import Template
from typing import Any

from lib.errors import ConfigError, meant, os_errors, run_main
from lib.kconf.external import check_place, has_kconfig
from lib.kconf.project import Project
from lib.kconf.tree import display, load_own_tree, load_tree
from lib.plugin_folders import external, shown
from lib.plugins import DATASETS, MODELS, TASKS
from lib.units import setting

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = Path(__file__).resolve().parent / "templates"
KINDS = {"model": MODELS, "task": TASKS, "data": DATASETS}
# Symbols that each kind of plug-in defines besides those that start with its name.
CHOICE_PREFIX = {"model": "MODEL_", "task": "MODEL_LEARNS_", "data": "DATASET_"}
WIDTH = 16  # the default of the scaffolded CONFIG_<NAME>_WIDTH


def main() -> int:
    """Write the files of the plug-in that the command line names, and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name", metavar="NAME", help="name of the new directory: a-z, 0-9 and _")
    parser.add_argument("task", metavar="TASK", nargs="?", default="", help="task of the model")
    arguments = parser.parse_args()
    name = arguments.name
    check(arguments.kind, name, task=arguments.task)
    for path in scaffold(arguments.kind, name, task=arguments.task):
        print(f"wrote {display(path)}")
    output = Project.of_environment(ROOT).output  # each O= keeps its own EXTERNAL=
    make = "make" if output == Path() else f"make {setting('O', output)}"
    make_model = f"{make} new-model NAME={name}_net TASK={name}" if arguments.kind == "task" else ""
    print(f"next: {make_model or f'{make} defconfig-{name} && {make} train'}")
    return 0


def check(kind: str, name: str, *, task: str = "") -> None:
    """Raise ConfigError for a name or a task that cannot be scaffolded. Writes nothing."""
    noun = KINDS[kind].noun
    if not name:
        raise ConfigError(f"a new {noun} needs NAME=", todo=f"give one, such as NAME=my_{kind}")
    reserved = keyword.iskeyword(name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]|[a-z]", name) or reserved or "__" in name:
        raise ConfigError(
            f"{name!r} cannot be the name of a {noun}",
            why="it is a keyword of Python"
            if reserved
            else "it becomes a Python package and starts CONFIG_ names",
            todo=f"give NAME= as lower-case letters, digits and single underscores, such as NAME=my_{kind}",
        )
    if (base := external()) is not None:
        check_place(base, ROOT)
    for path in (*files(kind, name), *files(kind, name, base)):
        if path.exists():
            raise ConfigError(f"{shown(path)} exists", todo="choose another NAME= or remove it")
    if kind == "model":
        template_of(task)
    _check_symbols(kind, name, task)


def template_of(task: str) -> str:
    """Return the model template for `task`, a folder of templates/model. Raises ConfigError without one."""
    if not task:
        raise ConfigError("a new model needs TASK=", todo=f"there are {', '.join(TASKS.names())}")
    if task not in TASKS.names():
        raise ConfigError(f"there is no task {task!r}", todo=f"give TASK=: {meant(task, TASKS.names())}")
    if (TEMPLATES / "model" / task).is_dir():
        return task
    from lib.data import ImageSpec, TextSpec

    _, kinds = TASKS.load(task).DATA
    template = "classify" if ImageSpec in kinds else "lm" if TextSpec in kinds else ""
    if not template:
        raise ConfigError(
            f"there is no template of a model for the task {task!r}",
            why="it learns neither from images nor from text",
            todo="start from a model that has the task",
        )
    return template


def files(kind: str, name: str, base: Path | None = None) -> tuple[Path, ...]:
    """Return the paths of a plug-in of the tree or of the folder `base` of EXTERNAL=, its directory first.

    The tests of the tree read its golden file; they do not see models of other folders.
    """
    package = KINDS[kind].external if base else KINDS[kind].package.replace(".", "/")
    home, defconfig = (base or ROOT) / package / name, (base or ROOT) / "defconfigs" / name
    golden = () if base else (ROOT / "tests" / "golden" / f"{name}.json",)
    return {"model": (home, defconfig, *golden), "data": (home, defconfig), "task": (home,)}[kind]


def scaffold(kind: str, name: str, *, task: str = "") -> list[Path]:
    """Write the files of a new plug-in and return them. Raises ToolkitError where they cannot be written."""
    directory, *others = files(kind, name, external())
    names = {"name": name, "NAME": name.upper(), "Name": name.title().replace("_", "")}
    names |= {"task": task, "width": str(WIDTH), "selects": ""}
    templates = TEMPLATES / kind
    if kind == "model":
        templates /= template_of(task)
        selects = _selects(task) if task != templates.name else None
        names["selects"] = f"\tselect {selects}\n" if selects else ""
    written = [directory / name for name in ("__init__.py", "Kconfig", f"{KINDS[kind].file}.py")]
    with os_errors(f"write the new {KINDS[kind].noun}"):
        directory.mkdir(parents=True)
        try:
            written[0].touch()
            for path in written[1:]:
                path.write_text(fill(templates / path.name, names), encoding="utf-8")
            if kind == "model":
                cases = _golden_cases(name, template=templates.name)
                names["parameters"] = f"{cases[0]['parameters']:,}"
                lines = ",\n".join(f"    {json.dumps(case)}" for case in cases)
                for golden in others[1:]:
                    golden.write_text(f'{{\n  "cases": [\n{lines}\n  ]\n}}\n', encoding="utf-8")
            if others:
                others[0].parent.mkdir(exist_ok=True)
                others[0].write_text(fill(TEMPLATES / kind / "defconfig", names), encoding="utf-8")
        except BaseException:  # the same command would find half a plug-in, and refuse
            shutil.rmtree(directory)
            for path in others:
                path.unlink(missing_ok=True)
            raise
    return [*written, *others]


def _selects(task: str) -> Any:
    return vars(TASKS.load(task)).get("SELECTS")


def fill(template: Path, names: dict[str, str]) -> str:
    """Return the text of `template` (without its suffix .tmpl) with each ${NAME} replaced."""
    return Template(template.with_name(f"{template.name}.tmpl").read_text(encoding="utf-8")).substitute(names)


def _check_symbols(kind: str, name: str, task: str) -> None:
    """Raise ConfigError where symbols of `name` and of another plug-in could be mixed up.

    Also where the SELECTS of `task`, if any, is no symbol: Kconfig selects what is not there without a word.
    """
    base = external()
    ready = base is None or has_kconfig(base)  # a folder that begins with this plug-in cannot be checked yet
    tree = load_own_tree(ROOT) if ready else load_tree(srctree=ROOT, prefix="CONFIG_")
    choice_member = CHOICE_PREFIX[kind] + name.upper()
    clashes = [f"CONFIG_{symbol}" for symbol in tree.syms if symbol.startswith(f"{name.upper()}_")]
    clashes += [f"CONFIG_{key}" for key in (*tree.syms, *tree.named_choices) if key == choice_member]
    paths = [*KINDS[kind].folders(ROOT, "Kconfig"), *KINDS[kind].of_external("Kconfig")]
    homes = [path.parent for path in paths]
    clashes += [f"those of {shown(home)}" for home in homes if name.startswith(f"{home.name}_")]
    selects = _selects(task) if task else None
    if selects and not getattr(tree.syms.get(selects), "nodes", ()):
        what = f'{TASKS.place(task)}/task.py: SELECTS = "{selects}" is no symbol'
        raise ConfigError(what, todo="name one that a Kconfig file defines")
    if clashes:
        raise ConfigError(
            f"{name!r} cannot be the name of a {KINDS[kind].noun}",
            why=f"its symbols would mix with {clashes[0]}",
            todo="choose another NAME=",
        )


def _golden_cases(name: str, *, template: str) -> list[dict[str, Any]]:
    """Return reference parameter counts of the network, that of the default data set first.

    The network is built on the meta device, which allocates nothing. Shapes have the keys of tests/golden.
    """
    import torch

    from lib.data import ImageSpec, Spec, TextSpec

    made: list[tuple[dict[str, int], Spec]] = []
    if template == "lm":
        for vocab_size, block_size in ((256, 32), (50, 8)):
            spec = TextSpec(name="golden", vocab_size=vocab_size, block_size=block_size, unit="token")
            made.append(({"vocab_size": vocab_size, "block_size": block_size}, spec))
    else:
        for channels, size, classes in ((3, 32, 10), (1, 28, 10)):
            half = (0.5,) * channels
            shape = {"channels": channels, "height": size, "width": size, "classes": classes}
            made.append((shape, ImageSpec(name="golden", mean=half, std=half, synthetic=True, **shape)))
    module = MODELS.load(name)
    cases = []
    for shape, built_for in made:
        with torch.device("meta"):
            model = module.build(module.Options(width=WIDTH), built_for)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        cases.append({"options": {"width": WIDTH}, **shape, "parameters": parameters})
    return cases


if __name__ == "__main__":
    sys.exit(run_main(main))

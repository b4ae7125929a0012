"""Write a configuration as an experiment file, to which axes can be added."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kconfiglib

from lib import kconf
from lib.kconf.defconfig import DIRECTORY, FRAGMENTS
from lib.kconf.reader import read_text
from lib.kconf.resolve import load_text
from lib.kconf.tree import find, load_own_tree
from lib.sweeps.experiment import raw
from lib.sweeps.runner import ALL_DEFAULTS, compose_text

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def as_yaml(resolved: kconf.Resolved, *, root: Path) -> str:
    """Return an experiment file whose only run is `resolved`.

    It sets what differs from the shipped files it was made from, or from all defaults if they have changed.
    """
    for base in (*_base_of(resolved, root), ALL_DEFAULTS):
        text = compose_text(root, base)
        given = _differences(resolved, kconf.load_written(text, root=root), root=root)
        overrides = {f"CONFIG_{name}": _raw(value) for name, value in given.items()}
        again = kconf.load_written(text, root=root, overrides=overrides)
        if again.values == resolved.values:
            break
    else:
        raise AssertionError("the differences from all defaults do not reproduce the configuration")
    seed = given.pop("SEED", str(resolved.values["SEED"]))
    settings = [f"  {name}: {_in_yaml(value)}" for name, value in given.items()]
    lines = [
        f"about: {resolved.values['MODEL']}, as it was configured",
        f"config: {base}",
        *(["set:", *settings] if settings else []),
        f"seeds: [{seed}]",
        "# axes: {LEARNING_RATE: [0.1, 0.01]}  # values to try; seeds: 3 trains each with 1, 2 and 3",
    ]
    return "".join(f"{line}\n" for line in lines)


def _base_of(resolved: kconf.Resolved, root: Path) -> list[str]:
    """Return the value of `config:` for the shipped files of a configuration; none if others were used."""
    files = [Path(name) for name in read_text(resolved.text.encode(), name="the configuration").sources]
    folders = [str(file.parent) for file in files if (root / file).is_file()]
    if not files or folders != [DIRECTORY, *[FRAGMENTS] * (len(files) - 1)]:
        return []
    return ["+".join(file.name.removesuffix(".config") for file in files)]


def _differences(requested: kconf.Resolved, base: kconf.Resolved, *, root: Path) -> dict[str, str]:
    """Return the assignments, as in a configuration file, that turn `base` into `requested`."""
    wanted, present, full = (
        {each.name: each.text for each in read_text(text.encode(), name="the configuration").assignments}
        for text in (requested.minimal, base.minimal, requested.text)
    )
    given = {name: value for name, value in wanted.items() if present.get(name) != value}
    tree = load_own_tree(root)
    load_text(tree, requested.text)
    for name in present.keys() - wanted.keys():  # at its default in `requested`, but not in `base`
        symbol: Any = find(tree, name)
        if symbol.choice:
            if symbol.choice.visibility and symbol.choice.selection:
                given[symbol.choice.selection.name] = "y"
        elif symbol.visibility:
            given[name] = full[name]
    return given


def _raw(value: str) -> str:
    """Return the value as on a command line."""
    return str(kconfiglib.unescape(value[1:-1])) if value.startswith('"') else value


def _in_yaml(value: str) -> str:
    if value in ("y", "n"):
        return "true" if value == "y" else "false"
    text = _raw(value)
    if _NUMBER.fullmatch(text) and raw(float(text) if "." in text else int(text)) == text:
        return text  # YAML reads it as a number that is formatted the same
    return json.dumps(text, ensure_ascii=False)  # JSON is YAML

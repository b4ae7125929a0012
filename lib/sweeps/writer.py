"""A configuration as an experiment file, which one can add axes to."""

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
    """An experiment file whose only run is `resolved`: what differs from the files that it was made from, or,
    where these are not shipped or have become something else, from all defaults."""
    for base in (*_made_from(resolved, root), ALL_DEFAULTS):
        text = compose_text(root, base)
        given = _differences(resolved, kconf.load_written(text, root=root), root=root)
        overrides = {f"CONFIG_{name}": _raw(value) for name, value in given.items()}
        again = kconf.load_written(text, root=root, overrides=overrides)
        if again.values == resolved.values:
            break
    else:
        raise AssertionError("what differs from all defaults does not make the configuration")
    seed = given.pop("SEED", str(resolved.values["SEED"]))
    settings = [f"  {name}: {_in_yaml(value)}" for name, value in given.items()]
    return "\n".join(
        [
            f"about: {resolved.values['MODEL']}, as it was configured",
            f"config: {base}",
            *(["set:", *settings] if settings else []),
            f"seeds: [{seed}]",
            "# axes: {LEARNING_RATE: [0.1, 0.01]}  # what is tried out; seeds: 3 trains each with 1, 2 and 3",
            "",
        ]
    )


def _made_from(resolved: kconf.Resolved, root: Path) -> list[str]:
    """The shipped files that a configuration was made from, as `config:` has them; none where others were."""
    files = [Path(name) for name in read_text(resolved.text.encode(), name="it").made_from]
    folders = [str(file.parent) for file in files]
    are_there = all((root / file).is_file() for file in files)
    if not files or not are_there or folders != [DIRECTORY, *[FRAGMENTS] * (len(files) - 1)]:
        return []
    return ["+".join(file.name.removesuffix(".config") for file in files)]


def _differences(asked: kconf.Resolved, base: kconf.Resolved, *, root: Path) -> dict[str, str]:
    """Symbols and values, as a configuration file has them, that make `asked` of `base`."""
    wanted, there, full = (_assigned(text) for text in (asked.minimal, base.minimal, asked.text))
    given = {name: value for name, value in wanted.items() if there.get(name) != value}
    tree = load_own_tree(root)
    load_text(tree, asked.text)
    for name in there.keys() - wanted.keys():  # what has its default in `asked` has to be told so
        symbol: Any = find(tree, name)
        if symbol.choice:
            if symbol.choice.visibility and symbol.choice.selection:
                given[symbol.choice.selection.name] = "y"
        elif symbol.visibility:
            given[name] = full[name]
    return given


def _assigned(text: str) -> dict[str, str]:
    return {each.name: each.text for each in read_text(text.encode(), name="it").assignments}


def _raw(value: str) -> str:
    """As on a command line."""
    return str(kconfiglib.unescape(value[1:-1])) if value.startswith('"') else value


def _in_yaml(value: str) -> str:
    if value in ("y", "n"):
        return "true" if value == "y" else "false"
    text = _raw(value)
    if _NUMBER.fullmatch(text) and raw(float(text) if "." in text else int(text)) == text:
        return text  # which is read as the same number, and written as it is here
    return json.dumps(text, ensure_ascii=False)  # JSON is YAML

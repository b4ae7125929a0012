"""Variables of make's command line, the only part of the environment that reaches the configuration.

The Makefile exports KCONFIG_MAKE_VARIABLES, the names of all variables given on its command line, separated
by spaces; make puts their values into the environment. Before any recipe, scripts/check_goals.sh judges goals
and variables by the table scripts/targets. Of one that is not in it, it asks for suggestions here with
    KCONFIG_MAKE_KNOWN      the variables of the table (O, V, PYTHON, ...),
    KCONFIG_MAKE_GOALS      goals that are no targets,
    KCONFIG_MAKE_TARGETS    targets, with the names of configurations put in.
Without these only the names of options, CONFIG_, are checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lib.errors import ConfigError
from lib.kconf import diagnostics
from lib.kconf.legacy import read_legacy
from lib.kconf.reader import Finding
from lib.kconf.resolve import rejection
from lib.kconf.tree import find, load_own_tree

_PREFIX = "CONFIG_"
# Variables of other programs with this prefix.
_OF_OTHERS = frozenset({"CONFIG_SITE", "CONFIG_SHELL"})


def config_file_of(root: Path) -> Path:
    """Return the configuration file: KCONFIG_CONFIG, or `root`/.config.

    Raises ConfigError for a name with a line break, which no message could show.
    """
    name = os.environ.get("KCONFIG_CONFIG", "")
    if not name.isprintable():
        raise ConfigError(f"KCONFIG_CONFIG={name!r} has a line break or another control character")
    return Path(name or root / ".config")


def given_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """Return CONFIG_ variables of make's command line with their raw values."""
    return {name: environ.get(name, "") for name in _given(environ) if name.startswith(_PREFIX)}


def check_variables(root: Path) -> None:
    """Raise ConfigError, with suggestions, for unknown goals and variables of make's command line."""
    environ = os.environ
    known = set(environ.get("KCONFIG_MAKE_KNOWN", "").split())
    doubtful = [name for name in _given(environ) if name.startswith(_PREFIX) or (known and name not in known)]
    goals = environ.get("KCONFIG_MAKE_GOALS", "").split()
    if not doubtful and not goals:
        return
    tree, legacy = load_own_tree(root), read_legacy(root)
    targets = environ.get("KCONFIG_MAKE_TARGETS", "").split()
    faults = [_unknown_goal(goal, targets) for goal in goals]
    for name in doubtful:
        value, symbol = environ.get(name, ""), name.removeprefix(_PREFIX)
        if not name.startswith(_PREFIX):
            bare = name.upper().removeprefix(_PREFIX)
            meant = _near_variable(name, known) or diagnostics.suggest(tree, bare, value)
            hint = f"; did you mean {meant}?" if meant else ""
            faults.append(f"{name}={value} is not a variable of this Makefile{hint}")
        elif symbol in legacy.removed:
            faults.append(f"{name} is no more: {legacy.removed[symbol]}")
        elif find(tree, legacy.present(symbol)) is None:
            faults.append(diagnostics.unknown_symbol(tree, symbol, value))
    if faults:
        findings = [Finding("command line", 0, fault) for fault in faults]
        raise rejection(findings, "nothing was done", where="on the command line")


def _unknown_goal(goal: str, targets: list[str]) -> str:
    close = diagnostics.close_names(goal, targets, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "make help shows what there is"
    return f"{goal} is not a target; {hint}"


def stray_variables(root: Path) -> list[str]:
    """Return a notice for each CONFIG_ variable of the environment that is not on make's command line."""
    given = {*_given(os.environ), *_OF_OTHERS, _PREFIX}
    names = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in given)
    if not names:
        return []
    tree, notices = load_own_tree(root), []
    for name in names:
        symbol = name.removeprefix(_PREFIX)
        known = find(tree, symbol) is not None
        meant = None if known else diagnostics.suggest(tree, symbol)
        hint = f"; did you mean {meant}?" if meant else ""
        rest = "; give it on make's command line" if known else f", and is not a symbol{hint}"
        notices.append(f"{name} in the environment is not used{rest}")
    return notices


def _given(environ: Mapping[str, str]) -> list[str]:
    return environ.get("KCONFIG_MAKE_VARIABLES", "").split()


def _near_variable(name: str, known: set[str]) -> str | None:
    """Return a variable of the Makefile that differs only in case or by a typing error."""
    same = [word for word in sorted(known) if word.lower() == name.lower()]
    near = same or diagnostics.closest(name, [word for word in known if len(word) > 3], 0.8)
    return near[0] if near else None

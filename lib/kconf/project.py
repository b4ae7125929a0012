"""Environment of a configuration command: make's variables, the paths, and how it prints and writes.

Only make's command line reaches the configuration. The Makefile exports KCONFIG_MAKE_VARIABLES, the names of
all variables given there, separated by spaces; make puts their values into the environment. Before any
recipe, scripts/check_goals.sh judges goals and variables by the table scripts/targets. Of one that is not in
it, it asks for suggestions here with
    KCONFIG_MAKE_KNOWN      the variables of the table (O, V, PYTHON, ...),
    KCONFIG_MAKE_GOALS      goals that are no targets,
    KCONFIG_MAKE_TARGETS    targets, with the names of configurations put in.
Without these only the names of options, CONFIG_, are checked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lib.errors import ConfigError, foremost
from lib.kconf import diagnostics, write
from lib.kconf.legacy import read_legacy
from lib.kconf.reader import Finding
from lib.kconf.resolve import Resolved, load, load_file, origin, rejection
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import display, find, load_own_tree, shown

_PREFIX = "CONFIG_"
# Variables of other programs with this prefix.
_OF_OTHERS = frozenset({"CONFIG_SITE", "CONFIG_SHELL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Source tree, configuration file, output directory (O=), and V=1."""

    root: Path
    config_file: Path
    output: Path
    verbose: bool

    @classmethod
    def of_environment(cls, root: Path) -> Project:
        """Make the context from make's variables KCONFIG_CONFIG, KCONFIG_OUTPUT and KCONFIG_VERBOSE.

        Raises ConfigError for a name with a line break, which no message could show.
        """
        name = os.environ.get("KCONFIG_CONFIG", "")
        if not name.isprintable():
            raise ConfigError(f"KCONFIG_CONFIG={name!r} has a line break or another control character")
        return cls(
            root=root,
            config_file=Path(name or root / ".config"),
            output=Path(os.environ.get("KCONFIG_OUTPUT") or "."),
            verbose=os.environ.get("KCONFIG_VERBOSE") == "1",
        )

    def load(self, *, refresh: bool = False, notice_new: bool = True) -> StrictLoad:
        """Load the configuration file and print its notices, as `resolve.load_file` does."""
        tree = load_own_tree(self.root)
        configuration, notices = load_file(tree, self.config_file, refresh=refresh, notice_new=notice_new)
        report_notices(notices)
        return configuration

    def save(
        self, configuration: StrictLoad, *, changed: str, same: str, differences: Iterable[str] = ()
    ) -> None:
        """Write the full configuration, print `differences` and a line on the outcome. Raises ConfigError."""
        text = write.full_text(configuration.tree, sources=configuration.sources)
        is_new = write_file(self.config_file, text, keep_old=True)
        for line in differences:
            print(line)
        print(f"{display(self.config_file)}: {changed if is_new else same}")
        if self.verbose:
            report_origins(self.root, self.config_file)


Command: TypeAlias = tuple[Callable[[Project, Namespace], None], str]  # with its help


def write_file(path: Path, text: str, *, keep_old: bool = False) -> bool:
    """Write a configuration; returns true if it changed. Raises ConfigError where it cannot be written."""
    with refusals(path):
        return write.write_configuration(path, text, keep_old=keep_old)


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Context that turns an OSError while writing `path` into a ConfigError."""
    try:
        yield
    except OSError as error:
        culprit = Path(error.filename or path)
        # The user does not know the temporary file beside the target, so it is not named.
        elsewhere = "" if culprit.parent == Path(os.path.realpath(path)).parent else f"{display(culprit)}: "
        raise ConfigError(f"cannot write {display(path)}", why=f"{elsewhere}{error.strerror}") from error


def report_notices(notices: Iterable[str]) -> None:
    """Print notices to stderr."""
    for notice in foremost(list(notices), "notes"):
        print(f"note: {notice}", file=sys.stderr)


def from_environment(root: Path, *, report_stray: bool = True) -> Resolved:
    """Return the configuration in KCONFIG_CONFIG or `root`/.config, with make's CONFIG_ variables on top.

    report_stray: also report CONFIG_ variables of the environment that are not used. Notices go to stderr.

    Raises ConfigError.
    """
    if report_stray:
        report_notices(stray_variables(root))
    check_variables(root)
    config_file = Project.of_environment(root).config_file
    resolved = load(root=root, config_file=config_file, overrides=given_overrides(os.environ))
    report_notices(resolved.notices)
    return resolved


def report_origins(root: Path, config_file: Path) -> None:
    """Print to stderr the origin of every value of a configuration file that is not a default."""
    configuration, _ = load_file(load_own_tree(root), config_file)
    for symbol in configuration.tree.unique_defined_syms:
        if configuration.assigned(symbol.name) is not None:
            report_notices([f"{shown(symbol, symbol.str_value)} from {origin(configuration, symbol)}"])


def given_overrides(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
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
    faults = []
    for goal in goals:
        close = diagnostics.close_names(goal, targets, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}?" if close else "make help-all shows what there is"
        faults.append(f"{goal} is not a target; {hint}")
    for name in doubtful:
        value, symbol = environ.get(name, ""), name.removeprefix(_PREFIX)
        if not name.startswith(_PREFIX):
            bare = name.upper().removeprefix(_PREFIX)
            meant = _near_variable(name, known) or diagnostics.suggest(tree, bare, value)
            hint = f"; did you mean {meant}?" if meant else ""
            faults.append(f"{name}={value} is not a variable of this Makefile{hint}")
        elif symbol in legacy.removed:
            faults.append(f"{name} was removed: {legacy.removed[symbol]}")
        elif find(tree, legacy.present(symbol)) is None:
            faults.append(diagnostics.unknown_symbol(tree, symbol, value))
    if faults:
        findings = [Finding("command line", 0, fault) for fault in faults]
        raise rejection(findings, "nothing was done", where="on the command line")


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

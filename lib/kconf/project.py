"""Working context of a configuration command: its paths, and how it prints and writes."""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lib.errors import ConfigError
from lib.kconf import variables, write
from lib.kconf.reader import foremost
from lib.kconf.resolve import Resolved, load, load_file, origin
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import display, load_own_tree, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Source tree, configuration file, output directory (O=), and V=1."""

    root: Path
    config_file: Path
    output: Path
    verbose: bool

    @classmethod
    def of_environment(cls, root: Path) -> Project:
        """Make the context from make's variables KCONFIG_CONFIG, KCONFIG_OUTPUT and KCONFIG_VERBOSE."""
        return cls(
            root=root,
            config_file=variables.config_file_of(root),
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
        report_notices(variables.stray_variables(root))
    variables.check_variables(root)
    overrides = variables.given_overrides(os.environ)
    resolved = load(root=root, config_file=variables.config_file_of(root), overrides=overrides)
    report_notices(resolved.notices)
    return resolved


def report_origins(root: Path, config_file: Path) -> None:
    """Print to stderr the origin of every value of a configuration file that is not a default."""
    configuration, _ = load_file(load_own_tree(root), config_file)
    for symbol in configuration.tree.unique_defined_syms:
        if configuration.assigned(symbol.name) is not None:
            report_notices([f"{shown(symbol, symbol.str_value)} from {origin(configuration, symbol)}"])

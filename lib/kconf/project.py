"""Working context of a configuration command: its paths, and how it prints and writes."""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lib.errors import ConfigError
from lib.kconf import variables, write
from lib.kconf.provenance import Provenance
from lib.kconf.reader import foremost
from lib.kconf.resolve import Resolved, load, load_file
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
            config_file=variables.config_file_of(root, os.environ),
            output=Path(os.environ.get("KCONFIG_OUTPUT") or "."),
            verbose=os.environ.get("KCONFIG_VERBOSE") == "1",
        )

    def save(
        self, configuration: StrictLoad, *, changed: str, same: str, differences: Iterable[str] = ()
    ) -> None:
        """Write the full configuration, print `differences` and a line on the outcome. Raises ConfigError."""
        text = write.full_text(configuration.tree, made_from=configuration.made_from)
        is_new = write_file(self.config_file, text, keep_old=True)
        for line in differences:
            print(line)
        print(f"{display(self.config_file)}: {changed if is_new else same}")
        if self.verbose:
            tell_origins(self.root, self.config_file)


Command: TypeAlias = Callable[[Project, Namespace], None]


def write_file(path: Path, text: str, *, keep_old: bool = False) -> bool:
    """Write a configuration; returns true if it changed. Raises ConfigError where it cannot be written."""
    with refusals(path):
        return write.write_configuration(path, text, keep_old=keep_old)


def write_files(texts: Mapping[Path, str]) -> dict[Path, bool]:
    """Write several files, none if one is refused; returns true for each that changed. Raises ConfigError."""
    for path, text in texts.items():
        with refusals(path):
            write.would_change(path, text)
    return {path: write_file(path, text) for path, text in texts.items()}


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


def tell(notices: Iterable[str]) -> None:
    """Print notices to stderr."""
    for notice in foremost(list(notices), "notes"):
        print(f"note: {notice}", file=sys.stderr)


def from_environment(root: Path) -> Resolved:
    """Return the configuration that make asks for, and report stray CONFIG_ variables of the environment.

    It is in KCONFIG_CONFIG or `root`/.config, with the CONFIG_ variables of make's command line on top.
    Notices go to stderr. Raises ConfigError.
    """
    tell(variables.stray_variables(root, os.environ))
    return load_environment(root)


def load_environment(root: Path) -> Resolved:
    """As `from_environment`, without a word of stray variables."""
    variables.check_variables(root, os.environ)
    config_file = variables.config_file_of(root, os.environ)
    resolved = load(root=root, config_file=config_file, overrides=variables.given_overrides(os.environ))
    tell(resolved.notices)
    return resolved


def tell_origins(root: Path, config_file: Path) -> None:
    """Print to stderr the origin of every value of a configuration file that is not a default."""
    configuration, _ = load_file(load_own_tree(root), config_file)
    provenance = Provenance(configuration)
    for symbol in configuration.tree.unique_defined_syms:
        if configuration.assigned(symbol.name) is not None:
            tell([f"{shown(symbol, symbol.str_value)} from {provenance.origin(symbol)}"])

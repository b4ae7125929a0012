"""Kconfig.legacy: renamed symbols migrate with a notice, removed ones are refused with advice."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from dataclasses import dataclass, field
from pathlib import Path

from lib.errors import ConfigError
from lib.kconf.reader import Assignment, Layer
from lib.plugins import KINDS

FILE = "Kconfig.legacy"

_CONFIG = re.compile(r"config ([A-Z][A-Z0-9_]*\*?)")
_FATE = re.compile(r'\s+(?:renamed ([A-Z][A-Z0-9_]*)|removed "([^"]+)"|(overruled))')


@dataclass(frozen=True, slots=True)
class Legacy:
    """Contents of Kconfig.legacy; names are without prefix.

    `renamed`: old name -> new name. `removed`: old name -> advice. `overruled`: patterns of names that older
    versions let a user set without effect.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    removed: dict[str, str] = field(default_factory=dict)
    overruled: list[str] = field(default_factory=list)

    def names(self) -> set[str]:
        """Return every old symbol name."""
        return {*self.renamed, *self.removed}

    def present(self, name: str) -> str:
        """Return the current name of `name`."""
        return self.renamed.get(name, name)

    def was_overruled(self, name: str) -> bool:
        """True if an older full configuration loses nothing by setting `name` where it is hidden now."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.overruled)


def read_legacy(root: Path) -> Legacy:
    """Parse Kconfig.legacy of `root` and of its plug-ins' folders, where they have one.

    Raises ConfigError for a malformed line.
    """
    found = Legacy()
    for path in (root / FILE, *(path for kind in KINDS for path in kind.folders(root, FILE))):
        if path.is_file():
            _parse(path, found, place=path.relative_to(root).as_posix())
    return found


def _parse(path: Path, found: Legacy, *, place: str) -> None:
    """Add the contents of the file at `path` to `found`."""
    name = ""
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{place}:{number}: is not UTF-8") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        config, fate = _CONFIG.fullmatch(line), _FATE.fullmatch(line)
        if config and not name and config[1] not in {*found.names(), *found.overruled}:
            name = config[1]
        elif fate and name and (fate[3] or "*" not in name):
            if fate[3]:
                found.overruled.append(name)
            else:
                (found.renamed if fate[1] else found.removed)[name] = fate[1] or fate[2]
            name = ""
        else:
            raise ConfigError(f"{place}:{number}: '{line.strip()}' is not expected here")
    if name:
        raise ConfigError(f"{place}: config {name} says neither renamed, removed nor overruled")


def migrate(layer: Layer, root: Path) -> Layer:
    """Return `layer` without old symbols of the tree at `root`: under their new names, or as faults."""
    legacy = read_legacy(root)
    kept: list[Assignment] = []
    faults, notices = list(layer.faults), list(layer.notices)
    for assignment in layer.assignments:
        old = f"CONFIG_{assignment.name}"
        if (name := legacy.renamed.get(assignment.name)) is not None:
            new = f"CONFIG_{name}"
            source = assignment.source.replace(old, new, 1)
            kept.append(dataclasses.replace(assignment, name=name, source=source))
            notices.append(f"{assignment.place}: {old} is called {new} now; it was taken as that")
        elif assignment.name not in legacy.removed:
            kept.append(assignment)
        elif assignment.text == "n":
            notices.append(f"{assignment.place}: {old} was removed, and was off")
        else:
            advice = legacy.removed[assignment.name]
            faults.append(assignment.finding(f"{old} was removed: {advice}"))
    return dataclasses.replace(layer, assignments=tuple(kept), faults=tuple(faults), notices=tuple(notices))

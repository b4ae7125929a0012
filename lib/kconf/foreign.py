"""Configurations of any other Kconfig tree: what is lost of a file, and what only breaks our rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.kconf import diagnostics, spelling
from lib.kconf.reader import Assignment, Finding, read_file
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import find, shown


def judge(tree: Any, path: Path) -> tuple[list[Finding], list[Finding]]:
    """The lines at fault of a file: those that are lost or misspelled, and those that say what is so anyway.

    What is so is what kconfiglib, which such trees are used with, makes of the file. A line of which nothing
    else is said, and that does not take all the same, is told with what has taken its place.
    """
    layer = read_file(path, prefix=tree.config_prefix)
    configuration = StrictLoad(tree)
    configuration.add(layer)
    findings = list(configuration.finish().findings)
    told = {finding.line for finding in findings}
    if layer.assignments:
        tree.load_config(str(path.absolute()))
    agreeing = set()
    for one in layer.assignments:
        symbol = find(tree, one.name)
        value, now = _value(symbol, one), symbol.str_value if symbol else "n"
        if value == now:
            agreeing.add(one.line)
        if one.line in told or value is None:
            continue
        if symbol is None:
            findings.append(
                Finding(one.file, one.line, diagnostics.unknown_symbol(tree, one.name, value, near=False))
            )
        elif value != now:
            text = f"{one.source} does not take: it is {shown(symbol, now)}"
            findings.append(Finding(one.file, one.line, text))
    findings.sort(key=lambda finding: finding.line)
    lost = [finding for finding in findings if finding.line not in agreeing]
    return lost, [finding for finding in findings if finding.line in agreeing]


def _value(symbol: Any | None, assignment: Assignment) -> str | None:
    """The value that the line gives; None where it is misspelled."""
    if symbol is None:
        return assignment.text
    try:
        return spelling.read_value(symbol, assignment)
    except spelling.Misspelled:
        return None

"""Check of configurations of any Kconfig tree: lost assignments, and those that only break our rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.kconf import diagnostics, spelling
from lib.kconf.reader import Assignment, Finding, read_file
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import find, shown


def judge(tree: Any, path: Path) -> tuple[list[Finding], list[Finding]]:
    """Return the findings of a file: lines that are lost or misspelled, and lines whose value holds anyway.

    The reference is the state that kconfiglib, the usual tool of such trees, computes from the file. A lost
    line without another finding is reported with the value that replaced it.
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
    """Return the value that the line assigns; None where it is misspelled."""
    if symbol is None:
        return assignment.text
    try:
        return spelling.read_value(symbol, assignment)
    except spelling.Misspelled:
        return None

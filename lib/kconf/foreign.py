"""Check of configurations of any Kconfig tree: lost assignments, and those that only break our rules."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lib.kconf import diagnostics, spelling
from lib.kconf.project import report_notices
from lib.kconf.reader import Assignment, Finding, foremost, read_file
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import display, find, load_tree, shown


def check_files(options: Namespace) -> int:
    """Print lost assignments to stdout, one per line; with V=1 also those whose value holds anyway.

    options: kconfig, srctree, prefix and files of the command line. Returns the exit status: 2 for losses.
    """
    verbose = "1" in (os.environ.get("V"), os.environ.get("KCONFIG_VERBOSE"))
    tree = load_tree(options.kconfig, srctree=options.srctree, prefix=options.prefix, inside=True)
    lost = held = 0
    for path in options.files:
        losses, others = judge(tree, path)
        lost, held = lost + len(losses), held + len(others)
        lines = [*map(str, losses)]
        for line in lines if verbose else foremost(lines, f"faults in {display(path)}"):
            print(line)
        for finding in others if verbose else ():
            report_notices([f"{finding} (it is so anyway)"])
    if held:
        seen = "" if verbose else " (V=1 shows them)"
        counts = f"lines that are lost or wrong: {lost}; others of which the value is so anyway: {held}"
        report_notices([f"{counts}{seen}"])
    return 2 if lost else 0


def judge(tree: Any, path: Path) -> tuple[list[Finding], list[Finding]]:
    """Return the findings of a file: lines that are lost or misspelled, and lines whose value holds anyway.

    The reference is the state that kconfiglib, the usual tool of such trees, computes from the file. A lost
    line without another finding is reported with the value that replaced it.
    """
    layer = read_file(path, prefix=tree.config_prefix)
    findings = list(StrictLoad(tree, layer).finish().findings)
    reported = {finding.line for finding in findings}
    if layer.assignments:
        tree.load_config(str(path.absolute()))
    held = set()
    for one in layer.assignments:
        symbol = find(tree, one.name)
        value, now = _value(symbol, one), symbol.str_value if symbol else "n"
        if value == now:
            held.add(one.line)
        if one.line in reported or value is None:
            continue
        if symbol is None:
            findings.append(one.finding(diagnostics.unknown_symbol(tree, one.name, value, near=False)))
        elif value != now:
            findings.append(one.finding(f"{one.source} does not take: it is {shown(symbol, now)}"))
    findings.sort(key=lambda finding: finding.line)
    lost = [finding for finding in findings if finding.line not in held]
    return lost, [finding for finding in findings if finding.line in held]


def _value(symbol: Any | None, assignment: Assignment) -> str | None:
    """Return the value that the line assigns; None where it is misspelled."""
    if symbol is None:
        return assignment.text
    try:
        return spelling.read_value(symbol, assignment)
    except spelling.Misspelled:
        return None

"""Check of shared configurations for facts of one machine or day."""

from __future__ import annotations

import re
from typing import Any

import kconfiglib

from lib.kconf.reader import Finding
from lib.kconf.tree import find
from lib.kconf.values import rule_of

_ABSOLUTE = re.compile(r"""(?:^|[\s"'=:,])(~?/[\w.-]+|~\w*/|[A-Za-z]:\\|(?:file|local):/)""")
_DATE = re.compile(r"\b(?:19|20)\d\d-(?:0\d|1[0-2])-(?:[0-2]\d|3[01])\b|\b\d{8}T\d{6}Z?\b")
_LEAST_HOST_NAME = 4  # shorter ones may be ordinary words


def machine_facts(tree: Any, text: str, *, name: str) -> list[Finding]:
    """Return findings for lines of `text` that hold on one machine or day only; `name` is the file's name."""
    import socket  # slow to import, and few commands need it

    host = socket.gethostname().split(".")[0]
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        fault = _fault(tree, line, host)
        if fault:
            findings.append(Finding(name, number, f"{line} {fault}"))
    return findings


def _fault(tree: Any, line: str, host: str) -> str | None:
    value = _free_text(tree, line)
    if value is None:
        return None
    if _ABSOLUTE.search(value):
        return "has an absolute path; write it relative to the source tree"
    if _DATE.search(value):
        return "has a date"
    if len(host) >= _LEAST_HOST_NAME and re.search(rf"\b{re.escape(host)}\b", value):
        return "has the name of this machine"
    return None


def _free_text(tree: Any, line: str) -> str | None:
    """Return a comment, or the value of a path or text; other values are numbers or names."""
    match = re.fullmatch(r'CONFIG_(\w+)="(.*)"', line)
    if match is None:
        return line if line.startswith("#") else None
    symbol = find(tree, match[1])
    rule = rule_of(symbol) if symbol is not None else None
    if rule is not None and rule.kind not in ("path", "text"):
        return None
    return str(kconfiglib.unescape(match[2]))

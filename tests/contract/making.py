"""Calling make with a recorder for PYTHON, and what targets there are."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A shell, for to start Python took most of the time; and Python without its site, to write lists.
RECORDER = """#!/bin/sh
case "$1 $2" in
-c*) exec '{python}' "$@" ;;
*bootstrap_probe*) exit 0 ;;
esac
exec '{python}' -IS '{writer}' "$@"
"""
WRITER = """
import os, sys
kept = {{k: v for k, v in os.environ.items() if k.startswith(("CONFIG_", "KCONFIG_", "GOMP_"))}}
with open({log!r}, "a") as log:
    print([sys.argv[1:], kept], file=log)
sys.exit(int(os.environ.get("RECORDER_EXIT", "0")))
"""


@dataclass
class Recorded:
    returncode: int
    stderr: str
    calls: list[list[str]] = field(default_factory=list)
    environments: list[dict[str, str]] = field(default_factory=list)


Make = Callable[..., Recorded]


@dataclass(frozen=True)
class Row:
    """A row of scripts/targets: variable -> what it may be, as it stands after the equals sign."""

    target: str
    variables: dict[str, str]
    text: str


def table(text: str = (ROOT / "scripts" / "targets").read_text()) -> list[Row]:
    rows = []
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            targets, variables, shown = re.split(r" *\| *", line)[:3]  # without the goal
            forms = dict(word.partition("=")[::2] for word in variables.split())
            rows += [Row(target, forms, shown) for target in targets.split()]
    return rows


def make_database() -> str:
    """Everything that make knows of the Makefile; this is also what shells complete from."""
    command = ["make", "-npq", "__BASH_MAKE_COMPLETION__=1", ".DEFAULT"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def defconfigs() -> set[str]:
    return {path.name for path in (ROOT / "defconfigs").iterdir() if path.is_file()}


def recording_make(tmp_path: Path) -> Make:
    """A make whose Python writes down how it was called; calls of the bootstrap are left out."""
    log = tmp_path / "calls"
    recorder, writer = tmp_path / "recorder", tmp_path / "writer.py"
    recorder.write_text(RECORDER.format(python=sys.executable, writer=writer))
    recorder.chmod(0o755)
    writer.write_text(WRITER.format(log=str(log)))

    def run(*arguments: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Recorded:
        log.write_text("")
        done = subprocess.run(
            ["make", "--no-print-directory", "VENV=", f"PYTHON={recorder}", *arguments],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
        )
        lines = [ast.literal_eval(line) for line in log.read_text().splitlines()]
        return Recorded(
            done.returncode, done.stderr, [call for call, _ in lines], [kept for _, kept in lines]
        )

    return run


def fragments() -> set[str]:
    return {path.name for path in (ROOT / "defconfigs" / "fragments").iterdir()}


def named_targets() -> set[str]:
    forms = ("defconfig-{}", "{}_defconfig", "train-{}")
    named = {form.format(name) for name in defconfigs() for form in forms}
    return named | {f"{name}.config" for name in fragments()}


def user_targets() -> list[str]:
    """What a user may call, with one defconfig and one fragment to stand for all."""
    shown = {row.target for row in table() if row.text}
    patterns = {name for name in shown if "NAME" in name or "FRAGMENT" in name}
    return sorted(shown - patterns | {"defconfig-lenet5", "train-lenet5", "debug.config"})

"""Every defconfig and fragment: a sentence first, the canonical minimal form, and all of it takes."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import kconfiglib
import pytest

from lib.kconf.defconfig import opening_comment

ROOT = Path(__file__).resolve().parents[2]
DEFCONFIGS = sorted(path for path in (ROOT / "defconfigs").iterdir() if path.is_file())
FRAGMENTS = sorted((ROOT / "defconfigs" / "fragments").iterdir())
ASSIGNMENT = re.compile(r"CONFIG_(\w+)=(.*)|# CONFIG_(\w+) is not set")


def assignments(path: Path) -> dict[str, str]:
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines()[1:]:
        match = ASSIGNMENT.fullmatch(line)
        assert match, f"{path}: {line!r}"
        found[match[1] or match[3]] = match[2].strip('"') if match[1] else "n"
    return found


@functools.cache
def own_tree() -> kconfiglib.Kconfig:
    return kconfiglib.Kconfig(str(ROOT / "Kconfig"), warn_to_stderr=False)


def loaded(*files: Path) -> kconfiglib.Kconfig:
    """The tree with the values of `files`, and no others, until it is loaded again."""
    tree = own_tree()
    for number, file in enumerate(files):
        tree.load_config(str(file), replace=number == 0)
    return tree


@pytest.mark.parametrize("path", [*DEFCONFIGS, *FRAGMENTS], ids=lambda path: path.name)
def test_form(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"# [A-Za-z].*[^.]\.", lines[0]), "the first line is one sentence"
    assert 1 <= len(lines[1:]) <= 16


@pytest.mark.parametrize("path", DEFCONFIGS, ids=lambda path: path.name)
def test_a_defconfig_is_canonical(path: Path, tmp_path: Path) -> None:
    tree = loaded(path)
    tree.write_min_config(str(tmp_path / "minimal"), header="")
    text = path.read_text(encoding="utf-8")
    assert text.removeprefix(opening_comment(path)) == (tmp_path / "minimal").read_text()


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.name)
def test_a_fragment_takes_on_every_defconfig(fragment: Path) -> None:
    for path in DEFCONFIGS:
        tree = loaded(path, fragment)
        for name, value in assignments(fragment).items():
            assert tree.syms[name].str_value == value, f"CONFIG_{name} of {fragment.name} on {path.name}"

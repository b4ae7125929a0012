"""One table of targets: each has a row and a rule, each variable a reader; make judges before it begins."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.contract.making import ROOT, Make, Row, make_database, table, user_targets

MAKEFILE_LINES = 250
# Files that make looks for are no targets of its own.
NO_TARGETS = {"Makefile", "always", "force", "idle", "requirements.lock", "requirements-dev.lock"}
# What the Python front reads of the environment by itself.
READERS = [*(ROOT / "lib" / "kconf").glob("*.py"), ROOT / "Makefile"]


def rules_of_make() -> set[str]:
    """Targets that make has a rule for, patterns with the name that stands for what matches."""
    files = make_database().partition("# Files")[2]
    lines = re.findall(r"^(\S*%\S*(?: \S*%\S*)*):", make_database(), flags=re.M)
    patterns = [pattern for line in lines for pattern in line.split()]
    explicit = re.findall(r"^(?<!# Not a target:\n)([A-Za-z][\w.+-]*):", files, flags=re.M)
    return {*explicit, *patterns}


def rowless(rules: set[str], rows: list[Row]) -> set[str]:
    """Rules without a row, configurations and fragments under the name of their pattern."""
    named = {row.target: re.sub("NAME|FRAGMENT", "[^/]+", re.escape(row.target)) for row in rows}
    known = re.compile("|".join(named.values()))
    return {rule for rule in rules - NO_TARGETS if not known.fullmatch(rule.replace("%", "NAME"))}


def ruleless(rules: set[str], rows: list[Row]) -> set[str]:
    wanted = {re.sub("NAME|FRAGMENT", "%", row.target) for row in rows if row.target != "*"}
    return {name for name in wanted - rules if "/" not in name}


def unread(rows: list[Row], code: str) -> set[str]:
    names = {name for row in rows for name in row.variables} - {"CONFIG_*"}
    return {name for name in names if not re.search(rf"(?<![A-Z_]){name}(?![A-Z_])", code)}


def test_every_target_has_a_row_and_every_row_a_rule() -> None:
    rules, rows = rules_of_make(), table()
    assert (rowless(rules, rows), ruleless(rules, rows)) == (set(), set())
    fewer = [row for row in rows if row.target not in {"plan", "train-NAME"}]
    assert {"plan", "train-%", "train-lenet5"} <= rowless(rules, fewer)
    assert ruleless(rules, [*rows, Row("no-rule", {}, "")]) == {"no-rule"}


@pytest.mark.parametrize("second", ["defconfig-resnet18", "resnet18_defconfig", "defconfig", "allnoconfig"])
def test_of_two_whole_configurations_neither_is_written(make: Make, second: str) -> None:
    done = make("defconfig-lenet5", second)
    assert (done.returncode, done.calls) == (2, [])
    assert f"error: {second} would replace what defconfig-lenet5 has written; name one" in done.stderr
    for between in ("debug.config", "train", "help"):
        assert make("-n", "defconfig-lenet5", between, second).returncode == 2


@pytest.mark.slow
def test_every_variable_of_the_table_is_read() -> None:
    code = "\n".join(re.sub(r"^\s*#.*", "", path.read_text(), flags=re.M) for path in READERS)
    assert unread(table(), code) == set()
    assert unread(table("x | KCONFIG_NOTHING=* TOP_=1 | x"), code) == {"KCONFIG_NOTHING", "TOP_"}


def test_a_variable_has_one_form() -> None:
    forms: dict[str, set[str]] = {}
    for row in table():
        for name, form in row.variables.items():
            forms.setdefault(name, set()).add(form)
    assert {name: found for name, found in forms.items() if len(found) > 1} == {}


def test_no_target_has_two_rows() -> None:
    targets = [row.target for row in table()]
    assert len(targets) == len(set(targets))


def test_the_makefile_is_short() -> None:
    assert len((ROOT / "Makefile").read_text().splitlines()) <= MAKEFILE_LINES


@pytest.mark.parametrize(
    "how", [["-n"], ["-q"], ["-k"], ["-B"], ["-j4"], ["-nf", str(ROOT / "Makefile")], ["MAKEFILE_LIST=x"]]
)
def test_make_judges_whatever_its_options_are(tmp_path: Path, how: list[str]) -> None:
    """A refused variable begins nothing: neither a goal nor the making of an environment."""
    command = [
        "make",
        *how,
        "help",
        "list-defconfigs",
        "LR=3",
        f"VENV={tmp_path}/none",
        "PYTHON=/nonexistent",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not a variable of this Makefile" in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_file_of_its_name_hides_no_target(tree: Path) -> None:
    (tree / ".config").touch()
    for target in user_targets():
        if not (tree / target).exists():
            (tree / target).touch()
        done = subprocess.run(
            ["make", "-n", "VENV=", target], cwd=tree, capture_output=True, text=True, check=True
        )
        assert "up to date" not in done.stdout and "Nothing to be done" not in done.stdout, target
        assert len(done.stdout.splitlines()) > 0, target

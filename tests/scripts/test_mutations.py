"""Faults of the table have their places, and a test that catches one is found and named."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from scripts import mutations

FAULT = {"at": "sums.Sum.of", "old": "a + b", "new": "a - b"}
TREE = {
    "lib/sums.py": "class Sum:\n  def of(self, a, b):\n    return a + b\n\ndef of(a, b):\n  return a+b\n",
    "lib/means.py": "from lib.sums import Sum\n\n\ndef mean(a, b):\n    return Sum().of(a, b) / 2\n",
    "lib/alone.py": "",
    "tests/test_sums.py": "from lib.sums import Sum\n\n\ndef test_zero():\n    assert Sum().of(1, 0) == 1\n",
    "tests/test_more.py": "from lib import sums\n\n\ndef test_two():\n    assert sums.Sum().of(1, 1) == 2\n",
    "tests/test_means.py": "from lib.means import mean\n\n\ndef test_mean():\n    assert mean(1, 3) == 2\n",
    "tests/test_run.py": "PROGRAM = 'lib.means'\n",
    "tests/test_alone.py": "import lib.alone\n",
    "tests/e2e/test_sums.py": "import lib.sums\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.mark.slow
def test_every_fault_of_the_table_has_one_place_and_is_a_program() -> None:
    lost = []
    for name, (fault, _) in mutations.read_table(mutations.TABLE).items():
        if not (mutations.ROOT / fault.get("plugin", "")).exists():
            continue  # the plug-in was deleted
        found = mutations.located(mutations.ROOT, [fault])
        if found is None:
            lost.append(f"{name}: the text of `old` is not once in {fault['at']}")
            continue
        file, source, _ = found
        text = file.read_text()
        assert text.count(source) == 1, name
        ast.parse(text.replace(source, source.replace(fault["old"], fault["new"])))
    assert not lost, f"update scripts/mutations.toml: {lost}"


def test_the_form_of_an_older_tree_is_used_where_the_present_one_does_not_fit(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text('[one]\nat = "a.f"\nold = "1"\nnew = "2"\nbefore = { at = "b.f" }\n')
    assert mutations.read_table(table) == {
        "one": [{"at": "a.f", "old": "1", "new": "2"}, {"at": "b.f", "old": "1", "new": "2"}]
    }
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "b.py").write_text("def f():\n    return 1\n")
    found = mutations.located(tmp_path, mutations.read_table(table)["one"])
    assert found is not None and found[0].name == "b.py" and found[2]["at"] == "b.f"


@pytest.mark.parametrize(
    ("at", "old", "source"),
    [
        ("sums.Sum.of", "a + b", "  def of(self, a, b):\n    return a + b\n"),
        ("lib.sums.of", "a+b", "def of(a, b):\n  return a+b\n"),
        ("sums.of", "a", None),  # more than once
        ("sums.of", "a * b", None),
        ("ums.of", "a + b", None),
        ("means.of", "a + b", None),
    ],
)
def test_a_fault_is_in_the_function_of_that_name_alone(
    tree: Path, at: str, old: str, source: str | None
) -> None:
    found = mutations.located(tree, [{"at": at, "old": old, "new": ""}])
    assert (found and found[1]) == source


def test_tests_come_by_name_then_by_distance_and_those_of_whole_runs_last(tree: Path) -> None:
    found = mutations.nearest_tests(tree, tree / "lib" / "sums.py", "sums.Sum.of")
    names = [Path(file).relative_to(tree / "tests").as_posix() for file in found]
    assert names == ["test_sums.py", "test_more.py", "test_means.py", "test_run.py", "e2e/test_sums.py"]


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (0, "3 passed", ""),
        (5, "no tests ran", ""),
        (1, "F\nFAILED tests/a.py::test_b[c-d] - assert 1 == 2\n1 failed", "tests/a.py::test_b[c-d]"),
        (1, "ERROR tests/a.py::test_b - OSError\n1 error", "tests/a.py::test_b"),
        (124, "..", "no verdict: status 124"),
    ],
)
def test_a_verdict_is_the_first_test_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, output: str, verdict: str
) -> None:
    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:3] == ["nice", "timeout", "7"] and command[-1] == "tests/a.py"
        return subprocess.CompletedProcess(command, status, stdout=output)

    monkeypatch.setattr(subprocess, "run", run)
    assert mutations.first_failure(tmp_path, ["tests/a.py"], seconds=7) == verdict


@pytest.mark.long
@pytest.mark.slow
def test_faults_are_put_in_and_taken_out_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tree: Path
) -> None:
    table: Mapping[str, list[dict[str, str]]] = {
        "other": [{"at": "sums.of", "old": "a+b", "new": "a-b"}],
        "minus": [FAULT],
        "gone": [{**FAULT, "at": "sums.gone"}],
    }
    monkeypatch.setattr(mutations, "read_table", lambda _: table)
    monkeypatch.setattr(mutations, "extract", lambda *_: tree)
    monkeypatch.setattr(sys, "argv", ["mutations", "--files", "2"])
    assert mutations.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "| other | `sums.of` | survived |",
        "| minus | `sums.Sum.of` | tests/test_more.py::test_two |",
        "| gone | `sums.gone` | not in this tree |",
        "1 caught",
    ]
    assert (tree / "lib" / "sums.py").read_text() == TREE["lib/sums.py"]

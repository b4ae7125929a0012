"""What `make test-deletion` deletes, and that nothing that is marked is left or taken along."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lib.errors import ConfigError, ToolkitError
from scripts import deletion
from scripts.deletion import EXPERIMENTS, drop_marked, patterns

ROOT = Path(__file__).resolve().parents[2]
THERE = [name for name in EXPERIMENTS if (ROOT / "models" / name).exists()]
PAGE = "one\n<!-- plugin: a -->\ntwo\n<!-- /plugin -->\nthree\n# plugin: b\nfour\n# /plugin\nfive\n"


def tracked() -> list[str]:
    try:
        return deletion.files()
    except ToolkitError:
        pytest.skip("the tree is not a git checkout")


@pytest.mark.parametrize("name", THERE)
def test_all_that_is_named_is_there_and_its_tests_go_with_it(name: str) -> None:
    assert all(list(ROOT.glob(place)) for place in EXPERIMENTS[name])
    gone = {file for file in tracked() if any(re.fullmatch(one, file) for one in patterns(name))}
    assert {f"models/{name}/model.py", f"tests/models/{name}/example.py", f"tests/golden/{name}.json"} <= gone
    others = [f"models/{other}/model.py" for other in THERE if other != name]
    assert not gone & {
        "models/lenet5/model.py",
        f"lib/plan/{name}.py",
        f"tests/lib/plan/test_{name}.py",
        *others,
    }


def test_a_file_goes_with_the_test_that_mirrors_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "EXPERIMENTS", {"a": ("scripts/x/a.py", "defconfigs/a-*")})
    found = list(patterns("a"))
    for file in (
        "scripts/x/a.py",
        "tests/scripts/x/test_a.py",
        "defconfigs/a-one",
        "tests/golden/a_more.json",
    ):
        assert any(re.fullmatch(one, file) for one in found), file
    for file in ("scripts/x/a_b.py", "defconfigs/b-a-one", "defconfigs/a", "tests/golden/b.json"):
        assert not any(re.fullmatch(one, file) for one in found), file


def test_what_is_marked_is_dropped(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for name, left in (("a", "three"), ("b", "one")):
        page.write_text(PAGE)
        drop_marked(page, name)
        text = page.read_text()
        assert f"plugin: {name}" not in text and left in text and "five" in text
        assert ("two" in text) == (name == "b") and ("four" in text) == (name == "a")
    page.write_text(PAGE)
    drop_marked(page, "other")
    assert page.read_text() == PAGE


def test_a_page_that_begins_with_its_mark_goes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- plugin: a -->\n# All of a\n")
    drop_marked(page, "b")
    assert page.exists()
    drop_marked(page, "a")
    assert not page.exists()


@pytest.mark.parametrize("text", ["one\n# plugin: a\ntwo\n", "\n# plugin: a\n# plugin: a\n# /plugin\n"])
def test_a_mark_without_an_end_is_refused(text: str, tmp_path: Path) -> None:
    page = tmp_path / "Makefile"
    page.write_text(text)
    with pytest.raises(ToolkitError, match="has no end"):
        drop_marked(page, "a")


def test_an_unknown_experiment_is_refused_with_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "copy_without", lambda *_: pytest.fail("a copy was made"))
    monkeypatch.setattr("sys.argv", ["deletion", "loped"])
    with pytest.raises(ConfigError, match=r"no experiment is called 'loped'.*looped"):
        deletion.main()


def test_what_fails_is_shown(tmp_path: Path) -> None:
    checks = {"well": ("-c", "print(1)"), "badly": ("-c", "raise SystemExit('no such model')")}
    (_, _, nothing), (name, seconds, output) = deletion.check(tmp_path, checks)
    assert nothing == "" and name == "badly: FAILED" and seconds > 0 and "no such model" in output


@pytest.mark.long
@pytest.mark.parametrize("name", THERE)
def test_what_is_left_is_imported_and_configured(name: str, tmp_path: Path) -> None:
    """The tests of what is left are run by make test-deletion."""
    tracked()
    copy = deletion.copy_without(name, tmp_path / "tree")
    assert [output for _, _, output in deletion.check(copy, deletion.QUICK)] == [""] * len(deletion.QUICK)

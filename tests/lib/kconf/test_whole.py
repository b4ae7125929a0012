"""A full configuration that was cut is refused by whatever reads it; what was always partial is not."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from lib.kconf import edit, listing
from lib.kconf.reader import END, HEADER, read_text
from lib.kconf.write import full_text, minimal_text

FORMER = "# Full configuration of Anneal. Change it with: make menuconfig, make defconfig-NAME"
ADVICE = "; restore the file, or add that to accept the defaults of what is lost"
READERS = {
    "config",
    "oldconfig",
    "olddefconfig",
    "syncconfig",
    "merge long",
    "setconfig NUM_EPOCHS=7",
    "savedefconfig",
    "checkconfig",
    "listnewconfig",
    "helpnewconfig",
    "explain NUM_EPOCHS",
    "searchconfig epochs",
    "diffconfig -a=.config -b=lenet5",
    "checkconfig -- .config",
    "defconfig --fragments=.config lenet5",
    "merge --fragments=.config",
}


def faults(text: str) -> list[str]:
    return [str(fault) for fault in read_text(text.encode(), name="f").faults]


@pytest.fixture
def whole(kconf_project: Path, kconf) -> str:
    assert kconf("defconfig", "lenet5")[0] == 0
    return (kconf_project / ".config").read_text()


def test_wherever_a_full_configuration_is_cut_it_says_so(whole: str) -> None:
    assert whole.startswith(f"{HEADER}\n") and whole.endswith(f"\n{END}\n")
    for length in range(1, len(whole) - 1):
        cut = whole[:length]
        (fault,) = faults(cut)
        line = len(cut.splitlines())
        assert fault.startswith(f"f:{line}: the file is cut off here, without ") and fault.endswith(ADVICE)
        if length > len(HEADER):
            assert f"without the line '{END}';" in fault
    assert faults(whole) == faults(whole.removesuffix("\n")) == []


@pytest.mark.slow
@pytest.mark.parametrize("words", sorted(READERS))
def test_every_command_that_reads_it_refuses_it(
    words: str, whole: str, kconf_project: Path, kconf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n" * 99))
    file = kconf_project / ".config"
    assert kconf(*words.split())[0] == 0, "it is the cut that is refused"
    for length in (60, len(whole) // 2, len(whole) - len(END) - 1):
        file.write_text(whole[:length])
        before = sorted(kconf_project.rglob("*"))
        status, out, err = kconf(*words.split())
        assert (status, out) == (2, []) and "the file is cut off here, without " in err[0] and len(err) == 2
        assert file.read_text() == whole[:length]
        assert sorted(kconf_project.rglob("*")) == before


def test_every_command_is_thought_of() -> None:
    known = {words.split()[0] for words in READERS}
    terminals = {"menuconfig", "nconfig", "guiconfig", "xconfig"}  # tests/lib/kconf/test_menu.py
    others = {"defconfig", "list-defconfigs", "kconfig-docs", "kconfig-lint", "update-defconfigs"}
    by_rule = {name for name, (run, _) in edit.OF_CONFIGURATION.items() if run is edit._extreme}
    every = {*edit.OF_CONFIGURATION, *edit.OF_SHIPPED, *listing.COMMANDS}
    assert every - known - terminals - others - by_rule == set()


@pytest.mark.parametrize("length", [5, 60, 200])
def test_it_is_replaced_by_a_command_that_does_not_read_it(
    length: int, whole: str, kconf_project: Path, kconf
) -> None:
    (kconf_project / ".config").write_text(whole[:length])
    assert kconf("defconfig", "lenet5")[0] == 0
    assert (kconf_project / ".config").read_text() == whole


def test_what_is_left_is_accepted_with_the_line(whole: str, kconf_project: Path, kconf) -> None:
    half = whole[: whole.index("CONFIG_NUM_EPOCHS")]
    (kconf_project / ".config").write_text(f"{half}{END}\n")
    assert kconf("olddefconfig")[0] == 0
    text = (kconf_project / ".config").read_text()
    assert text.count(END) == 2 and text.endswith(f"{END}\n"), "in the header, and at the end"


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("CONFIG_NUM_EPOCHS=3", True),
        ("# by hand\nCONFIG_NUM_EPOCHS=3", True),
        ("", True),
        (f"{FORMER}\nCONFIG_NUM_EPOCHS=3\n", True),
        (f"{FORMER}\nCONFIG_NUM_EPOCHS=3", False),
        (f"{FORMER}\nCONFIG_NUM_", False),
        ("#\n# Automatically generated file; DO NOT EDIT.\n#\nCONFIG_NUM_EPOCHS=3\n", True),
        ("#\n# Automatically generated file; DO NOT EDIT.\n#\nCONFIG_NUM_EPOCHS=3", False),
        (f"{HEADER}\nCONFIG_NUM_EPOCHS=3\n{END}\nCONFIG_SEED=4", True),
        (f"{HEADER}\r\nCONFIG_NUM_EPOCHS=3\r\n{END}\r\n", True),
    ],
)
def test_only_what_promised_an_end_lacks_one(text: str, is_whole: bool) -> None:
    assert (faults(text) == []) == is_whole


def test_the_minimal_form_promises_none(kconf_project: Path) -> None:
    from lib.kconf.tree import load_own_tree

    tree = load_own_tree(kconf_project)
    assert full_text(tree).count(END) == 2 and END not in minimal_text(tree)

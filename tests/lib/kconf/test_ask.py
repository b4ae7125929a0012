"""config and oldconfig: questions on standard output, answers from standard input."""

from __future__ import annotations

import io

import pytest


@pytest.fixture
def answer(kconf, monkeypatch):
    """Run a command with these lines on standard input."""

    def run(command: str, *lines: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status, out, err = kconf(command)
        return status, "\n".join(out), err

    return run


def lines_of(project) -> list[str]:
    return (project / ".config").read_text().splitlines()


def add(project, text: str) -> None:
    kconfig = project / "Kconfig"
    kconfig.write_text(kconfig.read_text() + text)


NEW = '\nconfig NEW\n\tint "New"\n\trange 1 9\n\tdefault 7\n\thelp\n\t  About it.\n'


def test_oldconfig_asks_for_what_is_new_only(kconf_project, kconf, answer):
    kconf("defconfig", "lenet5")
    status, out, _ = answer("oldconfig")
    assert status == 0 and "there is nothing new to ask for" in out
    add(kconf_project, NEW)
    status, out, err = answer("oldconfig", "3")
    assert status == 0 and out.count("(NEW)") == 1 and "(SEED)" not in out
    assert "New (NEW) (1..9) [7] 3" in out
    assert "CONFIG_NEW=3" in lines_of(kconf_project) and "CONFIG_NUM_EPOCHS=3" in lines_of(kconf_project)
    assert err == []


def test_an_empty_answer_leaves_the_default_and_a_bad_one_is_refused(kconf_project, kconf, answer):
    kconf("defconfig", "lenet5")
    add(kconf_project, NEW)
    status, out, _ = answer("oldconfig", "0", "3.5", "?", "")
    assert status == 0
    assert "CONFIG_NEW=0 is outside 1..9" in out
    assert "CONFIG_NEW=3.5 is not a plain decimal number" in out
    assert "New: About it." in out
    assert "CONFIG_NEW=7" in lines_of(kconf_project)


def test_the_end_of_the_answers_writes_nothing(kconf_project, kconf, answer):
    kconf("defconfig", "lenet5")
    add(kconf_project, NEW)
    before = (kconf_project / ".config").read_bytes(), (kconf_project / ".config").stat().st_mtime_ns
    status, _, err = answer("oldconfig")
    assert status == 2
    assert err[-1] == (
        "error: the answers end at the question for CONFIG_NEW: no configuration was written; "
        "make olddefconfig takes the defaults of all new options"
    )
    assert (
        (kconf_project / ".config").read_bytes(),
        (kconf_project / ".config").stat().st_mtime_ns,
    ) == before


def test_an_answer_opens_further_questions(kconf_project, kconf, answer):
    kconf("defconfig", "lenet5")
    add(
        kconf_project,
        '\nconfig DEEP\n\tstring "Deep"\n\tdepends on NEW\n\tdefault "1"\n\thelp\n\t  Value: float, x < 2\n'
        '\nconfig NEW\n\tbool "New"\n',
    )
    status, out, _ = answer("oldconfig", "maybe", "yes", "3", "1.5")
    assert status == 0
    assert "CONFIG_NEW=maybe is not y or n" in out
    assert "Deep (DEEP) (float, x < 2) [1] 3" in out and "is out of range" in out
    assert 'CONFIG_DEEP="1.5"' in lines_of(kconf_project)


def test_a_new_choice_is_asked_once(kconf_project, kconf, answer):
    kconf("defconfig", "lenet5")
    add(
        kconf_project,
        '\nchoice KIND_CHOICE\n\tprompt "Kind"\n\tdefault KIND_B\n\nconfig KIND_A\n\tbool "A"\n'
        '\thelp\n\t  First.\n\nconfig KIND_B\n\tbool "B"\n\nendchoice\n',
    )
    status, out, _ = answer("oldconfig", "3", "?", "1")
    assert status == 0
    assert "  1. A (KIND_A)\n> 2. B (KIND_B)\nchoice[1-2?]: 3\n'3' is not one of 1 to 2" in out
    assert "A: First." in out
    assert "CONFIG_KIND_A=y" in lines_of(kconf_project)


def test_config_asks_for_everything_also_without_a_file(kconf_project, answer):
    status, out, _ = answer("config", "2", "", "", "", "y", *[""] * 40)
    assert status == 0
    assert "CONFIG_MODEL_GPT2=y" in lines_of(kconf_project)
    for name in ("MODEL_GPT2", "GPT2_SIZE_SMALL", "NUM_EPOCHS", "LEARNING_RATE", "NOTE", "DETERMINISTIC"):
        assert f"({name})" in out
    assert "(MODEL_HAS_ATTENTION)" not in out and "(FAST_ATTENTION)" not in out  # nothing to choose there


def test_a_default_that_was_not_answered_follows_a_later_answer(kconf_project, kconf, answer):
    kconf("defconfig", "lenet5")
    add(
        kconf_project,
        '\nconfig FIRST\n\tint "First"\n\trange 1 9\n\tdefault 5 if SECOND\n\tdefault 2\n'
        '\nconfig SECOND\n\tbool "Second"\n',
    )
    assert answer("oldconfig", "", "y")[0] == 0
    assert "CONFIG_FIRST=5" in lines_of(kconf_project)

"""The configuration commands, in a small project of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(kconf_project):
    return kconf_project


def test_defconfig_writes_a_full_file_and_says_so_in_one_line(project, kconf):
    assert kconf("defconfig", "lenet5") == (0, [".config: written from defconfigs/lenet5"], [])
    lines = (project / ".config").read_text().splitlines()
    assert "CONFIG_NUM_EPOCHS=3" in lines and 'CONFIG_MODEL="lenet5"' in lines
    assert kconf("checkconfig") == (0, [".config: ok"], [])


def test_a_defconfig_may_be_a_file_anywhere(project, kconf, tmp_path_factory):
    mine = tmp_path_factory.mktemp("my configurations") / "a+b_defconfig"
    mine.write_text("CONFIG_NUM_EPOCHS=7\n")
    status, out, err = kconf("defconfig", str(mine))
    assert (status, out, err) == (0, [f".config: written from {mine}"], [])
    assert "\nCONFIG_NUM_EPOCHS=7\n" in (project / ".config").read_text()
    assert kconf("defconfig", "./defconfigs/lenet5+debug")[0] == 0
    (project / "bad").write_text("CONFIG_NUM_EPOCHS=many\n")
    assert kconf("defconfig", "./bad")[2][0].startswith("bad:1: CONFIG_NUM_EPOCHS=many is not a")
    assert kconf("defconfig", "./nope")[0] == kconf("defconfig", "./defconfigs")[0] == 2


def test_defconfig_again_touches_nothing(project, kconf):
    kconf("defconfig", "lenet5")
    os.utime(project / ".config", (1, 1))
    assert kconf("defconfig", "lenet5") == (0, [".config: already as defconfigs/lenet5"], [])
    assert (project / ".config").stat().st_mtime == 1
    kconf("defconfig", "gpt2")
    assert "CONFIG_NUM_EPOCHS=3" in (project / ".config.old").read_text()


def test_fragments_go_on_top_in_order(project, kconf):
    status, out, err = kconf("defconfig", "lenet5+debug+long")
    assert (status, out) == (0, [".config: written from defconfigs/lenet5+debug+long"])
    assert err == [
        "note: defconfigs/fragments/long:2: CONFIG_NUM_EPOCHS=90 replaces CONFIG_NUM_EPOCHS=3 "
        "of defconfigs/lenet5:2"
    ]
    text = (project / ".config").read_text()
    assert "CONFIG_DEBUG=y" in text and "CONFIG_NUM_EPOCHS=90" in text


def test_fragment_that_hides_something_says_so(kconf):
    status, _, err = kconf("defconfig", "gpt2+plain")
    assert status == 0
    assert err[1] == (
        'note: defconfigs/gpt2:4: CONFIG_EMA_DECAY="0.5" has no effect: it needs CONFIG_EMA=y (now n)'
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lenet", "there is no configuration called 'lenet'; did you mean lenet5?"),
        ("nope", "there is no configuration called 'nope'; make list-defconfigs shows what there is"),
        ("", "there is no configuration called ''; make list-defconfigs shows what there is"),
        ("../lenet5", "there is no configuration called '../lenet5'; did you mean lenet5?"),
        ("no/lenet5", "there is no configuration called 'no/lenet5'; did you mean lenet5?"),
        ("lenet5+./defconfigs/lenet5", "./defconfigs/lenet5 is a path, not the name of a fragment; "
         "give FRAGMENT=./defconfigs/lenet5"),
        ("sweeps", "there is no configuration called 'sweeps'; make list-defconfigs shows what there is"),
        ("lenet5+debgu", "there is no fragment called 'debgu'; did you mean debug?"),
        ("lenet5-wide", "there is no configuration called 'lenet5-wide'; did you mean lenet5?"),
        ("lenet5+", "'lenet5+' lacks a name beside a plus sign; "
         "write CONFIGURATION+FRAGMENT, as in make defconfig-lenet5+debug"),
        ("+debug", "'+debug' lacks a name beside a plus sign; "
         "write CONFIGURATION+FRAGMENT, as in make defconfig-lenet5+debug"),
        ("LeNet5", "there is no configuration called 'LeNet5'; did you mean lenet5?"),
        ("quite", "there is no configuration called 'quite'; did you mean quiet?"),
        # Four letters in common are no likeness.
        ("token", "there is no configuration called 'token'; make list-defconfigs shows what there is"),
        ("debug", "debug is a fragment, not a configuration; "
         "write CONFIGURATION+FRAGMENT, as in make defconfig-lenet5+debug"),
        ("lenet5+gpt2", "gpt2 is a configuration, not a fragment; "
         "write CONFIGURATION+FRAGMENT, as in make defconfig-lenet5+debug"),
    ],
)  # fmt: skip
def test_name_that_does_not_exist(project, kconf, name, message):
    assert kconf("defconfig", name) == (2, [], [f"error: {message}"])
    assert not (project / ".config").exists()


def test_broken_defconfig_leaves_the_configuration_alone(project, kconf):
    kconf("defconfig", "lenet5")
    before = (project / ".config").read_bytes(), (project / ".config").stat().st_mtime_ns
    status, out, err = kconf("defconfig", "broken")
    assert (status, out) == (2, [])
    assert err == [
        "defconfigs/broken:2: CONFIG_BATCH_SIZE=3 has no effect: it needs CONFIG_HYPER_PARAM_MANUAL=y "
        "(now CONFIG_HYPER_PARAM_AUTO=y)",
        "error: 1 fault in the configuration; no configuration was written",
    ]
    assert ((project / ".config").read_bytes(), (project / ".config").stat().st_mtime_ns) == before


def test_setconfig_prints_a_member_of_a_choice_that_was_hidden(kconf):
    kconf("defconfig", "lenet5")
    status, out, _ = kconf("setconfig", "MODEL_GPT2=y GPT2_SIZE_LARGE=y")
    assert (status, out) == (
        0,
        [
            "MODEL_CHOICE CONFIG_MODEL_LENET5 -> CONFIG_MODEL_GPT2",
            "CONFIG_GPT2_SIZE_LARGE y",
            ".config: written",
        ],
    )
    changed = ["GPT2_SIZE_CHOICE CONFIG_GPT2_SIZE_LARGE -> CONFIG_GPT2_SIZE_SMALL", ".config: written"]
    assert kconf("setconfig", "GPT2_SIZE_SMALL=y")[1] == changed


def test_what_goes_on_top_wants_something_below_it(project, kconf):
    for arguments in (("--fragments=defconfigs/fragments/debug",), ("--strict",)):
        assert kconf("defconfig", *arguments) == (
            2,
            [],
            ["error: FRAGMENT= and STRICT= apply on top of a configuration; give DEFCONFIG=NAME"],
        )
    assert not (project / ".config").exists()


def test_list_shows_fragments_apart(kconf):
    assert kconf("list-defconfigs")[1] == [
        "Configurations (make defconfig-NAME):",
        "  broken  Does not hold",
        "  gpt2    Large",
        "  lenet5  Small and quick",
        "  quiet",
        "Fragments (make defconfig-NAME+FRAGMENT):",
        "  debug   For looking inside",
        "  long    More epochs",
        "  plain",
    ]


def test_savedefconfig_and_back(project, kconf):
    kconf("defconfig", "gpt2")
    full = (project / ".config").read_text()
    assert kconf("savedefconfig") == (0, ["defconfig: written"], [])
    assert (
        project / "defconfig"
    ).read_text() == 'CONFIG_MODEL_GPT2=y\nCONFIG_EMA=y\nCONFIG_EMA_DECAY="0.5"\n'
    # Onto a shipped configuration: its first comment stays, and it was in this form already.
    assert kconf("savedefconfig", "defconfigs/gpt2") == (0, ["defconfigs/gpt2: unchanged"], [])
    kconf("defconfig", "gpt2")
    assert (project / ".config").read_text() == full


def test_olddefconfig_adds_what_is_new_and_refreshes_what_is_derived(project, kconf):
    kconf("defconfig", "lenet5")
    kconfig = project / "Kconfig"
    text = kconfig.read_text().replace('default "lenet5" if', 'default "lenet-5" if')
    kconfig.write_text(text + '\nconfig NEW\n\tint "New"\n\tdefault 7\n')
    line = (project / ".config").read_text().splitlines().index('CONFIG_MODEL="lenet5"') + 1
    outdated = (project / ".config").read_text()
    status, _, err = kconf("checkconfig")
    assert status == 2 and err[0].endswith("; remove the line or run make olddefconfig")
    assert kconf("olddefconfig") == (
        0,
        [".config: brought up to date"],
        [
            f'note: .config:{line}: CONFIG_MODEL="lenet5" is now CONFIG_MODEL="lenet-5"',
            "note: .config: a new option takes its default: CONFIG_NEW=7 "
            "(make olddefconfig writes this down)",
        ],
    )
    assert (project / ".config.old").read_text() == outdated
    assert kconf("olddefconfig") == (0, [".config: is up to date"], [])


def test_checkconfig_of_another_file(project, kconf):
    (project / "mine").write_text("CONFIG_NUM_EPOCHS=0\n")
    assert kconf("checkconfig", "defconfigs/gpt2") == (0, ["defconfigs/gpt2: ok"], [])
    status, out, err = kconf("checkconfig", "mine")
    assert (status, out) == (2, [])
    assert err[0] == "mine:1: CONFIG_NUM_EPOCHS=0 is outside 1..1000000"


def test_checkconfig_of_another_file_takes_the_command_line(kconf, monkeypatch):
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", "CONFIG_BATCH_SIZE")
    monkeypatch.setenv("CONFIG_BATCH_SIZE", "4")
    status, out, err = kconf("checkconfig", "defconfigs/gpt2")
    assert (status, out) == (2, []) and err[0].startswith("command line: CONFIG_BATCH_SIZE=4 has no effect")


@pytest.mark.parametrize("command", ["checkconfig", "savedefconfig", "syncconfig", "listnewconfig"])
def test_no_configuration_yet(kconf, command):
    status, out, err = kconf(command)
    assert (status, out) == (2, [])
    assert err == [
        "error: there is no configuration at .config; use make defconfig-NAME "
        "(make list-defconfigs shows the names) or make menuconfig"
    ]


def test_configuration_elsewhere(project, kconf, monkeypatch):
    monkeypatch.setenv("KCONFIG_CONFIG", str(project / "build" / "config"))
    assert kconf("defconfig", "lenet5")[1] == ["build/config: written from defconfigs/lenet5"]
    assert not (project / ".config").exists()


def test_configuration_that_cannot_be_written(project, kconf, monkeypatch):
    (project / "file").write_text("")
    monkeypatch.setenv("KCONFIG_CONFIG", "file/config")
    assert kconf("defconfig", "lenet5") == (2, [], ["error: cannot write file/config: file: File exists"])


def test_check_variables(kconf, monkeypatch):
    assert kconf("check-variables") == (0, [], [])
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", "LR V")
    monkeypatch.setenv("KCONFIG_MAKE_KNOWN", "O V")
    monkeypatch.setenv("LR", "3")
    assert kconf("check-variables") == (
        2,
        [],
        [
            "command line: LR=3 is not a variable of this Makefile; did you mean CONFIG_LEARNING_RATE?",
            "error: 1 fault on the command line; nothing was done",
        ],
    )


def test_option_beside_a_command_that_writes_is_said_not_to_be_written(project, kconf, monkeypatch):
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", "CONFIG_NUM_EPOCHS")
    monkeypatch.setenv("CONFIG_NUM_EPOCHS", "4")
    assert kconf("defconfig", "lenet5")[2] == [
        "note: CONFIG_NUM_EPOCHS on the command line is for runs; it is not written"
    ]
    assert "CONFIG_NUM_EPOCHS=3" in (project / ".config").read_text()


def test_command_is_light(tmp_path):
    """No module that takes long to import, on the project's own tree."""
    (tmp_path / "config").write_text("CONFIG_MODEL_LENET5=y\n")
    script = (
        "import sys, runpy; sys.argv = ['kconf.py', 'olddefconfig']\n"
        f"try: runpy.run_path({str(ROOT / 'scripts' / 'kconf.py')!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'rich', 'yaml', 'difflib', 'curses'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    environment = {"PATH": "/usr/bin:/bin", "KCONFIG_CONFIG": str(tmp_path / "config")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"

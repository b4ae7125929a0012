"""Merging configurations: which value wins, what is reported, and the origin of each value afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.kconf import load


def origins(project: Path, **overrides: str) -> dict[str, str]:
    return dict(load(root=project, config_file=project / ".config", overrides=overrides).origins)


def values(project: Path) -> dict[str, object]:
    return dict(load(root=project, config_file=project / ".config").values)


def test_a_fragment_goes_on_top_of_the_configuration(kconf_project, kconf):
    kconf("defconfig", "lenet5")
    assert kconf("merge", "long") == (
        0,
        [".config: merged with defconfigs/fragments/long"],
        [
            "note: defconfigs/fragments/long:2: CONFIG_NUM_EPOCHS=90 replaces CONFIG_NUM_EPOCHS=3 "
            "of defconfigs/lenet5:2"
        ],
    )
    assert values(kconf_project)["NUM_EPOCHS"] == 90
    assert kconf("merge", "long") == (0, [".config: already has defconfigs/fragments/long"], [])


@pytest.mark.parametrize(
    "arguments", [("merge", "--strict", "long"), ("defconfig", "--strict", "lenet5+long")]
)
def test_strict_refuses_to_replace(kconf_project, kconf, arguments):
    kconf("defconfig", "lenet5")
    before = (kconf_project / ".config").read_bytes()
    status, out, err = kconf(*arguments)
    assert (status, out) == (2, [])
    assert err[0].startswith(
        "defconfigs/fragments/long:2: CONFIG_NUM_EPOCHS=90 replaces CONFIG_NUM_EPOCHS=3 of"
    )
    assert (kconf_project / ".config").read_bytes() == before
    assert err[0].endswith("of defconfigs/lenet5:2")  # as explain has it, also where .config was read


def test_strict_refuses_to_take_away_what_a_value_needs(kconf):
    status, _, err = kconf("defconfig", "--strict", "gpt2+plain")
    assert status == 2
    assert 'defconfigs/gpt2:4: CONFIG_EMA_DECAY="0.5" has no effect: it needs CONFIG_EMA=y (now n)' in err
    kconf("defconfig", "gpt2")
    assert kconf("merge", "--strict", "plain")[2] == [
        'defconfigs/gpt2:4: CONFIG_EMA_DECAY="0.5" has no effect: it needs CONFIG_EMA=y (now n)',
        "defconfigs/fragments/plain:1: CONFIG_EMA=n replaces CONFIG_EMA=y of defconfigs/gpt2:3",
        "error: 2 faults in the configuration; nothing was changed",
    ]


def test_strict_names_the_line_of_what_was_changed_since(kconf_project, kconf):
    kconf("defconfig", "lenet5")
    kconf("setconfig", "NUM_EPOCHS=4")
    line = (kconf_project / ".config").read_text().splitlines().index("CONFIG_NUM_EPOCHS=4") + 1
    assert kconf("merge", "--strict", "long")[2][0].endswith(
        f"replaces CONFIG_NUM_EPOCHS=4 of .config:{line}"
    )


def test_strict_has_nothing_against_what_only_adds(kconf):
    assert kconf("defconfig", "--strict", "lenet5+debug")[0] == 0
    assert kconf("merge", "--strict", "debug")[0] == 0


def test_files_anywhere_go_on_top_in_their_order(kconf_project, kconf):
    (kconf_project / "one").write_text("CONFIG_NUM_EPOCHS=5\n")
    (kconf_project / "the other").write_text("CONFIG_NUM_EPOCHS=6\n")
    status, out, err = kconf("defconfig", "lenet5", "--fragments=one 'the other'")
    assert (status, out) == (0, [".config: written from defconfigs/lenet5 + one + the other"])
    assert len(err) == 2 and values(kconf_project)["NUM_EPOCHS"] == 6
    assert kconf("merge", "--fragments=one")[0] == 0
    assert values(kconf_project)["NUM_EPOCHS"] == 5
    assert kconf("merge")[2] == ["error: no fragment is named; give FRAGMENT=FILE, or make NAME.config"]
    assert kconf("merge", "--fragments='one")[2] == [
        "error: FRAGMENT: 'one cannot be read: no closing quotation"
    ]
    assert kconf("merge", "./one")[2] == [
        "error: ./one is a path, not the name of a fragment; give FRAGMENT=./one"
    ]


def test_fragments_of_a_user_come_first(kconf_project, kconf, monkeypatch, tmp_path_factory):
    mine = tmp_path_factory.mktemp("mine")
    (mine / "long").write_text("CONFIG_NUM_EPOCHS=91\n")
    (mine / "site.config").write_text("CONFIG_NUM_WORKERS=1\n")
    monkeypatch.setenv("ANNEAL_CONFIG_PATH", f"{tmp_path_factory.mktemp('empty')}:{mine}")
    status, _, reported = kconf("defconfig", "lenet5+long+site")
    hides = f"note: {mine / 'long'} is used, and defconfigs/fragments/long of the same name is not"
    assert (status, reported[0]) == (0, hides)
    assert kconf("merge", "site")[2] == [] and kconf("merge", "long")[2] == [hides]
    found = values(kconf_project)
    assert (found["NUM_EPOCHS"], found["NUM_WORKERS"]) == (91, 1)
    listed = kconf("list-defconfigs")[1]
    assert any(line.split()[0] == "site.config" for line in listed)
    # A place on this machine has no business in the file.
    assert str(mine) not in (kconf_project / ".config").read_text()


def test_a_place_for_fragments_that_is_not_there_is_told(kconf_project, kconf, monkeypatch):
    """Otherwise the shipped fragment of the same name would be used."""
    monkeypatch.setenv("ANNEAL_CONFIG_PATH", "nope")
    assert kconf("defconfig", "lenet5+long")[2] == [
        "error: ANNEAL_CONFIG_PATH names nope, which is not a directory"
    ]
    assert not (kconf_project / ".config").exists()


@pytest.mark.parametrize("name", ["one, two", "one\ntwo"])
def test_a_name_that_the_line_of_names_cannot_hold_is_left_out(kconf_project, kconf, name):
    (kconf_project / name).write_text("CONFIG_NUM_EPOCHS=5\n")
    assert kconf("defconfig", "lenet5", f"--fragments='{name}'")[0] == 0
    assert origins(kconf_project)["NUM_EPOCHS"].startswith(".config:")
    assert (kconf_project / ".config").read_text().splitlines()[1] == "# Made from: defconfigs/lenet5"


def test_values_remember_the_file_they_were_shipped_in(kconf_project, kconf):
    kconf("defconfig", "gpt2+debug")
    found = origins(kconf_project, CONFIG_NUM_WORKERS="3")
    assert found["MODEL"] == "defconfigs/gpt2:2"
    assert found["EMA_DECAY"] == "defconfigs/gpt2:4"
    assert found["DEBUG"] == "defconfigs/fragments/debug:2"
    assert found["NUM_WORKERS"] == "command line"
    assert found["MODEL_HAS_ATTENTION"] == "selected by CONFIG_MODEL_GPT2"
    assert found["NUM_EPOCHS"] == "default"


def test_a_default_tells_its_condition(kconf_project, kconf):
    kconf("defconfig", "lenet5")
    kconf("setconfig", "HYPER_PARAM_MANUAL=y")
    assert origins(kconf_project)["LEARNING_RATE"] == "default if CONFIG_HYPER_PARAM_MANUAL"


def test_what_was_changed_since_comes_from_the_file_itself(kconf_project, kconf):
    kconf("defconfig", "gpt2+debug")
    kconf("setconfig", "EMA_DECAY=0.7")
    kconf("merge", "long")
    kconf("olddefconfig")
    lines = (kconf_project / ".config").read_text().splitlines()
    assert lines[1] == ("# Made from: defconfigs/gpt2, defconfigs/fragments/debug, defconfigs/fragments/long")
    found = origins(kconf_project)
    assert found["EMA_DECAY"] == f".config:{lines.index('CONFIG_EMA_DECAY=' + chr(34) + '0.7' + chr(34)) + 1}"
    assert found["DEBUG"] == "defconfigs/fragments/debug:2"
    assert found["NUM_EPOCHS"] == "defconfigs/fragments/long:2"
    # Also where the shipped file says otherwise by now, or is gone.
    (kconf_project / "defconfigs/gpt2").write_text("# Moved.\nCONFIG_MODEL_MLP=y\n")
    (kconf_project / "defconfigs/fragments/debug").unlink()
    found = origins(kconf_project)
    assert found["MODEL"].startswith(".config:") and found["DEBUG"].startswith(".config:")


def test_verbose_shows_origins(kconf, monkeypatch):
    monkeypatch.setenv("KCONFIG_VERBOSE", "1")
    assert kconf("defconfig", "lenet5+debug")[2] == [
        "note: CONFIG_NUM_EPOCHS=3 from defconfigs/lenet5:2",
        "note: CONFIG_DEBUG=y from defconfigs/fragments/debug:2",
    ]


# setconfig


def test_options_are_set_with_or_without_their_prefix(kconf_project, kconf):
    kconf("defconfig", "lenet5")
    status, out, err = kconf("setconfig", "EMA=y CONFIG_EMA_DECAY=0.5 NOTE='a \"b\" $c #d'")
    assert (status, err) == (0, [])
    new = "CONFIG_EMA_DECAY 0.5"  # it was hidden before, and had no value
    assert out == ['CONFIG_NOTE  -> a "b" $c #d', "CONFIG_EMA n -> y", new, ".config: written"]
    found = values(kconf_project)
    assert (found["EMA_DECAY"], found["NOTE"]) == (0.5, 'a "b" $c #d')
    assert kconf("setconfig", "EMA=y")[1] == [".config: already has that"]


def test_a_member_of_a_choice_is_set_like_an_option(kconf):
    kconf("defconfig", "lenet5")
    status, out, err = kconf("setconfig", "MODEL_GPT2=y EMA=y")
    assert (status, out) == (
        0,
        ["MODEL_CHOICE CONFIG_MODEL_LENET5 -> CONFIG_MODEL_GPT2", "CONFIG_EMA n -> y", ".config: written"],
    )
    assert err == ["note: SET: defaults that follow: CONFIG_FAST_ATTENTION n -> y"]


def test_a_choice_that_follows_is_told(kconf_project, kconf):
    kconfig = kconf_project / "Kconfig"
    kconfig.write_text(
        kconfig.read_text()
        + '\nchoice KIND_CHOICE\n\tprompt "Kind"\n\tdefault KIND_B if DEBUG\n\thelp\n\t  Which.\n'
        '\nconfig KIND_A\n\tbool "A"\n\nconfig KIND_B\n\tbool "B"\n\nendchoice\n'
    )
    kconf("defconfig", "lenet5")
    assert kconf("setconfig", "DEBUG=y")[1:] == (
        ["CONFIG_DEBUG n -> y", ".config: written"],
        ["note: SET: defaults that follow: KIND_CHOICE CONFIG_KIND_A -> CONFIG_KIND_B"],
    )


def test_defaults_that_follow_are_told(kconf):
    kconf("defconfig", "lenet5")
    assert kconf("setconfig", "HYPER_PARAM_MANUAL=y")[2] == [
        "note: SET: defaults that follow: CONFIG_LEARNING_RATE 0.001 -> 0.1"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'error: nothing is to be set; write make setconfig SET="NAME=value NAME=value"'),
        ("EMA", "error: SET: 'EMA' is not NAME=value; write SET=\"NAME=value NAME=value\""),
        ("=3", "error: SET: '=3' is not NAME=value; write SET=\"NAME=value NAME=value\""),
        ("EMA=y CONFIG_EMA=n", "error: SET: CONFIG_EMA is given twice, as y and as n"),
        ("NOTE='a", "error: SET: NOTE='a cannot be read: no closing quotation"),
        ("EPOCHS=3", "SET: CONFIG_EPOCHS is not a symbol; did you mean CONFIG_NUM_EPOCHS?"),
        ("NUM_EPOCHS=0", "SET: CONFIG_NUM_EPOCHS=0 is outside 1..1000000"),
        (
            "LEARNING_RATE=fast",
            'SET: CONFIG_LEARNING_RATE="fast" is not a number (Value: float, 0 < x <= 10)',
        ),
        (
            "BATCH_SIZE=3",
            "SET: CONFIG_BATCH_SIZE=3 has no effect: it needs CONFIG_HYPER_PARAM_MANUAL=y "
            "(now CONFIG_HYPER_PARAM_AUTO=y); give CONFIG_HYPER_PARAM_MANUAL=y CONFIG_BATCH_SIZE=3",
        ),
    ],
)
def test_what_cannot_be_set_changes_nothing(kconf_project, kconf, text, message):
    kconf("defconfig", "lenet5")
    before = (kconf_project / ".config").read_bytes()
    status, out, err = kconf("setconfig", text)
    assert (status, out, err[0]) == (2, [], message)
    assert (kconf_project / ".config").read_bytes() == before

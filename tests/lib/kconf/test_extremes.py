"""Whole configurations by rule: all defaults, all off, all on, at random, and what a file fixes."""

from __future__ import annotations

import pytest

from lib.errors import ConfigError
from lib.kconf import load
from lib.kconf.extremes import probability_of, seed_of
from lib.kconf.reader import read_file

NO_SEED = "is not a number of 0..0xffffffff; give one such as 42 or 0x2A"
BOOLS = {"FAST_ATTENTION", "EMA", "DEBUG", "TRACE", "DETERMINISTIC"}


def written(project) -> dict[str, str]:
    return {one.name: one.text for one in read_file(project / ".config").assignments}


def test_all_defaults(kconf_project, kconf):
    assert kconf("alldefconfig") == (0, [".config: written by alldefconfig"], [])
    values = written(kconf_project)
    assert values["DETERMINISTIC"] == "y" and values["EMA"] == "n" and values["NUM_EPOCHS"] == "10"
    assert kconf("defconfig") == (
        0,
        [".config: already as alldefconfig has it"],
        ["note: no DEFCONFIG= is given: every option has its default"],
    )


def test_all_off_and_all_on_reach_what_they_can(kconf_project, kconf):
    kconf("allnoconfig")
    values = written(kconf_project)
    assert {name for name in BOOLS if values.get(name) == "y"} == set()
    assert values["MODEL_LENET5"] == "y"  # of a choice always one is on
    kconf("allyesconfig")
    values = written(kconf_project)
    # TRACE needs EMA off: what cannot be on is off, and that is no fault.
    assert {name for name in BOOLS if values.get(name) == "y"} == BOOLS - {"TRACE"}
    assert kconf("checkconfig") == (0, [".config: ok"], [])


def test_allmodconfig_says_what_it_is(kconf):
    assert kconf("allmodconfig")[2] == ["note: there are no modules here: allmodconfig is allyesconfig"]


def test_a_seed_gives_the_same_configuration_again(kconf_project, kconf, monkeypatch):
    texts = set()
    for seed in ("7", "0x7", "8"):
        monkeypatch.setenv("KCONFIG_SEED", seed)
        status, out, err = kconf("randconfig")
        assert (status, err) == (0, []) and out[0] == f"KCONFIG_SEED=0x{int(seed, 0):X}"
        texts.add((kconf_project / ".config").read_text())
    assert len(texts) == 2


def test_the_printed_seed_is_the_one_that_was_drawn(kconf_project, kconf, monkeypatch):
    printed = kconf("randconfig")[1][0]
    text = (kconf_project / ".config").read_text()
    monkeypatch.setenv("KCONFIG_SEED", printed.removeprefix("KCONFIG_SEED="))
    assert kconf("randconfig")[1] == [printed, ".config: already as randconfig has it"]
    assert (kconf_project / ".config").read_text() == text


@pytest.mark.slow
def test_probability_counts(kconf_project, kconf, monkeypatch):
    on = {}
    for percent in ("0", "50", "100"):
        monkeypatch.setenv("KCONFIG_PROBABILITY", percent)
        on[percent] = 0
        for seed in range(40):
            monkeypatch.setenv("KCONFIG_SEED", str(seed))
            kconf("randconfig")
            on[percent] += written(kconf_project)["DEBUG"] == "y"
    assert on["0"] == 0 and on["100"] == 40 and 10 <= on["50"] <= 30


@pytest.mark.slow
def test_every_member_of_a_choice_is_drawn(kconf_project, kconf, monkeypatch):
    models = set()
    for seed in range(30):
        monkeypatch.setenv("KCONFIG_SEED", str(seed))
        kconf("randconfig")
        models.add(written(kconf_project)["MODEL"])
    assert models == {'"lenet5"', '"gpt2"', '"mlp"'}


@pytest.mark.parametrize(
    ("text", "percent"), [("", 50), ("0", 0), ("30", 30), ("20:30", 50), ("10:20:30", 10)]
)
def test_probability_in_the_ways_of_the_c_tools(text, percent):
    assert probability_of({"KCONFIG_PROBABILITY": text}) == percent


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("KCONFIG_PROBABILITY", "half", "is not 1 to 3 percentages with colons between them"),
        ("KCONFIG_PROBABILITY", "1:2:3:4", "is not 1 to 3 percentages with colons between them"),
        ("KCONFIG_PROBABILITY", "-1", "is not 1 to 3 percentages with colons between them"),
        ("KCONFIG_PROBABILITY", "101", "is more than 100 percent"),
        ("KCONFIG_PROBABILITY", "60:50", "is more than 100 percent"),
        ("KCONFIG_PROBABILITY", "5:60:50", "is more than 100 percent"),
        ("KCONFIG_PROBABILITY", "1000", "is not 1 to 3 percentages with colons between them"),
        ("KCONFIG_SEED", "lucky", NO_SEED),
        ("KCONFIG_SEED", "-1", NO_SEED),
        ("KCONFIG_SEED", "0x100000000", NO_SEED),
        ("KCONFIG_SEED", "4294967296", NO_SEED),
        ("KCONFIG_SEED", "1_0", NO_SEED),
        ("KCONFIG_SEED", "010", NO_SEED),
        ("KCONFIG_SEED", "9" * 5000, NO_SEED),
    ],
)
def test_what_is_no_seed_or_probability_writes_nothing(
    kconf_project, kconf, monkeypatch, variable, text, message
):
    monkeypatch.setenv(variable, text)
    status, out, err = kconf("randconfig")
    given = f"{variable}={text}"
    shown = given if len(given) < 100 else f"{given[:60]}...({len(given)} characters)"
    assert (status, out, err) == (2, [], [f"error: {shown} {message}"])
    assert not (kconf_project / ".config").exists()


def test_seed_is_fresh_without_a_variable():
    assert len({seed_of({}) for _ in range(5)}) > 1
    with pytest.raises(ConfigError):
        seed_of({"KCONFIG_SEED": "x"})


def test_a_file_fixes_what_it_names(kconf_project, kconf, monkeypatch):
    (kconf_project / "mine").write_text("CONFIG_MODEL_MLP=y\nCONFIG_DEBUG=y\nCONFIG_NUM_EPOCHS=3\n")
    monkeypatch.setenv("KCONFIG_ALLCONFIG", "mine")
    for command in ("alldefconfig", "allnoconfig", "allyesconfig", "randconfig"):
        status, _, err = kconf(command)
        assert (status, err) == (0, []), command
        values = written(kconf_project)
        assert (values["MODEL"], values["DEBUG"], values["NUM_EPOCHS"]) == ('"mlp"', "y", "3"), command


@pytest.mark.parametrize(("name", "value"), [("allno.config", "1"), ("all.config", "")])
def test_a_file_is_found_by_the_name_of_the_kind(kconf_project, kconf, monkeypatch, name, value):
    (kconf_project / name).write_text("CONFIG_DEBUG=y\n")
    monkeypatch.setenv("KCONFIG_ALLCONFIG", value)
    kconf("allnoconfig")
    assert written(kconf_project)["DEBUG"] == "y"


def test_a_file_that_is_not_there_or_does_not_hold(kconf_project, kconf, monkeypatch):
    monkeypatch.setenv("KCONFIG_ALLCONFIG", "1")
    assert kconf("allyesconfig")[2] == [
        "error: KCONFIG_ALLCONFIG=1, but there is neither allyes.config nor all.config; "
        "make one, or name a file"
    ]
    monkeypatch.setenv("KCONFIG_ALLCONFIG", "nope")
    assert kconf("allnoconfig")[2][0] == "nope: cannot be read: No such file or directory"
    (kconf_project / "mine").write_text('CONFIG_EMA_DECAY="0.5"\n')
    monkeypatch.setenv("KCONFIG_ALLCONFIG", "mine")
    assert kconf("allnoconfig")[2][0] == (
        'mine:1: CONFIG_EMA_DECAY="0.5" has no effect: it needs CONFIG_EMA=y (now n)'
    )
    assert not (kconf_project / ".config").exists()


def test_tinyconfig_is_all_off_but_for_its_fragment(kconf_project, kconf, monkeypatch):
    assert kconf("tinyconfig")[2] == [
        "error: there is no fragment called 'tiny'; make list-defconfigs shows what there is"
    ]
    (kconf_project / "defconfigs/fragments/tiny").write_text("# Tiny.\nCONFIG_NUM_EPOCHS=1\n")
    (kconf_project / "mine").write_text("CONFIG_EMA=y\n")
    monkeypatch.setenv("KCONFIG_ALLCONFIG", "mine")
    assert kconf("tinyconfig") == (0, [".config: written by tinyconfig"], [])
    values = written(kconf_project)
    assert (values["NUM_EPOCHS"], values["EMA"], values["DETERMINISTIC"]) == ("1", "y", "n")


def test_values_come_from_the_file_in_which_they_were_written(
    kconf_project, kconf, monkeypatch, tmp_path_factory
):
    (kconf_project / "defconfigs/fragments/tiny").write_text("# Tiny.\nCONFIG_NUM_EPOCHS=1\n")
    (kconf_project / "mine").write_text("# What is to be so.\nCONFIG_EMA=y\nCONFIG_MODEL_MLP=y\n")
    monkeypatch.setenv("KCONFIG_ALLCONFIG", "mine")
    origin = origins_of(kconf_project, kconf, "tinyconfig")
    assert origin["NUM_EPOCHS"] == "defconfigs/fragments/tiny:2"
    assert (origin["EMA"], origin["MODEL"]) == ("mine:2", "mine:3")
    assert origin["DETERMINISTIC"].startswith(".config:")  # the rule turned it off
    origin = origins_of(kconf_project, kconf, "alldefconfig")
    assert (origin["EMA"], origin["MODEL"], origin["NUM_EPOCHS"]) == ("mine:2", "mine:3", "default")
    # A place on this machine has no business in the file.
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "theirs"
    elsewhere.write_text("CONFIG_EMA=y\n")
    monkeypatch.setenv("KCONFIG_ALLCONFIG", str(elsewhere))
    assert origins_of(kconf_project, kconf, "alldefconfig")["EMA"].startswith(".config:")
    assert str(elsewhere) not in (kconf_project / ".config").read_text()


def test_a_file_whose_name_begins_like_an_origin_counts_as_asked(kconf_project, kconf, monkeypatch):
    (kconf_project / "default.config").write_text("CONFIG_EMA=y\n")
    monkeypatch.setenv("KCONFIG_ALLCONFIG", "default.config")
    kconf("alldefconfig")
    resolved = load(root=kconf_project, config_file=kconf_project / ".config")
    assert resolved.requested() == ["requested: EMA = True (default.config:1)"]
    assert "  from        default.config:1" in kconf("explain", "EMA")[1]


def origins_of(project, kconf, command: str) -> dict[str, str]:
    assert kconf(command)[0] == 0
    return dict(load(root=project, config_file=project / ".config").origins)

"""savedefconfig, update-defconfigs, syncconfig, kconfig-docs: what they write, and where."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lib.kconf.explain import reference
from lib.kconf.lint import machine_facts
from lib.kconf.tree import load_own_tree

ROOT = Path(__file__).resolve().parents[3]


def test_savedefconfig_writes_where_the_build_is(kconf_project, kconf, monkeypatch):
    kconf("defconfig", "gpt2")
    monkeypatch.setenv("KCONFIG_OUTPUT", "out")
    assert kconf("savedefconfig")[1] == ["out/defconfig: written"]
    assert not (kconf_project / "defconfig").exists()
    assert (kconf_project / "out/defconfig").read_text().startswith("CONFIG_MODEL_GPT2=y\n")


def test_savedefconfig_by_name_keeps_the_opening_comment(kconf_project, kconf):
    kconf("defconfig", "gpt2+debug")
    gpt2 = kconf_project / "defconfigs/gpt2"
    gpt2.write_text("# Large\n# and slow.\nCONFIG_MODEL_MLP=y\n")
    assert kconf("savedefconfig", "--name=gpt2")[1] == ["defconfigs/gpt2: written"]
    assert gpt2.read_text() == (
        '# Large\n# and slow.\nCONFIG_MODEL_GPT2=y\nCONFIG_EMA=y\nCONFIG_EMA_DECAY="0.5"\nCONFIG_DEBUG=y\n'
    )
    assert kconf("savedefconfig", "--name=new")[1] == ["defconfigs/new: written"]
    assert kconf("savedefconfig", "--name=../x")[2] == [
        "error: '../x' cannot be the name of a configuration; use FILE= for a path"
    ]
    assert kconf("savedefconfig", "--name=new", "file")[2] == [
        "error: FILE= and DEFCONFIG= both name a file; give one of them"
    ]


def test_a_configuration_cannot_have_the_name_of_a_fragment(kconf_project, kconf):
    kconf("defconfig", "gpt2")
    (kconf_project / "defconfigs/fragments/site.config").write_text("CONFIG_DEBUG=y\n")
    for name, file in (("debug", "debug"), ("site", "site.config"), ("site.config", "site.config")):
        assert kconf("savedefconfig", f"--name={name}")[::2] == (
            2,
            [f"error: defconfigs/fragments/{file} is a fragment of that name; choose another DEFCONFIG="],
        )
        assert not (kconf_project / "defconfigs" / name).exists()
    assert kconf("savedefconfig", "defconfigs/debug")[0] == 2


def test_a_comment_that_would_be_lost_stops_the_writing(kconf_project, kconf):
    kconf("defconfig", "lenet5")
    lenet5 = kconf_project / "defconfigs/lenet5"
    text = "# Small and quick\nCONFIG_NUM_EPOCHS=3\n# Three are enough.\n"
    lenet5.write_text(text)
    assert kconf("savedefconfig", "--name=lenet5")[2] == [
        "error: defconfigs/lenet5:3: a comment below the first assignment would be lost; "
        "move it to the top of the file"
    ]
    assert lenet5.read_text() == text


def test_nothing_of_a_machine_gets_into_a_shipped_configuration(kconf_project, kconf):
    kconf("defconfig", "lenet5")
    kconf("setconfig", "DATA_DIR=/data/sets")
    fault = 'CONFIG_DATA_DIR="/data/sets" has an absolute path; write it relative to the source tree'
    assert kconf("savedefconfig") == (0, ["defconfig: written"], [f"note: defconfig:2: {fault}"])
    status, _, err = kconf("savedefconfig", "--name=lenet5")
    assert (status, err[0]) == (2, f"defconfigs/lenet5:3: {fault}")
    assert kconf("savedefconfig", "defconfigs/lenet5")[0] == 2
    assert "DATA_DIR" not in (kconf_project / "defconfigs/lenet5").read_text()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('CONFIG_DATA_DIR="~/sets"', "an absolute path"),
        ('CONFIG_DATA_DIR="~someone/sets"', "an absolute path"),
        ('CONFIG_DATA_DIR="C:\\\\sets"', "an absolute path"),
        ('CONFIG_CHECKPOINT_URL="file:///data/sets"', "an absolute path"),
        ('CONFIG_CHECKPOINT_URL="local:/data/sets"', "an absolute path"),
        ('CONFIG_CHECKPOINT_URL="gs://bucket/file/x"', None),
        ('CONFIG_NOTE="see /data/sets"', "an absolute path"),
        ('CONFIG_NOTE="of 2026-02-28"', "a date"),
        ('CONFIG_NOTE="20260228T120000Z"', "a date"),
        ("# Made on 2026-02-28.", "a date"),
        ("# Of the sets in /data.", "an absolute path"),
        ('CONFIG_NOTE="runs on box7"', "the name of this machine"),
        ('CONFIG_DATA_DIR="data/sets"', None),
        ('CONFIG_NOTE="and/or, 1/2, 2026-02"', None),
        ('CONFIG_NOTE="runs on box77"', None),
        ('CONFIG_LR_STEP_PCT_LIST="50,75"', None),
        ("CONFIG_NUM_EPOCHS=20260228", None),
        ("# CONFIG_EMA is not set", None),
    ],
)
def test_what_is_a_fact_of_a_machine_or_a_day(kconf_project, monkeypatch, line, fault):
    monkeypatch.setattr(socket, "gethostname", lambda: "box7.example.org")
    findings = machine_facts(load_own_tree(kconf_project), f"\n{line}\n", name="x")
    message = [str(finding) for finding in findings]
    assert len(message) == bool(fault) and all(f"x:2: {line} has {fault}" in one for one in message), message


def test_update_defconfigs_rewrites_all_or_none(kconf_project, kconf):
    (kconf_project / "defconfigs/lenet5").write_text("# Small\nCONFIG_DEBUG=y\nCONFIG_NUM_EPOCHS=3\n")
    status, _, err = kconf("update-defconfigs")
    assert status == 2 and err[0].startswith("defconfigs/broken:2: CONFIG_BATCH_SIZE=3 has no effect")
    assert (kconf_project / "defconfigs/lenet5").read_text().endswith("CONFIG_NUM_EPOCHS=3\n")
    (kconf_project / "defconfigs/broken").unlink()
    assert kconf("update-defconfigs")[1] == [
        "defconfigs/gpt2: unchanged",
        "defconfigs/lenet5: written anew",
        "defconfigs/quiet: unchanged",
    ]
    assert (
        kconf_project / "defconfigs/lenet5"
    ).read_text() == "# Small\nCONFIG_NUM_EPOCHS=3\nCONFIG_DEBUG=y\n"


def test_update_defconfigs_rewrites_none_where_one_is_read_only(kconf_project, kconf):
    (kconf_project / "defconfigs/broken").unlink()
    untidy = "# Small\nCONFIG_DEBUG=y\nCONFIG_NUM_EPOCHS=3\n"
    for name in ("gpt2", "lenet5"):
        (kconf_project / "defconfigs" / name).write_text(untidy)
    (kconf_project / "defconfigs/lenet5").chmod(0o444)
    assert kconf("update-defconfigs") == (
        2,
        [],
        ["error: cannot write defconfigs/lenet5: lenet5 is read-only"],
    )
    assert (kconf_project / "defconfigs/gpt2").read_text() == untidy


@pytest.mark.parametrize(
    "arguments",
    [
        ("defconfig", "gpt2"),
        ("alldefconfig",),
        ("randconfig",),
        ("merge", "debug"),
        ("setconfig", "NUM_EPOCHS=7"),
        ("olddefconfig",),
        ("syncconfig",),
        ("savedefconfig", ".config"),
    ],
)
def test_a_read_only_configuration_is_not_replaced(kconf_project, kconf, arguments):
    file = kconf_project / ".config"
    text = "CONFIG_NUM_EPOCHS=3\nCONFIG_NUM_WORKERS=2\n"  # every command would write more, or less
    file.write_text(text)
    file.chmod(0o444)
    status, out, err = kconf(*arguments)
    assert status == 2 and err[-1] == "error: cannot write .config: .config is read-only"
    assert [line for line in out if not line.startswith("KCONFIG_SEED=")] == []
    assert file.read_text() == text
    assert {path.name for path in kconf_project.iterdir()} == {".config", "Kconfig", "defconfigs"}


def test_a_read_only_copy_of_the_old_configuration_is_not_replaced(kconf_project, kconf):
    kconf("defconfig", "lenet5")
    kconf("defconfig", "gpt2")
    before = (kconf_project / ".config").read_text()
    (kconf_project / ".config.old").chmod(0o444)
    assert kconf("defconfig", "quiet")[2] == ["error: cannot write .config: .config.old is read-only"]
    assert (kconf_project / ".config").read_text() == before


def test_what_is_no_configuration_is_not_replaced_by_one(kconf_project, kconf, monkeypatch):
    kconf("defconfig", "lenet5")
    text = "Permission is hereby granted\n"
    (kconf_project / "LICENSE").write_text(text)
    refused = "error: cannot write LICENSE: LICENSE is not a configuration"
    assert kconf("savedefconfig", "LICENSE")[::2] == (2, [refused])
    monkeypatch.setenv("KCONFIG_CONFIG", "LICENSE")
    assert kconf("defconfig", "gpt2")[::2] == (2, [refused])
    assert (kconf_project / "LICENSE").read_text() == text
    # Of a configuration with a bad line enough is known, and a copy is kept.
    (kconf_project / "LICENSE").write_text("CONFIG_EMA=y\nCONFIG_NUM_EPOCHS = 3\n")
    assert kconf("defconfig", "gpt2")[0] == 0


def test_a_link_to_itself_is_refused(kconf_project, kconf):
    (kconf_project / ".config").symlink_to(".config")
    assert kconf("defconfig", "lenet5")[::2] == (
        2,
        ["error: cannot write .config: Too many levels of symbolic links"],
    )


def test_syncconfig_writes_a_stamp_for_what_changed_and_says_nothing(kconf_project, kconf, monkeypatch):
    kconf("defconfig", "lenet5")
    monkeypatch.setenv("KCONFIG_OUTPUT", "out")
    assert kconf("syncconfig") == (0, [], [])
    stamps = kconf_project / "out/include/config"
    assert "CONFIG_NUM_EPOCHS=3" in (stamps / "auto.conf").read_text().splitlines()
    for stamp in stamps.rglob("*.h"):
        os.utime(stamp, (1, 1))
    kconf("setconfig", "NUM_EPOCHS=4")
    kconf("syncconfig")
    assert {stamp.name for stamp in stamps.rglob("*.h") if stamp.stat().st_mtime != 1} == {"epochs.h"}


def test_syncconfig_may_be_forbidden_to_change_the_configuration(kconf_project, kconf, monkeypatch):
    (kconf_project / ".config").write_text("CONFIG_NUM_EPOCHS=3\n")
    monkeypatch.setenv("KCONFIG_NOSILENTUPDATE", "1")
    assert kconf("syncconfig") == (
        2,
        [],
        ["error: .config is not up to date, and KCONFIG_NOSILENTUPDATE is set; run make olddefconfig"],
    )
    assert (kconf_project / ".config").read_text() == "CONFIG_NUM_EPOCHS=3\n"
    kconf("olddefconfig")
    assert kconf("syncconfig") == (0, [], [])


def test_olddefconfig_without_a_file_takes_the_defaults_and_says_so(kconf_project, kconf):
    assert kconf("olddefconfig") == (
        0,
        [".config: brought up to date"],
        ["note: there was no .config: every option has its default"],
    )
    assert "CONFIG_NUM_EPOCHS=10" in (kconf_project / ".config").read_text()


def test_the_page_of_options_is_current():
    assert (ROOT / "docs/options.md").read_text(encoding="utf-8") == reference(ROOT), "make kconfig-docs"


@pytest.mark.slow
def test_every_option_that_can_be_set_is_on_the_page():
    text = reference(ROOT)
    for symbol in load_own_tree(ROOT).unique_defined_syms:
        if any(node.prompt for node in symbol.nodes):
            assert f"`CONFIG_{symbol.name}`" in text

"""Symbols that are no more: renamed ones migrate, removed ones are refused with advice."""

from __future__ import annotations

import pytest

from lib.errors import ConfigError
from lib.kconf import load
from lib.kconf.legacy import read_legacy

LEGACY = """# What became of what.

config EPOCHS
	renamed NUM_EPOCHS

config OLD_MODEL_GPT2
	renamed MODEL_GPT2

config HAS_ATTENTION
	renamed MODEL_HAS_ATTENTION

config WARP
	removed "there is no warp; use CONFIG_FAST_ATTENTION"
"""


@pytest.fixture
def project(kconf_project):
    (kconf_project / "Kconfig.legacy").write_text(LEGACY)
    return kconf_project


def test_a_renamed_symbol_is_taken_and_told(project, kconf):
    (project / ".config").write_text("CONFIG_EPOCHS=4\nCONFIG_OLD_MODEL_GPT2=y\n")
    notices = [
        "note: .config:1: CONFIG_EPOCHS is called CONFIG_NUM_EPOCHS now; it was taken as that",
        "note: .config:2: CONFIG_OLD_MODEL_GPT2 is called CONFIG_MODEL_GPT2 now; it was taken as that",
    ]
    assert kconf("checkconfig") == (0, [".config: ok"], notices)
    assert kconf("olddefconfig") == (0, [".config: brought up to date"], notices)
    lines = (project / ".config").read_text().splitlines()
    assert "CONFIG_NUM_EPOCHS=4" in lines and "CONFIG_MODEL_GPT2=y" in lines
    assert kconf("checkconfig") == (0, [".config: ok"], [])


def test_a_full_file_of_before_the_renaming_loses_nothing(project, kconf):
    kconf("defconfig", "gpt2+debug")
    file = project / ".config"
    new = file.read_text()
    old = new.replace("CONFIG_NUM_EPOCHS=10", "CONFIG_EPOCHS=10")
    file.write_text(old.replace("CONFIG_MODEL_HAS_ATTENTION=y", "CONFIG_HAS_ATTENTION=y"))
    # What nobody can set is in a full file too, and is judged by how it would be written now.
    assert kconf("checkconfig")[0] == 0
    status, _, err = kconf("olddefconfig")
    assert status == 0 and len(err) == 2 and any("is called CONFIG_NUM_EPOCHS now" in line for line in err)
    assert file.read_text() == new


def test_both_names_at_once_must_agree(project, kconf):
    (project / ".config").write_text("CONFIG_EPOCHS=4\nCONFIG_NUM_EPOCHS=5\n")
    assert kconf("checkconfig")[2][:2] == [
        "note: .config:1: CONFIG_EPOCHS is called CONFIG_NUM_EPOCHS now; it was taken as that",
        ".config:2: CONFIG_NUM_EPOCHS is set to 5, but .config:1 sets it to 4",
    ]


def test_a_fault_of_an_old_name_says_which_it_is(project, kconf):
    """The finding has the new name, which the line does not have."""
    (project / ".config").write_text("CONFIG_DEBUG=y\nCONFIG_EPOCHS=0\n")
    assert kconf("checkconfig")[::2] == (
        2,
        [
            "note: .config:2: CONFIG_EPOCHS is called CONFIG_NUM_EPOCHS now; it was taken as that",
            ".config:2: CONFIG_NUM_EPOCHS=0 is outside 1..1000000",
            "error: 1 fault in the configuration; nothing was changed",
        ],
    )


def test_a_removed_symbol_is_refused_with_advice(project, kconf):
    (project / ".config").write_text("CONFIG_DEBUG=y\nCONFIG_WARP=y\n")
    before = (project / ".config").read_bytes()
    for command in ("checkconfig", "olddefconfig", "savedefconfig"):
        assert kconf(command)[2][0] == (
            ".config:2: CONFIG_WARP was removed: there is no warp; use CONFIG_FAST_ATTENTION"
        )
    assert (project / ".config").read_bytes() == before


def test_a_removed_symbol_that_was_off_is_no_loss(project, kconf):
    (project / ".config").write_text("CONFIG_DEBUG=y\n# CONFIG_WARP is not set\n")
    assert kconf("olddefconfig")[::2] == (0, ["note: .config:2: CONFIG_WARP was removed, and was off"])


def test_the_command_line_knows_old_names_too(project, kconf, monkeypatch):
    (project / ".config").write_text("CONFIG_DEBUG=y\n")
    resolved = load(root=project, config_file=project / ".config", overrides={"CONFIG_EPOCHS": "4"})
    assert resolved.values["NUM_EPOCHS"] == 4
    assert "command line: CONFIG_EPOCHS is called CONFIG_NUM_EPOCHS now" in resolved.notices[0]
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", "CONFIG_WARP")
    monkeypatch.setenv("CONFIG_WARP", "y")
    assert kconf("check-variables")[2][0] == (
        "command line: CONFIG_WARP was removed: there is no warp; use CONFIG_FAST_ATTENTION"
    )
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", "CONFIG_EPOCHS")
    monkeypatch.setenv("CONFIG_EPOCHS", "4")
    monkeypatch.delenv("CONFIG_WARP")
    assert kconf("check-variables") == (0, [], [])


@pytest.mark.usefixtures("project")
def test_an_old_name_can_be_set_and_explained(kconf):
    kconf("defconfig", "lenet5")
    assert kconf("setconfig", "EPOCHS=4")[1:] == (
        ["CONFIG_NUM_EPOCHS 3 -> 4", ".config: written"],
        ["note: SET: CONFIG_EPOCHS is called CONFIG_NUM_EPOCHS now; it was taken as that"],
    )
    assert kconf("explain", "CONFIG_EPOCHS")[1][:2] == [
        "CONFIG_EPOCHS is called CONFIG_NUM_EPOCHS now",
        "CONFIG_NUM_EPOCHS=4",
    ]
    assert kconf("explain", "WARP") == (
        2,
        [],
        ["error: CONFIG_WARP was removed: there is no warp; use CONFIG_FAST_ATTENTION"],
    )
    assert kconf("searchconfig", "CONFIG_EPOCHS") == (
        0,
        ["CONFIG_EPOCHS is called CONFIG_NUM_EPOCHS now"],
        [],
    )
    assert kconf("searchconfig", "WARP")[::2] == kconf("explain", "WARP")[::2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config A\n\tgone\n", "Kconfig.legacy:2: 'gone' is not expected here"),
        ("\trenamed B\n", "Kconfig.legacy:1: 'renamed B' is not expected here"),
        ("config A\nconfig B\n", "Kconfig.legacy:2: 'config B' is not expected here"),
        ("config A\n\trenamed B\nconfig A\n", "Kconfig.legacy:3: 'config A' is not expected here"),
        ('config A\n\tremoved "\udcff"\n', "Kconfig.legacy:2: is not UTF-8"),
        ("config A\n", "Kconfig.legacy: config A says neither renamed, removed nor overruled"),
        ("config A*\n\trenamed B\n", "Kconfig.legacy:2: 'renamed B' is not expected here"),
        ("config A\n\tremoved\n", "Kconfig.legacy:2: 'removed' is not expected here"),
    ],
)
def test_a_line_that_is_not_in_the_grammar(tmp_path, text, message):
    (tmp_path / "Kconfig.legacy").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read_legacy(tmp_path)
    assert str(caught.value) == message


def test_a_symbol_may_not_vanish_without_a_word(project, kconf):
    assert kconf("kconfig-docs") == (0, ["docs/options.md: written"], [])
    assert kconf("kconfig-docs") == (0, ["docs/options.md: is up to date"], [])
    kconfig = project / "Kconfig"
    kconfig.write_text(kconfig.read_text().replace("config OFFSET\n", "config SHIFT\n"))
    page = (project / "docs/options.md").read_text()
    assert kconf("kconfig-docs")[2] == [
        "error: OFFSET left the Kconfig files without a word in Kconfig.legacy; "
        "say there what it was renamed to, or why it was removed"
    ]
    assert (project / "docs/options.md").read_text() == page
    (project / "Kconfig.legacy").write_text(LEGACY + "\nconfig OFFSET\n\trenamed SHIFT\n")
    assert kconf("kconfig-docs") == (0, ["docs/options.md: written"], [])
    text = (project / "docs/options.md").read_text()
    assert "### `CONFIG_SHIFT`: Offset" in text and "OFFSET" not in text

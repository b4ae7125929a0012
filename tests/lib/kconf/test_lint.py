"""The rules of our own Kconfig files, each with a tree that breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.kconf import lint
from lib.kconf.lint import (
    RULES,
    choices_have_a_name_and_a_derived_symbol,
    configurations_hold_and_are_minimal,
    defined_once,
    files_have_an_opening_comment,
    fragments_take_on_every_configuration,
    help_for_everything_in_the_menu,
    no_configuration_has_the_name_of_a_fragment,
    nothing_of_the_machine,
    numbers_have_range_and_default,
    only_what_is_hidden_is_selected,
    plain_names,
    settable_strings_have_a_default,
    strings_are_not_compared,
    strings_have_a_value_line_that_their_defaults_obey,
    two_valued,
    what_is_no_more_is_no_symbol,
)
from lib.kconf.tree import load_own_tree, load_tree

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*RULES, *lint.FILE_RULES])
def test_our_tree_keeps_the_rule(rule):
    assert list(rule(load_own_tree(ROOT))) == []


HELP = "\thelp\n\t  Something.\n"
BROKEN = {
    help_for_everything_in_the_menu: [('config A\n\tbool "A"\n', "A has a prompt and no help")],
    numbers_have_range_and_default: [
        (f'config A\n\tint "A"\n\trange 1 5\n{HELP}', "A has no unconditional default"),
        (f'config A\n\tint "A"\n\tdefault 3\n{HELP}', "A has no unconditional range"),
        (
            'config A\n\tint "A"\n\trange 1 5\n\tdefault 9 if B\n\tdefault 2\n\nconfig B\n\tbool "B"\n',
            "A has the default 9 outside 1..5",
        ),
    ],
    strings_have_a_value_line_that_their_defaults_obey: [
        (f'config A\n\tstring "A"\n{HELP}', "A is a string without a Value line"),
        ('config A\n\tstring "A"\n\thelp\n\t  Value: fraction\n', "A 'Value: fraction' is not understood"),
        (
            'config A\n\tstring "A"\n\tdefault "2"\n\thelp\n\t  Value: float, x < 1\n',
            "A is out of range (Value: float, x < 1)",
        ),
    ],
    settable_strings_have_a_default: [
        (
            'config A\n\tstring "A"\n\tdefault "1" if B\n\thelp\n\t  Value: float\n\nconfig B\n\tbool "B"\n',
            "A has no unconditional default",
        ),
    ],
    strings_are_not_compared: [
        (
            'config A\n\tstring "A"\n\nconfig B\n\tbool "B"\n\tdefault y if A < "3"\n',
            "A is a string and is compared",
        ),
        (
            'config A\n\tstring "A"\n\nconfig B\n\tbool "B"\n\tdepends on A != "x"\n',
            "A is a string and is compared",
        ),
    ],
    nothing_of_the_machine: [
        ('config A\n\tstring "A"\n\tdefault "$(shell,hostname)"\n', "Kconfig:3 expands")
    ],
    two_valued: [('config A\n\ttristate "A"\n', "A is a tristate")],
    defined_once: [
        (
            'config A\n\tbool "A"\n\nconfig A\n\tdefault y\n',
            "A is defined more than once: Kconfig:1, Kconfig:4",
        ),
    ],
    only_what_is_hidden_is_selected: [
        ('config A\n\tbool "A"\n\tselect B\n\nconfig B\n\tbool "B"\n', "A selects B, which a user can set"),
    ],
    choices_have_a_name_and_a_derived_symbol: [
        ('choice\n\tprompt "A"\n\nconfig A\n\tbool "a"\n\nendchoice\n', "a choice is not called X_CHOICE"),
        (
            'choice A_CHOICE\n\tprompt "A"\n\nconfig A_B\n\tbool "b"\n\nconfig A_C\n\tbool "c"\n\nendchoice\n'
            'config A\n\tstring\n\tdefault "b" if A_B\n',
            "A is not the members of A_CHOICE in lower case",
        ),
    ],
    plain_names: [
        ('config a\n\tbool "a"\n', "a is not in capitals"),
        ('config NO_A\n\tbool "a"\n', "NO_A is a negation"),
    ],
    what_is_no_more_is_no_symbol: [
        ('config NEW\n\tbool "A"\n', "OLD is renamed AWAY in Kconfig.legacy, which is not a symbol"),
        ('config OLD\n\tbool "A"\n\nconfig AWAY\n\tbool "B"\n', "OLD is in Kconfig.legacy, and is a symbol"),
    ],
}


def test_every_rule_has_a_tree_that_breaks_it():
    assert list(BROKEN) == RULES


@pytest.mark.parametrize(
    ("rule", "text", "fault"), [(rule, *case) for rule, cases in BROKEN.items() for case in cases]
)
def test_broken_rule_is_found(tmp_path, rule, text, fault):
    (tmp_path / "Kconfig").write_text(text)
    (tmp_path / "Kconfig.legacy").write_text("config OLD\n\trenamed AWAY\n")
    faults = list(rule(load_tree("Kconfig", srctree=tmp_path, prefix="CONFIG_")))
    assert any(one.startswith(fault) for one in faults), faults


SHIPPED = {
    files_have_an_opening_comment: [
        ("a", "CONFIG_DEBUG=y\n", "defconfigs/a:1: is not a comment of one sentence, such as # "),
        ("a", "# A sentence.\n", "defconfigs/a: has 1 lines, not 2 to 16"),
        (
            "a",
            '# A sentence.\nCONFIG_DATA_DIR="/data"\n',
            'defconfigs/a:2: CONFIG_DATA_DIR="/data" has an absolute path; write it relative',
        ),
        (
            "fragments/a",
            "# Of 2026-01-31.\nCONFIG_DEBUG=y\n",
            "defconfigs/fragments/a:1: # Of 2026-01-31. has a date",
        ),
    ],
    no_configuration_has_the_name_of_a_fragment: [
        (
            "debug",
            "# A.\nCONFIG_EMA=y\n",
            "defconfigs/debug: defconfigs/fragments/debug is a fragment of that name",
        ),
    ],
    configurations_hold_and_are_minimal: [
        ("a", "# A.\nCONFIG_BATCH_SIZE=3\n", "defconfigs/a:2: CONFIG_BATCH_SIZE=3 has no effect: it needs"),
        ("a", "# A.\nCONFIG_NUM_EPOCHS=10\n", "defconfigs/a: is not in the form of make update-defconfigs"),
        ("a", "# A.\nCONFIG_DEBUG=y\n# And.\n", "defconfigs/a:3: a comment below the first assignment"),
    ],
    fragments_take_on_every_configuration: [
        (
            "fragments/a",
            '# A.\nCONFIG_EMA_DECAY="0.5"\n',
            'defconfigs/fragments/a:2: CONFIG_EMA_DECAY="0.5" has no effect: it needs CONFIG_EMA=y',
        ),
    ],
}


def test_every_rule_of_files_has_a_file_that_breaks_it():
    assert list(SHIPPED) == lint.FILE_RULES


@pytest.mark.parametrize(
    ("rule", "name", "text", "fault"), [(rule, *case) for rule, cases in SHIPPED.items() for case in cases]
)
def test_broken_file_is_found(kconf_project, rule, name, text, fault):
    (kconf_project / "defconfigs" / name).write_text(text)
    faults = list(rule(load_own_tree(kconf_project)))
    assert any(one.startswith(fault) for one in faults), faults


def test_a_file_that_is_no_text_is_a_breach(kconf_project):
    for name in ("defconfigs/a", "defconfigs/fragments/b"):
        (kconf_project / name).write_bytes(b"# A.\nCONFIG_DEBUG=\xff\n")
    faults = [fault for rule in lint.FILE_RULES for fault in rule(load_own_tree(kconf_project))]
    for name in ("defconfigs/a", "defconfigs/fragments/b"):
        assert any(fault.startswith(f"{name}:2: byte 0xff in column 14 is not UTF-8") for fault in faults)


def test_the_command_tells_every_breach(kconf):
    status, out, err = kconf("kconfig-lint")
    assert (status, out) == (2, [])
    assert "EMA has a prompt and no help" in err
    assert err[-1] == f"error: {len(err) - 1} violations of the lint rules"

"""The rules of our own Kconfig files, each with a tree that breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kconfiglib
import pytest

from lib.kconf.tree import load_own_tree, load_tree
from lib.kconf.values import parse_rule, value_line

ROOT = Path(__file__).resolve().parents[2]
Faults = Iterator[str]


def prompted(tree: Any) -> list[Any]:
    return [
        item for item in tree.unique_defined_syms + tree.unique_choices if any(n.prompt for n in item.nodes)
    ]


def help_for_everything_in_the_menu(tree: Any) -> Faults:
    for item in prompted(tree):
        if not any((node.help or "").strip() for node in item.nodes):
            yield f"{item.name} has a prompt and no help"


def numbers_have_range_and_default(tree: Any) -> Faults:
    for symbol in prompted(tree):
        if symbol.orig_type not in (kconfiglib.INT, kconfiglib.HEX):
            continue
        base = 16 if symbol.orig_type == kconfiglib.HEX else 10
        if not any(condition is tree.y for _, condition in symbol.orig_defaults):
            yield f"{symbol.name} has no unconditional default"
        if not any(entry[2] is tree.y for entry in symbol.orig_ranges):
            yield f"{symbol.name} has no unconditional range"
        for value, _ in symbol.orig_defaults:
            for entry in symbol.orig_ranges:
                low, high = (int(bound.str_value, base) for bound in entry[:2])
                if not low <= int(value.str_value, base) <= high:
                    yield f"{symbol.name} has the default {value.str_value} outside {low}..{high}"


def strings_have_a_value_line_that_their_defaults_obey(tree: Any) -> Faults:
    for symbol in tree.unique_defined_syms:
        if symbol.orig_type != kconfiglib.STRING:
            continue
        line = value_line(symbol)
        if line is None:
            yield f"{symbol.name} is a string without a Value line"
            continue
        try:
            rule = parse_rule(line)
            for value, _ in symbol.orig_defaults:
                rule.parse(value.str_value)
        except ValueError as error:
            yield f"{symbol.name} {error}"


def strings_are_not_compared(tree: Any) -> Faults:
    relations = tuple(kconfiglib.REL_TO_STR)

    def walk(expr: Any) -> Iterator[Any]:
        if isinstance(expr, tuple):
            if expr[0] in relations:
                yield from (side for side in expr[1:] if side.orig_type == kconfiglib.STRING and side.nodes)
            for part in expr[1:]:
                yield from walk(part)

    for node in tree.node_iter():
        conditions = [node.dep, node.visibility] if hasattr(node, "visibility") else [node.dep]
        conditions += [node.prompt[1]] if node.prompt else []
        conditions += [entry[-1] for entry in node.defaults + node.selects + node.implies]
        conditions += [entry[2] for entry in node.ranges]
        for condition in conditions:
            for symbol in walk(condition):
                yield f"{symbol.name} is a string and is compared near {node.filename}:{node.linenr}"


def nothing_of_the_machine(tree: Any) -> Faults:
    for name in tree.kconfig_filenames:
        path = Path(tree.srctree) / name
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "$(" in line:
                yield f"{name}:{number} expands a macro"


def two_valued(tree: Any) -> Faults:
    for item in tree.unique_defined_syms + tree.unique_choices:
        if item.orig_type == kconfiglib.TRISTATE:
            yield f"{item.name} is a tristate"


def defined_once(tree: Any) -> Faults:
    """But a model may add its default to a symbol that all models share."""
    for symbol in tree.unique_defined_syms:
        full = [node for node in symbol.nodes if node.prompt or node.help or node.ranges or node.selects]
        adding = [node for node in symbol.nodes if node not in full and node.filename.startswith("models/")]
        if len(symbol.nodes) > 1 and (len(full) != 1 or len(full) + len(adding) != len(symbol.nodes)):
            places = ", ".join(f"{node.filename}:{node.linenr}" for node in symbol.nodes)
            yield f"{symbol.name} is defined more than once: {places}"


def only_what_is_hidden_is_selected(tree: Any) -> Faults:
    for symbol in tree.unique_defined_syms:
        for target, _ in symbol.orig_selects:
            if any(node.prompt for node in target.nodes):
                yield f"{symbol.name} selects {target.name}, which a user can set"


def choices_have_a_name_and_a_derived_symbol(tree: Any) -> Faults:
    for choice in tree.unique_choices:
        name = choice.name or "a choice"
        stem = name.removesuffix("_CHOICE")
        derived = tree.syms.get(stem)
        if stem == name or derived is None or derived.orig_type != kconfiglib.STRING:
            yield f"{name} is not called X_CHOICE beside a string X"
            continue
        wanted = {member.name: member.name.removeprefix(stem + "_").lower() for member in choice.syms}
        given = {condition.name: value.str_value for value, condition in derived.orig_defaults}
        if given != wanted:
            yield f"{stem} is not the members of {name} in lower case"
        if any(member.orig_type != kconfiglib.BOOL for member in choice.syms) or choice.is_optional:
            yield f"{name} is not a plain choice"


def plain_names(tree: Any) -> Faults:
    for symbol in tree.unique_defined_syms:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", symbol.name):
            yield f"{symbol.name} is not in capitals"
        if re.search(r"(^|_)(NO|DISABLE|WITHOUT)_", symbol.name):
            yield f"{symbol.name} is a negation"


RULES: list[Callable[[Any], Faults]] = [
    help_for_everything_in_the_menu,
    numbers_have_range_and_default,
    strings_have_a_value_line_that_their_defaults_obey,
    strings_are_not_compared,
    nothing_of_the_machine,
    two_valued,
    defined_once,
    only_what_is_hidden_is_selected,
    choices_have_a_name_and_a_derived_symbol,
    plain_names,
]


@pytest.mark.parametrize("rule", RULES)
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
}


def test_every_rule_has_a_tree_that_breaks_it():
    assert list(BROKEN) == RULES


@pytest.mark.parametrize(
    ("rule", "text", "fault"), [(rule, *case) for rule, cases in BROKEN.items() for case in cases]
)
def test_broken_rule_is_found(tmp_path, rule, text, fault):
    (tmp_path / "Kconfig").write_text(text)
    faults = list(rule(load_tree("Kconfig", srctree=tmp_path, prefix="CONFIG_")))
    assert any(one.startswith(fault) for one in faults), faults

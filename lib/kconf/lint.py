"""Lint rules for our own Kconfig files, configurations and fragments; docs/adr/0002-kconfig.md gives reasons.

A rule takes a tree and yields a line per violation.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import kconfiglib

from lib.errors import ConfigError
from lib.kconf import defconfig, write
from lib.kconf.legacy import read_legacy
from lib.kconf.reader import Finding
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import find, has_prompt, load_own_tree
from lib.kconf.values import parse_rule, rule_of, value_line

Faults: TypeAlias = Iterator[str]
Rule: TypeAlias = Callable[[Any], Faults]

_FIRST_LINE = re.compile(r"# [A-Za-z].*[^.]\.")
_PLUG_INS = ("models/", "lib/data/datasets/", "train/tasks/")
_MIN_LINES, _MAX_LINES = 2, 16  # the comment, and 1 to 15 assignments
_ABSOLUTE = re.compile(r"""(?:^|[\s"'=:,])(~?/[\w.-]+|~\w*/|[A-Za-z]:\\|(?:file|local):/)""")
_DATE = re.compile(r"\b(?:19|20)\d\d-(?:0\d|1[0-2])-(?:[0-2]\d|3[01])\b|\b\d{8}T\d{6}Z?\b")
_MIN_HOST_NAME = 4  # shorter ones may be ordinary words


def lint(root: Path) -> list[str]:
    """Return every violation in the tree at `root`. Raises ConfigError where it cannot be parsed."""
    tree = load_own_tree(root)
    faults = [fault for rule in RULES for fault in rule(tree)]
    return faults or [fault for rule in FILE_RULES for fault in rule(tree)]


def help_for_everything_in_the_menu(tree: Any) -> Faults:
    """Require help for every symbol and choice with a prompt."""
    for item in _prompted(tree):
        if not any((node.help or "").strip() for node in item.nodes):
            yield f"{item.name} has a prompt and no help"


def numbers_have_range_and_default(tree: Any) -> Faults:
    """Require an unconditional range and default of int and hex options, and defaults within the ranges."""
    for symbol in _prompted(tree):
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
    """Require a `Value:` line for every string, which its defaults match."""
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


def settable_strings_have_a_default(tree: Any) -> Faults:
    """Require an unconditional default for strings with a prompt, except free text."""
    for symbol in _prompted(tree):
        is_text = symbol.orig_type != kconfiglib.STRING or value_line(symbol) == "text"
        if not is_text and not any(condition is tree.y for _, condition in symbol.orig_defaults):
            yield f"{symbol.name} has no unconditional default"


def strings_are_not_compared(tree: Any) -> Faults:
    """Forbid comparisons of strings in conditions."""
    for node in tree.node_iter():
        conditions = [node.dep, node.visibility] if hasattr(node, "visibility") else [node.dep]
        conditions += [node.prompt[1]] if node.prompt else []
        conditions += [entry[-1] for entry in node.defaults + node.selects + node.implies]
        conditions += [entry[2] for entry in node.ranges]
        for condition in conditions:
            for symbol in _compared_strings(condition):
                yield f"{symbol.name} is a string and is compared near {node.filename}:{node.linenr}"


def nothing_of_the_machine(tree: Any) -> Faults:
    """Forbid macro expansion in Kconfig files, but for EXTERNAL=, as it would read the environment."""
    for name in tree.kconfig_filenames:
        path = Path(tree.srctree) / name
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if "$(" in line.removeprefix('osource "$(ANNEAL_EXTERNAL)/'):
                yield f"{name}:{number} expands a macro"


def two_valued(tree: Any) -> Faults:
    """Forbid tristates."""
    for item in tree.unique_defined_syms + tree.unique_choices:
        if item.orig_type == kconfiglib.TRISTATE:
            yield f"{item.name} is a tristate"


def defined_once(tree: Any) -> Faults:
    """Require one full definition per symbol; a plug-in may add its default to a shared symbol."""
    for symbol in tree.unique_defined_syms:
        full = [node for node in symbol.nodes if node.prompt or node.help or node.ranges or node.selects]
        adding = [node for node in symbol.nodes if node not in full and node.filename.startswith(_PLUG_INS)]
        if len(symbol.nodes) > 1 and (len(full) != 1 or len(full) + len(adding) != len(symbol.nodes)):
            places = ", ".join(f"{node.filename}:{node.linenr}" for node in symbol.nodes)
            yield f"{symbol.name} is defined more than once: {places}"


def only_what_is_hidden_is_selected(tree: Any) -> Faults:
    """Forbid `select` of symbols that have a prompt."""
    for symbol in tree.unique_defined_syms:
        for target, _ in symbol.orig_selects:
            if has_prompt(target):
                yield f"{symbol.name} selects {target.name}, which a user can set"


def choices_have_a_name_and_a_derived_symbol(tree: Any) -> Faults:
    """Require that a choice X_CHOICE is a plain choice of bools with a string X that names its member."""
    for choice in tree.unique_choices:
        name = choice.name or "a choice"
        stem = name.removesuffix("_CHOICE")
        derived = tree.syms.get(stem)
        if stem == name or derived is None or derived.orig_type != kconfiglib.STRING:
            yield f"{name} is not called X_CHOICE beside a string X"
            continue
        members = [(one.name, one.name.removeprefix(stem + "_").lower()) for one in choice.syms]
        defaults = [(condition.name, value.str_value) for value, condition in derived.orig_defaults]
        # A last default may name the member for when the choice is invisible.
        rest = [value for _, value in defaults[len(members) :]]
        if defaults[: len(members)] != members or rest[1:] or not {*rest} <= {value for _, value in members}:
            yield f"{stem} is not the members of {name} in lower case"
        if any(member.orig_type != kconfiglib.BOOL for member in choice.syms) or choice.is_optional:
            yield f"{name} is not a plain choice"


def plain_names(tree: Any) -> Faults:
    """Require names in capitals, and forbid negations."""
    for symbol in tree.unique_defined_syms:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", symbol.name):
            yield f"{symbol.name} is not in capitals"
        if re.search(r"(^|_)(NO|DISABLE|WITHOUT)_", symbol.name):
            yield f"{symbol.name} is a negation"


def what_is_no_more_is_no_symbol(tree: Any) -> Faults:
    """Check that Kconfig.legacy agrees with the symbols of the tree."""
    legacy = read_legacy(Path(tree.srctree))
    for name in sorted(legacy.names()):
        if find(tree, name) is not None:
            yield f"{name} is in Kconfig.legacy, and is a symbol"
    for pattern in legacy.overruled:
        if not fnmatch.filter((symbol.name for symbol in tree.unique_defined_syms), pattern):
            yield f"{pattern} is overruled in Kconfig.legacy, and no symbol has such a name"
    for old, new in legacy.renamed.items():
        if find(tree, new) is None:
            yield f"{old} is renamed {new} in Kconfig.legacy, which is not a symbol"


def files_have_an_opening_comment(tree: Any) -> Faults:
    """Require a sentence in the first line, a few assignments below it, and no facts of a machine."""
    configurations, fragments = _shipped(tree)
    for path in configurations + fragments:
        text = path.read_text(encoding="utf-8", errors="replace")  # a later rule reports non-UTF-8
        lines = text.splitlines()
        name = _name(tree, path)
        if not lines or not _FIRST_LINE.fullmatch(lines[0]):
            yield f"{name}:1: is not a comment of one sentence, such as # ResNet-18 on my photos."
        if not _MIN_LINES <= len(lines) <= _MAX_LINES:
            yield f"{name}: has {len(lines)} lines, not {_MIN_LINES} to {_MAX_LINES}"
        yield from map(str, machine_facts(tree, text, name=name))


def no_configuration_has_the_name_of_a_fragment(tree: Any) -> Faults:
    """Forbid a configuration and a fragment of the same name."""
    for path in _shipped(tree)[0]:
        try:
            defconfig.path_of(Path(tree.srctree), path.name)
        except ConfigError as error:
            yield f"{_name(tree, path)}: {error.what}"


def configurations_hold_and_are_minimal(tree: Any) -> Faults:
    """Require that shipped configurations are valid and in minimal form."""
    for path in _shipped(tree)[0]:
        try:
            defconfig.compose(tree, path.name)
            text = defconfig.opening_comment(path) + write.minimal_text(tree)
        except ConfigError as error:
            yield from error.findings or (str(error),)
            continue
        if path.read_text(encoding="utf-8") != text:
            yield f"{_name(tree, path)}: is not in the form of make update-defconfigs"


def fragments_take_on_every_configuration(tree: Any) -> Faults:
    """Require that every fragment takes effect on every shipped configuration."""
    configurations, fragments = _shipped(tree)
    root = Path(tree.srctree)
    bases = [defconfig.read_shipped(root, path) for path in configurations]
    for fragment in (defconfig.read_shipped(root, path) for path in fragments):
        for one in fragment.assignments:
            if one.text == "n" and find(tree, one.name) is None:
                yield f"{one.place}: {one.source}, which is not a symbol"
        for base in bases:
            for finding in StrictLoad(tree, base, fragment).finish().findings:
                if finding.file == fragment.name:
                    yield f"{finding} (on {base.name})"


RULES: list[Rule] = [
    help_for_everything_in_the_menu,
    numbers_have_range_and_default,
    strings_have_a_value_line_that_their_defaults_obey,
    settable_strings_have_a_default,
    strings_are_not_compared,
    nothing_of_the_machine,
    two_valued,
    defined_once,
    only_what_is_hidden_is_selected,
    choices_have_a_name_and_a_derived_symbol,
    plain_names,
    what_is_no_more_is_no_symbol,
]
FILE_RULES: list[Rule] = [
    files_have_an_opening_comment,
    no_configuration_has_the_name_of_a_fragment,
    configurations_hold_and_are_minimal,
    fragments_take_on_every_configuration,
]


def _prompted(tree: Any) -> list[Any]:
    return [item for item in tree.unique_defined_syms + tree.unique_choices if has_prompt(item)]


def _compared_strings(expr: Any) -> Iterator[Any]:
    if isinstance(expr, tuple):
        if expr[0] in kconfiglib.REL_TO_STR:
            yield from (side for side in expr[1:] if side.orig_type == kconfiglib.STRING and side.nodes)
        for part in expr[1:]:
            yield from _compared_strings(part)


def _shipped(tree: Any) -> tuple[list[Path], list[Path]]:
    """Return configurations and fragments of the tree itself, ignoring ANNEAL_CONFIG_PATH."""
    root = Path(tree.srctree)
    configurations, fragments = defconfig.available(root)
    return configurations, [path for path in fragments if path.parent == root / defconfig.FRAGMENTS]


def _name(tree: Any, path: Path) -> str:
    return str(path.relative_to(tree.srctree))


def machine_facts(tree: Any, text: str, *, name: str) -> list[Finding]:
    """Return findings for lines of `text` that hold on one machine or day only; `name` is the file's name."""
    import socket  # slow to import, and few commands need it

    host = socket.gethostname().split(".")[0]
    facts = {_ABSOLUTE: "has an absolute path; write it relative to the source tree", _DATE: "has a date"}
    if len(host) >= _MIN_HOST_NAME:
        facts[re.compile(rf"\b{re.escape(host)}\b")] = "has the name of this machine"
    findings = []
    for number, line in enumerate(text.splitlines(), 1):
        value = _free_text(tree, line)
        fault = next((fault for pattern, fault in facts.items() if pattern.search(value)), None)
        findings += [Finding(name, number, f"{line} {fault}")] if fault else []
    return findings


def _free_text(tree: Any, line: str) -> str:
    """Return a comment, or the value of a path or text; "" for other values, which are numbers or names."""
    match = re.fullmatch(r'CONFIG_(\w+)="(.*)"', line)
    if match is None:
        return line if line.startswith("#") else ""
    symbol = find(tree, match[1])
    rule = rule_of(symbol) if symbol is not None else None
    return "" if rule is not None and rule.kind not in ("path", "text") else kconfiglib.unescape(match[2])

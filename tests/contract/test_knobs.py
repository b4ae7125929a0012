"""No dead knobs: every symbol is read by some code, what code reads is defined, each explains itself."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import kconfiglib
import pytest

from lib.config import GROUPS, OF_PLUG_INS, Config
from lib.plugin_folders import symbols_of
from lib.plugins import DATASETS, MODELS, TASKS, Kind
from tests.contract import house_rules as rules
from tests.contract.house_rules import Module

ROOT = Path(__file__).resolve().parents[2]
KINDS: tuple[Kind, ...] = (MODELS, TASKS, DATASETS)


@functools.cache
def code() -> tuple[Module, ...]:
    return tuple(rules.modules_under(ROOT, "anneal", "lib", "models", "train", "scripts"))


@functools.cache
def kconfig() -> kconfiglib.Kconfig:
    return kconfiglib.Kconfig(str(ROOT / "Kconfig"), warn_to_stderr=False)


def config_fields() -> set[str]:
    """Names of the fields of Config and of its groups."""
    names = {field.name for kind in (Config, *GROUPS.values()) for field in dataclasses.fields(kind)}
    return names - GROUPS.keys()


def option_symbols(tree: kconfiglib.Kconfig) -> dict[Path, set[str]]:
    """Folder of a plug-in -> its own symbols, as kconfiglib has them, members of choices left out."""
    homes = {kind.home(name) for kind in KINDS for name in kind.names()}
    return {
        home: {
            symbol.name
            for symbol in tree.unique_defined_syms
            if symbol.choice is None
            and symbol.name.lower() not in config_fields()
            and any(  # else a capability
                node.filename == f"{home.relative_to(ROOT)}/Kconfig" and (node.prompt or node.help)
                for node in symbol.nodes
            )
        }
        for home in homes
    }


def home_of(module: Module, name: str) -> Module:
    """The module that a name comes from: an imported one, or `module` itself."""
    origin = next(
        (full.rpartition(".")[0] for _, full in rules.imports(module) if full.endswith(f".{name}")), None
    )
    return next((other for other in code() if other.name == origin), module)


def unread_fields(modules: list[Module], config: Module, fields: set[str]) -> set[str]:
    """Fields of Config that no code reads, directly or through a property that is read."""
    outside = {
        name for module in modules if module.path != config.path for name in rules.config_reads(module)
    }
    through = rules.own_reads(config)
    read = outside | {name for method, names in through.items() if method in outside for name in names}
    return fields - read


def dead_symbols(tree: kconfiglib.Kconfig, read: set[str]) -> set[str]:
    """Symbols that neither the code reads nor another symbol depends on, also by its `Neutral:` line."""
    helps = "\n".join(node.help or "" for symbol in tree.unique_defined_syms for node in symbol.nodes)
    read = read | set(re.findall(r"Neutral: .* unless (\w+)", helps))
    return {
        symbol.name
        for symbol in tree.unique_defined_syms
        if symbol.name not in read and not symbol._dependents
    }


def incomplete_choices(tree: kconfiglib.Kconfig) -> Iterator[str]:
    """The code reads one string, X, for the choice X_CHOICE; a member that X leaves out is a dead knob."""
    for choice in tree.unique_choices:
        derived = tree.syms.get((choice.name or "").removesuffix("_CHOICE"))
        conditions = [condition for _, condition in derived.defaults] if derived else []
        named = {symbol for condition in conditions for symbol in kconfiglib.expr_items(condition)}
        yield from (member.name for member in choice.syms if member not in named)


def unexplained(tree: kconfiglib.Kconfig) -> Iterator[str]:
    """Help on every prompt, range and default on every number, a Value: line on every string."""
    for item in [*tree.unique_defined_syms, *tree.unique_choices]:
        texts = [node.help or "" for node in item.nodes]
        is_prompted = any(node.prompt for node in item.nodes)
        if is_prompted and not any(texts):
            yield f"{item.name} has no help"
        if is_prompted and item.orig_type == kconfiglib.INT and not (item.ranges and item.defaults):
            yield f"{item.name} has no range or no default"
        if item.orig_type == kconfiglib.STRING and not any(text.startswith("Value: ") for text in texts):
            yield f"{item.name} has no Value: line"


@pytest.mark.slow
def test_every_field_of_the_configuration_is_read() -> None:
    config = next(module for module in code() if module.path == "lib/config.py")
    assert unread_fields(list(code()), config, config_fields()) == set()


def test_every_field_is_a_symbol() -> None:
    defined = {symbol.name for symbol in kconfig().unique_defined_syms}
    assert {name.upper() for name in config_fields()} - defined == {name.upper() for name in OF_PLUG_INS}


def test_every_symbol_is_read() -> None:
    """As a field of Config, as an option of its model, or as a condition within the Kconfig tree."""
    options = {name for names in option_symbols(kconfig()).values() for name in names}
    assert dead_symbols(kconfig(), {name.upper() for name in config_fields()} | options) == set()


@pytest.mark.slow
def test_options_of_a_plug_in_are_its_symbols() -> None:
    for home, symbols in option_symbols(kconfig()).items():
        folder = home.relative_to(ROOT).as_posix()
        files = {f"{folder}/{kind.file}.py" for kind in KINDS}
        module = next(module for module in code() if module.path in files)
        options = rules.fields_of(home_of(module, "Options"), class_name="Options")
        owned = {field: symbol for symbol, field in symbols_of(home).items()}
        assert {owned.get(name, name) for name in options} == symbols, f"{folder}: Options and Kconfig differ"


def test_every_choice_has_a_string_that_names_its_members() -> None:
    assert list(incomplete_choices(kconfig())) == []


def test_every_symbol_explains_itself() -> None:
    assert list(unexplained(kconfig())) == []


def test_an_unread_field_is_found() -> None:
    config = Module(
        "lib/config.py", "class Config:\n    def target(self):\n        return self.a or self.b\n"
    )
    reader = Module("train/x.py", "f(run.config.target, config.c, other.d)")
    assert unread_fields([config, reader], config, {"a", "b", "c", "d"}) == {"d"}


PLANTED = """
choice COLOUR_CHOICE
    prompt "Colour"

config COLOUR_RED
    bool "Red"
    help
      Red.

config COLOUR_BLUE
    bool "Blue"
    help
      Blue.

endchoice

config COLOUR
    string
    default "red" if COLOUR_RED
    help
      Name of the colour.

config SIZE
    int "Size"
    default 1
    help
      Size.

config HAS_HOLES
    bool

config HAS_LEGS
    bool

config LEGS
    int "Legs" if HAS_LEGS
    range 1 8
    default 4
"""


@pytest.fixture
def planted(tmp_path: Path) -> kconfiglib.Kconfig:
    (tmp_path / "Kconfig").write_text(PLANTED)
    return kconfiglib.Kconfig(str(tmp_path / "Kconfig"), warn_to_stderr=False)


def test_a_dead_symbol_is_found(planted: kconfiglib.Kconfig) -> None:
    assert dead_symbols(planted, {"COLOUR", "SIZE", "LEGS"}) == {"HAS_HOLES"}
    assert dead_symbols(planted, {"COLOUR", "SIZE", "HAS_HOLES"}) == {"LEGS"}


def test_a_choice_that_its_string_leaves_out_is_found(planted: kconfiglib.Kconfig) -> None:
    assert list(incomplete_choices(planted)) == ["COLOUR_BLUE"]


def test_a_symbol_that_does_not_explain_itself_is_found(planted: kconfiglib.Kconfig) -> None:
    assert sorted(unexplained(planted)) == [
        "COLOUR has no Value: line",
        "COLOUR_CHOICE has no help",
        "LEGS has no help",
        "SIZE has no range or no default",
    ]

"""Resolution of a configuration file and a command line into typed values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kconfiglib

from lib.errors import ConfigError, foremost
from lib.kconf import diagnostics, write
from lib.kconf.legacy import migrate
from lib.kconf.reader import Finding, Layer, command_line, read_file, read_text
from lib.kconf.spelling import expression
from lib.kconf.strict import StrictLoad, Verdict
from lib.kconf.tree import display, find, has_prompt, option, parsed_tree, shown
from lib.kconf.values import Value, neutral_line, rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A valid configuration, resolved for this process.

    values:  symbol (without prefix) -> bool, int, float, str or tuple by its type and `Value:` line; None if
        hidden and without a value. Choice members are omitted: the choice's string names the member.
    in_effect: the part of `values` that defines what is trained: symbols visible in this configuration and
        the strings of choices, without options at their `Neutral:` value.
    origins: symbol -> origin of its value, as from `origin`.
    given:   symbol, including choice members -> raw value set by a user, even if it is the default.
    text:    the full configuration; minimal: its minimal form (savedefconfig).
    notices: messages to print once: new options, changes by the command line.
    """

    values: Mapping[str, Value]
    in_effect: Mapping[str, Value]
    origins: Mapping[str, str]
    given: Mapping[str, str]
    text: str
    minimal: str
    notices: tuple[str, ...] = ()

    def requested(self) -> list[str]:
        """Return a line for each value set by a user, with its origin, in the order of the menu."""
        given = [(name, place) for name, place in self.origins.items() if is_given(place)]
        return [f"requested: {name} = {self.values[name]} ({place})" for name, place in given]

    def to_json(self) -> dict[str, Any]:
        """Return everything but the notices, which were printed."""
        mappings = ("values", "in_effect", "origins", "given")
        data = {name: dict(getattr(self, name)) for name in mappings}
        return {**data, "text": self.text, "minimal": self.minimal}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Resolved:
        """Make it from `to_json` data, also after JSON has turned tuples into lists."""
        typed = {kind: values_from_json(data[kind]) for kind in ("values", "in_effect")}
        return cls(**{**data, **typed})


def origin(configuration: StrictLoad, symbol: Any) -> str:
    """Return the origin of a value in a finished configuration.

    One of `file:line`, `command line`, `selected by CONFIG_X`, `default if CONFIG_X` or `default`. The string
    that names a choice's member (MODEL) has the origin of that member.
    """
    assignment = configuration.assigned(symbol.name)
    if assignment is not None and has_prompt(symbol):
        return assignment.place
    if selecting := diagnostics.selecting(symbol):
        return f"selected by {', '.join(option(one) for one in selecting)}"
    written = zip(symbol.defaults, symbol.orig_defaults, strict=True)
    active = (condition for (_, when), (_, condition) in written if kconfiglib.expr_value(when))
    condition = next(active, symbol.kconfig.y)  # as written
    if condition is symbol.kconfig.y:
        return "default"
    choice = condition.choice if isinstance(condition, kconfiglib.Symbol) else None
    if choice is None or choice.name != f"{symbol.name}_CHOICE":
        return f"default if {expression(condition)}"
    member = configuration.assigned(condition.name)
    return member.place if member is not None else "default"


def is_given(origin: str) -> bool:
    """True if a value with that origin was set by a user."""
    return origin != "default" and not origin.startswith(("default if ", "selected by "))


def values_from_json(values: Mapping[str, Any]) -> dict[str, Value]:
    """Restore typed values after JSON has turned tuples into lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def load(
    *,
    root: Path,
    config_file: Path,
    overrides: Mapping[str, str] = MappingProxyType({}),
    refresh: bool = False,
) -> Resolved:
    """Load `config_file` strictly against `root`/Kconfig, then apply `overrides`, which are never written.

    refresh: recompute promptless symbols that an older tree wrote, with a notice.
    overrides: `CONFIG_NAME` -> raw value, as on a command line (strings without quotes).
    Raises ConfigError with one finding (`file:line: reason`) for each assignment without effect.
    """
    with parsed_tree(root) as tree:
        configuration, notices = load_file(tree, config_file, refresh=refresh)
        return _resolved(configuration, notices + override(configuration, overrides))


def load_written(
    text: str,
    *,
    root: Path,
    overrides: Mapping[str, str] = MappingProxyType({}),
    places: Mapping[str, str] = MappingProxyType({}),
) -> Resolved:
    """Load a configuration written from the tree at `root` from its `text`, as `load` does.

    places: `CONFIG_NAME` -> place of its assignment (`file:line`), for the findings.
    """
    layer = read_text(text.encode(), name="the configuration")
    with parsed_tree(root) as tree:
        configuration, notices = _load_layer(tree, layer)
        return _resolved(configuration, notices + override(configuration, overrides, places=places))


def _resolved(configuration: StrictLoad, notices: Sequence[str]) -> Resolved:
    tree = configuration.tree
    symbols = [symbol for symbol in tree.unique_defined_syms if not symbol.choice]
    values = {symbol.name: typed_value(symbol) for symbol in symbols}
    in_effect = {symbol.name: values[symbol.name] for symbol in symbols if _in_effect(symbol)}
    settable = [symbol for symbol in tree.unique_defined_syms if has_prompt(symbol)]
    given = {symbol.name: symbol.str_value for symbol in settable if configuration.assigned(symbol.name)}
    return Resolved(
        values=MappingProxyType(values),
        in_effect=MappingProxyType(in_effect),
        origins=MappingProxyType({symbol.name: origin(configuration, symbol) for symbol in symbols}),
        given=MappingProxyType(given),
        text=write.full_text(tree, sources=configuration.sources),
        minimal=write.minimal_text(tree),
        notices=tuple(dict.fromkeys(notices)),
    )


def load_file(
    tree: Any, config_file: Path, *, refresh: bool = False, notice_new: bool = True
) -> tuple[StrictLoad, list[str]]:
    """Load the configuration in `config_file` into `tree`; also returns its notices.

    A full file written by a tool names every symbol; those at their default are left unset, so that they
    follow it. With `refresh`, outdated values of symbols without a prompt in such a file are recomputed; with
    `notice_new` a notice names options that such a file, written by an older tree, does not mention. Raises
    ConfigError for a file that is missing or has a fault.
    """
    if not config_file.exists():
        raise ConfigError(
            f"there is no configuration at {display(config_file)}",
            todo="use make defconfig-NAME (make list-defconfigs shows the names) or make menuconfig",
        )
    layer = read_own(Path(tree.srctree), config_file)
    configuration, notices = _load_layer(tree, layer, refresh=refresh, notice_new=notice_new)
    if not layer.assignments:
        notices.append(f"{layer.name} assigns nothing: every option has its default")
    return configuration, notices


def override(
    configuration: StrictLoad,
    given: Mapping[str, str],
    *,
    place: str = "command line",
    places: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Apply the NAME=value words `given` (raw values) on top; returns the notices. Raises ConfigError."""
    if not given:
        return []
    tree = configuration.tree
    before = settings(tree)
    layer = migrate(command_line(given, place=place, places=places), Path(tree.srctree))
    configuration.add(layer)
    notices = accept(configuration, "nothing was changed").notices
    _, followers = changes(before, {assignment.name for assignment in layer.assignments})
    return [*notices, *([f"{place}: defaults that follow: {', '.join(followers)}"] if followers else [])]


def read_own(root: Path, path: Path) -> Layer:
    """Read the configuration file `path`, with old symbols migrated by the tree at `root`."""
    return migrate(read_file(path), root)


def load_valid_lines(tree: Any, config_file: Path) -> StrictLoad:
    """Load the valid lines of a file whose faults were reported."""
    configuration = StrictLoad(tree, read_own(Path(tree.srctree), config_file))
    _release(configuration)
    return configuration


def load_text(tree: Any, text: str) -> StrictLoad:
    """Load a configuration that was written from `tree` itself."""
    return _load_layer(tree, read_text(text.encode(), name="memory"))[0]


def accept(configuration: StrictLoad, todo: str) -> Verdict:
    """Return the verdict. Raises ConfigError with its findings, ending in `todo`, if there are any."""
    verdict = configuration.finish()
    if verdict.findings:
        raise rejection(verdict.findings, todo, notices=configuration.layer_notices)
    return verdict


def rejection(
    findings: Sequence[Finding],
    todo: str,
    *,
    notices: Sequence[str] = (),
    where: str = "in the configuration",
) -> ConfigError:
    """Return the error that reports `findings`, after the `notices` that help to find them."""
    count = f"{len(findings)} faults" if len(findings) > 1 else "1 fault"
    lines = foremost([f"note: {notice}" for notice in notices], "notes")
    lines += foremost([str(finding) for finding in findings], "faults")
    return ConfigError(f"{count} {where}", todo=todo, findings=lines)


def typed_value(symbol: Any) -> Value:
    """Return the value of `symbol` by its type and `Value:` line; None if it is hidden and has none.

    Raises ConfigError where a default of the Kconfig files violates its own `Value:` line.
    """
    if symbol.orig_type == kconfiglib.BOOL:
        return bool(symbol.tri_value)
    text: str = symbol.str_value
    if not text and not symbol.visibility:
        return None
    if symbol.orig_type in (kconfiglib.INT, kconfiglib.HEX):
        return int(text, 16 if symbol.orig_type == kconfiglib.HEX else 10) if text else None
    rule = rule_of(symbol)
    if rule is None:
        return text
    try:
        return rule.parse(text)
    except ValueError as error:
        place = f"{symbol.nodes[0].filename}:{symbol.nodes[0].linenr}"
        raise ConfigError(f"{place}: the default {shown(symbol, text)} {error}") from error


def _in_effect(symbol: Any) -> bool:
    """True if `symbol` belongs to `Resolved.in_effect`."""
    if symbol.orig_type == kconfiglib.BOOL:
        # A promptless bool follows from others; a hidden "n" belongs to another model.
        counts = has_prompt(symbol) and bool(symbol.visibility or symbol.tri_value)
    else:
        counts = typed_value(symbol) is not None
    return counts and symbol.str_value != neutral_line(symbol)


def _load_layer(
    tree: Any, layer: Layer, *, refresh: bool = False, notice_new: bool = False
) -> tuple[StrictLoad, list[str]]:
    configuration = StrictLoad(tree, layer)
    if refresh:
        configuration.refresh_derived()
    notices = list(accept(configuration, "nothing was changed").notices)
    if configuration.is_by_tool(layer):
        new = [shown(symbol, symbol.str_value) for symbol in new_symbols(tree, layer)] if notice_new else []
        many = f"{len(new)} new options take their defaults"
        what = many if len(new) > 1 else "a new option takes its default"
        if new:
            notices.append(f"{layer.name}: {what}: {', '.join(new)} (make olddefconfig writes this down)")
        _release(configuration)
    return configuration, notices


def _release(configuration: StrictLoad) -> None:
    minimal = read_text(write.minimal_text(configuration.tree).encode(), name="minimal")
    before = write.full_text(configuration.tree)
    configuration.release_defaults({assignment.name for assignment in minimal.assignments})
    same = write.full_text(configuration.tree) == before
    assert same, "the minimal configuration does not reproduce the full one"


def _is_setting(symbol: Any) -> bool:
    return has_prompt(symbol) and not symbol.choice and bool(symbol.visibility)


def mentioned(tree: Any, layer: Layer) -> set[str]:
    """Return names of symbols that a file mentions; any choice member mentions all members."""
    named = {assignment.name for assignment in layer.assignments}
    choices = {symbol.choice for name in named if (symbol := find(tree, name)) is not None}
    return named | {member.name for choice in choices - {None} for member in choice.syms}


def new_symbols(tree: Any, layer: Layer) -> list[Any]:
    """Return visible options of `tree` that the file does not mention; for a new choice its member."""
    named = mentioned(tree, layer)
    return [
        symbol
        for symbol in tree.unique_defined_syms
        if symbol.name not in named and symbol.config_string and has_prompt(symbol)
        if _is_setting(symbol) or (symbol.choice and symbol.tri_value)
    ]


def settings(tree: Any) -> dict[Any, str]:
    """Return visible options with their values: symbols, and choices with the name of their member."""
    choices = [choice for choice in tree.unique_choices if has_prompt(choice) and choice.visibility]
    symbols = [symbol for symbol in tree.unique_defined_syms if _is_setting(symbol)]
    return {item: _setting(item) for item in [*choices, *symbols]}


def changes(before: Mapping[Any, str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return `NAME old -> new` for settings in `before` that changed and are still visible.

    First those that `names` (without prefix) has, also by a choice member, then the others.
    """
    named, others = list[str](), list[str]()
    for item, value in before.items():
        if item.visibility and _setting(item) != value:
            is_symbol = isinstance(item, kconfiglib.Symbol)
            symbols = [item] if is_symbol else item.syms
            group = named if any(symbol.name in names for symbol in symbols) else others
            name = option(item) if is_symbol else item.name or "a choice"
            group.append(f"{name} {value} -> {_setting(item)}")
    return named, others


def _setting(item: Any) -> str:
    if isinstance(item, kconfiglib.Symbol):
        return str(item.str_value)
    return option(item.selection) if item.selection else "nothing"

"""Strict application of assignments to a Kconfig tree: each one takes effect or is a finding.

Layers (files, then the command line) are added in order; a later one overrides an earlier one. An assignment
must hold in the final state, with all layers applied. One that held in its own layer and only lost its
dependencies to a later one is a notice: the later layer won.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lib.errors import MAX_LINES_SHOWN
from lib.kconf import diagnostics, spelling
from lib.kconf.legacy import read_legacy
from lib.kconf.reader import Assignment, Finding, Layer, shipped_assignments
from lib.kconf.tree import find, has_prompt, is_logical, option, shown
from lib.units import setting


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of all layers: faults in the order of their lines, and notices."""

    findings: tuple[Finding, ...]
    notices: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Entry:
    """A well-spelled assignment in force."""

    symbol: Any
    value: str
    assignment: Assignment
    layer: Layer
    held: bool = False  # in its own layer


@dataclass(slots=True)
class _Problem:
    text: str
    hidden: bool = False
    derived: bool = False  # it follows from the state of other symbols


class StrictLoad:
    """Configuration under construction in `tree`, whose previous values are discarded.

    refuse_replacing: a later file that contradicts an earlier one is a finding, not a notice.
    """

    def __init__(self, tree: Any, *layers: Layer, refuse_replacing: bool = False) -> None:
        self.tree, self.refuse_replacing = tree, refuse_replacing
        self._entries: dict[str, _Entry] = {}
        self._layers: list[Layer] = []
        # Findings that are dropped if a tool wrote the line and it matches the tree.
        self._faults: list[tuple[Layer, Assignment, str]] = []
        self._findings: list[Finding] = []
        self._unknown = 0
        self._notices: list[str] = []
        self._contradictory: set[Layer] = set()  # layers that contradict themselves
        tree.warn = False  # kconfiglib's warnings are replaced by the checks here
        tree.unset_values()
        for layer in layers:
            self.add(layer)

    def add(self, layer: Layer) -> None:
        """Apply the assignments of `layer` on top of earlier layers."""
        self._layers.append(layer)
        self._findings += layer.faults
        self._notices += layer.notices
        fresh = self._read(layer)
        self._find_contradictions(layer)
        for entry in fresh:
            self._replace_earlier(entry)
            self._entries[entry.symbol.name] = entry
            _assign(entry)
        by_tool = functools.cache(self.is_by_tool)  # it may scan all options
        for entry in self._entries.values():
            if entry.layer is layer:
                entry.held = _problem(entry) is None or (by_tool(layer) and _is_harmless(entry))

    def finish(self) -> Verdict:
        """Check every assignment against the final state. May be called again after more layers."""
        by_tool = functools.cache(self.is_by_tool)  # it may scan all options
        findings = list(self._findings)
        notices = list(self._notices)
        for layer, assignment, text in self._faults:
            if not (by_tool(layer) and _is_as_written(assignment, self.tree.syms[assignment.name])):
                findings.append(assignment.finding(text))
        for entry in self._entries.values():
            problem = _problem(entry)
            if problem is None or (by_tool(entry.layer) and _is_harmless(entry)):
                continue
            if entry.layer in self._contradictory and problem.derived:
                continue  # it depends on the contradiction, which is a finding already
            # A value that held and lost its dependencies to a later layer is reported at its original place.
            lost = problem.hidden and (entry.held or (by_tool(entry.layer) and self._was_overruled(entry)))
            at = self._original(entry) if lost else entry.assignment
            if lost and not self.refuse_replacing:
                notices.append(f"{at.place}: {problem.text}")
            else:
                text = problem.text + self._advice(entry, problem, by_tool(entry.layer))
                findings.append(at.finding(text))
        order = {layer.name: index for index, layer in enumerate(self._layers)}
        findings.sort(key=lambda finding: (order.get(finding.file, 0), finding.line))
        return Verdict(tuple(findings), tuple(dict.fromkeys(notices)))

    def release_defaults(self, keep: Collection[str]) -> None:
        """Discard every assignment except those to the symbols in `keep` (without prefix).

        A full configuration names every symbol. Those at their default can then follow when a later layer
        changes their dependencies.
        """
        self._entries = {name: entry for name, entry in self._entries.items() if name in keep}
        self.tree.unset_values()
        for entry in self._entries.values():
            _assign(entry)

    def refresh_derived(self) -> None:
        """Discard outdated values that a tool wrote for symbols without a prompt, each with a notice."""
        for name, entry in list(self._entries.items()):
            if has_prompt(entry.symbol) or not self.is_by_tool(entry.layer):
                continue
            del self._entries[name]
            if not _is_as_written(entry.assignment, entry.symbol):
                now = shown(entry.symbol, entry.symbol.str_value)
                self._notices.append(f"{entry.assignment.place}: {entry.assignment.source} is now {now}")

    def assigned(self, name: str) -> Assignment | None:
        """Return the assignment in force to the symbol `name` (without prefix), at its original place.

        A line of a full configuration that is unchanged from one of the files it was made from is placed in
        that file; a changed line is placed in the full configuration.
        """
        entry = self._entries.get(name)
        return self._original(entry) if entry is not None else None

    @property
    def sources(self) -> tuple[str, ...]:
        """Shipped files (relative to the source tree) that this was composed of."""
        return tuple(dict.fromkeys(name for layer in self._layers for name in layer.sources))

    @property
    def layer_notices(self) -> tuple[str, ...]:
        """Notices of the layers themselves, such as on renamed symbols."""
        return tuple(dict.fromkeys(notice for layer in self._layers for notice in layer.notices))

    def _read(self, layer: Layer) -> list[_Entry]:
        """Return the well-spelled assignments to defined symbols; the others become faults."""
        entries, absent = [], []
        for assignment in layer.assignments:
            symbol = find(self.tree, assignment.name)
            if symbol is None and assignment.text == "n" and not layer.command_line:
                absent.append(assignment)  # may come from another branch; an undefined symbol is off anyway
                continue
            if symbol is None:
                if not layer.command_line:
                    from lib.kconf.external import check_forgotten  # after an error only

                    check_forgotten(layer.made_with, assignment.file)
                self._unknown += 1
                # Finding likely names is slow, and findings beyond MAX_LINES_SHOWN are only counted.
                near = self._unknown <= MAX_LINES_SHOWN
                text = diagnostics.unknown_symbol(self.tree, assignment.name, assignment.text, near=near)
                self._findings.append(assignment.finding(text))
                continue
            try:
                value = spelling.read_value(symbol, assignment)
            except spelling.Misspelled as error:
                text = str(error)
                if not has_prompt(symbol):
                    why = diagnostics.no_prompt(symbol) + diagnostics.instead(symbol, assignment.text)
                    text = f"{option(symbol)} cannot be set: {why}"
                self._faults.append((layer, assignment, text))
                continue
            entries.append(_Entry(symbol, value, assignment, layer))
        if absent:
            text = diagnostics.absent_symbols(self.tree, absent, near=not layer.by_tool)
            self._notices.append(text + " (make olddefconfig removes this)" * layer.by_tool)
        return entries

    def _was_overruled(self, entry: _Entry) -> bool:
        return read_legacy(Path(self.tree.srctree)).was_overruled(entry.symbol.name)

    def _find_contradictions(self, layer: Layer) -> None:
        """Find symbols with two values and choices with two members within one layer."""
        values: dict[str, Assignment] = {}
        members: dict[int, Assignment] = {}
        for assignment in layer.assignments:
            symbol = find(self.tree, assignment.name)
            if symbol is None:
                continue
            name, texts = option(symbol), []
            first = values.setdefault(assignment.name, assignment)
            if first.text != assignment.text:
                texts.append(f"{name} is set to {assignment.text}, but {first.place} sets it to {first.text}")
            if symbol.choice and assignment.text == "y":
                first = members.setdefault(id(symbol.choice), assignment)
                if first.name != assignment.name:
                    other = f"{self.tree.config_prefix}{first.name}=y ({first.place})"
                    texts.append(f"{name}=y, but the choice already has {other}; keep one")
            if texts:
                self._findings += [assignment.finding(text) for text in texts]
                self._contradictory.add(layer)

    def _replace_earlier(self, entry: _Entry) -> None:
        """Drop earlier assignments to the same symbol or choice; between files that is a notice."""
        earlier = self._entries.pop(entry.symbol.name, None)
        if earlier is not None and earlier.value != entry.value:
            self._note_replaced(entry, earlier)
        members = entry.symbol.choice.syms if entry.symbol.choice and entry.value == "y" else ()
        for member in members:
            other = self._entries.get(member.name)
            if other is not None and other.value == "y":
                del self._entries[member.name]
                self._note_replaced(entry, other)

    def _original(self, entry: _Entry) -> Assignment:
        shipped = shipped_assignments(entry.layer, Path(self.tree.srctree))
        return shipped.get((entry.assignment.name, entry.assignment.text), entry.assignment)

    def _note_replaced(self, entry: _Entry, earlier: _Entry) -> None:
        # Overriding files is the purpose of a command line; within one file it is a contradiction.
        if entry.layer.command_line or entry.layer is earlier.layer:
            return
        now, before = shown(entry.symbol, entry.value), shown(earlier.symbol, earlier.value)
        text = f"{now} replaces {before} of {self._original(earlier).place}"
        if self.refuse_replacing:
            self._findings.append(entry.assignment.finding(text))
        else:
            self._notices.append(f"{entry.assignment.place}: {text}")

    def is_by_tool(self, layer: Layer) -> bool:
        """True if a tool wrote the file, judged by its header or its completeness.

        Complete means at least half of the names of a full file, since kconfiglib writes no header. Such a
        file also assigns symbols without a prompt.
        """
        if layer.by_tool or layer.command_line:
            return layer.by_tool
        assigned = {assignment.name for assignment in layer.assignments}
        every = (symbol.name for symbol in self.tree.unique_defined_syms if symbol.config_string)
        # Beyond this many names the file has less than half, so short files need only a short scan.
        written = list(islice(every, 2 * len(assigned) + 1))
        return 2 * sum(name in assigned for name in written) >= max(1, len(written))

    def _advice(self, entry: _Entry, problem: _Problem, by_tool: bool) -> str:
        if by_tool and not has_prompt(entry.symbol):
            return "; remove the line or run make olddefconfig"
        if not has_prompt(entry.symbol):
            return diagnostics.instead(entry.symbol, entry.value)
        on_top = entry.layer.command_line and problem.hidden
        words = diagnostics.remedy(entry.symbol) if on_top else None
        own = setting(option(entry.symbol), entry.assignment.text)
        return f"; give {' '.join([*words, own])}" if words else ""


def _assign(entry: _Entry) -> None:
    symbol = entry.symbol
    if symbol.choice and entry.value != "n":
        symbol.choice.set_value(entry.value)  # members set the mode of an optional or tristate choice
    accepted = symbol.set_value(entry.value)
    assert accepted, f"{entry.assignment.place}: kconfiglib does not take {entry.value!r}"


def _is_as_written(assignment: Assignment, symbol: Any) -> bool:
    """True if the line is exactly what writing the configuration would produce for the symbol."""
    return bool(assignment.line) and assignment.source == symbol.config_string.rstrip("\n")


def _is_harmless(entry: _Entry) -> bool:
    """True if an assignment written by a tool loses nothing: the tree has that value anyway."""
    hidden_alike = not entry.symbol.visibility and entry.symbol.str_value == entry.value
    return _is_as_written(entry.assignment, entry.symbol) or hidden_alike or _is_named(entry)


def _is_named(entry: _Entry) -> bool:
    """True if the choice is invisible and its string (X of X_CHOICE) names the member anyway."""
    symbol, choice = entry.symbol, entry.symbol.choice
    if choice is None or choice.visibility or entry.value != "y":
        return False
    derived = find(symbol.kconfig, (choice.name or "").removesuffix("_CHOICE"))
    if derived is None:
        return False
    names = [value.str_value for value, when in derived.defaults if symbol in diagnostics.items_in(when)]
    return derived.str_value in names


def _problem(entry: _Entry) -> _Problem | None:
    """Return why the assignment has no effect in the current state; None if it has."""
    symbol, value = entry.symbol, entry.value
    if not has_prompt(symbol):
        now = "" if symbol.str_value == value else f" (now {symbol.str_value or 'without a value'})"
        return _Problem(f"{option(symbol)} cannot be set{now}: {diagnostics.no_prompt(symbol)}", derived=True)
    if not symbol.visibility:
        text = f"{_shown_as_written(entry)} has no effect: it {diagnostics.unmet(symbol)}"
        return _Problem(text, hidden=True, derived=True)
    if fault := spelling.range_fault(symbol, value):
        return _Problem(fault)
    if symbol.str_value != value:
        return _Problem(diagnostics.not_taken(symbol, value), derived=True)
    return None


def _shown_as_written(entry: _Entry) -> str:
    if is_logical(entry.symbol) and entry.value == "n" and entry.assignment.source.startswith("#"):
        return f"'{entry.assignment.source}'"
    return shown(entry.symbol, entry.value)

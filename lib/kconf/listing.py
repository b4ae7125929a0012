"""Commands that read configurations: check, list, explain, compare; also files of any Kconfig tree."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, foremost
from lib.kconf import defconfig, diagnostics, spelling, write
from lib.kconf.project import (
    Command,
    Project,
    from_environment,
    given_overrides,
    refusals,
    report_notices,
    report_origins,
)
from lib.kconf.reader import Assignment, Finding, read_file, read_text
from lib.kconf.resolve import accept, load_file, new_symbols, override, read_own, rejection
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import display, find, load_own_tree, load_tree, shown

RUN_CONFIG = "config"  # file name of the configuration in a run directory


def _checkconfig(project: Project, options: Namespace) -> None:
    file = options.file
    if file is None:
        from_environment(project.root, report_stray=False)
        file = project.config_file
    else:
        layer = read_own(project.root, file)
        configuration = StrictLoad(load_own_tree(project.root), layer)
        report_notices(accept(configuration, "see above").notices)
        report_notices(override(configuration, given_overrides(os.environ)))
        if not layer.assignments:
            report_notices([f"{layer.name} assigns nothing: every option has its default"])
    print(f"{display(file)}: ok")
    if project.verbose:
        report_origins(project.root, file)


def _list_defconfigs(project: Project, _: Namespace) -> None:
    bases, fragments = defconfig.available(project.root)
    width = max((len(path.name) for path in bases + fragments), default=0)
    for title, paths in (
        ("Configurations (make defconfig-NAME)", bases),
        ("Fragments (make defconfig-NAME+FRAGMENT)", fragments),
    ):
        if paths:
            print(f"{title}:")
        for path in paths:
            print(f"  {path.name:<{width}}  {defconfig.summary(path)}".rstrip())


def _listnewconfig(project: Project, options: Namespace) -> None:
    """List options that the configuration does not mention, with default or (helpnewconfig) help."""
    tree = load_own_tree(project.root)
    load_file(tree, project.config_file, refresh=True)
    new = new_symbols(tree, read_own(project.root, project.config_file))
    for index, symbol in enumerate(new):
        if options.command == "listnewconfig":
            print(shown(symbol, symbol.str_value))
            continue
        item = symbol.choice or symbol
        node = next(node for node in item.nodes if node.prompt)
        blank = "\n" if index else ""
        print(f"{blank}{shown(symbol, symbol.str_value)}\n{node.prompt[0]}\n\n{(node.help or '').rstrip()}")


def _explain(project: Project, options: Namespace) -> None:
    """Describe the option `symbol`, or (searchconfig) list those that match `words`."""
    from lib.kconf.explain import explain, search

    configuration = _present(project)
    if options.command == "searchconfig":
        lines = search(configuration.tree, options.words)
    else:
        lines = explain(configuration, options.symbol)
    for line in lines:
        print(line)


def _present(project: Project) -> StrictLoad:
    """Load the configuration, or the defaults where there is none, with make's CONFIG_ variables."""
    tree = load_own_tree(project.root)
    if project.config_file.exists():
        configuration, notices = load_file(tree, project.config_file)
    else:
        configuration = StrictLoad(tree)
        notices = [f"there is no {display(project.config_file)}: these are the defaults"]
    report_notices(dict.fromkeys([*notices, *override(configuration, given_overrides(os.environ))]))
    return configuration


def _diffconfig(project: Project, options: Namespace) -> None:
    old, new = options.a or f"{project.config_file}.old", options.b or str(project.config_file)
    for place, given, variable in ((old, options.a, "A"), (new, options.b, "B")):
        if not given and not Path(place).exists():
            what = f"there is no configuration at {display(Path(place))}"
            raise ConfigError(what, todo=f"give {variable}=")
    for line in _differences(load_own_tree(project.root), old, new):
        print(line)


def _differences(tree: Any, old: str, new: str) -> Iterator[str]:
    """Yield lines `-NAME value`, `+NAME value` and ` NAME value -> value`, in the order of the menu.

    old, new: a file, a run directory, or the name of a shipped configuration, also with fragments. Choice
    members are omitted, since the string of the choice names them. Raises ConfigError.
    """
    before, after = _assignments(tree, old), _assignments(tree, new)
    order = {symbol.name: index for index, symbol in enumerate(tree.unique_defined_syms)}
    for name in sorted(before.keys() | after.keys(), key=lambda one: (order.get(one, len(order)), one)):
        symbol, one, other = find(tree, name), before.get(name), after.get(name)
        if one == other or (symbol is not None and symbol.choice):
            continue
        if one is not None and other is not None:
            yield f" {name} {one} -> {other}"
        else:
            yield f"-{name} {one}" if other is None else f"+{name} {other}"


def _assignments(tree: Any, place: str) -> dict[str, str]:
    """Return symbol -> right-hand side for every value in the full configuration of `place`."""
    path = Path(place)
    if path.is_dir():
        path = path / RUN_CONFIG
    if path.is_file():
        layer = read_own(Path(tree.srctree), path)
        if layer.faults:
            raise rejection(layer.faults, "nothing was compared")
        configuration = StrictLoad(tree, layer)
        # A full file is compared as it is, even if the Kconfig files have changed since.
        if not configuration.is_by_tool(layer):
            accept(configuration, "nothing was compared")
            layer = read_text(write.full_text(tree).encode(), name=place)
    elif "/" in place or place.startswith("."):
        raise ConfigError(f"{place} is neither a configuration nor the directory of a run")
    else:
        defconfig.compose(tree, place)
        layer = read_text(write.full_text(tree).encode(), name=place)
    return {assignment.name: assignment.text for assignment in layer.assignments}


def _kconfig_docs(project: Project, _: Namespace) -> None:
    from lib.kconf.explain import PAGE, reference

    path = project.root / PAGE
    text = reference(project.root)
    with refusals(path):
        changed = write.write_atomically(path, text)
    print(f"{display(path)}: {'written' if changed else 'is up to date'}")


def _kconfig_lint(project: Project, _: Namespace) -> None:
    from lib.kconf.lint import lint

    if findings := lint(project.root):
        raise ConfigError(f"{len(findings)} violations of the lint rules", findings=findings)
    print("the Kconfig files, configurations and fragments follow the lint rules")


def check_files(options: Namespace) -> int:
    """Print lost assignments to stdout, one per line; with V=1 also those whose value holds anyway.

    options: kconfig, srctree, prefix and files of the command line. Returns the exit status: 2 for losses.
    """
    verbose = "1" in (os.environ.get("V"), os.environ.get("KCONFIG_VERBOSE"))
    tree = load_tree(options.kconfig, srctree=options.srctree, prefix=options.prefix, inside=True)
    lost = held = 0
    for path in options.files:
        losses, others = judge(tree, path)
        lost, held = lost + len(losses), held + len(others)
        lines = [*map(str, losses)]
        for line in lines if verbose else foremost(lines, f"faults in {display(path)}"):
            print(line)
        for finding in others if verbose else ():
            report_notices([f"{finding} (it is so anyway)"])
    if held:
        seen = "" if verbose else " (V=1 shows them)"
        counts = f"lines that are lost or wrong: {lost}; others of which the value is so anyway: {held}"
        report_notices([f"{counts}{seen}"])
    return 2 if lost else 0


def judge(tree: Any, path: Path) -> tuple[list[Finding], list[Finding]]:
    """Return the findings of a file: lines that are lost or misspelled, and lines whose value holds anyway.

    The reference is the state that kconfiglib, the usual tool of such trees, computes from the file. A lost
    line without another finding is reported with the value that replaced it.
    """
    layer = read_file(path, prefix=tree.config_prefix)
    findings = list(StrictLoad(tree, layer).finish().findings)
    reported = {finding.line for finding in findings}
    if layer.assignments:
        tree.load_config(str(path.absolute()))
    held = set()
    for one in layer.assignments:
        symbol = find(tree, one.name)
        value, now = _value(symbol, one), symbol.str_value if symbol else "n"
        if value == now:
            held.add(one.line)
        if one.line in reported or value is None:
            continue
        if symbol is None:
            findings.append(one.finding(diagnostics.unknown_symbol(tree, one.name, value, near=False)))
        elif value != now:
            findings.append(one.finding(f"{one.source} does not take: it is {shown(symbol, now)}"))
    findings.sort(key=lambda finding: finding.line)
    lost = [finding for finding in findings if finding.line not in held]
    return lost, [finding for finding in findings if finding.line in held]


def _value(symbol: Any | None, assignment: Assignment) -> str | None:
    """Return the value that the line assigns; None where it is misspelled."""
    if symbol is None:
        return assignment.text
    try:
        return spelling.read_value(symbol, assignment)
    except spelling.Misspelled:
        return None


COMMANDS: Mapping[str, Command] = {
    "checkconfig": (_checkconfig, "check the configuration, or FILE"),
    "list-defconfigs": (_list_defconfigs, "shipped configurations and fragments"),
    "listnewconfig": (_listnewconfig, "options that the configuration does not mention"),
    "helpnewconfig": (_listnewconfig, "the same, with their help"),
    "explain": (_explain, "all about one option"),
    "searchconfig": (_explain, "find options"),
    "diffconfig": (_diffconfig, "compare files, shipped configurations or runs"),
    "kconfig-docs": (_kconfig_docs, "write docs/options.md"),
    "kconfig-lint": (
        _kconfig_lint,
        "check Kconfig files, configurations and fragments against the lint rules",
    ),
}

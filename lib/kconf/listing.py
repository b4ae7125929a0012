"""Commands that read configurations and change none."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from lib.errors import ConfigError
from lib.kconf import defconfig, write
from lib.kconf.project import Command, Project, load_environment, refusals, tell, tell_origins
from lib.kconf.resolve import accept, load_file, new_symbols, override, read_own
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import display, load_own_tree, shown
from lib.kconf.variables import given_overrides


def _checkconfig(project: Project, options: Namespace) -> None:
    file = options.file
    if file is None:
        load_environment(project.root)
        file = project.config_file
    else:
        layer = read_own(project.root, file)
        configuration = StrictLoad(load_own_tree(project.root))
        configuration.add(layer)
        tell(accept(configuration, "see above").notices)
        tell(override(configuration, given_overrides(os.environ)))
        tell([] if layer.assignments else [f"{layer.name} assigns nothing: every option has its default"])
    print(f"{display(file)}: ok")
    if project.verbose:
        tell_origins(project.root, file)


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
    from lib.kconf.explain import explain

    for line in explain(_present(project), options.symbol):
        print(line)


def _searchconfig(project: Project, options: Namespace) -> None:
    from lib.kconf.explain import search

    for line in search(_present(project).tree, options.words):
        print(line)


def _present(project: Project) -> StrictLoad:
    """Load the configuration, or the defaults where there is none, with make's CONFIG_ variables."""
    tree = load_own_tree(project.root)
    if project.config_file.exists():
        configuration, notices = load_file(tree, project.config_file)
    else:
        configuration = StrictLoad(tree)
        notices = [f"there is no {display(project.config_file)}: these are the defaults"]
    tell(dict.fromkeys([*notices, *override(configuration, given_overrides(os.environ))]))
    return configuration


def _diffconfig(project: Project, options: Namespace) -> None:
    from lib.kconf.diff import differences

    old, new = options.a or f"{project.config_file}.old", options.b or str(project.config_file)
    for place, given, variable in ((old, options.a, "A"), (new, options.b, "B")):
        if not given and not Path(place).exists():
            raise ConfigError(
                f"there is no configuration at {display(Path(place))}", todo=f"give {variable}="
            )
    for line in differences(project.root, old, new):
        print(line)


def _kconfig_docs(project: Project, _: Namespace) -> None:
    from lib.kconf.document import FILE, reference

    path = project.root / FILE
    text = reference(project.root)
    with refusals(path):
        changed = write.write_atomically(path, text)
    print(f"{display(path)}: {'written' if changed else 'is up to date'}")


def _kconfig_lint(project: Project, _: Namespace) -> None:
    from lib.kconf.lint import lint

    findings = lint(project.root)
    if findings:
        raise ConfigError(f"{len(findings)} breaches of the rules of the house", findings=findings)
    print("the Kconfig files, configurations and fragments are as they should be")


COMMANDS: Mapping[str, Command] = {
    "checkconfig": _checkconfig,
    "list-defconfigs": _list_defconfigs,
    "listnewconfig": _listnewconfig,
    "helpnewconfig": _listnewconfig,
    "explain": _explain,
    "searchconfig": _searchconfig,
    "diffconfig": _diffconfig,
    "kconfig-docs": _kconfig_docs,
    "kconfig-lint": _kconfig_lint,
}

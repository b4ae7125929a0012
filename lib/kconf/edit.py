"""Commands that write a configuration."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from lib.errors import ConfigError
from lib.kconf import defconfig, write
from lib.kconf.extremes import KINDS, make_extreme, probability_of, seed_of
from lib.kconf.legacy import read_legacy
from lib.kconf.project import Command, Project, refusals, report_notices, write_file
from lib.kconf.resolve import accept, changes, load_file, mentioned, override, read_own, rejection, settings
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import display, load_own_tree, option


def _menu(project: Project, options: Namespace) -> None:
    from lib.kconf import menu  # the only commands that need curses or tkinter

    run = menu.run_menu if options.command in ("menuconfig", "nconfig") else menu.run_window
    run(project.root, project.config_file, command=options.command)


def _config(project: Project, options: Namespace) -> None:
    """Ask for every option, or (oldconfig) for those that the file does not mention."""
    from lib.kconf.ask import Dialogue

    known: set[str] = set()
    if project.config_file.exists():
        configuration = project.load(refresh=True, notice_new=False)
        if options.command == "oldconfig":
            known = mentioned(configuration.tree, read_own(project.root, project.config_file))
    else:
        configuration = StrictLoad(load_own_tree(project.root))
    if not Dialogue(tree=configuration.tree, known=known).run():
        print("there is nothing new to ask for")
    project.save(configuration, changed="written", same="is up to date")


def _olddefconfig(project: Project, _: Namespace) -> None:
    if project.config_file.exists():
        configuration = project.load(refresh=True)
    else:
        configuration = StrictLoad(load_own_tree(project.root))
        report_notices([f"there was no {display(project.config_file)}: every option has its default"])
    project.save(configuration, changed="brought up to date", same="is up to date")


def _syncconfig(project: Project, _: Namespace) -> None:
    """Run olddefconfig quietly, and write include/config/auto.conf and a timestamp file per option."""
    configuration = project.load(refresh=True)
    text = write.full_text(configuration.tree, sources=configuration.sources)
    unchanged = project.config_file.read_bytes() == text.encode()
    if os.environ.get("KCONFIG_NOSILENTUPDATE") and not unchanged:
        raise ConfigError(
            f"{display(project.config_file)} is not up to date, and KCONFIG_NOSILENTUPDATE is set",
            todo="run make olddefconfig",
        )
    write_file(project.config_file, text, keep_old=True)
    directory = project.output / "include" / "config"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        configuration.tree.sync_deps(str(directory))
    except OSError as error:
        raise ConfigError(f"cannot write {display(directory)}", why=error.strerror or str(error)) from error


def _extreme(project: Project, options: Namespace) -> None:
    command, drawn = options.command, dict[str, int]()
    if command == "randconfig":
        drawn = {"percent": probability_of(os.environ), "seed": seed_of(os.environ)}
        print(f"KCONFIG_SEED=0x{drawn['seed']:X}")
    configuration, notices = make_extreme(load_own_tree(project.root), command, os.environ, **drawn)
    report_notices(notices)
    project.save(configuration, changed=f"written by {command}", same=f"already as {command} has it")


def _defconfig(project: Project, options: Namespace) -> None:
    if options.name is None:
        if options.fragments or options.strict:
            todo = "give DEFCONFIG=NAME"
            raise ConfigError("FRAGMENT= and STRICT= apply on top of a configuration", todo=todo)
        report_notices(["no DEFCONFIG= is given: every option has its default"])
        options.command = "alldefconfig"
        _extreme(project, options)
        return
    more = [Path(word) for word in _words("FRAGMENT", options.fragments)]
    tree = load_own_tree(project.root)
    configuration, notices = defconfig.compose(tree, options.name, more=more, strict=options.strict)
    report_notices(notices)
    base, *fragments = defconfig.parts_of(options.name)
    path = Path(base) if defconfig.is_file(base) else defconfig.path_of(project.root, base)  # or EXTERNAL='s
    name = " + ".join(["+".join([display(path), *fragments]), *map(str, more)])
    project.save(configuration, changed=f"written from {name}", same=f"already as {name}")


def _merge(project: Project, options: Namespace) -> None:
    """Merge fragments on top of the current configuration."""
    found = [defconfig.find_fragment(project.root, name) for name in options.names]
    paths = [*(Path(word) for word in _words("FRAGMENT", options.fragments)), *found]
    if not paths:
        raise ConfigError("no fragment is named", todo="give FRAGMENT=FILE, or make NAME.config")
    tree = load_own_tree(project.root)
    configuration, notices = load_file(tree, project.config_file)
    notices += defconfig.hidden(project.root, found)
    configuration.refuse_replacing = options.strict
    for path in paths:
        configuration.add(defconfig.read_shipped(project.root, path))
    notices += accept(configuration, "nothing was changed").notices
    report_notices(dict.fromkeys(notices))
    names = ", ".join(display(path) for path in paths)
    project.save(configuration, changed=f"merged with {names}", same=f"already has {names}")


def _savedefconfig(project: Project, options: Namespace) -> None:
    from lib.kconf.lint import machine_facts

    tree = project.load().tree
    if options.name and options.file:
        raise ConfigError("FILE= and DEFCONFIG= both name a file", todo="give one of them")
    name, target = options.name, options.file or project.output / "defconfig"
    if os.path.realpath(target.parent) == os.path.realpath(project.root / defconfig.DIRECTORY):
        name = target.name  # the directory may have another name
    if name:
        target = defconfig.path_of(project.root, name)
    text = defconfig.opening_comment(target) + write.minimal_text(tree)
    findings = machine_facts(tree, text, name=display(target))
    if findings and name:
        why = "a shipped configuration must hold on every machine"
        raise rejection(findings, f"{why}; no configuration was written")
    report_notices(map(str, findings))
    changed = write_file(target, text)
    print(f"{display(target)}: {'written' if changed else 'unchanged'}")


def _update_defconfigs(project: Project, _: Namespace) -> None:
    """Rewrite every shipped configuration in minimal form; all are read before the first is written."""
    tree = load_own_tree(project.root)
    texts: dict[Path, str] = {}
    for path in defconfig.available(project.root)[0]:
        report_notices(defconfig.compose(tree, path.name)[1])
        texts[path] = defconfig.opening_comment(path) + write.minimal_text(tree)
    for path, text in texts.items():  # none is written if one is refused
        with refusals(path):
            write.would_change(path, text)
    for path, text in texts.items():
        changed = write_file(path, text)
        print(f"{display(path)}: {'written anew' if changed else 'unchanged'}")


def _setconfig(project: Project, options: Namespace) -> None:
    given = _assignments(options.assignments)
    tree = load_own_tree(project.root)
    configuration, notices = load_file(tree, project.config_file)
    before, legacy = settings(tree), read_legacy(project.root)
    report_notices(dict.fromkeys([*notices, *override(configuration, given, place="SET")]))
    names = dict.fromkeys(legacy.present(name.removeprefix("CONFIG_")) for name in given)
    named, _ = changes(before, names)
    new = (symbol for symbol in (tree.syms[name] for name in names) if symbol not in before)  # hidden so far
    # A choice that was visible is among the changes.
    named += [f"{option(symbol)} {symbol.str_value}" for symbol in new if symbol.choice not in before]
    project.save(configuration, changed="written", same="already has that", differences=named)


def _assignments(text: str) -> dict[str, str]:
    """Parse the words of SET=: NAME=value, with or without the prefix, quoted as in a shell."""
    given: dict[str, str] = {}
    for word in _words("SET", text):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"SET: '{word}' is not NAME=value", todo='write SET="NAME=value NAME=value"')
        full = name if name.startswith("CONFIG_") else f"CONFIG_{name}"
        if given.setdefault(full, value) != value:
            raise ConfigError(f"SET: {full} is given twice, as {given[full]} and as {value}")
    if not given:
        raise ConfigError("nothing is to be set", todo='write make setconfig SET="NAME=value NAME=value"')
    return given


def _words(variable: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{variable}: {text} cannot be read", why=str(error).lower()) from error


# Commands that change the configuration, and commands that change shipped ones.
OF_CONFIGURATION: Mapping[str, Command] = {
    "menuconfig": (_menu, "edit the configuration in a terminal"),
    "nconfig": (_menu, "the same"),
    "guiconfig": (_menu, "edit the configuration in a window"),
    "xconfig": (_menu, "the same"),
    "config": (_config, "ask for every option"),
    "oldconfig": (_config, "ask for the options that the configuration does not mention"),
    "olddefconfig": (_olddefconfig, "bring the configuration up to date with the Kconfig files"),
    "syncconfig": (_syncconfig, "olddefconfig, and include/config/auto.conf"),
    **dict.fromkeys(KINDS, (_extreme, "a whole configuration by rule")),
    "defconfig": (_defconfig, "start from a shipped configuration, or from all defaults"),
    "merge": (_merge, "put fragments on top of the configuration"),
    "setconfig": (_setconfig, "set options in the configuration"),
}
OF_SHIPPED: Mapping[str, Command] = {
    "savedefconfig": (_savedefconfig, "write the minimal form"),
    "update-defconfigs": (_update_defconfigs, "write every shipped configuration in its minimal form"),
}

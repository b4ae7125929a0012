"""Random configurations: files of tools always load, and lost assignments are always reported."""

from __future__ import annotations

import random
import re
from pathlib import Path

import kconfiglib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.kconf import load, write
from lib.kconf.reader import read_text
from lib.kconf.resolve import load_file, typed_value
from lib.kconf.strict import StrictLoad, Verdict
from lib.kconf.tree import load_own_tree, load_tree
from tests.fixtures.kconf.trees import set_randomly, write_station_tree

ROOT = Path(__file__).resolve().parents[3]
SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def station(tmp_path_factory):
    """Two instances of the foreign tree: one to write with, one to load into."""
    directory = tmp_path_factory.mktemp("station")
    write_station_tree(directory)
    return load_tree("Kconfig", srctree=directory), load_tree("Kconfig", srctree=directory)


@pytest.fixture(scope="module")
def own():
    return load_own_tree(ROOT), load_own_tree(ROOT)


def judge(tree, text: str) -> Verdict:
    configuration = StrictLoad(tree)
    configuration.add(read_text(text.encode(), name="file"))
    return configuration.finish()


def values(tree) -> dict[str, str]:
    return {symbol.name: symbol.str_value for symbol in tree.unique_defined_syms}


def as_kconfiglib_writes(tree, directory: Path) -> tuple[str, str]:
    tree.write_config(str(directory / "full"), save_old=False)
    tree.write_min_config(str(directory / "minimal"))
    return (directory / "full").read_text(), (directory / "minimal").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("which", ["station", "own"])
def test_what_kconfiglib_writes_is_clean_and_reproduces_every_symbol(which, request, tmp_path_factory):
    writer, reader = request.getfixturevalue(which)
    directory = tmp_path_factory.mktemp("written")
    changed: set[str] = set()
    writer.unset_values()
    defaults = values(writer)

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(SEEDS)
    def check(seed: int) -> None:
        set_randomly(writer, seed)
        wanted = values(writer)
        changed.update(name for name in wanted if wanted[name] != defaults[name])
        for text in as_kconfiglib_writes(writer, directory):
            assert judge(reader, text).findings == ()
            assert values(reader) == wanted

    check()
    assert len(changed) > 0.7 * len(defaults)  # the configurations were not all alike


@pytest.mark.slow
def test_every_configuration_of_our_own_survives_its_file(own, tmp_path):
    tree, reader = own
    file = tmp_path / "config"

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(SEEDS)
    def check(seed: int) -> None:
        set_randomly(tree, seed)
        wanted = {
            symbol.name: typed_value(symbol) for symbol in tree.unique_defined_syms if not symbol.choice
        }
        full, minimal = write.full_text(tree), write.minimal_text(tree)
        for text in (full, minimal):
            file.write_text(text)
            _, notices = load_file(reader, file)
            assert notices == []
            assert {name: typed_value(reader.syms[name]) for name in wanted} == wanted
            assert (write.full_text(reader), write.minimal_text(reader)) == (full, minimal)

    check()
    resolved = load(root=ROOT, config_file=file)
    assert (resolved.text, resolved.minimal) == (write.full_text(tree), write.minimal_text(tree))


SET = re.compile(r"CONFIG_([^=]+)=(.*)")
UNSET = re.compile(r"# CONFIG_([^ ]+) is not set")


def requested(text: str) -> list[tuple[str, str]]:
    """Symbol and value of each line as kconfiglib would read it; ("", line) for what it would skip."""
    found = []
    for line in text.split("\n"):
        match, unset = SET.match(line), UNSET.match(line)
        if match:
            value = match[2]
            string = re.match(r'"((?:[^\\"]|\\.)*)"', value)
            found.append((match[1], kconfiglib.unescape(string[1]) if string else value))
        elif unset:
            found.append((unset[1], "n"))
        elif line and not line.lstrip().startswith("#"):
            found.append(("", line))
    return found


def some_assignment_is_lost(tree, text: str, directory: Path) -> bool:
    """Judged from outside: load with kconfiglib itself, and compare what was requested with the result."""
    file = directory / "mutated"
    file.write_text(text)
    tree.load_config(str(file))
    for name, value in requested(text):
        symbol = tree.syms.get(name)
        if symbol is None or not symbol.nodes or symbol.str_value != value:
            return True
    return False


def mutate(text: str, source: random.Random) -> str:
    lines = text.split("\n")
    for _ in range(source.randint(1, 3)):
        index = source.choice([i for i, line in enumerate(lines) if SET.match(line) or UNSET.match(line)])
        name = (SET.match(lines[index]) or UNSET.match(lines[index]))[1]  # type: ignore[index]
        value = source.choice(
            ["y", "n", "m", "0", "7", "-3", "99999", "0x5", "0x999", '"x"', '"', "", "y # no"]
        )
        lines[index] = source.choice(
            [
                f"CONFIG_{name}={value}",
                f"# CONFIG_{name} is not set",
                f"CONFIG_{name}X={value}",
                f"CONFIG_{name} = {value}",
                f" CONFIG_{name}={value}",
                "",
                f"{lines[index]}\nCONFIG_{name}={value}",
            ]
        )
    return "\n".join(lines)


@pytest.mark.slow
def test_whatever_is_lost_is_told(station, tmp_path):
    tree, reader = station
    lost = 0

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(SEEDS)
    def check(seed: int) -> None:
        nonlocal lost
        set_randomly(tree, seed)
        text = mutate(as_kconfiglib_writes(tree, tmp_path)[seed % 2], random.Random(seed))
        if some_assignment_is_lost(tree, text, tmp_path):
            lost += 1
            assert judge(reader, text).findings

    check()
    assert lost > 100

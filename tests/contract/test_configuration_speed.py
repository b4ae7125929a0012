"""Configuration commands are immediate: each is held to a number of function calls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from lib.kconf.cli import COMMANDS
from tests.support.work import calls_of_program

ROOT = Path(__file__).resolve().parents[2]
ON_THIS_TREE_CALLS = 380_000
ON_A_LARGE_TREE_CALLS = 1_000_000
# For developers: of every shipped configuration, and every fragment on each.
OF_DEVELOPERS = {"update-defconfigs": 1_000_000, "kconfig-lint": 1_500_000}
LARGE = 700  # symbols

# Without a terminal or a display these end at once, and so do questions without answers.
COMMAND_LINES = {
    **{name: [] for name in COMMANDS},
    "defconfig": ["one"],
    "merge": ["debug"],
    "savedefconfig": ["minimal"],
    "setconfig": ["SET_IN_TEST"],
    "diffconfig": ["-a", "one", "-b", "one+debug"],
    "explain": ["SYMBOL"],
    "searchconfig": ["batch"],
}
# One of those that call the same function, which are all tried on a large tree.
FIRST_OF = {command: name for name, (command, _) in reversed(COMMANDS.items())}
STATUS_2 = {"menuconfig", "nconfig", "guiconfig", "xconfig", "config"}

SECTION = """
menu "Section {n}"

config S{n}
    bool "Section {n}"
    default y
    help
      Text.

config S{n}_RATE
    int "Rate"
    depends on S{n}
    range 1 {top}
    default {n}
    help
      Text.

config S{n}_FACTOR
    string "Factor"
    depends on S{n} && !S{other}_SLOW
    default "0.5" if S{other}
    default "1"
    help
      Value: float, 0 < x <= 8

config S{n}_SLOW
    bool "Slow batch"
    help
      Text.

choice S{n}_KIND_CHOICE
    prompt "Kind"
    depends on S{n}
    help
      Text.

config S{n}_KIND_A
    bool "A"

config S{n}_KIND_B
    bool "B"

endchoice

config S{n}_KIND
    string
    default "a" if S{n}_KIND_A
    default "b" if S{n}_KIND_B
    help
      Value: text

endmenu
"""


def too_slow(
    root: Path, notes: Path, names: Iterable[str], *, symbol: str, assignment: str, bar: int
) -> dict[str, int]:
    """Command -> its function calls, where they are more than `bar` (OF_DEVELOPERS has own bars).

    Each is called in the tree at `root` with a configuration.
    """
    subprocess.run([sys.executable, "scripts/kconf.py", "alldefconfig"], cwd=root, check=True)
    found = {}
    for name in names:
        special = {"SYMBOL": symbol, "SET_IN_TEST": assignment}
        words = [special.get(word, word) for word in COMMAND_LINES[name]]
        count, status = calls_of_program("scripts/kconf.py", name, *words, cwd=root, notes=notes)
        if name != "kconfig-lint":  # what it finds in a made-up tree is not what is measured
            assert status == (2 if name in STATUS_2 else 0), name
        if count > max(bar, OF_DEVELOPERS.get(name, 0)):
            found[name] = count
    return found


@pytest.mark.slow
def test_every_command_is_immediate_on_this_tree(tree: Path, tmp_path: Path) -> None:
    (tree / "defconfigs" / "one").write_text("# One.\nCONFIG_EMA=y\n")
    names = FIRST_OF.values()
    found = too_slow(tree, tmp_path, names, symbol="MOMENTUM", assignment="EMA=y", bar=ON_THIS_TREE_CALLS)
    assert found == {}


@pytest.mark.long
def test_every_command_is_quick_on_a_large_tree(tree: Path, tmp_path: Path) -> None:
    sections = range(1, LARGE // 7 + 1)
    text = "".join(SECTION.format(n=n, other=n - 1 or len(sections), top=n + 9) for n in sections)
    (tree / "Kconfig").write_text(f'mainmenu "Large"\n{text}')
    (tree / "Kconfig.legacy").unlink()
    (tree / "docs" / "options.md").unlink()
    for path in (tree / "defconfigs").rglob("*"):
        if path.is_file():
            path.unlink()
    for n in range(10):
        (tree / "defconfigs" / ("one" if n == 0 else f"more-{n}")).write_text("# One.\nCONFIG_S1_SLOW=y\n")
    for name in ("debug", "tiny"):
        (tree / "defconfigs" / "fragments" / name).write_text("# One.\nCONFIG_S2_SLOW=y\n")
    given = {"symbol": "S3_FACTOR", "assignment": "S5_RATE=7", "bar": ON_A_LARGE_TREE_CALLS}
    found = too_slow(tree, tmp_path, COMMAND_LINES, **given)
    assert found == {}

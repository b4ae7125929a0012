"""Configuration commands are immediate: processor time, for other programs may run beside the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lib.kconf.front import COMMANDS
from tests.support.machine import processor_seconds

ROOT = Path(__file__).resolve().parents[2]
ON_THIS_TREE_SECONDS = 0.15
ON_A_LARGE_TREE_SECONDS = 0.5
LINT_SECONDS = 0.5  # a developer's: every fragment on every configuration
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


def too_slow(root: Path, *, symbol: str, assignment: str, bar: float) -> dict[str, float]:
    """Command -> seconds on the machine of the bars, where they are more than `bar` (LINT_SECONDS for lint).

    Each is called in the tree at `root` with a configuration.
    """
    subprocess.run([sys.executable, "scripts/kconf.py", "alldefconfig"], cwd=root, check=True)
    found = {}
    for name, arguments in COMMAND_LINES.items():
        words = [{"SYMBOL": symbol, "SET_IN_TEST": assignment}.get(word, word) for word in arguments]
        allowed = LINT_SECONDS if name == "kconfig-lint" else bar
        command = [sys.executable, "scripts/kconf.py", name, *words]
        seconds, status = processor_seconds(command, cwd=root, bar=allowed)
        if name != "kconfig-lint":  # what it finds in a made-up tree is not what is measured
            assert status == (2 if name in STATUS_2 else 0), name
        if seconds > allowed:
            found[name] = seconds
    return found


@pytest.mark.slow
def test_every_command_is_immediate_on_this_tree(tree: Path) -> None:
    (tree / "defconfigs" / "one").write_text("# One.\nCONFIG_EMA=y\n")
    assert too_slow(tree, symbol="MOMENTUM", assignment="EMA=y", bar=ON_THIS_TREE_SECONDS) == {}


@pytest.mark.slow
def test_every_command_is_quick_on_a_large_tree(tree: Path) -> None:
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
    assert too_slow(tree, symbol="S3_FACTOR", assignment="S5_RATE=7", bar=ON_A_LARGE_TREE_SECONDS) == {}

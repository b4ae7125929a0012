"""Write the table of rooms in docs/architecture.md, from the docstrings and imports of the tree.

python -m scripts.architecture          writes it
python -m scripts.architecture check    exits with 1 where the page has another one
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from lib.errors import ToolkitError, run_main

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: python -m scripts.architecture -->", "<!-- end of rooms -->"
# Modules of lib that belong to no package: the ground, which all import, and the doors.
GROUND = ("errors", "atomic", "units", "rng")
TREES = ("anneal", "lib", "models", "train", "scripts")


def main() -> int:
    """Write the table of rooms into docs/architecture.md, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", nargs="?", choices=("write", "check"), default="write")
    action = parser.parse_args().action
    written = PAGE.read_text(encoding="utf-8")
    before, rest = written.split(BEGIN)
    _, after = rest.split(END)
    page = f"{before}{BEGIN}\n{table()}{END}{after}"
    if action == "write":
        PAGE.write_text(page, encoding="utf-8")
    elif page != written:
        todo = "run python -m scripts.architecture"
        raise ToolkitError("docs/architecture.md has not the rooms of the tree", todo=todo)
    return 0


def table() -> str:
    """Return a Markdown table: each room after those that it imports, its purpose, and which those are."""
    wanted = imports_of_rooms()
    rows = ["| room | what lives there | imports |", "|---|---|---|"]
    done: set[str] = set()
    while len(done) < len(wanted):
        ready = sorted(room for room in wanted if room not in done and wanted[room] <= done)
        if not ready:
            raise ToolkitError(f"rooms import each other: {', '.join(sorted(set(wanted) - done))}")
        for room in ready:
            # What another import brings along anyway is left out, so that the arrows can be followed.
            direct = wanted[room].difference(*(wanted[via] for via in wanted[room]))
            rows.append(f"| `{room}` | {purpose(room)} | {', '.join(sorted(direct))} |")
        done |= set(ready)
    return "\n".join(rows) + "\n"


def imports_of_rooms() -> dict[str, set[str]]:
    """Return for each room the rooms that its modules import, at the top or in a function.

    The ground is left out: every room imports it.
    """
    found: dict[str, set[str]] = {}
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            room = room_of(".".join(parts))
            if room is not None:
                others = {other for name in _imported(path) if (other := room_of(name)) is not None}
                found.setdefault(room, set()).update(others - {room})
    return found


def room_of(name: str) -> str | None:
    """Return the room of a module by its dotted name; None for the ground and for what is not of the tree."""
    tree, *rest = name.split(".")
    if tree not in TREES or (tree == "lib" and (not rest or rest[0] in (*GROUND, "__init__"))):
        return None
    if tree != "lib":
        return tree
    return f"lib/{rest[0]}" + ("" if (ROOT / "lib" / rest[0]).is_dir() else ".py")


def purpose(room: str) -> str:
    """Return the first line of a room's docstring."""
    path = ROOT / room
    text = (path if path.suffix else path / "__init__.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring is not None, f"{room} has no docstring"
    return docstring.splitlines()[0]


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    sys.exit(run_main(main))

"""Put small faults into a copy of the tree, one at a time, and see whether the tests catch them.

mutations.toml lists them: `at` is a function by the name of its module and its own, `old` a text that it has
once, `new` what replaces it. Of the tests that import the module, those nearest to it run.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.errors import ToolkitError, run_main

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
TREES = ("anneal", "lib", "models", "train", "scripts")
COMMON = ("__init__", "base", "command", "data", "model", "spec", "task", "types")  # names of many files
PYTEST = ("-o", "addopts=", "-xqrfE", "--tb=no", "-m", "not long and not slurm")  # old trees have no "long"
FAILED = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", re.MULTILINE)


def main() -> int:
    """Print a row for each fault. Exit status 1 if one survives."""
    table, caught = read_table(TABLE), list[str]()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", default="HEAD", help="commit to try")
    parser.add_argument("--only", action="append", choices=[*table], metavar="NAME", help="repeatable")
    parser.add_argument("--files", type=int, default=3, help="test files to run for each fault")
    parser.add_argument("--seconds", type=int, default=120, help="limit for each fault")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="anneal-mutations-") as folder:
        copy = extract(options.tree, Path(folder))
        for name in options.only or table:
            verdict, found = "not in this tree", located(copy, table[name])
            if found is not None:
                file, source, fault = found
                tests = nearest_tests(copy, file, fault["at"])[: options.files]
                before = file.read_text(encoding="utf-8")
                _put(file, before.replace(source, source.replace(fault["old"], fault["new"])))
                verdict = first_failure(copy, tests, seconds=options.seconds) or "survived"
                _put(file, before)
            caught += [verdict] if "::" in verdict else []
            print(f"| {name} | `{table[name][0]['at']}` | {verdict} |", flush=True)
        print(f"{len(caught)} caught")
        # What also fails without a fault has caught nothing.
        if failed := first_failure(copy, sorted(set(caught)), seconds=0):
            raise ToolkitError(f"{failed} fails without a fault, too")
    return int(len(caught) < len(options.only or table))


def read_table(file: Path) -> dict[str, list[dict[str, str]]]:
    """Return each fault by its name: as it is now, and in older trees."""
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: [row, row | row.pop("before", {})] for name, row in rows.items()}


def extract(commit: str, folder: Path) -> Path:
    """Write the tree of `commit` into `folder`; return its root. Raises ToolkitError without the commit."""
    archive = ["git", "archive", f"--output={folder / 'tree.tar'}", commit]
    done = subprocess.run(archive, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ToolkitError(f"git has no tree {commit}", why=done.stderr.partition("\n")[0])
    shutil.unpack_archive(folder / "tree.tar", folder / "tree", filter="data")
    return folder / "tree"


@functools.cache
def modules(root: Path, *trees: str) -> dict[str, Path]:
    """Return dotted name -> file of the modules below `trees`."""
    files = (file for tree in trees for file in sorted((root / tree).rglob("*.py")))
    names = {".".join(file.relative_to(root).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


def located(root: Path, forms: Sequence[Mapping[str, str]]) -> tuple[Path, str, Mapping[str, str]] | None:
    """Return file, source of the function and form of a fault, of the first form that fits one function."""
    for fault in forms:
        found = [
            (file, source, fault)
            for module, file in modules(root, *TREES).items()
            if file.stem in fault["at"].split(".")
            for name, source in functions(module, file.read_text(encoding="utf-8"))
            if f".{name}".endswith(f".{fault['at']}") and source.count(fault["old"]) == 1
        ]
        if len(found) == 1:
            return found[0]
    return None


@functools.cache
def functions(module: str, text: str) -> list[tuple[str, str]]:
    """Return the dotted name and the source of each function and class of a module."""
    lines, found = text.splitlines(keepends=True), list[tuple[str, str]]()
    waiting: list[tuple[str, ast.AST]] = [(module, ast.parse(text))]
    for name, parent in waiting:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.append((f"{name}.{node.name}", "".join(lines[node.lineno - 1 : node.end_lineno])))
                waiting.append((f"{name}.{node.name}", node))
    return found


def nearest_tests(root: Path, file: Path, at: str) -> list[str]:
    """Return the tests that import a module or its importers: called like it first, then the nearest."""
    known, imports, steps = modules(root, *TREES, "tests"), _imports(root), dict[str, int]()
    word = file.parent.name if file.stem in COMMON else file.stem
    edge = {name for name in known if known[name] == file}
    while edge:
        steps |= dict.fromkeys(edge, len(set(steps.values())))
        edge = {name for name, wanted in imports.items() if name not in steps and wanted & edge}
    ranked = []
    for name in (name for name in steps if known[name].name.startswith("test_")):
        mentions = known[name].read_text(encoding="utf-8").count(at.rpartition(".")[2])
        alike = word not in name, f"{file.parent.name}." not in name and f"_{file.parent.name}" not in name
        ranked.append((".e2e." in name, *alike, steps[name], -mentions, str(known[name])))
    return [entry[-1] for entry in sorted(ranked)]


@functools.cache
def _imports(root: Path) -> dict[str, set[str]]:
    """Return what each module imports, or has as a text, as after python -m."""
    found: dict[str, set[str]] = {}
    for name, file in modules(root, *TREES, "tests").items():
        own = found.setdefault(name, set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                own.update((base[:-1], *(base + alias.name for alias in node.names)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                own.update((node.value, f"{node.value}.__main__"))
    return found


def _put(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):  # it is matched by size and whole seconds
        compiled.unlink()


def first_failure(root: Path, tests: Sequence[str], *, seconds: int) -> str:
    """Run `tests` in `root` for at most `seconds` (0: any); return the first that fails; "" if none does."""
    command = ["nice", "timeout", str(seconds), sys.executable, "-m", "pytest", *PYTEST, *tests]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True) if tests else None
    if done is None or done.returncode in (0, 5):  # 5: there is no such test
        return ""
    failed = FAILED.search(done.stdout)
    return failed[1] if failed else f"no verdict: status {done.returncode}"


if __name__ == "__main__":
    sys.exit(run_main(main))

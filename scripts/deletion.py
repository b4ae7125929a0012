"""Delete an experiment from a copy of the tree and see that the rest works: `make test-deletion`.

    python -m scripts.deletion [NAME ...] [--quick]

What belongs to an experiment are its folders, the tests that mirror them, and what is marked with its name:
of a page or a table the lines from "plugin: NAME" to "/plugin", or the whole page where that comes first.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from lib.errors import ConfigError, ToolkitError, meant, run_main

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "trm": (
        "models/trm",
        "train/tasks/recursive",
        "lib/data/datasets/sudoku",
        "scripts/bench/tasks/recursive.py",
        "defconfigs/trm-*",
        "defconfigs/sweeps/trm-*",
        "docs/benchmarks/curves/trm-*",
    ),
    "latentwire": (
        "models/latentwire",
        "train/tasks/bridge",
        "lib/data/datasets/question_answering",
        "defconfigs/latentwire-*",
    ),
    "looped": ("models/looped", "scripts/eqprop", "defconfigs/looped"),
}
SHOWN_LINES = 300  # of what fails
MARKED = ("*.md", "Makefile", "scripts/targets")
# Everything is imported, and every shipped configuration is read and typed.
IMPORTS = """
import importlib, pathlib
from lib import kconf
from lib.config import config_from_values
root = pathlib.Path.cwd()
packages = ("anneal", "lib", "models", "train", "scripts")
for file in sorted(file for package in packages for file in root.glob(package + "/**/*.py")):
    if file.name == "__main__.py":
        continue
    try:
        importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in packages:
            raise  # an extra, which is not installed, is no fault of the tree
for path in sorted(root.glob("defconfigs/*")):
    if path.is_file():
        config_from_values(kconf.load(root=root, config_file=path).values)
"""
QUICK: dict[str, tuple[str, ...]] = {
    "docs/options.md is written": ("scripts/kconf.py", "kconfig-docs"),
    "the table of rooms is written": ("-m", "scripts.architecture"),
    "everything is imported and configured": ("-c", IMPORTS),
    "Kconfig files and configurations": ("scripts/kconf.py", "kconfig-lint"),
}
WHOLE: dict[str, tuple[str, ...]] = {
    "types": ("-m", "mypy"),
    "documents": (
        *("-m", "pytest", "tests/contract/test_readme.py", "-k"),
        "test_what_a_document_names_exists and not CHANGELOG",  # which tells of what was
    ),
    "tests": ("-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow"),
}


def main() -> int:
    """Exit status 1 where something fails without an experiment; the end of its output is shown.

    Raises ConfigError for a name that is not in EXPERIMENTS.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="import and configure only")
    options = parser.parse_args()
    for name in set(options.names) - set(EXPERIMENTS):
        raise ConfigError(f"no experiment is called {name!r}", todo=meant(name, EXPERIMENTS))
    failed = 0
    for name in options.names or EXPERIMENTS:
        with tempfile.TemporaryDirectory(prefix="anneal-deletion-") as folder:
            copy = copy_without(name, Path(folder) / "tree")
            for done, seconds, output in check(copy, QUICK if options.quick else {**QUICK, **WHOLE}):
                print(f"without {name}: {done} ({seconds:.0f} s)", flush=True)
                if output:
                    print("\n".join(output.splitlines()[-SHOWN_LINES:]), file=sys.stderr)
                    failed += 1
    return int(failed > 0)


def copy_without(name: str, destination: Path) -> Path:
    """Copy the files of the tree that git knows, or may know, but for those of experiment `name`.

    Raises ToolkitError where the tree is no git checkout, or a mark has no end.
    """
    gone = [re.compile(pattern) for pattern in patterns(name)]
    for file in files():
        if (ROOT / file).is_file() and not any(pattern.fullmatch(file) for pattern in gone):
            target = destination / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target)
    for place in MARKED:
        for path in destination.rglob(place):
            drop_marked(path, name)
    (destination / "docs" / "options.md").unlink()  # it would not let symbols vanish
    if (ROOT / ".mypy_cache").is_dir():  # most files are the same
        shutil.copytree(ROOT / ".mypy_cache", destination / ".mypy_cache")
    return destination


def files() -> list[str]:
    """Names of all files of the tree, but for what git ignores. Raises ToolkitError without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ToolkitError("the tree is not a git checkout", why=done.stderr.strip().partition("\n")[0])
    return sorted(set(done.stdout.splitlines()))


def patterns(name: str) -> Iterator[str]:
    """Regular expressions of the files of experiment `name`: its own, and the tests that mirror them."""
    for place in EXPERIMENTS[name]:
        path = PurePosixPath(place)
        test = path.parent / f"test_{path.name}" if path.suffix else path
        for one in (path, "tests" / test):
            yield re.escape(str(one)).replace(r"\*", "[^/]*") + "(/.*)?"
    yield rf"tests/golden/{name}[^/]*\.json"


def drop_marked(path: Path, name: str) -> None:
    """Delete from the file at `path` what is marked as of experiment `name`, or the file if it begins so."""
    kept, dropping = list[str](), False
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        begins = re.fullmatch(rf"\W*plugin: {name}\W*\n", line) is not None
        if begins and not number:
            path.unlink()
            return
        if dropping and begins:
            raise ToolkitError(f"{path.name}:{number + 1}: the mark before has no end")
        dropping = dropping or begins
        if not dropping:
            kept.append(line)
        elif re.fullmatch(r"\W*/plugin\W*\n", line):
            dropping = False
    if dropping:
        raise ToolkitError(f"{path.name}: the mark of {name} has no end")
    if len(kept) < len(lines):
        path.write_text("".join(kept), encoding="utf-8")


def check(copy: Path, checks: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, float, str]]:
    """Make each of `checks` in `copy`; yield its name, its seconds, and its output where it fails."""
    for name, arguments in checks.items():
        started = time.monotonic()
        done = subprocess.run([sys.executable, *arguments], cwd=copy, capture_output=True, text=True)
        failure = (done.stdout + done.stderr or f"status {done.returncode}") if done.returncode else ""
        yield f"{name}{': FAILED' if failure else ''}", time.monotonic() - started, failure


if __name__ == "__main__":
    sys.exit(run_main(main))

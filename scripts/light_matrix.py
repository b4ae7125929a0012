"""make test-light: the tests of the configuration layer on every supported Python and kconfiglib.

Each pair gets an environment of its own under build/light, with kconfiglib and what the tests need, and no
torch. A missing interpreter is reported and is not a failure.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from lib.errors import ToolkitError, run_main

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
KCONFIGLIBS = ("14.1.0", "14.1.1a4")
NEEDED = ("pytest", "hypothesis", "pyyaml")
TESTS = (
    "tests/lib/test_atomic.py",
    "tests/lib/test_config.py",
    "tests/lib/test_errors.py",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "lib" / "kconf").glob("test_*.py")),
)


def main() -> int:
    """Run the tests in every environment. Raises ToolkitError if they fail in one."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    failed = []
    for version in PYTHONS:
        if (python := find_python(version)) is None:
            print(f"Python {version}: missing; install it, for example with pyenv install {version}")
            continue
        for kconfiglib in KCONFIGLIBS:
            name = f"Python {version}, kconfiglib {kconfiglib}"
            failure = run_tests(environment(python, version, kconfiglib))
            print(f"{name}: {failure or 'ok'}", flush=True)
            failed += [name] if failure else []
    if failed:
        raise ToolkitError(f"the tests of the configuration layer fail on {'; '.join(failed)}")
    return 0


def find_python(version: str) -> Path | None:
    """Return an interpreter of that version: this one, one on PATH, or pyenv's newest."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    if found := shutil.which(f"python{version}"):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        answer = subprocess.run([found, "-c", code], capture_output=True, text=True).stdout
        if answer.strip() == version:  # pyenv puts shims on PATH that only print an error
            return Path(found)
    versions = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    numbered = {path.parts[-3].rpartition(".")[2]: path for path in versions}
    newest = max((number for number in numbered if number.isdecimal()), key=int, default="")
    return numbered.get(newest)


def environment(python: Path, version: str, kconfiglib: str) -> Path:
    """Return the interpreter of the environment for this pair, created if it is missing."""
    directory = ROOT / "build" / "light" / f"{version}-{kconfiglib}"
    own, done = directory / "bin" / "python", directory / ".done"
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        call(python, "-m", "venv", str(directory))
        call(own, "-m", "pip", "install", "--quiet", f"kconfiglib=={kconfiglib}", *NEEDED)
        done.touch()
    return own


def call(*command: str | Path) -> None:
    """Run a command. Raises ToolkitError with its last line of output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise ToolkitError(f"{' '.join(map(str, command))} failed", why=last)


def run_tests(python: Path) -> str:
    """Run the light tests; return the last line of output if they fail, else ""."""
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (done.stdout.strip() or done.stderr.strip() or "pytest printed nothing").splitlines()
    return lines[-1] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(run_main(main))

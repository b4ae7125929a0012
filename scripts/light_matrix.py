"""make test-light: the tests of the configuration layer on every Python and kconfiglib that we promise.

Each pair gets an environment of its own under build/light, with kconfiglib and what the tests need, and no
torch. An interpreter that is not installed is named, and is no failure.
"""

from __future__ import annotations

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
    missing = [version for version in PYTHONS if find_python(version) is None]
    failed = []
    for version in PYTHONS:
        python = find_python(version)
        for kconfiglib in KCONFIGLIBS if python else ():
            name = f"Python {version}, kconfiglib {kconfiglib}"
            told = run_tests(environment(python, version, kconfiglib))
            print(f"{name}: {told or 'ok'}", flush=True)
            failed += [name] if told else []
    for version in missing:
        print(f"Python {version}: missing; install it, for example with pyenv install {version}")
    if failed:
        raise ToolkitError(f"the tests of the configuration layer fail on {'; '.join(failed)}")
    return 0


def find_python(version: str) -> Path | None:
    """An interpreter of that version: this one, one on PATH, or pyenv's newest."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    found = shutil.which(f"python{version}")
    if found and version_of(Path(found)) == version:  # pyenv puts names on PATH that only complain
        return Path(found)
    versions = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return versions[-1] if versions else None


def version_of(python: Path) -> str:
    """Major and minor version of an interpreter, empty where it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def environment(python: Path | None, version: str, kconfiglib: str) -> Path:
    """The interpreter of the environment for this pair, made where it is not there yet."""
    assert python is not None
    directory = ROOT / "build" / "light" / f"{version}-{kconfiglib}"
    own = directory / "bin" / "python"
    done = directory / ".done"
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        call(python, "-m", "venv", str(directory))
        call(own, "-m", "pip", "install", "--quiet", f"kconfiglib=={kconfiglib}", *NEEDED)
        done.touch()
    return own


def call(*command: str | Path) -> None:
    """Run a command. Raises ToolkitError with the last thing it said."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolkitError(f"{' '.join(map(str, command))} failed", why=said[-1] if said else "")


def run_tests(python: Path) -> str:
    """Run the light tests; the last line of what failed, or nothing."""
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.returncode else ""


if __name__ == "__main__":
    sys.exit(run_main(main))

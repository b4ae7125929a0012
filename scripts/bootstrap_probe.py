"""Print which requirements of a file this interpreter lacks, one per line; exit status 1 if any.

    python scripts/bootstrap_probe.py requirements.txt [NAME]

With NAME only that requirement is checked. Nothing is imported, because importing torch takes a second, and
only the standard library is installed when this runs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MODULE_OF = {"pyyaml": "yaml", "pytest-xdist": "xdist", "types-pyyaml": "yaml"}
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<minimum>[0-9.]+)")


def main(arguments: list[str]) -> int:
    """Print the faults; return 1 if there are any."""
    if sys.version_info < (3, 11):  # noqa: UP036 - run before that is known
        return 1
    requirements = requirements_of(Path(arguments[0]))
    wanted = arguments[1:] or list(requirements)
    faults = [fault for name in wanted if (fault := fault_of(name, minimum=requirements[name]))]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def requirements_of(file: Path) -> dict[str, str]:
    """Return names and minimum versions of a file of `name>=version` lines."""
    lines = file.read_text(encoding="utf-8").splitlines()
    matches = (REQUIREMENT.fullmatch(line.strip()) for line in lines)
    return {match["name"]: match["minimum"] for match in matches if match}


def fault_of(name: str, *, minimum: str) -> str | None:
    """Return why this interpreter does not satisfy `name>=minimum`, or None if it does."""
    module = MODULE_OF.get(name.lower(), name)
    if importlib.util.find_spec(module) is None:
        return f"{name} is missing"
    found = _version(name) or _version_of_source(module)
    if name == "torch" and importlib.util.find_spec("torch_xla") is not None:
        minimum = _version("torch_xla") or minimum  # it works with the torch of the same version only
    if not found or release(found) < release(minimum):
        return f"{name} {found or 'of unknown version'} is older than {minimum}"
    return None


def release(text: str) -> tuple[int, ...]:
    """Return the numbers a version starts with: "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _version_of_source(module: str) -> str | None:
    """Return the version in MODULE/version.py of a package built in place, as torch has it."""
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if source is None or not source.is_file():
        return None
    match = re.search(r"""^__version__\s*=\s*['"]([^'"]+)""", source.read_text(encoding="utf-8"), re.M)
    return match[1] if match else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

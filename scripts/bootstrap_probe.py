"""Say what of a requirements file this interpreter lacks: one line per fault, exit status 1 if any.

    python scripts/bootstrap_probe.py requirements.txt [NAME]

With NAME only that requirement is looked at. Nothing is imported: importing torch takes a second.
The standard library is all that is there when this runs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

MODULE_OF = {"pyyaml": "yaml", "pytest-xdist": "xdist", "types-pyyaml": "yaml"}
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)>=(?P<minimum>[0-9.]+)")


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - run before that is known
        return 1
    requirements = requirements_of(Path(arguments[0]))
    wanted = arguments[1:] or list(requirements)
    faults = [fault for name in wanted if (fault := fault_of(name, minimum=requirements[name]))]
    for fault in faults:
        print(fault)
    return 1 if faults else 0


def requirements_of(file: Path) -> dict[str, str]:
    """Names and least versions of a file of `name>=version` lines."""
    lines = file.read_text(encoding="utf-8").splitlines()
    matches = (REQUIREMENT.fullmatch(line.strip()) for line in lines)
    return {match["name"]: match["minimum"] for match in matches if match}


def fault_of(name: str, *, minimum: str) -> str | None:
    """Why this interpreter does not satisfy `name>=minimum`, or None if it does."""
    module = MODULE_OF.get(name.lower(), name)
    if importlib.util.find_spec(module) is None:
        return f"{name} is missing"
    found = _version(name) or _version_of_source(module)
    if name == "torch" and importlib.util.find_spec("torch_xla") is not None:
        minimum = _version("torch_xla") or minimum  # it goes with the torch of its own number only
    if not found or release(found) < release(minimum):
        return f"{name} {found or 'of unknown version'} is older than {minimum}"
    return None


def release(text: str) -> tuple[int, ...]:
    """The numbers a version starts with: "2.13.0+cpu" -> (2, 13, 0)."""
    return tuple(_leading_numbers(text))


def _leading_numbers(text: str) -> Iterator[int]:
    for part in text.split("+")[0].split("."):
        digits = re.match(r"\d+", part)
        if not digits:
            return
        yield int(digits[0])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _version_of_source(module: str) -> str | None:
    """The version that a package built in place carries in MODULE/version.py, as torch does."""
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if source is None or not source.is_file():
        return None
    match = re.search(r"""^__version__\s*=\s*['"]([^'"]+)""", source.read_text(encoding="utf-8"), re.M)
    return match[1] if match else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""make new-model: what it writes passes the tests of models, what it cannot write it refuses whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def new_model(tree: Path, name: str, task: str = "classify") -> subprocess.CompletedProcess[str]:
    """As make new-model calls it."""
    command = ["make", "new-model", f"NAME={name}", f"TASK={task}", "VENV=", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classify", "lm"])
def test_a_new_model_passes_the_tests_of_models(tree: Path, task: str) -> None:
    done = new_model(tree, "my_net", task)
    assert done.returncode == 0, done.stderr
    written = [line.removeprefix("wrote ") for line in done.stdout.splitlines() if line.startswith("wrote ")]
    assert all((tree / path).is_file() for path in written)
    assert {path.split("/")[0] for path in written} == {"models", "defconfigs", "tests"}
    of_models = [
        f"tests/contract/{name}"
        for name in ("test_models.py", "test_language_models.py", "test_parameter_counts.py")
        if (tree / "tests/contract" / name).exists()
    ]
    checks = [
        ["-m", "pytest", "-k", "not test_every_field", "tests/contract/test_knobs.py"],
        ["-m", "pytest", "-k", "my_net", *of_models],
        ["-m", "ruff", "check", "models/my_net"],
        ["-m", "ruff", "format", "--check", "models/my_net"],
    ]
    for check in checks:
        result = subprocess.run([sys.executable, *check], cwd=tree, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("name", "task", "told"),
    [
        ("", "classify", "cannot be the name of a model"),
        ("My-Net", "classify", "cannot be the name of a model"),
        ("../escape", "classify", "cannot be the name of a model"),
        ("class", "classify", "cannot be the name of a model"),
        ("net_", "classify", "cannot be the name of a model"),
        ("lenet5", "classify", "models/lenet5 exists"),
        ("data", "classify", "would mix with CONFIG_DATA_"),
        ("choice", "classify", "would mix with CONFIG_MODEL_CHOICE"),
        ("has_conv", "classify", "would mix with CONFIG_MODEL_HAS_CONV"),
        ("resnet18_wide", "classify", "would mix with those of models/resnet18"),
        ("my_net", "", "there is no task ''"),
        ("my_net", "clasify", "classify"),
    ],
)
def test_what_cannot_be_a_model_is_refused(name: str, task: str, told: str, tree: Path) -> None:
    command = [sys.executable, "-m", "scripts.new_model", name, task]
    before = status(tree)
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr and "Traceback" not in done.stderr
    assert status(tree) == before


def status(tree: Path) -> list[str]:
    places = (tree / "models", tree / "defconfigs", tree / "tests" / "golden")
    return sorted(str(path) for place in places for path in place.glob("*"))

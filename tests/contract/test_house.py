"""The house stands: each rule holds over the tree, and each rule catches a planted breach."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract import house_rules as rules
from tests.contract.house_rules import Module

ROOT = Path(__file__).resolve().parents[2]
CODE = ("anneal", "lib", "models", "train", "scripts")

# What git holds at the top, and nothing else.
TOP_LEVEL = {
    ".ci",
    ".github",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Kconfig",
    "Kconfig.legacy",
    "LICENSE",
    "Makefile",
    "README.md",
    "anneal",
    "defconfigs",
    "docs",
    "lib",
    "models",
    "pyproject.toml",
    "requirements-dev.lock",
    "requirements-dev.txt",
    "requirements.lock",
    "requirements.txt",
    "scripts",
    "tests",
    "train",
}

# The ratchet: what is longer than the rule today, and how long it may be. Entries only go down and away.
LONGEST_FUNCTION, LONGEST_FILE = 60, 400
LONG_FUNCTIONS: dict[str, int] = {}
LONG_FILES: dict[str, int] = {}

ROOMS = {
    *(
        "kconf",
        "plan",
        "devices",
        "distributed",
        "memory",
        "nn",
        "optim",
        "reports",
        "runs",
        "data",
        "sweeps",
        "scaling",
    ),
}

# Files outside lib/devices that name XLA or TPUs: at most 8.
NAME_XLA = {
    "lib/config.py",
    *(f"lib/plan/{name}.py" for name in ("gpus", "numerics", "placement", "tpus", "types")),
    "lib/distributed/job_specs.py",
    "scripts/bootstrap_probe.py",
}

Rule = Callable[[Module], Iterator[str]]

PLANTED: list[tuple[Rule, str, str]] = [
    (rules.layering, "lib/plan/x.py", "from lib.memory import facts"),
    (rules.layering, "lib/plan/x.py", "from lib import memory"),
    (rules.layering, "lib/data/x.py", "def f():\n    from train.loop import train"),
    (rules.layering, "lib/errors.py", "import lib.config"),
    (rules.layering, "lib/memory/x.py", "from ..data import loader"),
    (rules.layering, "models/x/model.py", "import train"),
    (rules.light_imports, "lib/plan/x.py", "def f():\n    import numpy as np"),
    (rules.light_imports, "lib/kconf/x.py", "from torch import nn"),
    (rules.environment, "lib/data/x.py", "import os\nos.environ['A']"),
    (rules.environment, "train/x.py", "import os\nos.getenv('A')"),
    (rules.environment, "train/x.py", "from os import environ"),
    (rules.run_directory_names, "train/x.py", "path = run / 'metrics.jsonl'"),
    (rules.run_directory_names, "scripts/x.py", "path = f'{run}/status.json'"),
    (rules.backend_seam, "lib/data/x.py", "import torch_xla.core"),
    (rules.backend_seam, "train/x.py", "import torch_tpu"),
    (rules.backend_seam, "train/x.py", "model.cuda()"),
    (rules.backend_seam, "train/x.py", "init('nccl')"),
    (rules.no_fallback_values, "train/x.py", "getattr(config, 'seed', 1)"),
    (rules.no_fallback_values, "train/x.py", "getattr(self.config, 'seed', None)"),
    (rules.no_fallback_values, "train/x.py", "hasattr(cfg, 'seed')"),
    (rules.no_broad_except, "lib/x.py", "try:\n    f()\nexcept Exception:\n    g()"),
    (rules.no_broad_except, "lib/x.py", "try:\n    f()\nexcept:\n    g()"),
    (
        rules.no_broad_except,
        "lib/x.py",
        "try:\n    f()\nexcept (OSError, BaseException) as e:\n    raise X from e",
    ),
    (rules.no_broad_except, "lib/x.py", "with contextlib.suppress(Exception):\n    f()"),
    (rules.models_know_tensors_only, "models/x/model.py", "import os.path"),
    (rules.models_know_tensors_only, "models/x/model.py", "from lib.config import Config"),
    (rules.models_know_tensors_only, "models/x/model.py", "print(1)"),
    (rules.models_know_tensors_only, "models/x/model.py", "x.to('cuda:0')"),
    (rules.modules_by_their_own_name, "train/x.py", "importlib.import_module('lib.config')"),
    (rules.modules_by_their_own_name, "lib/x.py", "import_module(f'models.{name}.model')"),
    (rules.modules_by_their_own_name, "lib/x.py", "sys.modules.get('lib.runs.dcp')"),
    (rules.modules_by_their_own_name, "lib/x.py", "sys.modules['train']"),
    (rules.nothing_of_a_machine, "lib/x.py", "DATA = '/" + "home/me/data'"),
    (rules.nothing_unfinished, "lib/x.py", "# TO" + "DO: finish"),
]

ALLOWED: list[tuple[Rule, str, str]] = [
    (
        rules.layering,
        "train/x.py",
        "from lib.plan import plan\nfrom models.lenet5 import model\nimport torch",
    ),
    (rules.layering, "lib/plan/x.py", "from lib.config import Config\nfrom lib.plan.types import Plan"),
    (rules.light_imports, "lib/devices/probe.py", "import torch"),
    (rules.environment, "lib/devices/backend.py", "import os\nos.environ['A'] = '1'"),
    (rules.environment, "lib/x.py", "import os\nos.replace(a, b)"),
    (rules.run_directory_names, "lib/runs/directory.py", "'metrics.jsonl'"),
    (rules.run_directory_names, "train/x.py", "def f():\n    'Rows of metrics.jsonl.'"),
    (rules.run_directory_names, "train/x.py", "say('the rows are in metrics.jsonl')"),
    (rules.backend_seam, "train/x.py", "torch.cuda.synchronize()"),
    (rules.backend_seam, "lib/devices/xla.py", "import torch_xla.core"),
    (rules.backend_seam, "lib/devices/tpu.py", "import torch_tpu"),
    (rules.no_fallback_values, "train/x.py", "getattr(torch, 'xpu', None)"),
    (rules.no_broad_except, "lib/x.py", "try:\n    f()\nexcept BaseException:\n    g()\n    raise"),
    (rules.no_broad_except, "lib/x.py", "try:\n    f()\nexcept OSError:\n    g()"),
    (rules.models_know_tensors_only, "models/x/model.py", "from lib.nn.batch_norm import GhostBatchNorm2d"),
    (rules.modules_by_their_own_name, "lib/x.py", "import_module('optuna')\nsys.modules.get(f'{a}.lib')"),
    (rules.nothing_of_a_machine, "lib/x.py", "URL = 'https://example.org/home/x'"),
]


@functools.cache
def code() -> tuple[Module, ...]:
    return tuple(rules.modules_under(ROOT, *CODE))


@pytest.mark.slow
@pytest.mark.parametrize("rule", rules.MODULE_RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    assert [breach for module in code() for breach in rule(module)] == []


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_rule_catches(rule: Rule, path: str, text: str) -> None:
    breaches = list(rule(Module(path, text)))
    assert breaches and all(breach.startswith(f"{path}:") for breach in breaches)


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED)
def test_rule_lets_pass(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Module(path, text))) == []


def test_few_files_name_xla() -> None:
    """So that support for it can be changed, or dropped, in one place."""
    named = re.compile(r"(?<![a-z])(xla|tpus?)(?![a-z])", re.IGNORECASE)
    files = {module.path for module in code() if named.search(module.text)}
    assert {path for path in files if not path.startswith("lib/devices/")} == NAME_XLA


def test_every_rule_is_tried() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(rules.MODULE_RULES)


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the tree is not a git checkout")
    return done.stdout.splitlines()


def test_top_level_is_fixed() -> None:
    assert {path.split("/")[0] for path in tracked()} == TOP_LEVEL


def test_lib_has_rooms_and_the_ground_at_its_top() -> None:
    """`git mv` a module that belongs to none into the room that it fits best, or argue for a new room."""
    found = {path.name for path in (ROOT / "lib").iterdir() if path.name != "__pycache__"}
    ground = {"errors.py", "atomic.py", "units.py", "rng.py"}
    doors = {"__init__.py", "plugin_folders.py", "plugins.py", "config.py", "hyperparams.py", "tiers.py"}
    assert found == ground | doors | ROOMS
    assert all((ROOT / "lib" / room / "__init__.py").is_file() for room in ROOMS)


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others() -> None:
    assert rules.cycles(code()) == []


def test_the_architecture_names_what_every_package_may_import() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("Every package may import")[2]
    named = re.findall(r"`([\w/]+)\.py`", text.partition(", which import")[0])
    assert {name.replace("/", ".") for name in named} == set(rules.ROOMS[0])


def test_cycles_are_found_in_functions_too() -> None:
    modules = [
        Module("lib/a.py", "from lib import b"),
        Module("lib/b.py", "def f():\n    from lib.c import x"),
        Module("lib/c.py", "import lib.a"),
        Module("lib/d.py", "import lib.a"),
    ]
    assert rules.cycles(modules) == [["lib.a", "lib.b", "lib.c"]]


def test_tests_mirror_the_tree() -> None:
    """So that the tests of a module are found by its path; contract and e2e tests are of the whole."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    of_the_whole = {"contract", "e2e", "extras", "pages"}
    assert of_the_whole < {folder.as_posix() for folder in folders}
    for folder in folders:
        assert folder.as_posix() in of_the_whole or (ROOT / folder).is_dir(), folder


def test_file_names_are_found_once() -> None:
    paths = [module.path for module in code()]
    for tree in ("lib/", "train/"):
        assert rules.repeated_names([path for path in paths if path.startswith(tree)]) == []
    assert rules.repeated_names(["lib/a/x.py", "lib/b/x.py", "lib/a/base.py", "lib/b/base.py"]) == [
        "lib/a/x.py",
        "lib/b/x.py",
    ]
    assert rules.repeated_names(["lib/plan/solver.py", "lib/data/datasets/sudoku/solver.py"]) == []


def test_no_path_of_a_machine_outside_tests() -> None:
    """In any file of text, not only in Python; a test may name a path that does not exist."""
    for path in tracked():
        if path.startswith("tests/") or not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_bytes().decode("utf-8", errors="replace")
        assert list(rules.nothing_of_a_machine(Module(path, text))) == []
        assert list(rules.nothing_unfinished(Module(path, text))) == []


@pytest.mark.slow
def test_functions_are_short() -> None:
    modules = [*code(), *rules.modules_under(ROOT, "tests")]
    sizes = {name: lines for module in modules for name, lines in rules.function_sizes(module).items()}
    long = {
        name: lines for name, lines in sizes.items() if lines > LONG_FUNCTIONS.get(name, LONGEST_FUNCTION)
    }
    assert long == {}
    assert all(LONGEST_FUNCTION < sizes[name] <= lines for name, lines in LONG_FUNCTIONS.items()), (
        "lower the ratchet"
    )


def test_files_are_short() -> None:
    modules = [*code(), *rules.modules_under(ROOT, "tests")]
    sizes = {module.path: len(module.text.splitlines()) for module in modules}
    long = {path: lines for path, lines in sizes.items() if lines > LONG_FILES.get(path, LONGEST_FILE)}
    assert long == {}
    assert all(LONGEST_FILE < sizes[path] <= lines for path, lines in LONG_FILES.items()), "lower the ratchet"


def test_function_sizes_are_counted() -> None:
    text = "class A:\n    def f(self):\n        def g():\n            pass\n        return g\n"
    assert rules.function_sizes(Module("x.py", text)) == {"x.py::A.f": 4, "x.py::A.f.g": 2}


def test_configuration_imports_nothing_heavy() -> None:
    """Not by reading the source but by importing it: whatever stands between counts too."""
    light = [module.name for module in code() if (rules.level(module.name) or 0) <= rules.HIGHEST_LIGHT]
    light += [name for name in ("scripts.kconf",) if (ROOT / (name.replace(".", "/") + ".py")).exists()]
    program = (
        "import importlib, json, sys\n"
        f"for name in {light!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(json.loads(done.stdout)) & rules.HEAVY == set()
    assert {"lib.errors", "lib.config", "lib.plan.types"} <= set(light)


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"', project, re.M)
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert version and f"## {version[1]}" in changes

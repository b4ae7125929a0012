"""make new-model, new-task, new-data: what they write trains, what they cannot write they refuse whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lib.errors import ConfigError, ToolkitError
from lib.plugins import TASKS
from scripts import scaffold as scaffolding
from scripts.scaffold import TEMPLATES
from train.tasks.classify import task as classify

# Tasks whose models are not to be had by a template.
WITHOUT_TEMPLATE = [task for task in TASKS.names() if not (TEMPLATES / "model" / task).is_dir()]


def new_model(tree: Path, name: str, task: str = "classify") -> subprocess.CompletedProcess[str]:
    """As make new-model calls it."""
    command = ["make", "new-model", f"NAME={name}", f"TASK={task}", "VENV=", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


@pytest.mark.long
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


@pytest.mark.slow
def test_new_plug_ins_of_external_are_written_there(tree: Path) -> None:
    """By the command of docs/tutorials/external.md; the folder is kept for the others."""
    environment, before = {**os.environ, "VENV": "", "PYTHON": sys.executable}, status(tree)

    def make(words: str, status: int = 0) -> str:
        command = ["sh", "-c", f"make {words}"]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    lab = tree.parent / "my_lab"
    assert "exists" in make("EXTERNAL=../my_lab new-model NAME=lenet5 TASK=classify", status=2)
    assert not lab.exists() and not (tree / ".external").exists(), "what is refused leaves nothing"
    make("EXTERNAL=../my_lab new-model NAME=my_net TASK=classify")
    make("new-task NAME=my_task")
    make("new-model NAME=my_other TASK=my_task")
    make("new-data NAME=my_data")
    files = sorted(str(path.relative_to(lab)) for path in lab.rglob("*") if path.is_file())
    assert [name for name in files if name.endswith("Kconfig") or "defconfigs" in name] == [
        "data/my_data/Kconfig",
        "defconfigs/my_data",
        "defconfigs/my_net",
        "defconfigs/my_other",
        "models/my_net/Kconfig",
        "models/my_other/Kconfig",
        "tasks/my_task/Kconfig",
    ]
    for name in ("my_net", "my_other", "my_data"):
        make(f"defconfig-{name} checkconfig")
    assert "my_lab/models/my_net exists" in make("new-model NAME=my_net TASK=classify", status=2)
    assert "those of" in make("new-model NAME=my_net_b TASK=classify", status=2)
    assert status(tree) == before, "nothing of it is in the tree"
    (lab / "models/my_net/Kconfig").write_text('config X\n\tstring\n\tdefault "$(shell,touch made)"\n')
    assert "runs a program" in make("new-model NAME=my_third TASK=classify", status=2)
    assert not (tree / "made").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "message"),
    [
        ("", "classify", "a new model needs NAME=; give one, such as NAME=my_model"),
        ("My-Net", "classify", "cannot be the name of a model"),
        ("../escape", "classify", "cannot be the name of a model"),
        ("class", "classify", "cannot be the name of a model"),
        ("net_", "classify", "cannot be the name of a model"),
        ("lenet5", "classify", "models/lenet5 exists"),
        ("lenet5", "", "models/lenet5 exists"),
        ("data", "classify", "would mix with CONFIG_DATA_"),
        ("choice", "classify", "would mix with CONFIG_MODEL_CHOICE"),
        ("has_conv", "classify", "would mix with CONFIG_MODEL_HAS_CONV"),
        ("resnet18_wide", "classify", "would mix with those of models/resnet18"),
        ("my_net", "", f"a new model needs TASK=; there are {', '.join(TASKS.names())}"),
        *(("my_net", task, f"no template of a model for the task {task!r}") for task in WITHOUT_TEMPLATE),
        ("my_net", "clasify", "classify"),
    ],
)
def test_what_cannot_be_a_model_is_refused(name: str, task: str, message: str) -> None:
    refused("model", name, message, task=task)


def refused(kind: str, name: str, message: str, *, task: str = "") -> None:
    """By the check that comes before anything is written; none of these names is taken."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        scaffolding.check(kind, name, task=task)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_is_interrupted_leaves_nothing(
    error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command would find half a plug-in, and refuse."""

    def fails(*_: object, **__: object) -> None:
        assert (tmp_path / "models/my_net/model.py").is_file()
        (tmp_path / "defconfigs").mkdir()
        (tmp_path / "defconfigs/my_net").touch()
        raise error

    monkeypatch.setenv("ANNEAL_EXTERNAL", str(tmp_path))
    monkeypatch.setattr(scaffolding, "_golden_cases", fails)
    with pytest.raises((KeyboardInterrupt, ToolkitError)):
        scaffolding.scaffold("model", "my_net", task="classify")
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("models", "defconfigs")]


@pytest.mark.slow
def test_what_is_refused_leaves_nothing(tree: Path) -> None:
    before = status(tree)
    for words in (["model", "has_conv", "classify"], ["task", "lm"], ["data", "digits"]):
        command = [sys.executable, "-m", "scripts.scaffold", *words]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
        assert status(tree) == before


def scaffold(tree: Path, kind: str, name: str) -> None:
    """As make calls it; what is written obeys the rules of the house."""
    command = ["make", f"new-{kind}", f"NAME={name}", "VENV=", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = [line.removeprefix("wrote ") for line in done.stdout.splitlines() if line.startswith("wrote ")]
    assert all((tree / path).is_file() for path in written)
    code = [path for path in written if path.endswith(".py")]
    for check in (
        ["-m", "ruff", "check", *code],
        ["-m", "ruff", "format", "--check", *code],
        ["-m", "mypy"],
        ["-m", "pytest", "-k", "not test_every_field", "tests/contract/test_knobs.py"],
        ["-m", "scripts.kconf", "kconfig-docs"],
        ["-m", "scripts.kconf", "kconfig-lint"],
    ):
        result = subprocess.run([sys.executable, *check], cwd=tree, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def losses(tree: Path, defconfig: str, **settings: str) -> list[float]:
    """Of a few steps of training by that configuration, in the order of metrics.jsonl."""
    requested = {
        "BUDGET_STEPS": "y",
        "MAX_STEPS": "100",
        "DEVICE_CPU": "y",
        "AUTO_METHOD_TABLE": "y",
    } | settings
    words = [f"CONFIG_{name}={value}" for name, value in ({"LOG_INTERVAL_STEPS": "1"} | requested).items()]
    make = ["make", "VENV=", f"PYTHON={sys.executable}"]
    for command in ([*make, f"defconfig-{defconfig}"], [*make, "train", *words]):
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    file = next((tree / "runs").glob("*/*/metrics.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.long
def test_a_new_data_set_trains_at_once(tree: Path) -> None:
    scaffold(tree, "data", "my_data")
    found = losses(tree, "my_data", MY_DATA_TRAIN_SIZE="500", TARGET_EFFECTIVE_BATCH="50")
    assert found[-1] < 0.7 * found[0]


@pytest.mark.long
def test_a_model_of_a_new_task_trains_at_once(tree: Path) -> None:
    scaffold(tree, "task", "my_task")
    assert new_model(tree, "my_net", "my_task").returncode == 0
    small = {"DATASET_SCENES": "y", "DATA_LIMIT": "500", "TARGET_EFFECTIVE_BATCH": "50"}
    found = losses(tree, "my_net", MY_TASK_FOCUS="1.0", **small)
    assert found[-1] < found[0] < 0.95 * 2.4, "a focus makes a loss smaller than ln 10"
    preflight = ["make", "preflight", "JSON=1", "VENV=", f"PYTHON={sys.executable}"]
    strict = "CONFIG_MY_TASK_FOCUS=10"  # with which a uniform guess has a third of ln 10
    done = subprocess.run([*preflight, strict], cwd=tree, capture_output=True, text=True)
    first, *_ = json.loads(done.stdout)
    assert first["name"] == "first loss" and first["passed"], done.stdout
    Image.new("RGB", (32, 32)).save(tree / "blank.png")
    for words in (["predict", "INPUT=blank.png", "OUT=out.json"], ["export", "FORMAT=pt2", "DIRECTORY=out"]):
        command = ["make", *words, "VENV=", f"PYTHON={sys.executable}"]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("task", "lm", "train/tasks/lm exists"),
        ("task", "My", "cannot be the name of a task"),
        ("task", "warmup", "would mix with CONFIG_WARMUP_"),
        ("data", "digits", "lib/data/datasets/digits exists"),
        ("data", "slurm", "would mix with CONFIG_SLURM_"),
        ("data", "choice", "would mix with CONFIG_DATASET_CHOICE"),
        ("data", "cifar10", "would mix with CONFIG_DATASET_CIFAR10"),
    ],
)
def test_what_cannot_be_a_plug_in_is_refused(kind: str, name: str, message: str) -> None:
    refused(kind, name, message)


def test_a_task_that_selects_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scaffolding.check("model", "my_net", task="classify")
    monkeypatch.setattr(classify, "SELECTS", "MODEL_LEARNS_MY_TASKS", raising=False)
    with pytest.raises(
        ConfigError, match=r'^train/tasks/classify/task.py: SELECTS = "MODEL_LEARNS_MY_TASKS" is no'
    ):
        scaffolding.check("model", "my_net", task="classify")


def status(tree: Path) -> list[str]:
    folders = ("models", "defconfigs", "tests/golden", "train/tasks", "lib/data/datasets")
    places = [tree / folder for folder in folders]
    return sorted(str(path) for place in places for path in place.glob("*"))

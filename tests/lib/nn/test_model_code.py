"""A model folder that is wrong is told in one line with its file and line, before anything is trained."""

from __future__ import annotations

import contextlib
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import models
import train.__main__
from lib import plugin_folders
from lib.config import Config
from lib.data.types import ImageSpec
from lib.devices.backend import check_channels_last
from lib.devices.base import Backend
from lib.errors import ConfigError, PlanError, ToolkitError
from lib.hyperparams import apply_hyperparams
from lib.kconf import values_from_json
from lib.nn.model_code import ModelCode, build_model, fault_of_plugin, place_in_code
from lib.plan.types import Plan
from lib.plugins import MODELS, TASKS
from scripts.scaffold import TEMPLATES, fill
from tests.support.training import CPU, random_data, small_config, small_job, small_plan, trained
from train import tasks
from train.initial_weights import initialise_from_samples
from train.planning import autotune
from train.planning.autotune import ProbeTarget
from train.planning.memory_estimate import MemoryTraces
from train.training_data import TrainingData

pytestmark = pytest.mark.slow

SHAPE = (1, 28, 28)
FORWARD = "        return logits_NK\n"
BUILD = "    return Network(options, spec=spec)"
LINEAR = (
    "self.linear = nn.Linear(2 * options.width * -(-spec.height // 4) * -(-spec.width // 4), spec.classes)"
)
TASK = 'TASK = "classify"'

Write = Callable[..., Config]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes models/net/model.py: what make new-model writes, with one text in place of another."""
    folder = tmp_path / "models" / "net"
    folder.mkdir(parents=True)
    plain = small_config("lenet5")  # while its folder is found
    (tmp_path / "train").symlink_to(plugin_folders.ROOT / "train")
    monkeypatch.setattr(plugin_folders, "ROOT", tmp_path)
    monkeypatch.setattr(models, "__path__", [str(folder.parent)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(old: str = "", new: str = "", **changes: Any) -> Config:
        text = fill(TEMPLATES / "model" / "classify" / "model.py", {"name": "net", "task": "classify"})
        assert old in text
        (folder / "model.py").write_text(text := text.replace(old, new))
        for module in [name for name in sys.modules if name.startswith("models.net")]:
            del sys.modules[module]
        options: dict[str, Any] = {"model": "net", "model_options": {"width": 4}, "norm_batch": None}
        options["task"] = (re.findall(r'^TASK = "(\w+)"', text, re.MULTILINE) or [""])[0]
        return plain.replace(**options | changes)

    yield write
    for module in [name for name in sys.modules if name.startswith("models.net")]:
        del sys.modules[module]


def data_of(config: Config) -> TrainingData:
    return random_data(config, shape=SHAPE, train_size=48)


def planned(config: Config) -> Plan:
    config = config.replace(auto_method="predict", device="cpu")
    data = data_of(config)
    predict = MemoryTraces(config, data).predictor(CPU)
    return apply_hyperparams(config, False, hardware=CPU, facts=data.facts, predict=predict)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (TASK, "", "models/net/model.py does not define TASK"),
        ("def build(", "def built(", "models/net/model.py does not define build"),
        (TASK, 'TASK = "regres"', f"py: there is no task 'regres'; there are {', '.join(TASKS.names())}"),
        (TASK, "TASK = [3]", r"there is no task \[3\]"),
        *(
            (TASK, f'TASK = "{name}"', f'TASK = "{name}" does not train on random: it needs {words}')
            for name, (words, kinds) in ((name, TASKS.load(name).DATA) for name in TASKS.names())
            if ImageSpec not in kinds
        ),
        ("@dataclass(frozen=True, slots=True, kw_only=True)", "", "Options is not a dataclass"),
        ("class Network(nn.Module):", "class Network(nn.Module:", r"models/net/model.py:\d+: SyntaxError: "),
        ("import torch.nn.functional as F", "import nowhere", "model.py:7: ModuleNotFoundError: No module"),
        ("    width: int", "    depth: int", "CONFIG_NET_DEPTH is not set and CONFIG_NET_WIDTH is not known"),
        (BUILD, "    Network(options, spec=spec)", "build returns NoneType, which is not a torch.nn.Module"),
        (BUILD, BUILD.replace("spec=spec", "spek=spec"), r"model.py:24: TypeError: .*argument 'spek'"),
        (LINEAR, "self.linear = nn.LazyLinear(spec.classes)", "the shape of linear.weight is left open"),
        (LINEAR, LINEAR.replace("2 *", "3 *"), r"model.py:37: RuntimeError: "),
        (FORWARD, "        raise KeyError(3)\n", "models/net/model.py:38: KeyError: 3"),
        (FORWARD, "        raise ValueError('a\\nb')\n", "models/net/model.py:38: ValueError: a b$"),
        (FORWARD, "        assert False\n", "models/net/model.py:38: AssertionError$"),
        (FORWARD, FORWARD[:-1] + ".sum().item()\n", r"models/net/model.py:38: RuntimeError: .*code reads"),
        ("def build(", "def build(extra, ", r"models/net/model.py: TypeError: build\(\) missing 1 required"),
        (FORWARD, "", r"forward returns NoneType, not floating-point logits \(2, 10\)"),
        (FORWARD, FORWARD[:-1] + ", 1\n", r"forward returns tuple, not floating-point logits \(2, 10\)"),
        (FORWARD, FORWARD[:-1] + "[:, :9]\n", r"forward returns \(2, 9\), not floating-point logits \(2, 1"),
        (LINEAR, LINEAR.replace("spec.classes)", "spec.classes + 1)"), r"returns \(2, 11\), not floating"),
        (LINEAR, LINEAR.replace("spec.classes", "spec.outputs"), "no attribute 'outputs'; it has name, chan"),
        (FORWARD, FORWARD[:-1] + ".argmax(1)\n", r"forward returns int64 \(2,\), not floating-point logits"),
        (FORWARD, FORWARD[:-1] + " + __import__('torch').rand(1)\n",
         r"model.py:38: .* meta; create tensors on the device of the input, by device=x.device"),
        (FORWARD, FORWARD[:-1] + ".detach()\n", "what forward returns depends on no weight: there is no"),
        (FORWARD, "        y = logits_NK.exp()\n        z = y * y\n        y += 1\n        return z\n",
         r"models/net: RuntimeError: .*modified by an inplace operation"),
    ],
)  # fmt: skip
def test_a_model_that_is_wrong_is_told_in_one_line(write: Write, old: str, new: str, told: str) -> None:
    config = write(old, new)
    with pytest.raises(ConfigError, match=told) as raised:
        data_of(config)
    assert "\n" not in str(raised.value) and "models/net" in str(raised.value)


def test_what_the_toolkit_itself_does_wrong_keeps_its_traceback(write: Write) -> None:
    config = write()
    with pytest.raises(RuntimeError, match="manual_seed"):
        build_model("net", config.model_options, None, seed="one")  # type: ignore[arg-type]
    with pytest.raises(KeyError), ModelCode("net"):
        {}["no frame of a model is here"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("return undefined", ":2"),
        ("return (", ":2"),
        ("raise RuntimeError", ":2"),
        ("torch.zeros(2) + torch.zeros(3)", ":2"),
        ("torch.nn.Linear(2, 3)(torch.zeros(3))", ""),  # a module is the model
    ],
)
def test_a_fault_in_a_task_has_its_line(text: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "train" / "tasks" / "mine" / "task.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def training():\n    {text}\nimport torch\ntraining()\n")
    with pytest.raises((NameError, SyntaxError, RuntimeError)) as raised:
        runpy.run_path(str(file))
    found = place_in_code(raised.value, root=tmp_path)
    assert found == (f"train/tasks/mine/task.py{place}" if place else "")


TRAINING = "        loss_N = F.cross_entropy("


def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str = "", new: str = "") -> None:
    """Write what make new-task does to a folder of EXTERNAL=, with one text in place of another."""
    home = tmp_path / "lab" / "tasks" / "mine"
    home.mkdir(parents=True)
    text = fill(TEMPLATES / "task" / "task.py", {"name": "mine", "Name": "Mine", "NAME": "MINE"})
    assert old in text
    (home / "task.py").write_text(text.replace(old, new))
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(tmp_path / "lab"))
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__])
    for module in [name for name in sys.modules if name.startswith("train.tasks.mine")]:
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (TRAINING, f"        raise ValueError('boom')\n{TRAINING}", r"mine/task\.py:\d+: ValueError: boom$"),
        (TRAINING, f"        logits_NK += logits_NK[:, :7]\n{TRAINING}", r"\.py:\d+: RuntimeError: "),
        ("    return Mine", "    Mine", "task.py: build returns NoneType, not a Task; return"),
        ("    return Mine", "    return Mine  #", "task.py: build returns the class Mine, not a Task; ret"),
        ("    return Mine", "    raise KeyError(3)\n    return Mine", r"task\.py:\d+: KeyError: 3$"),
        ("def build(", "def build(extra, ", r"task\.py: TypeError: build\(\) missing 1 required"),
        ("\nSELECTS = ", "\nDATA = None\nSELECTS = ", "task.py: DATA is None; write a description and sp"),
    ],
)
def test_a_task_that_is_wrong_is_named_and_not_its_model(
    write: Write, old: str, new: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_task(tmp_path, monkeypatch, old, new)
    config = write(TASK, 'TASK = "mine"', task_options={"focus": 2.0}, target_effective_batch=48)
    with pytest.raises(ConfigError, match=told) as raised:
        planned(config)
    assert "models/net" not in str(raised.value)


def test_a_micro_batch_with_which_a_task_fails_is_not_planned(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model returns no row for the last of an odd number of samples, which the loss finds."""
    own_task(tmp_path, monkeypatch)
    config = write(FORWARD, "        return logits_NK[: len(logits_NK) // 2 * 2]\n")
    config = config.replace(task="mine", task_options={"focus": 2.0}, target_effective_batch=48)
    told = r"; a multiple of 2, as training fails with 1 \(.*mine/task\.py:\d+: ValueError: Expected input"
    assert re.search(told, planned(config).reasons["micro_batch"])


def test_what_no_context_meets_is_reported_with_its_place(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_task(tmp_path, monkeypatch, TRAINING, f"        1 / 0\n{TRAINING}")
    config = write(TASK, 'TASK = "mine"', task_options={"focus": 2.0})
    job = small_job(config, small_plan(8), data_of(config))

    def command() -> int:
        return trained(job) and 0

    monkeypatch.setattr(train.__main__, "_command", command)
    with pytest.raises(ToolkitError, match=r"mine/task\.py:\d+: ZeroDivisionError: division by zero$"):
        train.__main__.main()
    for error in (KeyError(3), ConfigError("known")):  # of our own code
        monkeypatch.setattr(train.__main__, "_command", Mock(side_effect=error))
        with pytest.raises(type(error)) as raised:
            train.__main__.main()
        assert raised.value is error


def test_what_the_toolkit_raises_for_a_plugin_of_the_tree_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config("lenet5")
    job = small_job(config, small_plan(8), random_data(config, shape=SHAPE, train_size=16))
    monkeypatch.setattr("train.tasks.classify.task.full_precision", lambda _: values_from_json(cast(Any, 3)))
    with pytest.raises(AttributeError) as raised:
        trained(job)
    assert fault_of_plugin(raised.value) is None


@pytest.mark.parametrize(("text", "kind"), [("spec.nowhere", ConfigError), ("1 / 0", PlanError)])
def test_only_what_depends_on_the_data_is_an_error_of_the_class_that_is_named(
    write: Write, text: str, kind: type[ToolkitError]
) -> None:
    write(BUILD, f"    {text}")
    with pytest.raises(ToolkitError) as raised, ModelCode("net", PlanError):
        MODELS.load("net").build(None, None)
    assert raised.type is kind
    assert str(fault_of_plugin(cast(Exception, raised.value.__cause__))) == str(raised.value)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("None", "NoneType, not weights by name"),
        ("{'nowhere': first_samples}", "'nowhere', which the model does not have"),
        ("{'linear.bias': first_samples.mean(dim=0)}", r"linear.bias \(1, 28, 28\), not \(10,\)"),
        ("{'linear.bias': 3}", r"linear.bias int, not \(10,\)"),
    ],
)
def test_weights_computed_from_samples_are_those_of_the_model(write: Write, returned: str, told: str) -> None:
    function = f"def initialise_from_samples(model, first_samples):\n    return {returned}\n\n\n"
    config = write("def build(", f"{function}def build(")
    data = data_of(config)
    model = build_model("net", config.model_options, data.dataset.spec, seed=1)
    with pytest.raises(ConfigError, match=f"^models/net/model.py: initialise_from_samples returns {told}$"):
        initialise_from_samples(model, config, data.dataset, Backend("cpu"), log=print)


def test_memory_that_runs_out_is_no_fault_of_the_model(write: Write) -> None:
    with pytest.raises(MemoryError):
        data_of(write(BUILD, "    raise MemoryError"))


NORMALISED = LINEAR + "\n        self.norm = nn.BatchNorm1d(self.linear.in_features)"


def with_norm(write: Write, **changes: Any) -> Config:
    """A batch normalisation of torch, which refuses a single sample in training."""
    config = write(LINEAR, NORMALISED, **changes)
    file = plugin_folders.ROOT / "models" / "net" / "model.py"
    text = file.read_text().replace("x_NCHW.flatten(start_dim=1)", "self.norm(x_NCHW.flatten(start_dim=1))")
    file.write_text(text)
    return config


def test_a_micro_batch_that_the_model_refuses_is_not_planned(write: Write) -> None:
    plan = planned(with_norm(write, target_effective_batch=48))
    assert plan.micro_batch % 2 == 0 and 48 % plan.micro_batch == 0
    why = plan.reasons["micro_batch"]
    assert "a multiple of 2, as training fails with 1 (models/net/model.py:" in why
    assert "ValueError: Expected more than 1 value per channel" in why
    assert "select MODEL_HAS_BATCHNORM in models/net/Kconfig" in plan.reasons["norm_batch"]


def test_groups_of_samples_that_a_model_wants_are_planned(write: Write) -> None:
    plan = planned(
        write(FORWARD, "        return logits_NK.view(-1, 12, 10).flatten(0, 1)\n", target_effective_batch=48)
    )
    assert plan.micro_batch % 12 == 0
    assert "a multiple of 12, as training fails with 1, 2, 3, 4, 6, 8 (models/" in plan.reasons["micro_batch"]


def test_of_a_share_that_is_odd_its_first_divisor_is_taken(write: Write) -> None:
    assert planned(with_norm(write, target_effective_batch=45)).micro_batch in (3, 9, 15, 45)


def test_groups_are_planned_for_torchs_layers(write: Write) -> None:
    plan = planned(with_norm(write, target_effective_batch=48, norm_batch=8, norm_momentum=0.1))
    assert plan.norm_batch == 8 and plan.micro_batch % 8 == 0
    assert "fails" not in plan.reasons["micro_batch"]
    assert "every batch normalisation takes its statistics over groups of 8" in plan.reasons["norm_batch"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_batch_by_hand_that_the_model_refuses_is_told(write: Write, batch_size: int) -> None:
    """3 x 5 + 1: the last micro-batch counts, too."""
    text = "        torch._check(len(x_NCHW) > 1, lambda: 'alone')\n"
    by_hand = {"hyper_param": "manual", "batch_size": batch_size, "gradient_accumulation": 0}
    config = write(FORWARD, text + FORWARD, target_effective_batch=16, **by_hand)
    file = plugin_folders.ROOT / "models" / "net" / "model.py"
    file.write_text(file.read_text().replace("import torch.nn", "import torch\nimport torch.nn", 1))
    told = r"net fails with a micro-batch of 1: models/net/model.py:39: .*alone"
    with pytest.raises(PlanError, match=told):
        planned(config)


def test_a_model_that_refuses_every_micro_batch_is_told(write: Write) -> None:
    config = write(FORWARD, "        assert len(x_NCHW) in (2, 4) and not x_NCHW.is_cpu\n" + FORWARD)
    with pytest.raises(PlanError, match=r"fails with micro-batches of 1, .*: models/net/model.py:38: "):
        planned(config)


def test_what_a_backward_pass_alone_does_wrong_is_told_of_the_model(write: Write) -> None:
    hook = "self.linear.weight.register_hook(lambda g: g.view(7, 11) if g.is_cpu else g)"
    with pytest.raises(PlanError, match=r"fails with micro-batches of 1, .*: models/net/model.py:33: Ru"):
        planned(write(LINEAR, f"{LINEAR}\n        {hook}"))


def test_a_size_that_the_model_refuses_is_not_measured(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_norm(write, target_effective_batch=8, device="cpu", auto_method="probe")
    data, tried = data_of(config), list[int]()
    bench = ProbeTarget(
        resolved=None,  # type: ignore[arg-type]
        config=config,
        data=data,
        hardware=CPU,
        predict=MemoryTraces(config, data).predictor(CPU),
        root=Path(),
    )

    def probe_run(_: ProbeTarget, __: Plan, size: int) -> autotune.Measurement:
        tried.append(size)
        return autotune.Measurement(micro_batch=size, need_bytes=1, samples_per_second=1.0)

    monkeypatch.setattr(autotune, "probe_run", probe_run)
    monkeypatch.setattr(autotune, "_store", lambda *_: None)
    autotune.measure(bench)
    assert tried == [8, 4, 2]


def test_gradients_of_a_planned_step_are_the_same_however_the_batch_is_split(write: Write) -> None:
    """Torch's layers with NORM_BATCH, through the loop itself."""
    from tests.support.training import small_job, small_plan
    from train.job import Progress
    from train.loop import optimizer_step

    config = with_norm(write, norm_batch=4, norm_momentum=0.1, max_steps=1)
    data, found = data_of(config), []
    for sizes in ((16,), (8, 8), (4, 4, 4, 4), (12, 4)):
        job = small_job(config, small_plan(*sizes, norm_batch=4), data, dtype=torch.float64)
        optimizer_step(job, Progress())
        found.append(job.model.state_dict())
    assert set(found[0]) >= {"norm.weight", "norm.running_mean", "norm.num_batches_tracked"}
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("capability", "channels", "kernel", "told"),
    [
        ("AVX2", 4, 1, "0 is a 1x1 convolution with a stride and 4 input channels"),
        ("DEFAULT", 7, 1, "and 7 input channels"),
        ("AVX2", 8, 1, ""),
        ("AVX2", 4, 3, ""),
        ("AVX512", 4, 1, ""),
    ],
)
def test_a_layout_that_the_kernels_of_a_cpu_cannot_take_is_refused(
    capability: str, channels: int, kernel: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model = nn.Sequential(nn.Conv2d(channels, 8, kernel, stride=2))
    with pytest.raises(ConfigError, match=told) if told else contextlib.nullcontext():
        check_channels_last(model)

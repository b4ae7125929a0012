"""From the configuration to the optimizer step: the target is what the optimizer sees, however it is cut."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lib import kconf
from lib.config import Config, config_from_values
from lib.data import restrict
from lib.data.loader import Batch
from lib.plan import plan as make_plan
from lib.plan.types import Plan
from lib.plugins import TASKS
from lib.runs.metrics import NOT_METRICS
from tests.contract.cases import needs_extra
from tests.support.chats import random_chats
from tests.support.datasets import opened
from tests.support.examples import examples
from tests.support.labels import random_table, random_tags
from tests.support.tokens import BLOCK, VOCAB, sentences_data, text_data
from tests.support.training import CPU, Wrapped, random_data, small_job, trained
from train.job import evaluate
from train.tasks.base import Forward, Sums, Task, count_of, figures_of, requested_metrics
from train.training_data import TrainingData, make_training_data

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [path for path in (ROOT / "defconfigs").iterdir() if path.is_file()]
DEFCONFIGS = sorted(path.name for path in SHIPPED if not needs_extra(path))
STEPS = 3
TARGET = 32  # instead of hundreds, and the narrowest networks: it is the arithmetic that is tested
NORM_BATCH = 4
MARKS = {"gpt2-tiny": (), "resnet50": pytest.mark.long}


# What no shipped configuration asks for: one to start from, and further options.
METRICS = "top5_accuracy,macro_f1,calibration_error,roc_auc,average_precision"
OTHERS: dict[str, tuple[str, dict[str, str]]] = {
    "class weights": ("lenet5", {"CLASS_WEIGHTS": "1,2,3,4,5,6,7,8,9,0.5", "METRICS": METRICS}),
    "balanced classes": ("lenet5", {"CLASS_WEIGHTS": "balanced", "LABEL_SMOOTHING": "0.1"}),
    "augmented": (
        "resnet18",
        {
            "AUGMENT_RESIZED_CROP": "y",
            "AUGMENT_FLIP_HORIZONTAL": "y",
            "AUGMENT_FLIP_VERTICAL": "y",
            "AUGMENT_BRIGHTNESS": "0.4",
            "AUGMENT_CONTRAST": "0.4",
            "AUGMENT_SATURATION": "0.4",
            "AUGMENT_HUE": "0.1",
            "AUGMENT_ERASE_PCT": "50",
            "AUGMENT_MIXUP_ALPHA": "0.8",
            "AUGMENT_CUTMIX_ALPHA": "1.0",
        },
    ),
    "several numbers": ("tabular-regression", {"REGRESS_LOSS_HUBER": "y"}),
    "several labels": (
        "tabular-regression",
        {
            "DATASET_TABULAR": "y",
            "TABULAR_TARGET_LABELS": "y",
            "CLASS_WEIGHTS": "balanced",
            "METRICS": "roc_auc,average_precision",
        },
    ),
    "tags of words": (
        "gpt2-sst2",
        {"DATASET_TAGGED": "y", "GPT2_DROPOUT": "0.0", "LABEL_SMOOTHING": "0.0", "TOKENIZER_BYTE": "y"},
    ),
    "conversations": (
        "gpt2-sst2",
        {"DATASET_CHAT": "y", "GPT2_DROPOUT": "0.0", "LABEL_SMOOTHING": "0.0", "TOKENIZER_BYTE": "y"},
    ),
    "conversations by length": (
        "gpt2-sst2",
        {
            "DATASET_CHAT": "y",
            "CHAT_BUCKETING": "y",
            "GPT2_DROPOUT": "0.1",
            "LABEL_SMOOTHING": "0.0",
            "TOKENIZER_BYTE": "y",
        },
    ),
    "packed conversations": (
        "gpt2-sst2",
        {
            "DATASET_CHAT": "y",
            "CHAT_PACKING": "y",
            "GPT2_DROPOUT": "0.0",
            "LABEL_SMOOTHING": "0.0",
            "TOKENIZER_BYTE": "y",
        },
    ),
}


def model_of(defconfig: str) -> tuple[str, ...]:
    """What a defconfig chooses of models, and of data if its targets are labels of texts."""
    text = (ROOT / "defconfigs" / defconfig).read_text()
    return tuple(re.findall(r"^CONFIG_(MODEL_\w+|DATASET_SST2)=y", text, flags=re.M))


# One of each model; the narrowest networks of the others are almost the same.
FIRST = {model_of(name): name for name in sorted(DEFCONFIGS, key=lambda name: (name in MARKS, -len(name)))}


def narrow_config(defconfig: str) -> Config:
    values = {
        "CONFIG_TARGET_EFFECTIVE_BATCH": str(TARGET),
        "CONFIG_HYPER_PARAM_MANUAL": "y",
        "CONFIG_GRADIENT_ACCUMULATION": "0",
        "CONFIG_BUDGET_STEPS": "y",
        "CONFIG_MAX_STEPS": str(STEPS),
        "CONFIG_PRECISION_FP32": "y",
        # Adam divides by sqrt(v) + eps: with 1e-8 it blows the last bit of a small gradient up a
        # millionfold, and the check would be of rounding, not of the cut.
        "CONFIG_ADAM_EPS": "0.001",
    }
    name, more = OTHERS.get(defconfig, (defconfig, {}))
    values |= {f"CONFIG_{symbol}": value for symbol, value in more.items()}
    file = ROOT / "defconfigs" / name
    for model in ("RESNET18", "RESNET50"):
        if f"CONFIG_MODEL_{model}=y" in file.read_text():
            values |= {"CONFIG_NORM_BATCH": str(NORM_BATCH), f"CONFIG_{model}_WIDTH": "8"}
    if "CONFIG_MODEL_AIRBENCH=y" in file.read_text():
        values |= {"CONFIG_NORM_BATCH": str(NORM_BATCH), "CONFIG_AIRBENCH_WIDTH": "8"}
    if "CONFIG_MODEL_GPT2=y" in file.read_text():
        sizes = {"LAYERS": "2", "HEADS": "2", "WIDTH": "16"}
        values |= {"CONFIG_GPT2_SIZE_CUSTOM": "y"} | {f"CONFIG_GPT2_{k}": v for k, v in sizes.items()}
    if "CONFIG_MODEL_VIT=y" in file.read_text():
        values |= {"CONFIG_VIT_WIDTH": "8", "CONFIG_VIT_LAYERS": "2"}
    if "CONFIG_MODEL_RESNET_BK=y" in file.read_text():
        values |= {"CONFIG_RESNET_BK_LAYERS": "2", "CONFIG_RESNET_BK_WIDTH": "16"}
    for model, example in examples().items():
        if f"CONFIG_MODEL_{model.upper()}=y" in file.read_text():
            values |= {f"CONFIG_{name}": value for name, value in example.NARROW.items()}
    return config_from_values(kconf.load(root=ROOT, config_file=file, overrides=values).values)


def data_of(config: Config) -> TrainingData:
    """What a run of `config` trains on; a model is simulated once for all tests that build the same one."""
    key = repr(config.replace(batch_size=0))
    if key not in _DATA:
        _DATA[key] = _data_of(config)
    return _DATA[key]


_DATA: dict[str, TrainingData] = {}


def _data_of(config: Config) -> TrainingData:
    example = examples().get(config.model)
    if example is not None and hasattr(example, "data"):
        data: TrainingData = example.data(config, train=3 * TARGET)
        return data
    if config.task == "chat":
        packed, bucketed = (bool(config.data_options[name]) for name in ("packing", "bucketing"))
        return random_chats(config, train=3 * TARGET, test=37, packed=packed, bucketed=bucketed)
    if config.task == "tag":
        return random_tags(config, train=3 * TARGET, test=37)
    if config.task in ("multilabel", "regress") and (
        config.dataset == "tabular" or config.task_options.get("loss") == "huber"
    ):
        return random_table(config, train=3 * TARGET, test=37)
    if config.dataset == "friedman":
        return make_training_data(config, restrict(opened("friedman"), limit=3 * TARGET))
    if config.dataset == "sst2":
        return sentences_data(config, size=3 * TARGET)
    if config.block_size is not None:
        noise = np.random.default_rng(0).integers(0, VOCAB, (3 * TARGET + 1) * BLOCK, dtype=np.uint8)
        return text_data(config, train=noise)
    if config.dataset in ("digits", "mnist", "fashion_mnist"):
        shape = (1, 28, 28)
    else:  # with a last stage of 1x1, groups of four values are normalised, which amplifies rounding
        shape = (3, 16, 16) if config.model == "resnet18" else (3, 32, 32)
    return random_data(config, shape=shape, train_size=3 * TARGET)


class Spy(Wrapped):
    """A task that counts the samples it is shown."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.seen: list[int] = []

    def training(self, forward: Forward, batch: Batch) -> Sums:
        self.seen.append(int(count_of(batch)))
        return super().training(forward, batch)


def run(config: Config, plan: Plan, data: TrainingData) -> tuple[dict[str, torch.Tensor], list[int]]:
    """State of the model after STEPS steps in float64, and samples per optimizer step."""
    job = small_job(config, plan, data, task=Spy)
    spy = job.task
    assert isinstance(spy, Spy)
    updates: list[int] = []
    job.optimizer.register_step_post_hook(lambda *_: updates.append(sum(spy.seen)) or spy.seen.clear())
    return trained(job), updates


def micro_batches(config: Config) -> Iterator[int]:
    """The whole target, a part of it, and the smallest there is."""
    step = config.norm_batch or 1
    sizes = [size for size in range(step, TARGET + 1, step) if TARGET % size == 0]
    yield from (sizes[-1], sizes[len(sizes) // 2], sizes[0])


EVERY = pytest.mark.parametrize(
    "defconfig",
    [
        pytest.param(
            name, marks=MARKS.get(name, pytest.mark.slow) if name in FIRST.values() else pytest.mark.long
        )
        for name in DEFCONFIGS
    ]
    + [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS],
)


@pytest.mark.slow
def test_every_task_is_among_them() -> None:
    assert {narrow_config(name).task for name in (*FIRST.values(), *OTHERS)} == {*TASKS.names()}


@pytest.mark.slow
@EVERY
def test_optimizer_sees_the_target_and_the_cut_changes_nothing(defconfig: str) -> None:
    reference: dict[str, torch.Tensor] = {}
    config = narrow_config(defconfig)
    data = data_of(config)
    for size in micro_batches(config):
        cut = config.replace(batch_size=size)
        state, updates = run(cut, make_plan(cut, CPU, data.facts), data)
        assert updates == [TARGET] * STEPS
        reference = reference or state
        assert state.keys() == reference.keys()
        for name, tensor in state.items():
            close = torch.allclose(tensor, reference[name], rtol=1e-12, atol=1e-12)
            assert close, f"{name} at micro-batch {size}"


@EVERY
def test_rows_of_padding_change_nothing(defconfig: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lib.nn.compile.compiled_forward", lambda _, wrapped, **__: wrapped)  # takes minutes
    check_padding(defconfig)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # of torch's own compiler
def test_compiled_rows_of_padding_change_nothing() -> None:
    check_padding("lenet5")


def check_padding(defconfig: str) -> None:
    """As where programs are compiled for one shape: 12 + 12 + 8 rows are padded to 3 x 12."""
    config = narrow_config(defconfig).replace(batch_size=TARGET)
    data = data_of(config)
    whole = make_plan(config, CPU, data.facts)
    padded = dataclasses.replace(
        whole, micro_batch=12, accumulation=3, last_micro_batch=8, memory=None, compile=True
    )
    assert padded.is_padded and not whole.is_padded
    expected, _ = run(config, whole, data)
    state, updates = run(config, padded, data)
    assert updates == [TARGET] * STEPS
    for name, tensor in state.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-12, atol=1e-12), name


@EVERY
def test_an_evaluation_reports_what_its_task_names_however_it_is_split(defconfig: str) -> None:
    config = narrow_config(defconfig)
    data = data_of(config)
    names = (*figures_of(config, data.dataset.spec).always, *requested_metrics(config))
    found = []
    for size in micro_batches(config):
        cut = config.replace(batch_size=size)
        job = small_job(cut, make_plan(cut, CPU, data.facts), data)
        with job.train_loader, job.eval_loader:
            found.append(evaluate(job))
    assert {*[*found[0]][1:]} - NOT_METRICS == {*names}
    for other in found[1:]:
        # Parts of TRM are in single precision: 8e-9 was seen.
        assert other == pytest.approx(found[0], rel=1e-7, nan_ok=True)

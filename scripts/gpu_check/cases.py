"""Cases of the checks on a real GPU: models at the sizes at which people train them, on random data.

Only this module uses the rest of the toolkit to train and to predict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from lib import kconf
from lib.config import Config, config_from_values
from lib.data import ArrayPart, Dataset, ImageSpec, TextSpec, TokenPart
from lib.devices.probe import probe
from lib.plan import plan as make_plan
from lib.plan.fitting import Parts, predicted, step_settings
from lib.plan.tables import table_batch
from lib.plan.types import Hardware, Plan, Precision
from scripts.bench.interleaved_timing import job_of
from train import loop
from train.job import Budget, Job, Progress
from train.planning.memory_estimate import trace_memory, with_gaps
from train.training_data import TrainingData, make_training_data

ROOT = Path(__file__).resolve().parents[2]
ROWS = 256  # samples of a training part; longer runs go through it several times
TEST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A model: its symbols, its data, and the number that its micro-batches must be a multiple of."""

    settings: Mapping[str, str]
    dataset: Callable[[], Dataset]
    step: int  # NORM_BATCH where there is batch normalisation
    lacks: tuple[str, ...] = ()  # symbols that every other case has


def random_images(size: int, *, channels: int, classes: int) -> Dataset:
    """Make a data set of random square images (C, size, size) with labels."""
    random = np.random.default_rng(0)

    def part(rows: int) -> ArrayPart:
        images = random.integers(0, 256, (rows, channels, size, size), dtype=np.uint8)
        return ArrayPart(images, random.integers(0, classes, rows, dtype=np.int64))

    mean, std = (0.5,) * channels, (0.25,) * channels
    spec = ImageSpec.square("random", size, classes, mean=mean, std=std, synthetic=True)
    return Dataset(spec=spec, train=part(ROWS), test=part(TEST_ROWS), source="random images")


def random_text(block_size: int, *, vocab_size: int) -> Dataset:
    """Make a data set of random tokens in blocks of `block_size`."""
    random = np.random.default_rng(0)

    def part(rows: int, *, shifted: bool) -> TokenPart:
        tokens = random.integers(0, vocab_size, (rows + 1) * block_size + 1, dtype=np.uint16)
        return TokenPart(tokens, block_size, shifted=shifted)

    test = part(TEST_ROWS // 16, shifted=False)
    spec = TextSpec(
        name="random",
        vocab_size=vocab_size,
        block_size=block_size,
        unit="token",
        validation_tokens=len(test.tokens) - 1,
        validation_bytes=None,
        synthetic=True,
    )
    return Dataset(spec=spec, train=part(ROWS, shifted=True), test=test, source="random tokens")


CASES: dict[str, Case] = {
    "lenet5": Case(
        {"CONFIG_MODEL_LENET5": "y"}, dataset=partial(random_images, 28, channels=1, classes=10), step=1
    ),
    "resnet18": Case(
        {"CONFIG_MODEL_RESNET18": "y"}, dataset=partial(random_images, 32, channels=3, classes=10), step=32
    ),
    "resnet50": Case(
        settings={"CONFIG_MODEL_RESNET50": "y", "CONFIG_RESNET50_STEM_IMAGENET": "y"},
        dataset=partial(random_images, 224, channels=3, classes=1000),
        step=32,
    ),
    "gpt2": Case(
        settings={"CONFIG_MODEL_GPT2": "y", "CONFIG_GPT2_PAD_VOCAB": "128"},
        dataset=partial(random_text, 1024, vocab_size=50257),
        step=1,
        lacks=("CONFIG_AUGMENT_NONE",),
    ),
}

# Nothing but steps: no evaluation, log row or checkpoint in between.
SETTINGS = {
    "CONFIG_AUGMENT_NONE": "y",
    "CONFIG_DATA_PLACEMENT_RESIDENT": "y",
    "CONFIG_EVAL_INTERVAL_STEPS": "1000000",
    "CONFIG_LOG_INTERVAL_STEPS": "1000000",
    "CONFIG_CHECKPOINT_SECONDS": "0",
    "CONFIG_KEEP_BEST": "n",
    "CONFIG_HYPER_PARAM_MANUAL": "y",
    "CONFIG_COMPILE_MANUAL": "y",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings for training a case."""

    case: str
    micro_batch: int
    precision: Precision = "bf16"
    accumulation: int = 1
    compile: bool = False
    cuda_graphs: bool = False
    any_batch: bool = False  # not a multiple of NORM_BATCH: batch normalisation follows the micro-batch
    device: Literal["cuda", "cpu"] = "cuda"


class Opened(NamedTuple):
    """A setting, resolved and planned for this machine."""

    config: Config
    data: TrainingData
    hardware: Hardware
    plan: Plan


def open_setting(setting: Setting) -> Opened:
    """Resolve `setting` by the Kconfig tree and plan it as it stands."""
    config = _config(setting)
    data = make_training_data(config, CASES[setting.case].dataset())
    # The few samples there are stand for as many as a step may want.
    data = dataclasses.replace(data, facts=dataclasses.replace(data.facts, train_size=None))
    hardware = probe(setting.device)
    return Opened(config, data, hardware, make_plan(config, hardware, data.facts))


@dataclass(slots=True)
class Training:
    """A job and its progress."""

    job: Job
    progress: Progress = field(default_factory=Progress)

    def run(self, *, steps: int) -> float:
        """Make `steps` optimizer steps, then evaluate; return the seconds of training alone.

        Raises ToolkitError where memory does not suffice: a batch set by hand is not made smaller.
        """
        before = self.progress.seconds
        self.job.budget = Budget(total_steps=self.progress.step + steps, total_seconds=None)
        loop.train(self.job, self.progress)
        return self.progress.seconds - before


def training_of(opened: Opened) -> Training:
    """Create model, optimizer and data on the device."""
    return Training(job_of(opened.config, opened.plan, opened.data, opened.hardware))


def predicted_parts(opened: Opened) -> Parts:
    """Predict the bytes of tensors at the peak of a step, by category, and GAPS."""
    found = trace_memory(opened.config, opened.plan, opened.data, hardware=opened.hardware)
    return with_gaps(found.trace, opened.plan.device)


def is_predicted_to_fit(opened: Opened, parts: Parts, *, free_bytes: int) -> bool:
    """Return True if a plan would use this micro-batch, whose peak is `parts`, with `free_bytes` free."""
    step = dataclasses.replace(step_settings(opened.plan), several_devices=False)
    return predicted(step, lambda _: parts, free_bytes=free_bytes).fits


def table_choice(setting: Setting, *, free_bytes: int) -> int:
    """Return the micro-batch that the free-memory table gives."""
    scale = _config(setting).table_scale
    assert scale is not None, f"{setting.case} has no scale"
    return table_batch(free_bytes, scale=scale, compiled=setting.compile)


def _config(setting: Setting) -> Config:
    case = CASES[setting.case]
    overrides = {
        **case.settings,
        **{name: value for name, value in SETTINGS.items() if name not in case.lacks},
        f"CONFIG_PRECISION_{setting.precision.upper()}": "y",
        "CONFIG_BATCH_SIZE": str(setting.micro_batch),
        "CONFIG_GRADIENT_ACCUMULATION": str(setting.accumulation),
        "CONFIG_COMPILE_MODEL": "y" if setting.compile else "n",
    }
    if setting.cuda_graphs:
        overrides["CONFIG_CUDA_GRAPHS"] = "y"
    if setting.any_batch and case.step > 1:
        overrides["CONFIG_NORM_BATCH"] = "0"
    return config_from_values(kconf.load_written("", root=ROOT, overrides=overrides).values)

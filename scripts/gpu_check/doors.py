"""The doors of the toolkit that the checks go through, and nothing else: change them here when they move."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lib import kconf
from lib.config import Config, config_from_values
from lib.devices.base import Backend
from lib.devices.probe import probe
from lib.plan import plan as make_plan
from lib.plan.bound import table_batch
from lib.plan.fitting import Parts, predicted, trial_of
from lib.plan.types import Hardware, Plan, Precision
from scripts.gpu_check.cases import CASES
from train import loop
from train.budget import Budget
from train.build import make_job
from train.job import Job, Progress
from train.planning.memory_estimate import footprint, with_gaps
from train.record import SilentRecord
from train.training_data import Subject, measure

ROOT = Path(__file__).resolve().parents[2]

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
    """One way to train a case."""

    case: str
    micro_batch: int
    precision: Precision = "bf16"
    accumulation: int = 1
    compile: bool = False
    any_batch: bool = False  # not a multiple of NORM_BATCH: batch normalisation follows the micro-batch
    device: Literal["cuda", "cpu"] = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A setting, resolved and planned for this machine."""

    config: Config
    subject: Subject
    hardware: Hardware
    plan: Plan


def open_setting(setting: Setting) -> Opened:
    """Resolve `setting` by the Kconfig tree and plan it as it stands."""
    config = _config(setting)
    dataset = CASES[setting.case].dataset()
    subject = measure(config, dataset)
    # The few samples there are stand for as many as a step may want.
    subject = dataclasses.replace(subject, facts=dataclasses.replace(subject.facts, train_size=None))
    hardware = probe(setting.device)
    return Opened(
        config=config,
        subject=subject,
        hardware=hardware,
        plan=make_plan(config, hardware, subject.facts),
    )


@dataclass(slots=True)
class Training:
    """What is being trained, and how far it is."""

    job: Job
    progress: Progress = field(default_factory=Progress)

    def run(self, *, steps: int) -> float:
        """Make `steps` optimizer steps, then evaluate; the seconds of training alone.

        Raises ToolkitError where memory does not suffice: a batch set by hand is not made smaller.
        """
        before = self.progress.seconds
        self.job.budget = Budget(total_steps=self.progress.step + steps, total_seconds=None)
        loop.train(self.job, self.progress)
        return self.progress.seconds - before


def training_of(opened: Opened) -> Training:
    """Model, optimizer and data on the device, ready to run."""
    job = make_job(
        opened.config,
        opened.plan,
        opened.subject,
        hardware=opened.hardware,
        backend=Backend(opened.plan.device),
        record=SilentRecord(),
    )
    return Training(job)


def predicted_parts(opened: Opened) -> Parts:
    """Bytes that tensors are predicted to take at the peak of a step, by what they are for, and GAPS."""
    found = footprint(opened.config, opened.plan, opened.subject, hardware=opened.hardware)
    return with_gaps(found.trace, opened.plan.device)


def is_predicted_to_fit(opened: Opened, parts: Parts, *, free_bytes: int) -> bool:
    """Whether a plan would use that micro-batch, whose peak is `parts`, where `free_bytes` are free."""
    trial = dataclasses.replace(trial_of(opened.plan), several_devices=False)
    return predicted(trial, lambda _: parts, free_bytes=free_bytes).fits


def table_choice(setting: Setting, *, free_bytes: int) -> int:
    """The micro-batch that the free-memory table gives."""
    scale = _config(setting).table_scale
    assert scale is not None, f"{setting.case} has no scale"
    return table_batch(free_bytes, scale=scale, compiled=setting.compile)


def _config(setting: Setting) -> Config:
    overrides = {
        **CASES[setting.case].settings,
        **{name: value for name, value in SETTINGS.items() if name not in CASES[setting.case].lacks},
        f"CONFIG_PRECISION_{setting.precision.upper()}": "y",
        "CONFIG_BATCH_SIZE": str(setting.micro_batch),
        "CONFIG_GRADIENT_ACCUMULATION": str(setting.accumulation),
        "CONFIG_COMPILE_MODEL": "y" if setting.compile else "n",
    }
    if setting.any_batch and CASES[setting.case].step > 1:
        overrides["CONFIG_NORM_BATCH"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "config"
        empty.write_text("")
        resolved = kconf.load(root=ROOT, config_file=empty, overrides=overrides)
    return config_from_values(resolved.values)

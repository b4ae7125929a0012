"""Lightning's batch size finder on one of the cases, for comparison with plans."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from lib.data.loader import Batch
from lib.data.types import ImageSpec, Spec, TextSpec
from lib.errors import ToolkitError
from scripts.gpu_check.cases import Setting, Training, open_setting, training_of

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
SAMPLES = 1 << 16


def installed() -> str | None:
    """Return the name of the package that has the finder, if one is installed."""
    for name in PACKAGES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    return None


def find_batch_size(setting: dict[str, Any], mode: str, limit_bytes: int) -> dict[str, Any]:
    """Return the batch that the finder chooses in `mode` (power or binsearch), and its time.

    It gets the network, loss, optimizer and precision of `setting`, and Lightning's own loop.

    limit_bytes: limit of the allocator. Raises ToolkitError where Lightning is not installed.
    """
    package = installed()
    if package is None:
        raise ToolkitError("Lightning is not installed")
    lightning = importlib.import_module(package)
    tuner_of = importlib.import_module(f"{package}.tuner").Tuner
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    opened = open_setting(Setting(**setting))
    data = _data_module(lightning, opened.data.dataset.spec, batch_size=2)
    module = _module(lightning, training_of(opened))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed" if opened.plan.precision == "bf16" else "32-true",
            max_epochs=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        started = time.perf_counter()
        found = tuner_of(trainer).scale_batch_size(module, datamodule=data, mode=mode)
        seconds = time.perf_counter() - started
    return {"batch": found, "seconds": seconds, "version": lightning.__version__}


def _sample(spec: Spec) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(spec, ImageSpec):
        return torch.randn(spec.input_shape), torch.tensor(0)
    assert isinstance(spec, TextSpec)
    tokens = torch.randint(spec.vocab_size, spec.input_shape)
    return tokens, tokens.roll(-1)


def _data_module(lightning: Any, spec: Spec, *, batch_size: int) -> Any:
    samples: Any = [_sample(spec)] * SAMPLES  # any sequence is a data set to a DataLoader

    class Data(lightning.LightningDataModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = batch_size  # the finder changes it

        def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
            return DataLoader(samples, batch_size=self.batch_size)

    return Data()


def _module(lightning: Any, training: Training) -> Any:
    job = training.job

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.network = job.model

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:  # noqa: ARG002
            sums = job.task.training(self.network, Batch(*batch))
            return sums.loss / sums.count

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

    return Module()

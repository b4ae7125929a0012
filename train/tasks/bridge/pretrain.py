"""Pretraining of the toolkit's small language models, which are then frozen."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib import atomic
from lib.config import Config
from lib.data.cache import cached_folder, fingerprint
from lib.data.datasets.question_answering.data import HUGGING_FACE, folder_of
from lib.data.datasets.question_answering.spec import AnswerSpec
from lib.data.loader import Batch
from lib.data.types import ArrayPart, Dataset, TextSpec
from lib.devices.base import Backend
from lib.devices.probe import probe
from lib.nn import IGNORED
from lib.plan.types import fixed_plan
from train import loop
from train.build import make_job
from train.job import Progress
from train.record import Record
from train.signals import Stopped
from train.tasks.base import Forward, Sums
from train.tasks.bridge.frozen import FrozenSource, size_options, text_spec
from train.tasks.lm.task import LanguageModel
from train.training_data import cache_of, make_training_data

VERSION = 1
SEED, BATCH, LEARNING_RATE = 1, 64, 3e-3
WEIGHTS = "weights.pt"
RECIPE: Mapping[str, Any] = {
    "seed": SEED, "optimizer": "adamw", "learning_rate": LEARNING_RATE, "lr_scaling": "none",
    "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.99, "adam_eps": 1e-8, "schedule": "cosine",
    "lr_min_ratio": 0.0, "warmup_unit": "percent", "warmup_pct": 10, "warmup_start_ratio": 0.01,
    "grad_clip": 1.0, "label_smoothing": 0.0, "ema": False, "budget": "steps",
    "checkpoint_interval_steps": 0, "checkpoint_seconds": 0, "log_interval_steps": 10,
    "data_limit": 0, "holdout": 0, "data_placement": "resident", "deterministic": False,
    "grad_checkpoint": "none", "activation_offload": False, "chunked_cross_entropy": False,
}  # fmt: skip


def frozen_sources(
    config: Config, dataset: Dataset, *, root: Path, learned: bool, log: Callable[[str], None]
) -> tuple[FrozenSource, FrozenSource]:
    """Return the two models that `config` names; those of the toolkit are trained on the texts of `dataset`.

    learned: false for random weights. Weights are cached in the source tree at `root`. Raises ToolkitError
    where the cache cannot be written, KeyboardInterrupt where training is stopped.
    """
    spec = dataset.spec
    assert isinstance(spec, AnswerSpec)
    paths: list[Path | None] = []
    for number, side in enumerate(spec.sides):
        if side.name.startswith(HUGGING_FACE):
            paths.append(folder_of(side.name, root=root))
        elif learned:
            paths.append(_pretrained(config, dataset, number, cache_dir=cache_of(root), log=log))
        else:
            paths.append(None)
    first, second = (FrozenSource(side, path) for side, path in zip(spec.sides, paths, strict=True))
    return first, second


def _pretrained(
    config: Config, dataset: Dataset, number: int, *, cache_dir: Path, log: Callable[[str], None]
) -> Path:
    """Return the file of weights of one model, trained if necessary."""
    assert isinstance(dataset.spec, AnswerSpec)
    side, steps = dataset.spec.sides[number], _steps(config)
    texts = texts_of(dataset, number)
    recipe = (VERSION, SEED, BATCH, LEARNING_RATE, steps, size_options(side), side)
    contents = (part.inputs.tobytes() for part in (texts.train, texts.test) if isinstance(part, ArrayPart))
    identity = fingerprint(*recipe, *(hashlib.sha256(content).hexdigest() for content in contents))

    def fill(folder: Path) -> None:
        log(f"{side.name}: training it for {steps} steps, to be frozen, into {cache_dir}")
        log(f"{side.name}: {_train(_recipe(config, size_options(side)), texts, folder / WEIGHTS)}")

    name = f"frozen-{side.name.partition(':')[2]}-{identity[:8]}"
    return cached_folder(cache_dir / name, identity=identity, fill=fill, log=log) / WEIGHTS


def texts_of(dataset: Dataset, number: int) -> Dataset:
    """Return the whole texts of `dataset` in the tokens of one model, with the answers as targets.

    The rest of a text is unpredictable, and would dominate the noise of the gradient.
    """
    assert isinstance(dataset.spec, AnswerSpec)
    columns = dataset.spec.columns
    edges = np.cumsum((0, *columns))[2 * number :]
    parts = []
    for part in (dataset.train, dataset.test):
        assert isinstance(part, ArrayPart)
        _, targets = part.take()
        answers, texts = targets[:, edges[0] : edges[1]], targets[:, edges[1] : edges[2]]
        ends, counts = ((rows != IGNORED).sum(axis=1, keepdims=True) for rows in (texts, answers))
        following = np.pad(texts[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
        places = np.arange(1, texts.shape[1] + 1)
        requested = np.where(places >= ends - counts, following, IGNORED).astype(np.int32)
        parts.append(ArrayPart(texts.clip(min=0).astype(np.int64), requested))
    spec = text_spec(dataset.spec.sides[number])
    return Dataset(spec, parts[0], parts[1], f"the texts of {dataset.spec.name}")


class _Answers(LanguageModel):
    """Language modelling of the targets that are not IGNORED."""

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss of all rows."""
        every = torch.ones(len(batch.inputs), device=batch.inputs.device)
        return self.evaluation(forward, dataclasses.replace(batch, weights=every))


def _train(config: Config, texts: Dataset, file: Path) -> str:
    """Train on a CPU by the training loop, write the weights, and return a summary line."""
    job = make_job(
        config,
        fixed_plan("the same for every run, so that it is made once", micro_batch=BATCH),
        make_training_data(config, texts),
        hardware=probe("cpu"),
        backend=Backend("cpu"),
        record=Record(),
    )
    assert isinstance(texts.spec, TextSpec)
    job.task = _Answers(texts.spec, chunked=False)
    progress = Progress()
    with job.train_loader, job.eval_loader:
        try:
            result = loop.train(job, progress)
        except Stopped as error:
            text = f"stopped while {texts.spec.name} was trained, to be frozen"
            raise KeyboardInterrupt(f"{text}; make train begins with it again") from error
    weights = io.BytesIO()  # torch.save to a file would hide errors of the disk
    torch.save(job.model.state_dict(), weights)
    atomic.write_new(file, weights.getvalue())
    return f"loss {result['loss']:.4f} nats per token after {progress.step} steps, {progress.seconds:.0f} s"


def _recipe(config: Config, options: Mapping[str, Any]) -> Config:
    """Return the fixed training configuration, which depends on the run only through FROZEN_STEPS."""
    steps = _steps(config)
    return config.replace(
        model="gpt2", task="lm", model_options=options, task_options={}, **RECIPE,
        max_steps=steps, eval_interval_steps=steps,
    )  # fmt: skip


def _steps(config: Config) -> int:
    steps = config.task_options["frozen_steps"]
    assert isinstance(steps, int)
    return steps

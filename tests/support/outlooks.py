"""Outlooks of small runs on machines of the catalogue."""

from __future__ import annotations

from unittest import mock

from lib.config import Config
from lib.plan.gpus import parse_gpu
from tests.support.training import random_data, small_config
from train.planning.command import Outlook, look_ahead
from train.planning.memory_estimate import MemoryTraces
from train.training_data import TrainingData

BATCH = 64


def outlook_config(micro_batch: int, **changes: object) -> Config:
    return small_config(
        hyper_param="manual",
        batch_size=micro_batch,
        gradient_accumulation=0,
        target_effective_batch=BATCH,
        data_placement="stream",
        **changes,
    )


def outlook_data(config: Config) -> TrainingData:
    return random_data(config, shape=(1, 28, 28), train_size=640)


def outlook(gpu: str, micro_batch: int, **changes: object) -> Outlook:
    config = outlook_config(micro_batch, **changes)
    data = outlook_data(config)
    return look_ahead(config, data, parse_gpu(gpu), MemoryTraces(config, data))


def short_of_memory(gpu: str, micro_batch: int, **changes: object) -> Outlook:
    """Outlook as where memory is short, with the changes that need less."""
    with mock.patch("train.planning.command.is_short_of_memory", return_value=True):
        return outlook(gpu, micro_batch, **changes)

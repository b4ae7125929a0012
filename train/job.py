"""Training job and its progress."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lib.config import Config
from lib.data.loader import EvalLoader, TrainLoader
from lib.devices.base import Backend
from lib.nn.dropout import Dropout
from lib.optim.ema import Ema
from lib.plan.types import Plan
from train.budget import Budget
from train.record import Record
from train.tasks.base import Carry, Forward, Task


@dataclass(slots=True, kw_only=True)
class Job:
    """Model, optimizer, data and plan of a run, ready to train."""

    config: Config
    plan: Plan  # replaced by one with a smaller micro-batch after running out of memory
    backend: Backend
    task: Task
    model: nn.Module  # holds the weights
    wrapped: nn.Module  # the model, averaging gradients over ranks
    forward: Forward  # the wrapped model, perhaps compiled
    keeping: AbstractContextManager[Any]  # for training forward passes: activation offloading
    dropouts: tuple[Dropout, ...]  # modules of the model
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: Ema | None
    carry: Carry | None  # state of samples that stay for several steps
    train_loader: TrainLoader
    eval_loader: EvalLoader
    budget: Budget
    warmup_fraction: float  # of the budget
    record: Record


@dataclass(slots=True)
class Progress:
    """Progress of a run: with the weights and the optimizer all that a checkpoint needs.

    (And a carry, where samples stay.) Data order, augmentation and learning rate are functions of the step.
    """

    step: int = 0  # optimizer steps made
    seconds: float = 0.0  # training time, without evaluation and saving
    best: float = -math.inf  # best task.score of an evaluation so far
    evaluation_pending: bool = False  # a signal interrupted the evaluation of this step

"""What core tests need of LatentWire, how it learns, and its questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.datasets import key_values
from lib.data.datasets.question_answering.spec import AnswerSpec as SPEC
from lib.data.datasets.question_answering.spec import Side
from lib.devices.base import Backend
from models.latentwire.model import Prefixes as OUTPUT
from tests.models.latentwire.answers import answer_set
from tests.models.latentwire.answers import answers_data as data
from tests.models.latentwire.answers import small_bridge_config as config
from train.tasks.bridge.task import _Copy

__all__ = ["OUTPUT", "SPEC", "config", "data"]

DISTRIBUTED: dict[str, dict[str, Any]] = {
    name: {"model": "latentwire", "micro_batch": 5, "layout": layout, "settings": {"grad_clip": 0.5}}
    for name, layout in {
        "split": {"strategy": "split", "branch_devices": (1, 1)},
        "hybrid of 3": {"strategy": "split", "branch_devices": (2, 1)},
        "hybrid of 4": {"strategy": "split", "branch_devices": (2, 2)},
        "sequential": {"strategy": "sequential"},
    }.items()
}
DATASETS = ("key_values", "squad", "hotpot")
NARROW = {
    "LATENTWIRE_LATENTS": "3",
    "LATENTWIRE_WIDTH": "8",
    "LATENTWIRE_LAYERS": "1",
    "LATENTWIRE_HEADS": "2",
}
STATIC_GRAPH = {"latentwire": "latentwire-tiny"}
_BRIDGE = "CONFIG_FROZEN_STEPS=2 CONFIG_MAX_STEPS=2 CONFIG_LATENTWIRE_LAYERS=1 CONFIG_LATENTWIRE_WIDTH=8"
README_END_TO_END = (
    ("make defconfig-latentwire-tiny && make train", f"{_BRIDGE} CONFIG_DATA_LIMIT=512", "shuffled prefix b"),
)
SMALL = {
    "SOURCE_BYTES": "64",
    "FROZEN_STEPS": "1",
    "LATENTWIRE_LATENTS": "2",
    "LATENTWIRE_LAYERS": "1",
    "LATENTWIRE_HEADS": "2",
    "LATENTWIRE_WIDTH": "8",
}
SHOWN = ("LATENTWIRE",)
SMALLEST = {name: value for name, value in SMALL.items() if name != "SOURCE_BYTES"}
EMBEDDED = ("key_values",)
SQUAD = {"data": [{"paragraphs": [
    {"context": f"It rained {place}.", "qas": [{"question": "Where?", "answers": [{"text": place}]}]}
    for place in ("in Bergen", "here", "there", "in Rome") * 6
]}]}  # fmt: skip
HOTPOT = [
    {"question": "Who came first?", "answer": name, "context": [[name, [f"{name} was first."]]]}
    for name in ("Ann", "Bob", "Eve", "Tom") * 6
]


def few_generated() -> Iterator[Any]:
    yield mock.patch.multiple(key_values, TRAIN_SIZE=24, TEST_SIZE=8)


def write_files(folder: Path) -> None:
    """The published sets, in folders of `folder`."""
    for name, content, *files in (
        ("squad", SQUAD, "train-v1.1.json", "dev-v1.1.json"),
        ("hotpot", HOTPOT, "hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json"),
    ):
        (folder / name).mkdir(parents=True)
        for file in files:
            (folder / name / file).write_text(json.dumps(content))


def spec_of_case(case: dict[str, Any]) -> SPEC | None:
    """The questions of a golden case; None where it has others."""
    if "source_bytes" not in case:
        return None
    first, second = (side_of(width) for width in case["widths"])
    return SPEC(name="noise", source_bytes=case["source_bytes"], sides=(first, second), synthetic=True)


def spec_of_config(_: Config) -> SPEC:
    """What only the questions would tell."""
    spec = answer_set(1, 1).spec
    assert isinstance(spec, SPEC)
    return spec


def side_of(width: int) -> Side:
    """A language model of so many channels, of which nothing else is wanted."""
    return Side(name="noise", vocab_size=256, width=width, anchor=(65,), answer_tokens=3, text_tokens=15)


def targets_of(_: SPEC, inputs: Tensor) -> Tensor:
    return torch.arange(len(inputs))


def output_shape(spec: SPEC, rows: int) -> tuple[int, ...]:
    return rows, spec.sides[0].width


def logits_of(output: OUTPUT) -> Tensor:
    """The mean of the first prefix."""
    return output.a_BMC.mean(dim=1)


def further_loss(output: OUTPUT, targets: Tensor, *, reduction: str) -> Tensor:
    """That of the second prefix."""
    return F.cross_entropy(output.b_BMC.mean(dim=1), targets, reduction=reduction)


def second_device(patched: Any, device: torch.device) -> None:
    """Let `device` stand for those of copies, to which prefixes are moved, and for main memory."""
    patched.setattr(_Copy, "device", property(lambda _: device))
    patched.setattr(Backend, "host", property(lambda _: device))

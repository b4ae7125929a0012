"""The golden cases of models, and what goes in and comes out of one, whatever it learns from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.datasets.question_answering.spec import AnswerSpec, Side
from lib.data.types import ImageSpec, PuzzleSpec, Spec, TextClassSpec, TextSpec
from lib.nn.model_code import build_model, load_model
from lib.plugins import MODELS
from models.latentwire.model import Prefixes

ROOT = Path(__file__).resolve().parents[2]
NAMES = MODELS.names()
LANGUAGE_MODELS = tuple(name for name in NAMES if load_model(name).TASK == "lm")


def golden(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())[
        "cases"
    ]
    return cases


def spec_of(case: dict[str, Any]) -> Spec:
    """Images, puzzles, questions, texts with labels or without: by what the case tells of its data."""
    if "channels" in case:
        shape = {name: case[name] for name in ("channels", "height", "width", "classes")}
        constant = (0.5,) * case["channels"]
        return ImageSpec(name="noise", mean=constant, std=constant, synthetic=True, **shape)
    if "source_bytes" in case:
        first, second = (side_of(width) for width in case["widths"])
        return AnswerSpec(
            name="noise", source_bytes=case["source_bytes"], sides=(first, second), synthetic=True
        )
    if "side" in case:
        return PuzzleSpec(name="noise", side=case["side"], synthetic=True)
    sizes = {name: case[name] for name in ("vocab_size", "block_size")}
    if "classes" in case:
        return TextClassSpec(name="noise", classes=case["classes"], pad=case["vocab_size"] - 1, **sizes)
    return TextSpec(name="noise", unit="token", validation_tokens=1, validation_bytes=None, **sizes)


def side_of(width: int) -> Side:
    """A language model of so many channels, of which nothing else is wanted."""
    return Side(name="noise", vocab_size=256, width=width, anchor=(65,), answer_tokens=3, text_tokens=15)


def tiny(name: str, *, seed: int = 0) -> tuple[nn.Module, Spec]:
    """The smallest case of `name`, on the CPU."""
    case = min(golden(name), key=lambda case: case["parameters"])
    return build_model(name, case["options"], spec_of(case), seed=seed), spec_of(case)


def inputs_of(spec: Spec, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(spec, ImageSpec):
        return torch.randn(rows, *spec.input_shape, generator=generator)
    return torch.randint(0, spec.vocab_size, (rows, *spec.input_shape), generator=generator)


def targets_of(spec: Spec, rows: int) -> Tensor:
    if isinstance(spec, AnswerSpec):
        return torch.arange(rows)
    if isinstance(spec, PuzzleSpec):
        return 2 + inputs_of(spec, rows) % spec.side
    if isinstance(spec, TextSpec):
        return torch.arange(rows * spec.block_size).view(rows, -1) % spec.vocab_size
    return torch.arange(rows) % spec.classes


def output_shape(spec: Spec, rows: int) -> tuple[int, ...]:
    if isinstance(spec, AnswerSpec):
        return rows, spec.sides[0].width
    if isinstance(spec, PuzzleSpec):
        return rows, *spec.input_shape, spec.vocab_size
    if isinstance(spec, TextSpec):
        return rows, spec.block_size, spec.vocab_size
    return rows, spec.classes


def logits_of(output: Any) -> Tensor:
    """What a model predicts; one that learns recursively gives it with more. Of a prefix the mean."""
    if isinstance(output, Prefixes):
        return output.a_BMC.mean(dim=1)
    logits: Tensor = output[0] if isinstance(output, tuple) else output
    return logits


def loss_of(output: Any, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """The halting logits of a recursive model, too, are in it, and the second prefix of a bridge."""
    loss = F.cross_entropy(logits_of(output).flatten(0, -2), targets.flatten(), reduction=reduction)
    if isinstance(output, Prefixes):
        loss = loss + F.cross_entropy(output.b_BMC.mean(dim=1), targets, reduction=reduction)
    elif isinstance(output, tuple):
        halting = F.binary_cross_entropy_with_logits(
            output[1], torch.ones_like(output[1]), reduction=reduction
        )
        loss = loss + halting
    return loss

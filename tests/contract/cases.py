"""The golden cases of models, and what goes in and comes out of one, whatever it learns from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import Column, ImageSpec, Spec, TableClassSpec, TableSpec, TextClassSpec, TextSpec
from lib.nn.model_code import build_model, load_model
from lib.plugins import MODELS
from tests.support.examples import examples, told_of

ROOT = Path(__file__).resolve().parents[2]
# Models of packages that are extras are in tests/extras.
WITH_EXTRAS = tuple(name for name in MODELS.names() if hasattr(load_model(name), "EXTRA"))
NAMES = tuple(name for name in MODELS.names() if name not in WITH_EXTRAS)
LANGUAGE_MODELS = tuple(name for name in NAMES if load_model(name).TASK == "lm")


def needs_extra(defconfig: Path) -> bool:
    """Of a shipped configuration: tests/extras has what trains it or builds its model."""
    text = defconfig.read_text(encoding="utf-8")
    return any(f"CONFIG_MODEL_{name.upper()}=y" in text for name in WITH_EXTRAS)


def golden(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text())[
        "cases"
    ]
    return cases


def spec_of(case: dict[str, Any]) -> Spec:
    """Images, tables, texts with labels or without, or what an example has: by what the case tells."""
    if "features" in case:
        columns = tuple(Column(name=f"x{number}") for number in range(case["features"]))
        if "classes" in case:
            return TableClassSpec(name="noise", columns=columns, classes=case["classes"])
        return TableSpec(name="noise", columns=columns, targets=(Column(name="y"),) * case["targets"])
    if "channels" in case:
        shape = {name: case[name] for name in ("channels", "height", "width", "classes")}
        constant = (0.5,) * case["channels"]
        return ImageSpec(name="noise", mean=constant, std=constant, synthetic=True, **shape)
    for known in told_of("spec_of_case"):
        if (spec := known(case)) is not None:
            return spec  # type: ignore[no-any-return]
    sizes = {name: case[name] for name in ("vocab_size", "block_size")}
    if "classes" in case:
        return TextClassSpec(name="noise", classes=case["classes"], pad=case["vocab_size"] - 1, **sizes)
    return TextSpec(name="noise", unit="token", validation_tokens=1, validation_bytes=None, **sizes)


def example_of(kind: str, value: object) -> Any:
    """The example whose SPEC or OUTPUT `value` is; None where it is of the kinds that the core knows."""
    return next(
        (one for one in examples().values() if hasattr(one, kind) and isinstance(value, vars(one)[kind])),
        None,
    )


def tiny(name: str, *, seed: int = 0) -> tuple[nn.Module, Spec]:
    """The smallest case of `name`, on the CPU."""
    case = min(golden(name), key=lambda case: case["parameters"])
    return build_model(name, case["options"], spec_of(case), seed=seed), spec_of(case)


def inputs_of(spec: Spec, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(spec, ImageSpec | TableSpec | TableClassSpec):
        return torch.randn(rows, *spec.input_shape, generator=generator)
    vocab_size: int = spec.vocab_size  # type: ignore[attr-defined]
    return torch.randint(0, vocab_size, (rows, *spec.input_shape), generator=generator)


def targets_of(spec: Spec, rows: int) -> Tensor:
    if example := example_of("SPEC", spec):
        return example.targets_of(spec, inputs_of(spec, rows))  # type: ignore[no-any-return]
    if isinstance(spec, TextSpec):
        return torch.arange(rows * spec.block_size).view(rows, -1) % spec.vocab_size
    if isinstance(spec, TableSpec):
        return torch.arange(rows * len(spec.targets)).view(rows, -1) / rows
    return torch.arange(rows) % spec.classes


def output_shape(spec: Spec, rows: int) -> tuple[int, ...]:
    if example := example_of("SPEC", spec):
        return example.output_shape(spec, rows)  # type: ignore[no-any-return]
    if isinstance(spec, TextSpec):
        return rows, spec.block_size, spec.vocab_size
    if isinstance(spec, TableSpec):
        return rows, len(spec.targets)
    return rows, spec.classes


def logits_of(output: Any) -> Tensor:
    """What a model predicts, which may be given with more."""
    example = example_of("OUTPUT", output)
    logits: Tensor = example.logits_of(output) if example else output
    return logits


def loss_of(output: Any, targets: Tensor, *, reduction: str = "mean") -> Tensor:
    """All that a model gives is in it."""
    loss = F.cross_entropy(logits_of(output).flatten(0, -2), targets.flatten(), reduction=reduction)
    if example := example_of("OUTPUT", output):
        loss = loss + example.further_loss(output, targets, reduction=reduction)
    return loss

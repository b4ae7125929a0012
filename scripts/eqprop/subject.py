"""What the experiments are done on: the configured looped transformer, and its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib import kconf
from lib.config import Config, config_from_values
from lib.data.loader import Delivery, EvalLoader
from lib.errors import ConfigError
from lib.nn.model_code import build_model
from lib.tiers import with_changes
from models.looped.equilibrium import Equilibrium, jacobian_products
from models.looped.model import SOURCE_SCALE, LoopedTransformer
from train.training_data import Subject, open_subject

ROOT = Path(__file__).resolve().parents[2]
TIGHT = {"tolerance": 1e-13, "max_iterations": 1000, "nudged_iterations": 20}
# What is exact to the last bits in float64, as far as states settle: what the estimates are compared with.
REFERENCE = {"gradient": "implicit", "nudge": "symmetric", "solver": "damped", **TIGHT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where an experiment is done: on what was configured. quick: fewer repetitions, for a look."""

    resolved: kconf.Resolved
    quick: bool
    out: Path
    say: Callable[[str], None]

    def config(self, **changes: str) -> Config:
        """What was configured, with symbols (LOOPED_WIDTH, SEED) changed. Raises ConfigError."""
        wanted = {f"CONFIG_{name}": value for name, value in changes.items()}
        return config_from_values(with_changes(self.resolved, wanted, root=ROOT).values)

    def subject(self, config: Config) -> Subject:
        """The data of `config`. Raises DataError where they are not there."""
        return open_subject(config, root=ROOT, say=lambda _: None)


def model_of(config: Config, subject: Subject, *, seed: int, **changes: Any) -> LoopedTransformer:
    """The configured model with options changed. Raises ConfigError where they do not go together."""
    model = build_model("looped", {**config.model_options, **changes}, subject.dataset.spec, seed=seed)
    if not isinstance(model, LoopedTransformer):
        raise ConfigError("the configured model is not the looped transformer")
    return model


def with_options(
    model: LoopedTransformer, config: Config, subject: Subject, **changes: Any
) -> LoopedTransformer:
    """A copy of `model`, weights, precision and all, with options changed."""
    dtype = next(model.parameters()).dtype
    other = model_of(config, subject, seed=0, **changes).to(dtype)
    other.load_state_dict(model.state_dict())
    return other


def batch_of(subject: Subject, *, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The first `rows` samples of the evaluation part: images normalised, or tokens."""
    delivery = Delivery(
        device=torch.device("cpu"),
        dtype=dtype,
        channels_last=False,
        placement="stream",
        num_workers=1,
        prefetch=1,
    )
    with EvalLoader(subject.dataset.test, subject.dataset.spec, delivery) as loader:
        for batch in loader.batches(rank=0, world=1, batch_size=rows):
            return batch.inputs, batch.targets
    raise AssertionError("the evaluation part is empty")


def in_precision(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Images as `dtype`; tokens as they are."""
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over samples, as everywhere."""
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def core_gradient(model: LoopedTransformer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of the summed loss by all weights but the head's, which is exact anyway: one row in float64."""
    model.zero_grad(set_to_none=True)
    loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    parts = [
        grad.double().flatten() for name, grad in named if grad is not None and not name.startswith("head")
    ]
    return torch.cat(parts)


def equilibria(model: LoopedTransformer) -> list[Equilibrium]:
    return [block for block in model.blocks if isinstance(block, Equilibrium)]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near an estimate is to the exact gradient."""

    cosine: float
    relative_error: float
    norm_ratio: float

    @classmethod
    def between(cls, found: Tensor, exact: Tensor) -> Agreement:
        size = exact.norm()
        return cls(
            cosine=float(F.cosine_similarity(found, exact, dim=0)),
            relative_error=float((found - exact).norm() / size),
            norm_ratio=float(found.norm() / size),
        )


def settling(model: LoopedTransformer) -> dict[str, float]:
    """Of the last call: mean and largest iterations, largest residual, share of what had not settled, and
    the largest residual under the forces of the last gradient, where it has any."""
    solutions = model.solutions()
    iterations = torch.cat([solution.iterations.double().flatten() for solution in solutions])
    residual = torch.cat([solution.residual.double().flatten() for solution in solutions])
    tolerance = equilibria(model)[0].options.solver.tolerance
    forced = {"forced": max(float(each.max()) for each in model.forced())} if model.forced() else {}
    return {
        "iterations": float(iterations.mean()),
        "most_iterations": float(iterations.max()),
        "residual": float(residual.max()),
        "unsettled": float((residual > tolerance).double().mean()),
    } | forced


def spectral_radius(model: LoopedTransformer, inputs: Tensor, *, powers: int = 40) -> float:
    """Of the Jacobian of one undamped step at rest, by powers of it; the largest of all blocks."""
    largest = 0.0
    with torch.no_grad():
        model(inputs)
        x_BTD = model.embedding(inputs)
        for rest in equilibria(model):
            assert rest.solution is not None
            source = rest.block.source(SOURCE_SCALE * x_BTD, model.allowed(inputs))
            state = rest.solution.state
            moved = torch.randn(state.shape, generator=torch.Generator().manual_seed(0)).to(state.dtype)
            sizes = []
            _, push = jacobian_products(partial(rest.block.step, source=source), state)
            for _ in range(powers):
                moved = push(moved)
                sizes.append(moved.norm())
                moved = moved / sizes[-1]
            largest = max(largest, float(torch.stack(sizes[powers // 2 :]).log().mean().exp()))
            x_BTD = rest.block.activate(state)
    return largest


def shape_of(config: Config) -> str:
    options: Mapping[str, Any] = config.model_options
    return f"d={options['width']} heads={options['heads']} hidden={options['hidden']}"

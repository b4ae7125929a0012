"""Setting of the experiments: the configured looped transformer and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib import kconf
from lib.config import Config, config_from_values
from lib.data.loader import EvalLoader, LoaderConfig
from lib.errors import ConfigError
from lib.nn.model_code import build_model
from lib.tiers import with_changes
from models.looped.equilibrium import jacobian_products
from models.looped.model import SOURCE_SCALE, LoopedTransformer
from train.training_data import TrainingData, open_training_data

ROOT = Path(__file__).resolve().parents[2]
TIGHT = {"tolerance": 1e-13, "max_iterations": 1000, "nudged_iterations": 20}
# Options of the reference gradient, exact in float64 up to convergence of the states.
REFERENCE = {"gradient": "implicit", "nudge": "symmetric", "solver": "damped", **TIGHT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Configuration and output of an experiment. quick: fewer repetitions."""

    resolved: kconf.Resolved
    quick: bool
    out: Path
    log: Callable[[str], None]

    def config(self, **changes: str) -> Config:
        """Return the configuration with symbols (LOOPED_WIDTH, SEED) changed. Raises ConfigError."""
        symbols = {f"CONFIG_{name}": value for name, value in changes.items()}
        return config_from_values(with_changes(self.resolved, symbols, root=ROOT).values)

    def data(self, config: Config) -> TrainingData:
        """Open the data of `config`. Raises DataError if they are missing."""
        return open_training_data(config, root=ROOT, log=lambda _: None)


def model_of(config: Config, data: TrainingData, *, seed: int, **changes: Any) -> LoopedTransformer:
    """Build the configured model with options changed. Raises ConfigError if they are incompatible."""
    model = build_model("looped", {**config.model_options, **changes}, data.dataset.spec, seed=seed)
    if not isinstance(model, LoopedTransformer):
        raise ConfigError("the configured model is not the looped transformer")
    return model


def with_options(
    model: LoopedTransformer, config: Config, data: TrainingData, **changes: Any
) -> LoopedTransformer:
    """Copy `model` with its weights and precision, and options changed."""
    dtype = next(model.parameters()).dtype
    other = model_of(config, data, seed=0, **changes).to(dtype)
    other.load_state_dict(model.state_dict())
    return other


def batch_of(data: TrainingData, *, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the first `rows` samples of the evaluation part: normalised images or tokens."""
    loader_config = LoaderConfig(device=torch.device("cpu"), dtype=dtype)
    with EvalLoader(data.dataset.test, data.dataset.spec, loader_config) as loader:
        for batch in loader.batches(rank=0, world=1, batch_size=rows):
            return batch.inputs, batch.targets
    raise AssertionError("the evaluation part is empty")


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy summed over samples."""
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def core_gradient(model: LoopedTransformer, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the summed loss by all weights but the head's, flattened, in float64.

    Images are converted to the precision of the model.
    """
    model.zero_grad(set_to_none=True)
    inputs = inputs.to(model.head.weight.dtype) if inputs.is_floating_point() else inputs
    loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    parts = [
        grad.double().flatten() for name, grad in named if grad is not None and not name.startswith("head")
    ]
    return torch.cat(parts)


def agreement(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Compare two flattened gradients, an estimate and the exact one."""
    size = exact.norm()
    return {
        "cosine": float(F.cosine_similarity(found, exact, dim=0)),
        "relative_error": float((found - exact).norm() / size),
        "norm_ratio": float(found.norm() / size),
    }


def convergence(model: LoopedTransformer) -> dict[str, float]:
    """Return iterations, residuals and the unconverged share of the last forward pass.

    forced: the largest residual under the forces of the last gradient, if there are any.
    """
    solutions = model.solutions()
    iterations = torch.cat([solution.iterations.double().flatten() for solution in solutions])
    residual = torch.cat([solution.residual.double().flatten() for solution in solutions])
    tolerance = model.tolerance
    forced = {"forced": max(float(each.max()) for each in model.forced())} if model.forced() else {}
    return {
        "iterations": float(iterations.mean()),
        "most_iterations": float(iterations.max()),
        "residual": float(residual.max()),
        "unsettled": float((residual > tolerance).double().mean()),
    } | forced


def spectral_radius(model: LoopedTransformer, inputs: Tensor, *, powers: int = 40) -> float:
    """Return the largest spectral radius of the blocks' Jacobians at rest, by power iteration."""
    largest = 0.0
    with torch.no_grad():
        model(inputs)
        x_BTD = model.embedding(inputs)
        for rest in model.equilibria():
            assert rest.solution is not None
            source = rest.block.source(SOURCE_SCALE * x_BTD, model.allowed(inputs))
            state = rest.solution.state
            vector = torch.randn(state.shape, generator=torch.Generator().manual_seed(0)).to(state.dtype)
            sizes = []
            _, push = jacobian_products(partial(rest.block.step, source=source), state)
            for _ in range(powers):
                vector = push(vector)
                sizes.append(vector.norm())
                vector = vector / sizes[-1]
            largest = max(largest, float(torch.stack(sizes[powers // 2 :]).log().mean().exp()))
            x_BTD = rest.block.activate(state)
    return largest

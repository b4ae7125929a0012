"""Small looped transformers for tests, and gradients to compare."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import ImageSpec, Spec, TextSpec
from lib.nn.model_code import build_model
from models.looped.blocks import EnergyForm, Source, Weights, _log_cosh
from models.looped.model import LoopedTransformer

CLASSES = 5
IMAGES = ImageSpec(
    name="noise", channels=1, height=6, width=7, classes=CLASSES, mean=(0.5,), std=(0.5,), synthetic=True
)
TEXT = TextSpec(
    name="noise", vocab_size=11, block_size=6, unit="token", validation_tokens=1, validation_bytes=None
)
OPTIONS: dict[str, Any] = {
    "input": "images",
    "causal": False,
    "patch": 0,
    "readout": "mean",
    "width": 8,
    "heads": 2,
    "hidden": 16,
    "layers": 1,
    "block": "energy_cross",
    "activation": "layernorm",
    "mlp": "gelu",
    "spectral_cap": 0.8,
    "gradient": "ep",
    "nudge": "symmetric",
    "nudge_points": 4,
    "beta": 0.01,
    "nudged_iterations": 10,
    "together": False,
    "solver": "damped",
    "step_size": 1.0,
    "tolerance": 1e-6,
    "max_iterations": 50,
}
TIGHT: dict[str, Any] = {"tolerance": 1e-14, "max_iterations": 400, "nudged_iterations": 20}
TEXTS: dict[str, Any] = {"input": "text", "causal": True}


def looped(*, spec: Spec = IMAGES, seed: int = 0, **changes: Any) -> LoopedTransformer:
    default = {"gradient": "implicit"} if changes.get("block") == "plain" else {}
    model = build_model("looped", OPTIONS | default | changes, spec, seed=seed)
    assert isinstance(model, LoopedTransformer)
    return model


def batch(spec: Spec = IMAGES, *, rows: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    if isinstance(spec, ImageSpec):
        inputs = torch.randn(rows, *spec.input_shape, generator=random, dtype=torch.float64)
        return inputs.to(dtype), torch.arange(rows) % spec.classes
    assert isinstance(spec, TextSpec)
    inputs = torch.randint(0, spec.vocab_size, (rows, spec.block_size), generator=random)
    return inputs, (inputs * 3 + 1) % spec.vocab_size


def gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Of the summed loss with respect to every parameter, as one row in float64."""
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten(), reduction="sum").backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def estimated(*, spec: Spec = IMAGES, dtype: torch.dtype = torch.float64, **changes: Any) -> Tensor:
    return gradient(looped(spec=spec, **changes).to(dtype), *batch(spec, dtype=dtype))


def exact(*, spec: Spec = IMAGES, **changes: Any) -> Tensor:
    """By implicit differentiation at a fixed point to the last bits; held to finite differences by a test."""
    return estimated(spec=spec, **(changes | TIGHT | {"gradient": "implicit", "nudge": "symmetric"}))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def cosine(found: Tensor, expected: Tensor) -> float:
    return float(F.cosine_similarity(found, expected, dim=0))


def slope(errors: list[float], sizes: list[float]) -> float:
    """Of log error over log size, between the first and the last."""
    return math.log(errors[0] / errors[-1]) / math.log(sizes[0] / sizes[-1])


def energy(form: EnergyForm, weights: Weights, h_BTD: Tensor, source: Source) -> Tensor:
    """E of `models.looped.blocks`: (B,), for real states. It falls to the fixed point if Phi is convex."""
    g_BTD = form.activate(weights, h_BTD)
    lagrangian_BT = weights.gain * form._base_lagrangian(h_BTD) + h_BTD @ weights.shift_D
    bound_BT = (h_BTD * g_BTD).sum(dim=2) - lagrangian_BT
    return bound_BT.sum(dim=1) - potential(form, weights, g_BTD, source)


def potential(form: EnergyForm, weights: Weights, g_BTD: Tensor, source: Source) -> Tensor:
    """Phi: (B,), for real states."""
    q_BHTZ, k_BHTZ = form._queries_and_keys(weights, g_BTD, source)
    inverse_heat = q_BHTZ.shape[-1] ** -0.5
    scores_BHTT = inverse_heat * q_BHTZ @ k_BHTZ.transpose(2, 3)
    sees_something: Tensor | float = 1.0
    if source.allowed is not None:
        scores_BHTT = scores_BHTT.masked_fill(~source.allowed, torch.finfo(scores_BHTT.dtype).min)
        sees_something = source.allowed.any(dim=-1).expand(scores_BHTT.shape[:3])
    attention_B = (scores_BHTT.logsumexp(dim=3) * sees_something).sum(dim=(1, 2)) / inverse_heat
    u_BTF = F.linear(g_BTD, weights.units_FD, weights.unit_bias_F)
    driven_B = (g_BTD * (source.x_BTD + weights.bias_D)).sum(dim=(1, 2))
    return driven_B + attention_B + primitive(form.options.mlp, u_BTF).sum(dim=(1, 2))


def primitive(unit: str, u_BTF: Tensor) -> Tensor:
    """G, whose derivative is the unit of the two-layer network."""
    if unit == "gelu":
        density = torch.exp(-0.5 * u_BTF * u_BTF) / math.sqrt(2 * math.pi)
        return 0.5 * ((u_BTF * u_BTF - 1) * torch.special.ndtr(u_BTF) + u_BTF * density)
    return _log_cosh(u_BTF) if unit == "tanh" else 0.5 * F.relu(u_BTF) ** 2

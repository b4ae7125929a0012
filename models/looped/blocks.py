"""The blocks that are iterated: the energy block, and a plain transformer layer without an energy.

The state h of the energy block converges to a minimum of E, as equilibrium propagation requires:

    E(h) = <h, g> - L(h) - Phi(g; x)          g = dL/dh, the activation of the state
    Phi  = <g, x + bias> + 1/s sum_{heads, tokens i} log sum_j exp(s q_i . k_j) + sum G(W g + c)

q = Wq g, s = 1 / sqrt(channels of a head), G the primitive of the unit of the two-layer network. Keys are
k = Wk x ("cross": the states of different tokens do not touch) or k = Wk g ("self"; Hoover et al. 2023).
Where dE/dh = 0, h = dPhi/dg. Derivatives are written out without autograd, and also take complex states.

Shapes: B samples, T tokens, D channels, H heads, Z channels of a head, F units.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.nn.attention import merge_heads, split_heads

EPSILON = 1e-5  # added to the variance in the layer-norm activation
MIN_GAIN, MAX_GAIN = 0.3, 1.0
_UNITS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "tanh": torch.tanh, "relu": F.relu}


def attention(q_BHTZ: Tensor, k_BHTZ: Tensor, allowed: Tensor | None) -> Tensor:
    """Return softmax(q . k / sqrt(Z)) over allowed tokens: (B, H, T, T); analytic for complex arguments.

    allowed: bool mask, broadcast; None: all. A token without allowed tokens has a row of zeros.
    """
    scores = q_BHTZ @ k_BHTZ.transpose(2, 3) * q_BHTZ.shape[-1] ** -0.5
    if scores.is_complex():
        return _complex_softmax(scores, allowed)
    if allowed is None:
        return scores.softmax(dim=3)  # type: ignore[no-any-return]
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(dim=3) * allowed  # type: ignore[no-any-return]


def _complex_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is None:
        allowed = torch.ones((), dtype=torch.bool, device=scores.device)
    size = scores.real.masked_fill(~allowed, torch.finfo(scores.real.dtype).min)
    grown = torch.exp(scores - size.amax(dim=3, keepdim=True)) * allowed
    total = grown.sum(dim=3, keepdim=True)
    return grown / total.where(allowed.any(dim=-1, keepdim=True), torch.ones_like(total))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/looped/Kconfig."""

    input: str
    causal: bool
    patch: int
    readout: str
    width: int
    heads: int
    hidden: int
    layers: int
    block: str
    activation: str
    mlp: str
    spectral_cap: float
    gradient: str
    nudge: str
    nudge_points: int
    beta: float
    nudged_iterations: int
    together: bool
    solver: str
    step_size: float
    tolerance: float
    max_iterations: int


class Weights(NamedTuple):
    """Weights of the block, or their gradients."""

    query_DD: Tensor
    key_DD: Tensor
    units_FD: Tensor
    unit_bias_F: Tensor
    bias_D: Tensor
    gain: Tensor  # scalar, shared by all channels: otherwise there is no energy
    shift_D: Tensor


class Source(NamedTuple):
    """Input of the block, constant while the states converge."""

    x_BTD: Tensor
    keys_BHTZ: Tensor | None  # None: computed from the states
    allowed: Tensor | None  # bool, broadcast to (B, H, T, T): whether token i sees token j


@dataclass(frozen=True, slots=True)
class EnergyForm:
    """Form of the energy; all methods are pure functions of weights, states and source."""

    options: Options

    def source(self, weights: Weights, x_BTD: Tensor, allowed: Tensor | None) -> Source:
        """Return the source of input x, with keys if they do not depend on the states."""
        crosses, heads = self.options.block == "energy_cross", self.options.heads
        keys = split_heads(F.linear(x_BTD, weights.key_DD), heads) if crosses else None
        return Source(x_BTD, keys, allowed)

    def activate(self, weights: Weights, h_BTD: Tensor) -> Tensor:
        """Return the activation g = dL/dh."""
        return weights.gain * self._base(h_BTD) + weights.shift_D

    def step(self, weights: Weights, h_BTD: Tensor, source: Source) -> Tensor:
        """Return dPhi/dg at g(h), whose fixed points are the minima."""
        return self.slope(weights, self.activate(weights, h_BTD), source)

    def slope(self, weights: Weights, g_BTD: Tensor, source: Source) -> Tensor:
        """Return dPhi/dg."""
        q_BHTZ, k_BHTZ = self._queries_and_keys(weights, g_BTD, source)
        seen_BHTT = attention(q_BHTZ, k_BHTZ, source.allowed)
        result_BTD = source.x_BTD + weights.bias_D + merge_heads(seen_BHTT @ k_BHTZ) @ weights.query_DD
        if source.keys_BHTZ is None:
            result_BTD = result_BTD + merge_heads(seen_BHTT.transpose(2, 3) @ q_BHTZ) @ weights.key_DD
        return result_BTD + self._units(weights, g_BTD) @ weights.units_FD

    def gradient(
        self, weights: Weights, h_BTD: Tensor, source: Source, share: Tensor
    ) -> tuple[Weights, Tensor]:
        """Return share * dE/d(weights) summed over tokens, and share * dE/dx (B, T, D), at fixed h.

        share: broadcast to (B, T, 1); constant within a sample for "self" keys, which mix tokens. At a fixed
        point E depends on gain and shift only through L, because dE/dg is zero there.
        """
        g_BTD = self.activate(weights, h_BTD)
        units_FD, unit_bias_F = self._units_gradient(weights, g_BTD, share)
        shared_g_BTD = share * g_BTD
        read_BTD, queried_BTD = self._attended(weights, g_BTD, source, share)
        keyed_BTD = g_BTD if source.keys_BHTZ is None else source.x_BTD
        result = Weights(
            query_DD=-_outer(read_BTD, shared_g_BTD),
            key_DD=-_outer(queried_BTD, keyed_BTD),
            units_FD=units_FD,
            unit_bias_F=unit_bias_F,
            bias_D=-shared_g_BTD.sum(dim=(0, 1)),
            gain=-(share * self._base_lagrangian(h_BTD)[..., None]).sum(),
            shift_D=-(share * h_BTD).sum(dim=(0, 1)),
        )
        x_BTD = shared_g_BTD.neg_()
        if source.keys_BHTZ is not None:
            x_BTD -= queried_BTD @ weights.key_DD
        return result, x_BTD

    def _units(self, weights: Weights, g_BTD: Tensor) -> Tensor:
        return _UNITS[self.options.mlp](F.linear(g_BTD, weights.units_FD, weights.unit_bias_F))

    def _units_gradient(self, weights: Weights, g_BTD: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of units and biases; a function of its own frees the widest tensor early."""
        active_BTF = _UNITS[self.options.mlp](F.linear(g_BTD, weights.units_FD, weights.unit_bias_F)).mul_(
            share
        )
        return -_outer(active_BTF, g_BTD), -active_BTF.sum(dim=(0, 1))

    def _attended(
        self, weights: Weights, g_BTD: Tensor, source: Source, share: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return A k, and A' q weighted by the share of each query."""
        q_BHTZ, k_BHTZ = self._queries_and_keys(weights, g_BTD, source)
        seen_BHTT = attention(q_BHTZ, k_BHTZ, source.allowed)
        queried_BHTZ = seen_BHTT.transpose(2, 3) @ (q_BHTZ * share[:, None])
        return merge_heads(seen_BHTT @ k_BHTZ), merge_heads(queried_BHTZ)

    def _queries_and_keys(self, weights: Weights, g_BTD: Tensor, source: Source) -> tuple[Tensor, Tensor]:
        keys, heads = source.keys_BHTZ, self.options.heads
        if keys is None:
            keys = split_heads(F.linear(g_BTD, weights.key_DD), heads)
        return split_heads(F.linear(g_BTD, weights.query_DD), heads), keys

    def _base(self, h_BTD: Tensor) -> Tensor:
        match self.options.activation:
            case "layernorm":
                centred_BTD = h_BTD - h_BTD.mean(dim=2, keepdim=True)
                return centred_BTD / _spread(centred_BTD)
            case "tanh":
                return torch.tanh(h_BTD)
            case _:  # identity
                return h_BTD

    def _base_lagrangian(self, h_BTD: Tensor) -> Tensor:
        """Return the (B, T) potential whose gradient is `_base`."""
        match self.options.activation:
            case "layernorm":
                centred_BTD = h_BTD - h_BTD.mean(dim=2, keepdim=True)
                return h_BTD.shape[2] * _spread(centred_BTD)[..., 0]
            case "tanh":
                return _log_cosh(h_BTD).sum(dim=2)
            case _:  # identity
                return 0.5 * (h_BTD * h_BTD).sum(dim=2)


FormStep: TypeAlias = Callable[[EnergyForm, Weights, Tensor, Source], Tensor]


class EnergyBlock(nn.Module):
    """Weights of an energy, within bounds in which the states converge."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width, hidden = options.width, options.hidden
        self.form, self.spectral_cap = EnergyForm(options), options.spectral_cap
        self.form_step: FormStep = EnergyForm.step  # or its compiled version
        self.query = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.key = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.units = nn.Parameter(torch.randn(hidden, width) / hidden**0.5)
        self.unit_bias = nn.Parameter(torch.zeros(hidden))
        self.bias = nn.Parameter(torch.zeros(width))
        self.gain = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(width))
        self.constrain_weights()

    @property
    def weights(self) -> Weights:
        """All weights as one tuple."""
        own = (self.query, self.key, self.units, self.unit_bias, self.bias, self.gain, self.shift)
        return Weights(*own)

    def source(self, x_BTD: Tensor, allowed: Tensor | None) -> Source:
        """Return the source of input x (`EnergyForm.source`)."""
        return self.form.source(self.weights, x_BTD, allowed)

    def activate(self, h_BTD: Tensor) -> Tensor:
        """Return the activation of a state."""
        return self.form.activate(self.weights, h_BTD)

    def step(self, h_BTD: Tensor, source: Source) -> Tensor:
        """Apply one undamped iteration, compiled where no gradient is taken."""
        step = EnergyForm.step if torch.is_grad_enabled() else self.form_step
        return step(self.form, self.weights, h_BTD, source)

    def compile_step(self, compiler: Callable[[FormStep], FormStep]) -> None:
        """Compile the iteration for use without autograd."""
        self.form_step = compiler(EnergyForm.step)

    @torch.no_grad()
    def constrain_weights(self) -> None:
        """Scale matrices down to a largest singular value of `spectral_cap`; keep the gain in its range."""
        for matrix in (self.query, self.key, self.units):
            matrix.mul_((self.spectral_cap / largest_singular_value(matrix)).clamp(max=1.0))
        self.gain.clamp_(MIN_GAIN, MAX_GAIN)


class PlainBlock(nn.Module):
    """A transformer layer f(h; x) = LN(x + a + MLP(LN(a))), a = h + attention(LN(h)), without an energy.

    Without the source x or the last normalisation the state would grow without bound.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        width, hidden, self.heads = options.width, options.hidden, options.heads
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, hidden)
        self.mlp_out = nn.Linear(hidden, width)
        self.fast_step: PlainStep = PlainBlock.once  # or its compiled version

    def source(self, x_BTD: Tensor, allowed: Tensor | None) -> Source:
        """Return the source of input x."""
        return Source(x_BTD, None, allowed)

    def activate(self, h_BTD: Tensor) -> Tensor:
        """Return the state itself, which energy blocks pass through an activation."""
        return h_BTD

    def step(self, h_BTD: Tensor, source: Source) -> Tensor:
        """Apply one iteration, compiled where no gradient is taken."""
        return self.once(h_BTD, source) if torch.is_grad_enabled() else self.fast_step(self, h_BTD, source)

    def compile_step(self, compiler: Callable[[PlainStep], PlainStep]) -> None:
        """Compile the iteration for use without autograd."""
        self.fast_step = compiler(PlainBlock.once)

    def once(self, h_BTD: Tensor, source: Source) -> Tensor:
        """Return f(h; x)."""
        a_BTD = h_BTD + self._attend(self.norm1(h_BTD), source.allowed)
        hidden_BTF = F.gelu(self.mlp_in(self.norm2(a_BTD)))
        return self.norm3(source.x_BTD + a_BTD + self.mlp_out(hidden_BTF))  # type: ignore[no-any-return]

    def _attend(self, h_BTD: Tensor, allowed: Tensor | None) -> Tensor:
        q_BHTZ, k_BHTZ, v_BHTZ = (
            split_heads(part_BTD, self.heads) for part_BTD in self.qkv(h_BTD).split(h_BTD.shape[2], dim=2)
        )
        return self.attention_out(merge_heads(attention(q_BHTZ, k_BHTZ, allowed) @ v_BHTZ))  # type: ignore[no-any-return]


PlainStep = Callable[[PlainBlock, Tensor, Source], Tensor]


def largest_singular_value(matrix: Tensor) -> Tensor:
    """Return the largest singular value, from the smaller of the two Gram matrices."""
    thin = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
    return torch.linalg.eigvalsh(thin @ thin.t())[-1].clamp(min=torch.finfo(matrix.dtype).tiny).sqrt()  # type: ignore[no-any-return]


def _outer(one_BTX: Tensor, other_BTY: Tensor) -> Tensor:
    """Return the (X, Y) sum of outer products over samples and tokens, without conjugation."""
    return one_BTX.flatten(0, 1).t() @ other_BTY.flatten(0, 1)


def _spread(centred_BTD: Tensor) -> Tensor:
    """Return sqrt(variance + EPSILON), (B, T, 1); analytic for complex arguments."""
    return ((centred_BTD * centred_BTD).mean(dim=2, keepdim=True) + EPSILON).sqrt()


def _log_cosh(x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.log(torch.cosh(x))
    size = x.abs()  # avoids the overflow of cosh
    return size + F.softplus(-2 * size) - math.log(2)

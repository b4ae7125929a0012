"""The Tiny Recursive Model (Jolicoeur-Martineau 2025, arXiv 2510.04871).

One small network improves a latent z and an answer y alternately. A forward pass is one supervision step: all
cycles, the last of them with gradients. It returns the latents for the next call; the caller decides when to
stop by the halting logit.

Shapes: B puzzles, L cells, P puzzle tokens, T = P + L tokens, D channels, H heads,
K channels of a head, V vocabulary size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.datasets.sudoku.spec import PuzzleSpec
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain
from lib.nn.attention import full_attention, merge_heads, split_heads
from lib.nn.precision import full_precision

HEAD = "head"  # not the one that decides to halt, which comes last
TASK = "recursive"

HALT_BIAS = -5.0  # an untrained model does not stop
EPSILON = 1e-5
ROTARY_BASE = 1e4
# Standard deviation of a standard normal distribution truncated at +-2.
_TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/trm/Kconfig."""

    mixer: str
    size: str
    width: int
    heads: int
    layers: int
    h_cycles: int
    l_cycles: int
    expansion: float
    multiple: int
    puzzle_tokens: int


class Thought(NamedTuple):
    """Result of one supervision step."""

    logits: Tensor  # (B, L, V)
    halt: Tensor  # (B,): above 0 where the model would stop; single precision at least
    y_BTD: Tensor  # answer and latent for the next step, without gradients
    z_BTD: Tensor


def build(options: Options, spec: PuzzleSpec) -> nn.Module:
    """Build a network from int64 (B, L) tokens and the latents of the last step to a `Thought`.

    Raises ConfigError if the width does not divide into heads of even width.
    """
    if options.mixer == "attention" and options.width % (2 * options.heads):
        raise ConfigError(
            f"CONFIG_TRM_WIDTH={options.width} cannot be cut into {options.heads} heads of an even width",
            todo="make it a multiple of twice CONFIG_TRM_HEADS",
        )
    return TinyRecursiveModel(options, spec)


class TinyRecursiveModel(nn.Module):
    """The network with its embeddings and heads."""

    def __init__(self, options: Options, spec: PuzzleSpec) -> None:
        super().__init__()
        (cells,), width = spec.input_shape, options.width
        self.h_cycles, self.l_cycles = options.h_cycles, options.l_cycles
        self.puzzle_tokens, self.embedding_scale = options.puzzle_tokens, math.sqrt(width)
        tokens = cells + options.puzzle_tokens
        self.token = nn.Embedding(spec.vocab_size, width)
        self.puzzle = nn.Parameter(torch.zeros(1, width)) if options.puzzle_tokens else None
        self.blocks = nn.ModuleList(Block(options, tokens) for _ in range(options.layers))
        self.chain = Chain()
        self.head = nn.Linear(width, spec.vocab_size, bias=False)
        self.halt = nn.Linear(width, 2)  # the second logit is unused, as in the original
        self.y_first: Tensor
        self.z_first: Tensor
        self.register_buffer("y_first", truncated_normal_(torch.empty(width), std=1.0))
        self.register_buffer("z_first", truncated_normal_(torch.empty(width), std=1.0))
        initialise(self)
        truncated_normal_(self.token.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.halt.weight)
        nn.init.constant_(self.halt.bias, HALT_BIAS)

    def sign_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are updated by the sign of their gradient, and not averaged."""
        return [self.puzzle] if self.puzzle is not None else []

    def forward(
        self,
        tokens_BL: Tensor,
        y_BTD: Tensor | None = None,
        z_BTD: Tensor | None = None,
        fresh_B: Tensor | None = None,
    ) -> Thought:
        """Run a supervision step from the given latents, or from the start if None or where `fresh_B` is."""
        x_BTD = self._embed(tokens_BL)
        y_BTD = self._initial(self.y_first, x_BTD, y_BTD, fresh_B)
        z_BTD = self._initial(self.z_first, x_BTD, z_BTD, fresh_B)
        with torch.no_grad():
            for _ in range(self.h_cycles - 1):
                y_BTD, z_BTD = self._cycle(x_BTD, y_BTD, z_BTD)
        if not torch.compiler.is_compiling():
            # The autocast cache holds weights without gradients, which the last cycle must not reuse.
            torch.clear_autocast_cache()
        y_BTD, z_BTD = self._cycle(x_BTD, y_BTD, z_BTD)
        logits_BLV = self.head(y_BTD[:, self.puzzle_tokens :])
        halt_B = self.halt(y_BTD[:, 0])[:, 0]
        return Thought(logits_BLV, full_precision(halt_B), y_BTD.detach(), z_BTD.detach())

    def _embed(self, tokens_BL: Tensor) -> Tensor:
        x_BTD = self.token(tokens_BL)
        if self.puzzle is not None:
            first_1PD = F.pad(self.puzzle[:, None], (0, 0, 0, self.puzzle_tokens - 1))
            x_BTD = torch.cat((first_1PD.expand(len(x_BTD), -1, -1).to(x_BTD.dtype), x_BTD), dim=1)
        return self.embedding_scale * x_BTD  # type: ignore[no-any-return]

    def _initial(
        self, first_D: Tensor, x_BTD: Tensor, last_BTD: Tensor | None, fresh_B: Tensor | None
    ) -> Tensor:
        first_BTD = first_D.expand_as(x_BTD)
        if last_BTD is None:
            return first_BTD
        assert fresh_B is not None
        return torch.where(fresh_B[:, None, None], first_BTD, last_BTD)

    def _cycle(self, x_BTD: Tensor, y_BTD: Tensor, z_BTD: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.l_cycles):
            z_BTD = self.chain(z_BTD + (y_BTD + x_BTD), *self.blocks)
        return self.chain(y_BTD + z_BTD, *self.blocks), z_BTD


class Block(nn.Module):
    """Mix tokens, then channels, with a residual connection and normalisation after each."""

    def __init__(self, options: Options, tokens: int) -> None:
        super().__init__()
        self.mixes_tokens = options.mixer == "mlp"
        self.mixer: nn.Module
        if self.mixes_tokens:
            self.mixer = GatedNetwork(tokens, options)
        else:
            self.mixer = Attention(options.width, heads=options.heads, tokens=tokens)
        self.network = GatedNetwork(options.width, options)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.mixes_tokens:  # normalised over the tokens of each channel, as in the original
            x_BDT = x_BTD.transpose(1, 2)
            x_BTD = rms_norm(x_BDT + self.mixer(x_BDT)).transpose(1, 2)
        else:
            x_BTD = rms_norm(x_BTD + self.mixer(x_BTD))
        return rms_norm(x_BTD + self.network(x_BTD))


class GatedNetwork(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, options: Options) -> None:
        super().__init__()
        inner = -(-round(options.expansion * width * 2 / 3) // options.multiple) * options.multiple
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Bidirectional attention with rotary positions (Su et al. 2021)."""

    def __init__(self, width: int, *, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = torch.arange(0, width // heads, 2, dtype=torch.float64) / (width // heads)
        rates_K = (ROTARY_BASE**-half).repeat(2)
        angles_TK = torch.arange(tokens, dtype=torch.float64)[:, None] * rates_K
        self.cosines_TK: Tensor
        self.sines_TK: Tensor
        # Not in checkpoints, because they follow from the sizes.
        self.register_buffer("cosines_TK", angles_TK.cos().float(), persistent=False)
        self.register_buffer("sines_TK", angles_TK.sin().float(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            split_heads(part_BTD, self.heads) for part_BTD in self.qkv(x_BTD).chunk(3, dim=2)
        )
        mixed_BHTK = full_attention(self._rotated(q_BHTK), self._rotated(k_BHTK), v_BHTK)
        return self.out(merge_heads(mixed_BHTK))  # type: ignore[no-any-return]

    def _rotated(self, x_BHTK: Tensor) -> Tensor:
        first, second = x_BHTK.chunk(2, dim=-1)
        rotated = x_BHTK * self.cosines_TK + torch.cat((-second, first), dim=-1) * self.sines_TK
        return rotated.to(x_BHTK.dtype)


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square over the last dimension, in single precision at least."""
    exact = full_precision(x)
    return (exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + EPSILON)).to(x.dtype)


@torch.no_grad()
def truncated_normal_(tensor: Tensor, *, std: float) -> Tensor:
    """Fill with a normal distribution truncated at two standard deviations, with standard deviation `std`.

    By the inverse distribution function, without torch's rejection sampling.
    """
    wide, share = std / _TRUNCATED_STD, math.erf(math.sqrt(2))
    tensor.uniform_(-share, share).erfinv_().mul_(math.sqrt(2) * wide)
    return tensor.clamp_(-2 * wide, 2 * wide)


def initialise(model: nn.Module) -> None:
    """Draw truncated normal weights with deviation 1 / sqrt(inputs) (LeCun et al. 1998); zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            truncated_normal_(module.weight, std=1 / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.zeros_(module.bias)

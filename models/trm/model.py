"""The Tiny Recursive Model (Jolicoeur-Martineau 2025, arXiv 2510.04871).

One small network improves a latent z and an answer y in turn. A call is one supervision step: it goes
through all cycles, the last of them with gradients, and gives the latents back for the next call. When to
stop is for the caller to decide, by the halting logit.

Shapes: B puzzles, L cells, P puzzle tokens, T = P + L tokens, D channels, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lib.data.types import PuzzleSpec
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain
from models.trm.layers import Block, initialise, truncated_normal_

TASK = "recursive"

HALT_BIAS = -5.0  # a model that knows nothing yet does not stop


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
    """What one supervision step comes to."""

    logits: Tensor  # (B, L, V)
    halt: Tensor  # (B,): above 0 where the model would stop; single precision at the least
    y_BTD: Tensor  # answer and latent to go on from, without gradients
    z_BTD: Tensor


def build(options: Options, spec: PuzzleSpec) -> nn.Module:
    """A network from int64 (B, L) tokens, and where it left off, to a `Thought`.

    Raises ConfigError where the width cannot be cut into heads.
    """
    if options.mixer == "attention" and options.width % (2 * options.heads):
        raise ConfigError(
            f"CONFIG_TRM_WIDTH={options.width} cannot be cut into {options.heads} heads of an even width",
            todo="make it a multiple of twice CONFIG_TRM_HEADS",
        )
    return TinyRecursiveModel(options, spec)


class TinyRecursiveModel(nn.Module):
    def __init__(self, options: Options, spec: PuzzleSpec) -> None:
        super().__init__()
        (cells,), width = spec.input_shape, options.width
        self.h_cycles, self.l_cycles = options.h_cycles, options.l_cycles
        self.puzzle_tokens, self.embedding_scale = options.puzzle_tokens, math.sqrt(width)
        tokens = cells + options.puzzle_tokens
        self.token = nn.Embedding(spec.vocab_size, width)
        self.puzzle = nn.Parameter(torch.zeros(1, width)) if options.puzzle_tokens else None
        self.blocks = nn.ModuleList(
            Block(
                mixer=options.mixer,
                width=width,
                tokens=tokens,
                heads=options.heads,
                expansion=options.expansion,
                multiple=options.multiple,
            )
            for _ in range(options.layers)
        )
        self.chain = Chain()
        self.head = nn.Linear(width, spec.vocab_size, bias=False)
        self.halt = nn.Linear(width, 2)  # the second logit is the original's, which never reads it
        self.y_first: Tensor
        self.z_first: Tensor
        self.register_buffer("y_first", truncated_normal_(torch.empty(width), std=1.0))
        self.register_buffer("z_first", truncated_normal_(torch.empty(width), std=1.0))
        initialise(self)
        truncated_normal_(self.token.weight, std=1 / math.sqrt(width))
        nn.init.zeros_(self.halt.weight)
        nn.init.constant_(self.halt.bias, HALT_BIAS)

    def sign_parameters(self) -> list[nn.Parameter]:
        """Those that are updated by the sign of their gradient, and are not averaged."""
        return [self.puzzle] if self.puzzle is not None else []

    def forward(
        self,
        tokens_BL: Tensor,
        y_BTD: Tensor | None = None,
        z_BTD: Tensor | None = None,
        fresh_B: Tensor | None = None,
    ) -> Thought:
        """One supervision step from where `y_BTD` and `z_BTD` are; from the start where `fresh_B` is true.

        Without them every puzzle starts afresh.
        """
        x_BTD = self._embed(tokens_BL)
        y_BTD = self._started(self.y_first, x_BTD, y_BTD, fresh_B)
        z_BTD = self._started(self.z_first, x_BTD, z_BTD, fresh_B)
        with torch.no_grad():
            for _ in range(self.h_cycles - 1):
                y_BTD, z_BTD = self._cycle(x_BTD, y_BTD, z_BTD)
        if not torch.compiler.is_compiling():
            # Weights that autocast has rounded without gradients must not serve those with them.
            torch.clear_autocast_cache()
        y_BTD, z_BTD = self._cycle(x_BTD, y_BTD, z_BTD)
        logits_BLV = self.head(y_BTD[:, self.puzzle_tokens :])
        halt_B = self.halt(y_BTD[:, 0])[:, 0]
        return Thought(logits_BLV, _single(halt_B), y_BTD.detach(), z_BTD.detach())

    def _embed(self, tokens_BL: Tensor) -> Tensor:
        x_BTD = self.token(tokens_BL)
        if self.puzzle is not None:
            first_1PD = nn.functional.pad(self.puzzle[:, None], (0, 0, 0, self.puzzle_tokens - 1))
            x_BTD = torch.cat((first_1PD.expand(len(x_BTD), -1, -1).to(x_BTD.dtype), x_BTD), dim=1)
        return self.embedding_scale * x_BTD  # type: ignore[no-any-return]

    def _started(
        self, first_D: Tensor, x_BTD: Tensor, left_BTD: Tensor | None, fresh_B: Tensor | None
    ) -> Tensor:
        first_BTD = first_D.expand_as(x_BTD)
        if left_BTD is None:
            return first_BTD
        assert fresh_B is not None
        return torch.where(fresh_B[:, None, None], first_BTD, left_BTD)

    def _cycle(self, x_BTD: Tensor, y_BTD: Tensor, z_BTD: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.l_cycles):
            z_BTD = self.chain(z_BTD + (y_BTD + x_BTD), *self.blocks)
        return self.chain(y_BTD + z_BTD, *self.blocks), z_BTD


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

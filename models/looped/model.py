"""A looped transformer: blocks that are iterated to a fixed point.

Inputs are tokens: rows or patches of an image, or those of a text. Gradients come from equilibrium
propagation or one of five other estimators: docs/eqprop.md.

Shapes: B samples, T tokens, D channels, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import ImageSpec, TextClassSpec, TextSpec
from lib.errors import ConfigError
from models.looped.blocks import EnergyBlock, Options
from models.looped.equilibrium import Equilibrium
from models.looped.solver import Solution

TASK = "lm"  # with labels, of images or texts, it classifies

DataSpec: TypeAlias = ImageSpec | TextSpec | TextClassSpec

SOURCE_SCALE = 2.0  # of embeddings and positions, relative to activations of about 1


def build(options: Options, spec: DataSpec) -> nn.Module:
    """Build a network from (B, C, H, W) images or (B, T) tokens to (B, classes) logits.

    For texts without labels: to (B, T, V) logits of the next tokens. Raises ConfigError for options that do
    not fit each other or the data.
    """
    check(options, spec)
    return LoopedTransformer(options, spec)


class LoopedTransformer(nn.Module):
    """Embedding, blocks at their fixed points in sequence, and a linear head."""

    settles = True  # for lib.nn.graph_lint: the number of iterations is not known in advance

    def __init__(self, options: Options, spec: DataSpec) -> None:
        super().__init__()
        self.pad = spec.pad if isinstance(spec, TextClassSpec) else None
        self.causal = options.causal
        self.tolerance = options.tolerance
        self.embedding: ImageTokens | TextTokens
        if isinstance(spec, ImageSpec):
            self.embedding = ImageTokens(spec, patch=options.patch, width=options.width)
        else:
            self.embedding = TextTokens(spec, width=options.width)
        self.blocks = nn.ModuleList(Equilibrium(options) for _ in range(options.layers))
        outputs = spec.vocab_size if isinstance(spec, TextSpec) else spec.classes
        self.reads_tokens = options.readout == "tokens"
        tokens = len(self.embedding.position) if self.reads_tokens else 1
        self.head = nn.Linear(tokens * options.width, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, classes), or (B, T, V) of the next token at every position."""
        state_BTD = self.embedding(inputs)
        allowed = self.allowed(inputs)
        for block in self.blocks:
            state_BTD = block(SOURCE_SCALE * state_BTD, allowed)
        return self.read(state_BTD, inputs)

    def read(self, state_BTD: Tensor, inputs: Tensor) -> Tensor:
        """Return the logits for the activations of the last block; `inputs` tell padding."""
        if self.reads_tokens:
            state_BTD = state_BTD.flatten(1)
        elif self.pad is not None:
            text_BT1 = (inputs != self.pad)[:, :, None]
            state_BTD = state_BTD.where(text_BT1, 0.0).sum(dim=1) / text_BT1.sum(dim=1).clamp(min=1)
        elif not self.causal:
            state_BTD = state_BTD.mean(dim=1)
        return self.head(state_BTD)  # type: ignore[no-any-return]

    def solutions(self) -> list[Solution]:
        """Return the solutions of the blocks in the last forward pass."""
        return [block.solution for block in self.equilibria() if block.solution is not None]

    def forced(self) -> list[Tensor]:
        """Return the residuals under the forces of the last gradient, for estimators with forces."""
        return [residual for block in self.equilibria() for residual in block.forced]

    def equilibria(self) -> list[Equilibrium]:
        """Return the blocks."""
        return [block for block in self.blocks if isinstance(block, Equilibrium)]

    def run_note(self) -> str | None:
        """Return a warning if states of the last batch did not converge, which makes gradients inexact."""
        free = self._unsettled([solution.residual for solution in self.solutions()])
        shares = ((free, ""), (self._unsettled(self.forced()), " under a force"))
        parts = [f"{share:.2%} of the states{where}" for share, where in shares if share]
        if not parts:
            return None
        return (
            f"Unsettled: {' and '.join(parts)} in the last batch, after as many iterations as they may take "
            "(CONFIG_LOOPED_MAX_ITERATIONS); the gradient of such states is not exact: docs/eqprop.md"
        )

    def _unsettled(self, residuals: list[Tensor]) -> float:
        """Return the share of states beyond the tolerance."""
        if not residuals:
            return 0.0
        flat = torch.cat([each.flatten() for each in residuals])
        return float((flat > self.tolerance).double().mean())

    def constrain_weights(self) -> None:
        """Project the weights into the bounds in which states converge."""
        for rest in self.equilibria():
            if isinstance(rest.block, EnergyBlock):
                rest.block.constrain_weights()

    def compile_steps(self, compiler: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        """Compile one iteration of each block, because their number varies."""
        for rest in self.equilibria():
            rest.block.compile_step(compiler)

    def allowed(self, inputs: Tensor) -> Tensor | None:
        """Return the attention mask: causal, or without padding; None: all."""
        if self.causal:
            length = inputs.shape[1]
            return torch.ones(length, length, dtype=torch.bool, device=inputs.device).tril()
        if self.pad is None:
            return None
        text_BT = inputs != self.pad
        return (text_BT[:, :, None] & text_BT[:, None, :])[:, None]


class ImageTokens(nn.Module):
    """Embedding of rows of an image, or of zero-padded square patches: (B, C, H, W) -> (B, T, D)."""

    def __init__(self, spec: ImageSpec, *, patch: int, width: int) -> None:
        super().__init__()
        self.tile = (patch, patch) if patch else (1, spec.width)
        rows, columns = (-(-size // step) for size, step in zip(spec.input_shape[1:], self.tile, strict=True))
        if rows * columns < 2:
            raise ConfigError(
                f"CONFIG_LOOPED_PATCH={patch} makes one token of an image of {spec.height}x{spec.width}",
                why="attention over one token is none",
                todo="choose a smaller patch, or 0 for a token for each row",
            )
        self.linear = nn.Linear(spec.channels * self.tile[0] * self.tile[1], width, bias=False)
        self.position = nn.Parameter(torch.randn(rows * columns, width))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        high, wide = self.tile
        batch, channels, height, width = x_BCHW.shape
        x_BCHW = F.pad(x_BCHW, (0, -width % wide, 0, -height % high))
        tiles = x_BCHW.reshape(batch, channels, x_BCHW.shape[2] // high, high, x_BCHW.shape[3] // wide, wide)
        x_BTE = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.linear(x_BTE) + self.position  # type: ignore[no-any-return]


class TextTokens(nn.Module):
    """Embedding of tokens with positions: (B, T) -> (B, T, D)."""

    def __init__(self, spec: TextSpec | TextClassSpec, *, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(spec.vocab_size, width)
        self.position = nn.Parameter(torch.randn(spec.block_size, width))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.token(tokens_BT) + self.position[: tokens_BT.shape[1]]  # type: ignore[no-any-return]


def check(options: Options, spec: DataSpec) -> None:
    """Raise ConfigError for combinations that Kconfig refuses, for callers that bypass it."""
    energy = options.block != "plain"
    refused = {
        f"CONFIG_LOOPED_WIDTH={options.width} is not a multiple of CONFIG_LOOPED_HEADS={options.heads}": (
            options.width % options.heads != 0
        ),
        "equilibrium propagation needs an energy, and the plain block has none": (
            options.gradient == "ep" and not energy
        ),
        "the vector field's estimators are for the plain block": (
            options.gradient in ("ep_vf", "ep_adjoint") and energy
        ),
        "an energy over keys made of the states is symmetric: it cannot see the past alone": (
            options.causal and options.block == "energy_self"
        ),
        "a holomorphic nudge needs an energy and units that are analytic: tanh": (
            options.nudge == "holomorphic" and (options.gradient != "ep" or options.mlp != "tanh")
        ),
        "the tokens of a text are not read side by side, for their number differs": (
            options.readout == "tokens" and not isinstance(spec, ImageSpec)
        ),
        "a text without labels is modelled by the past alone, and nothing else is": (
            options.causal != isinstance(spec, TextSpec)
        ),
    }
    if faults := [text for text, applies in refused.items() if applies]:
        raise ConfigError("the looped transformer cannot be built", why="; ".join(faults))

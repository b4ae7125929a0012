"""ResNet-BK: a residual network that mixes positions by entries of a learned resolvent (H - zI)^-1.

Three forms: "value" carries values along the text and "features" the resolvent alone, both causal; "upstream"
is the original, bidirectional block.

Shapes: B texts, T tokens, C channels, H heads of W channels, V vocabulary size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import TextClassSpec, TextSpec
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain
from lib.nn.dropout import Dropout
from lib.nn.linear_cross_entropy import linear_cross_entropy
from lib.nn.precision import full_precision
from models.resnet_bk.scan import both_sides, continued_fraction, linear_recurrence

TASK = "lm"
TAKES_TARGETS = True

HEAD_WIDTH = 4  # channels that share a resolvent
SMALL_STD = 0.02
# A small imaginary part has a long memory (up to about sqrt(1 / k) / eta tokens), a large one is sharp.
MAX_ETA, MIN_ETA = 1.0, 0.03
EXPERTS, MAX_POTENTIAL = 4, 3.0  # of the original block


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/resnet_bk/Kconfig."""

    form: str
    layers: int
    width: int
    ffn_ratio: int
    dropout: float
    allow_leak: bool


def build(options: Options, spec: TextSpec | TextClassSpec) -> nn.Module:
    """Build a network from int64 (B, T) tokens to (B, T, V) logits of the next tokens.

    For texts with labels: to (B, classes) logits at the last token before the padding. Raises ConfigError if
    the width is not a multiple of the head width, and for a language model of the bidirectional form.
    """
    if options.width % HEAD_WIDTH:
        raise ConfigError(
            f"CONFIG_RESNET_BK_WIDTH={options.width} is not a multiple of {HEAD_WIDTH}",
            why=f"a head has {HEAD_WIDTH} channels",
        )
    if isinstance(spec, TextClassSpec):
        return TextClassifier(options, spec)
    if options.form == "upstream" and not options.allow_leak:
        raise ConfigError(
            "CONFIG_RESNET_BK_FORM_UPSTREAM=y cannot model a language",
            why="every output depends on the tokens that it is to predict",
            todo="use CONFIG_RESNET_BK_FORM_VALUE=y; CONFIG_RESNET_BK_ALLOW_LEAK=y shows the leak",
        )
    return LanguageModel(options, spec)


class _Model(nn.Module):
    """A model with a backbone, whose matrices Muon may update."""

    def __init__(self, options: Options, spec: TextSpec | TextClassSpec) -> None:
        super().__init__()
        self.backbone = Backbone(options, vocab_size=spec.vocab_size, block_size=spec.block_size)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the weights of the mixers and of the two-layer networks."""
        return [parameter for parameter in self.backbone.blocks.parameters() if parameter.dim() == 2]


class LanguageModel(_Model):
    """Language model. The head is tied to the embedding; the original form has its own, with a bias."""

    def __init__(self, options: Options, spec: TextSpec) -> None:
        super().__init__(options, spec)
        self.head = nn.Linear(options.width, spec.vocab_size) if options.form == "upstream" else None
        initialise(self, layers=options.layers)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """int64 (B, T) -> (B, T, V) logits of the next token at every position; with targets, their loss."""
        x_BTC = self.backbone(tokens_BT)
        head = self.backbone.token if self.head is None else self.head
        bias_V = None if self.head is None else self.head.bias
        if targets_BT is None:
            return F.linear(x_BTC, head.weight, bias_V)
        classes = len(head.weight)
        return linear_cross_entropy(
            x_BTC.flatten(0, 1), head.weight, targets_BT.flatten(), bias_V, classes=classes
        )


class TextClassifier(_Model):
    """Classifier with a linear head on the last token of each text."""

    def __init__(self, options: Options, spec: TextClassSpec) -> None:
        super().__init__(options, spec)
        self.pad = spec.pad
        self.head = nn.Linear(options.width, spec.classes)
        initialise(self, layers=options.layers)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """int64 (B, T), `pad` after the end of each text -> (B, classes) logits."""
        x_BTC = self.backbone(tokens_BT)
        last_B = ((tokens_BT != self.pad).sum(dim=1) - 1).clamp(min=0)
        last_B1C = last_B[:, None, None].expand(-1, 1, x_BTC.shape[2])
        return self.head(x_BTC.gather(1, last_B1C)[:, 0])  # type: ignore[no-any-return]


class Backbone(nn.Module):
    """Embeddings, blocks and the final normalisation: (B, T) tokens -> (B, T, C).

    Only the original form has learned positions.
    """

    def __init__(self, options: Options, *, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, options.width)
        upstream = options.form == "upstream"
        self.position = nn.Embedding(block_size, options.width) if upstream else None
        self.dropout = Dropout(options.dropout, site=0)
        self.blocks = nn.ModuleList(
            UpstreamBlock(options, layer) if upstream else Block(options, layer)
            for layer in range(options.layers)
        )
        self.chain = Chain()
        self.norm = nn.LayerNorm(options.width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.token(tokens_BT)
        if self.position is not None:
            x_BTC = x_BTC + self.position.weight[: tokens_BT.shape[1]]
        return self.norm(self.chain(self.dropout(x_BTC), *self.blocks))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A mixer, then a two-layer network, each on normalised input and added to the residual stream."""

    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        width = options.width
        self.norm1 = nn.LayerNorm(width)
        self.mixer = ValueMixer(width) if options.form == "value" else FeatureMixer(width)
        self.dropout1 = Dropout(options.dropout, site=2 * layer + 1)
        self.norm2 = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, options.ffn_ratio * width)
        self.mlp_out = nn.Linear(options.ffn_ratio * width, width)
        self.dropout2 = Dropout(options.dropout, site=2 * layer + 2)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.dropout1(self.mixer(self.norm1(x_BTC)))
        hidden_BTF = F.gelu(self.mlp_in(self.norm2(x_BTC)), approximate="tanh")
        return x_BTC + self.dropout2(self.mlp_out(hidden_BTF))  # type: ignore[no-any-return]


class Resolvent(nn.Module):
    """Matrix H of every head from the input, and the last diagonal entries of its leading resolvents."""

    def __init__(self, width: int) -> None:
        super().__init__()
        heads = width // HEAD_WIDTH
        self.potential = nn.Linear(width, heads)
        self.coupling = nn.Linear(width, heads)
        # As a logarithm, so that eta stays positive.
        self.log_eta = nn.Parameter(torch.linspace(math.log(MAX_ETA), math.log(MIN_ETA), heads))

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return g (T, B, H) complex, couplings k (T, B, H) and eta (H,), in single precision at least."""
        a_TBH = 2.5 * torch.tanh(full_precision(self.potential(x_BTC)).transpose(0, 1))
        k_TBH = torch.sigmoid(full_precision(self.coupling(x_BTC)).transpose(0, 1) + 1.0)
        eta_H = self.log_eta.exp()
        s_TBH = torch.complex(a_TBH, -eta_H.expand_as(a_TBH))
        return continued_fraction(s_TBH, k_TBH), k_TBH, eta_H


class ValueMixer(nn.Module):
    """Mixing by forward elimination of (H - zI) y = v, read at every position.

    u_t = sqrt(eta) g_t v_t + sqrt(k_t) g_t u_{t-1}: sqrt(eta) times the last entry of
    (H[1..t] - zI)^-1 v[1..t], where the entries beside the diagonal of H are -sqrt(k).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.resolvent = Resolvent(width)
        self.values = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        g_TBH, k_TBH, eta_H = self.resolvent(x_BTC)
        v_TBC = full_precision(self.values(x_BTC)).transpose(0, 1)
        v_TBHW = v_TBC.reshape(*g_TBH.shape, HEAD_WIDTH)
        entering_TBHW = (eta_H.sqrt() * g_TBH)[..., None] * v_TBHW
        u_TBHW = linear_recurrence(entering_TBHW, k_TBH.sqrt() * g_TBH)
        return self.out(_real_parts(u_TBHW))  # type: ignore[no-any-return]


class FeatureMixer(nn.Module):
    """Mixing by the real and imaginary part of g."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.resolvent = Resolvent(width)
        self.out = nn.Linear(2 * (width // HEAD_WIDTH), width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        g_TBH, _, _ = self.resolvent(x_BTC)
        return self.out(_real_parts(g_TBH))  # type: ignore[no-any-return]


class UpstreamBlock(nn.Module):
    """x + f + scale W (Re G, Im G), where f = experts(norm(x)) and G is the diagonal of (H - i)^-1.

    The original, bidirectional block, which can only classify, or demonstrate a leak.
    H = tridiag(1, -2 + v, 1) with one number v for each position, from f. G comes from two continued
    fractions, which do not overflow, in place of the original's quotients of determinants, and its gradient
    is exact. It is below 1 in absolute value, so that the original's limits on it never act.
    """

    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width)
        self.experts = Experts(options, site=layer + 1)
        self.potential = nn.Linear(options.width, 1)
        self.out = nn.Linear(2, options.width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x_BTC: Tensor) -> Tensor:
        f_BTC = self.experts(self.norm(x_BTC))
        v_BT = self.potential(f_BTC)[..., 0].clamp(-MAX_POTENTIAL, MAX_POTENTIAL)
        v_TB = full_precision(v_BT).t()
        g_TB = both_sides(torch.complex(v_TB - 2.0, -torch.ones_like(v_TB)))
        return x_BTC + f_BTC + self.scale * self.out(torch.view_as_real(g_TB).transpose(0, 1))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Mixture of four two-layer networks with top-1 routing.

    As in the original, the router is not trained: its softmax over the single chosen score is always 1.
    """

    def __init__(self, options: Options, *, site: int) -> None:
        super().__init__()
        width, hidden = options.width, options.ffn_ratio * options.width
        self.router = nn.Linear(width, EXPERTS).requires_grad_(False)
        self.into = nn.ModuleList(nn.Linear(width, hidden) for _ in range(EXPERTS))
        self.out = nn.ModuleList(nn.Linear(hidden, width) for _ in range(EXPERTS))
        self.dropout = Dropout(options.dropout, site=site)

    def forward(self, x_BTC: Tensor) -> Tensor:
        chosen_BT = self.router(x_BTC).argmax(-1)
        # All networks are computed, so that no shape depends on the data.
        experts = zip(self.into, self.out, strict=True)
        outputs = [out(self.dropout(F.relu(into(x_BTC)))) for into, out in experts]
        index_BTC1 = chosen_BT[..., None, None].expand(*x_BTC.shape, 1)
        return torch.stack(outputs, -1).gather(-1, index_BTC1)[..., 0]

    def idle_parameters(self) -> int:
        """Return the number of parameters of the networks that a token does not use."""
        own = sum(parameter.numel() for parameter in (*self.into[0].parameters(), *self.out[0].parameters()))
        return (EXPERTS - 1) * own


def initialise(model: nn.Module, *, layers: int) -> None:
    """Draw weights that preserve variance, scaled by 1 / sqrt(2 layers) before the residual stream.

    Embeddings, an untied head and the inputs of resolvents are drawn from N(0, 0.02); biases are 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            residual = name.endswith(("mixer.out", "mlp_out"))
            std = module.in_features**-0.5 * ((2 * layers) ** -0.5 if residual else 1.0)
            small = name == "head" or ".resolvent." in name
            nn.init.normal_(module.weight, std=SMALL_STD if small else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=SMALL_STD)


def _real_parts(u_TBX: Tensor) -> Tensor:
    """Convert complex (T, B, ...) to real (B, T, 2 * rest)."""
    return torch.view_as_real(u_TBX).flatten(2).transpose(0, 1)

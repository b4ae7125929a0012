"""GPT-2 (Radford et al. 2019): a pre-norm causal transformer with a tied head.

Shapes: B texts, T tokens, C channels, H heads, D channels of a head, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.datasets.chat.spec import ChatSpec
from lib.data.types import TextClassSpec, TextSpec, TokensSpec, TokenTagSpec
from lib.distributed.staged_model import Stages
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain
from lib.nn.attention import causal_attention, merge_heads, same_document, split_heads
from lib.nn.dropout import Dropout
from lib.nn.linear_cross_entropy import linear_cross_entropy

TASK = "lm"
TAKES_TARGETS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/gpt2/Kconfig."""

    size: str
    layers: int
    heads: int
    width: int
    bias: bool
    dropout: float
    pad_vocab: int
    init_std: float


def build(options: Options, spec: TextSpec | ChatSpec | TextClassSpec | TokenTagSpec) -> nn.Module:
    """Build a network from int64 (B, T) tokens to (B, T, V) logits of the next tokens, T <= block_size.

    Packed conversations are int64 (B, 2, T): tokens, and the document that each belongs to. For texts with
    labels: to (B, classes) logits, from the mean over the tokens before the padding. For tags: to (B, T,
    tags) logits. Raises ConfigError if the width is not a multiple of the number of heads.
    """
    if options.width % options.heads:
        raise ConfigError(
            f"GPT-2 ({options.size}): CONFIG_GPT2_WIDTH={options.width} is not a multiple of "
            f"CONFIG_GPT2_HEADS={options.heads}",
            why="every head has an equal share of the channels",
        )
    if isinstance(spec, TextClassSpec):
        return TextClassifier(options, spec)
    if isinstance(spec, TokenTagSpec):
        return Tagger(options, spec)
    return GPT2(options, spec) if isinstance(spec, ChatSpec) else StagedGPT2(options, spec)


class Backbone(nn.Module):
    """Embeddings, blocks and the final normalisation: (B, T) tokens -> (B, T, C)."""

    def __init__(self, options: Options, *, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.token = nn.Embedding(-(-vocab_size // options.pad_vocab) * options.pad_vocab, options.width)
        self.position = nn.Embedding(block_size, options.width)
        self.dropout = Dropout(options.dropout, site=0)
        self.blocks = nn.ModuleList(Block(options, layer) for layer in range(options.layers))
        self.norm = nn.LayerNorm(options.width, bias=options.bias)
        self.heads = options.heads
        self.chain = Chain()

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dim() == 2:
            return self.forward_embedded(self.token(inputs))
        tokens_BT, documents_BT = inputs.unbind(dim=1)
        seen_BTT, places_BT = same_document(documents_BT)
        x_BTC = self.dropout(self.token(tokens_BT) + self.position(places_BT))
        blocks = (partial(block, seen_BTT=seen_BTT) for block in self.blocks)
        return self.norm(self.chain(x_BTC, *blocks))  # type: ignore[no-any-return]

    def forward_embedded(self, x_BTC: Tensor) -> Tensor:
        """Run on embeddings (B, T, C) without positions."""
        return self.norm(self.chain(self.add_positions(x_BTC), *self.blocks))  # type: ignore[no-any-return]

    def add_positions(self, x_BTC: Tensor) -> Tensor:
        """Return the input of the first block."""
        return self.dropout(x_BTC + self.position.weight[: x_BTC.shape[1]])  # type: ignore[no-any-return]

    def pipeline_stages(self, head: Callable[..., Tensor], *weights: Tensor) -> Stages:
        """Return the parts of a pipeline. head: of hidden states, tokens and targets, with `weights`."""
        return Stages(
            first=lambda tokens_BT: self.add_positions(self.token(tokens_BT)),
            chain=self.chain,
            blocks=tuple(self.blocks),
            last=lambda x_BTC, *rest: head(self.norm(x_BTC), *rest),
            first_weights=(self.token.weight, self.position.weight),
            last_weights=(*self.norm.parameters(), *weights),
            channels=self.token.embedding_dim,
        )


class _Model(nn.Module):
    """A model with a backbone, whose matrices Muon may update."""

    def __init__(self, options: Options, spec: TokensSpec) -> None:
        super().__init__()
        self.backbone = Backbone(options, vocab_size=spec.vocab_size, block_size=spec.block_size)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the weights of attention and of the two-layer networks."""
        return [parameter for parameter in self.backbone.blocks.parameters() if parameter.dim() == 2]


class GPT2(_Model):
    """Language model. The head is tied to the token embedding."""

    def __init__(self, options: Options, spec: TextSpec | ChatSpec) -> None:
        super().__init__(options, spec)
        self.vocab_size = spec.vocab_size
        initialise(self, layers=options.layers, std=options.init_std)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """int64 (B, T) -> (B, T, V) logits of the next token at every position; with targets, their loss."""
        return self._head(self.backbone(tokens_BT), targets_BT)

    def forward_embedded(self, x_BTC: Tensor) -> Tensor:
        """Run on embeddings (B, T, C), T <= block_size."""
        return self._head(self.backbone.forward_embedded(x_BTC))

    def _head(self, x_BTC: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        # Without the rows that pad the vocabulary.
        weight_VC, classes = self.backbone.token.weight, self.vocab_size
        if targets_BT is None:
            return F.linear(x_BTC, weight_VC)[..., :classes]
        return linear_cross_entropy(x_BTC.flatten(0, 1), weight_VC, targets_BT.flatten(), classes=classes)


class StagedGPT2(GPT2):
    """Language model that can be a pipeline, of unpacked rows."""

    def pipeline_stages(self) -> Stages:
        """Return the parts of a pipeline."""
        head = lambda x_BTC, _, targets_BT=None: self._head(x_BTC, targets_BT)  # noqa: E731
        return self.backbone.pipeline_stages(head, self.backbone.token.weight)


class TextClassifier(_Model):
    """Classifier with a linear head on the mean over the tokens of each text.

    The last token alone, as in fine-tuning, learns more slowly.
    """

    def __init__(self, options: Options, spec: TextClassSpec) -> None:
        super().__init__(options, spec)
        self.pad, self.text_tokens = spec.pad, spec.vocab_size if spec.published else spec.pad
        self.head = nn.Linear(options.width, spec.classes)
        initialise(self, layers=options.layers, std=options.init_std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """int64 (B, T), `pad` after the end of each text -> (B, classes) logits."""
        return self._head(self.backbone(tokens_BT), tokens_BT)

    def pipeline_stages(self) -> Stages:
        """Return the parts of a pipeline."""
        return self.backbone.pipeline_stages(self._head, *self.head.parameters())

    def _head(self, x_BTC: Tensor, tokens_BT: Tensor) -> Tensor:
        text_BT1 = (tokens_BT != self.pad)[:, :, None]
        mean_BC = x_BTC.where(text_BT1, 0.0).sum(dim=1) / text_BT1.sum(dim=1).clamp(min=1)
        return self.head(mean_BC)  # type: ignore[no-any-return]


class Tagger(_Model):
    """Tagger with a linear head at every token, which knows this token and earlier ones."""

    def __init__(self, options: Options, spec: TokenTagSpec) -> None:
        super().__init__(options, spec)
        self.text_tokens = spec.vocab_size if spec.published else spec.pad
        self.head = nn.Linear(options.width, len(spec.tags))
        initialise(self, layers=options.layers, std=options.init_std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """int64 (B, T) -> (B, T, tags) logits."""
        return self.head(self.backbone(tokens_BT))  # type: ignore[no-any-return]

    def pipeline_stages(self) -> Stages:
        """Return the parts of a pipeline."""
        return self.backbone.pipeline_stages(lambda x_BTC, _: self.head(x_BTC), *self.head.parameters())


class Block(nn.Module):
    """Attention, then a two-layer network, each on normalised input and added to the residual stream."""

    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        width, bias = options.width, options.bias
        self.heads = options.heads
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.dropout1 = Dropout(options.dropout, site=2 * layer + 1)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.mlp_in = nn.Linear(width, 4 * width, bias=bias)
        self.mlp_out = nn.Linear(4 * width, width, bias=bias)
        self.dropout2 = Dropout(options.dropout, site=2 * layer + 2)

    def forward(self, x_BTC: Tensor, seen_BTT: Tensor | None = None) -> Tensor:
        x_BTC = x_BTC + self.dropout1(self.attention_out(self._attend(self.norm1(x_BTC), seen_BTT)))
        hidden_BTF = F.gelu(self.mlp_in(self.norm2(x_BTC)), approximate="tanh")
        return x_BTC + self.dropout2(self.mlp_out(hidden_BTF))  # type: ignore[no-any-return]

    def _attend(self, x_BTC: Tensor, seen_BTT: Tensor | None) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            split_heads(part_BTC, self.heads) for part_BTC in self.qkv(x_BTC).chunk(3, dim=2)
        )
        return merge_heads(causal_attention(q_BHTD, k_BHTD, v_BHTD, seen_BTT))


def initialise(model: nn.Module, *, layers: int, std: float) -> None:
    """Draw weights from N(0, std), scaled by 1 / sqrt(2 layers) before the residual stream; zero biases."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name.endswith(("attention_out", "mlp_out"))
            nn.init.normal_(module.weight, std=std / (2 * layers) ** 0.5 if residual else std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

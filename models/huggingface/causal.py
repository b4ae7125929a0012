"""Causal language models of Hugging Face transformers, whose head computes the loss (linear_cross_entropy).

Attention runs by a function of this file: it alone knows what a token may see, so that neither a cache nor
what the library reads from positions changes that, and it is the same in a simulation, where tokens have no
values. Shapes: B rows, T tokens, H heads, D channels of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from lib.data.sampler import HasLengths
from lib.errors import ConfigError
from lib.memory.simulation import simulated
from lib.nn.linear_cross_entropy import linear_cross_entropy
from lib.nn.model_directory import HOST, values_of, widest_dtype
from models.huggingface.library import (
    attention,
    attention_dropout,
    check_length,
    check_vocabulary,
    key_attention,
    loaded,
    note,
)

_ATTENTION = "causal_by_document"
_LAYERS = {"full_attention", "sliding_attention"}
_PROBE = 8  # tokens
_compared: set[str] = set()  # configurations


class LanguageSpec(Protocol):
    """Facts about data that a language model needs: every spec of tokens has them."""

    @property
    def name(self) -> str:
        """Name of the data set."""

    @property
    def vocab_size(self) -> int:
        """Tokens are below it."""

    @property
    def block_size(self) -> int:
        """Longest row in tokens."""


def build_causal(
    transformers: Any, theirs: Any, folder: str, files: Sequence[str], spec: LanguageSpec
) -> nn.Module:
    """Build a model from int64 (B, T) tokens to (B, T, V) logits; with targets (B, T), to their summed loss.

    Packed rows (B, 2, T) are tokens and the number of the document that each is of, -1 for padding: no token
    sees another document. V is the vocabulary of the directory, which may be larger than that of the data.
    theirs: the configuration in `folder`; files: its files of weights.
    """
    kind = _class_of(transformers, theirs, folder)
    check_length(theirs, spec.block_size, folder)
    if isinstance(spec, HasLengths) and spec.bucketed and attention_dropout(theirs):
        what = f"{folder}: CONFIG_CHAT_BUCKETING=y is not for a model with dropout in attention"
        why = "what it drops would depend on the longest row of a micro-batch"
        raise ConfigError(what, why=why, todo="set it to n, or attention_dropout to 0 in config.json")
    check_vocabulary(theirs, spec, folder, files)
    transformers.AttentionInterface.register(_ATTENTION, functools.partial(_attend, transformers))
    with values_of(f"{folder}/config.json"):
        return _built(kind, theirs, folder, files)


def _built(kind: Any, theirs: Any, folder: str, files: Sequence[str]) -> nn.Module:
    real = not simulated() and torch.empty(0).device.type != "meta"
    model = None
    if files and not simulated():
        own = loaded(kind, theirs, folder, _ATTENTION, dtype=widest_dtype(folder, files))
        model = _adapted(own, kind, folder, files)
        with HOST:  # also for a model on the meta device
            _compare(model, kind, folder)
    if model is None or not real:  # a copy on the meta device would not tie weights
        made = kind._from_config(theirs, dtype=torch.float32, attn_implementation=_ATTENTION)
        model = _adapted(made, kind, folder, files)
        if real:
            _compare(model, kind, folder)
    return cast(nn.Module, model.float().train())


def _adapted(model: Any, kind: Any, folder: str, files: Sequence[str]) -> Any:
    """Return `model`, of class `kind`, with the forward pass of this file: the names of weights stay."""
    theirs, head = model.config, model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise _refusal(theirs, folder, f"has a head that is not linear: {type(head).__name__}")
    if theirs.tie_word_embeddings and head.weight is not model.get_input_embeddings().weight:
        why = "config.json has tie_word_embeddings=true, and the weights have a head of their own"
        raise ConfigError(f"{folder} contradicts itself", why=why, todo="write tie_word_embeddings=false")
    stacked = next((each for each, weight in model.named_parameters() if weight.dim() > 2), "")
    if stacked:
        why = f"{stacked} holds several, whose products cannot be traced in fp32"
        raise _refusal(theirs, folder, "has experts", why)
    model.__class__ = type(kind.__name__, (Causal, kind), {})
    model.window = getattr(theirs, "sliding_window", None) or 0
    model.attention_drops = attention_dropout(theirs)
    if model.attention_drops:
        key_attention(model, model.attention_drops)
    model.hidden_scale = getattr(theirs, "logit_scale", 1) / getattr(theirs, "logits_scaling", 1)
    model.build_note = note(files)
    return model


def _refusal(theirs: Any, folder: str, what: str, why: str = "") -> ConfigError:
    return ConfigError(f"{folder}: {theirs.model_type} {what}", why=why, todo="choose another model")


def _class_of(transformers: Any, theirs: Any, folder: str) -> Any:
    """Return the class of the model. Raises ConfigError for what is no such model or cannot be planned."""
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(theirs) not in classes or theirs.get_text_config() is not theirs:
        what = f"{folder}: transformers has no causal language model of text alone for {theirs.model_type}"
        raise ConfigError(what, todo="choose another directory, or another CONFIG_HUGGINGFACE_INPUT")
    if others := {*(getattr(theirs, "layer_types", None) or ())} - _LAYERS:
        why = f"only {' and '.join(sorted(_LAYERS))} keep documents apart"
        raise _refusal(theirs, folder, f"has layers of {min(others)}", why)
    kind = classes[type(theirs)]
    if not kind._supports_sdpa:
        why = "eager attention holds all T x T weights, and its memory is not predicted well"
        raise _refusal(theirs, folder, "has no sdpa attention", why)
    caps = (key for key in theirs.to_dict() if "softcap" in key or "soft_cap" in key)
    for cap in (key for key in caps if getattr(theirs, key, None)):
        what = f"caps its logits ({cap}={getattr(theirs, cap)})"
        raise _refusal(theirs, folder, what, "the loss in chunks has no cap")
    return kind


class Causal(nn.Module):
    """Mix-in for a causal model of transformers."""

    hidden_scale: float  # of what the head is given; some families scale their logits
    window: int  # of layers with a window: how many tokens a token sees; 0 for all
    attention_drops: float  # share of attention weights that is zeroed in training

    def forward(self, tokens: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """int64 (B, T) or (B, 2, T) -> (B, T, V) logits of the next token; with targets, their loss."""
        own, packed = cast(Any, self), {}
        documents_BT = None
        if tokens.dim() == 3:
            tokens, documents_BT = tokens.unbind(dim=1)
            packed["position_ids"] = positions(documents_BT)
        masks = self._masks(tokens, documents_BT)
        found = own.base_model(input_ids=tokens, use_cache=False, masks=masks, **packed)
        x_BTC, head = found.last_hidden_state, own.get_output_embeddings()
        x_BTC = x_BTC if self.hidden_scale == 1 else x_BTC * self.hidden_scale
        if targets_BT is None:
            return cast(Tensor, head(x_BTC))
        x_NC, targets_N = x_BTC.flatten(0, 1), targets_BT.flatten()
        return linear_cross_entropy(x_NC, head.weight, targets_N, head.bias, classes=len(head.weight))

    def _masks(self, tokens_BT: Tensor, documents_BT: Tensor | None) -> dict[int, Tensor | None]:
        """Return what is added to the scores of attention, by the window of the layer; 0 is no window."""
        weight, length = cast(Any, self).get_input_embeddings().weight, tokens_BT.shape[1]
        explicit = documents_BT is not None or self.attention_drops > 0
        kind = weight.device.type
        mixed = kind != "meta" and torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
        dtype = torch.get_autocast_dtype(kind) if mixed else weight.dtype
        return {
            size: causal_mask(tokens_BT, documents_BT, window=size, dtype=dtype) if explicit or size else None
            for size in {0, self.window if self.window < length else 0}
        }


def positions(documents_BT: Tensor) -> Tensor:
    """Return the position of each token (B, T) in its document."""
    index_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand_as(documents_BT)
    begins_BT = nn.functional.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
    return index_BT - torch.cummax(index_BT.where(begins_BT, 0), dim=1).values


def causal_mask(tokens_BT: Tensor, documents_BT: Tensor | None, *, window: int, dtype: torch.dtype) -> Tensor:
    """Return (B or 1, 1, T, T): 0 where the second token may be seen by the first, else -inf.

    It is of the same document, and at most `window` - 1 tokens earlier (0: any number).
    """
    index_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    back_TT = index_T[:, None] - index_T
    hidden = ((back_TT < 0) | (back_TT >= (window or len(index_T))))[None]
    if documents_BT is not None:
        hidden = hidden | (documents_BT[:, :, None] != documents_BT[:, None, :])
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, -torch.inf)[:, None]


def _attend(
    transformers: Any,
    module: Any,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    masks: dict[int, Tensor | None] | None = None,
    sliding_window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it, with the mask of the layer's window and dropout by sample."""
    if masks is None or attention_mask is not None:
        what = f"{type(module).__name__} of transformers is not passed what its tokens may see"
        raise ConfigError(what, todo="choose another model")
    window = sliding_window if sliding_window and sliding_window < query_BHTD.shape[2] else 0
    given = module, query_BHTD, key_BHTD, value_BHTD, masks[window]
    if dropout:
        assert masks[window] is not None, "it is made where the configuration has dropout"
        return attention(*given, scaling=scaling)
    own = transformers.integrations.sdpa_attention.sdpa_attention_forward
    return own(*given, scaling=scaling, **options)  # type: ignore[no-any-return]


@torch.no_grad()
def _compare(model: Any, kind: Any, folder: str) -> None:
    """Raise ConfigError unless `model` has transformers' logits, and no token sees later or foreign ones."""
    known = model.config.to_json_string()
    if known in _compared:
        return
    tokens_1T = torch.arange(1, _PROBE + 1)[None] % model.config.vocab_size
    documents_1T = torch.tensor([[0] * 5 + [1] * (_PROBE - 5)])
    model.eval()
    found = model(tokens_1T)
    model.config._attn_implementation = "sdpa"
    theirs = kind.forward(model, input_ids=tokens_1T, use_cache=False).logits
    model.config._attn_implementation = _ATTENTION
    packed = model(torch.stack([tokens_1T, documents_1T], dim=1))
    pairs = (
        (found, theirs, "its head alone does not give its logits"),
        (found[:, :4], model(tokens_1T[:, :4]), "a token sees later ones"),
        (packed[:, 5:], model(tokens_1T[:, 5:]), "a token sees other documents of its row"),
    )
    for ours, expected, fault in pairs:
        difference, scale = (ours - expected).abs().max(), expected.abs().max()
        if not difference <= scale * torch.finfo(expected.dtype).eps * 8:
            why = f"{fault}: a difference of {difference:.1e} in logits up to {scale:.1e}"
            raise _refusal(model.config, folder, "cannot be trained here", why)
    _compared.add(known)

"""Language models that are not trained: what the bridge asks of them, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lib.data.answers.huggingface import not_there, transformers
from lib.data.answers.opening import HUGGING_FACE, SIZES
from lib.data.answers.spec import Side
from lib.data.types import TextSpec
from lib.memory.simulation import simulated
from lib.registry import build_model
from models.gpt2.model import GPT2


class FrozenLM(Protocol):
    """A language model of which gradients are wanted with respect to what it reads, and no others.

    positions: the longest sequence that it takes; None where there is no bound that is known.
    embedding_rms: (), the root mean square of the embeddings of its tokens.
    """

    positions: int | None
    embedding_rms: Tensor

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """int64 (B, T) -> (B, T, C)."""
        ...

    def logits(self, embedded_BTC: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, V), of the token that follows at every position."""
        ...

    def weights(self) -> list[Tensor]:
        """All that it holds on the device."""
        ...


class _Frozen:
    """What both kinds share: a module whose weights stay."""

    def __init__(self, model: nn.Module, table_VC: Tensor, *, positions: int | None) -> None:
        self.positions = positions
        self.embedding_rms = table_VC.detach().square().mean().sqrt()
        self._model = model

    def weights(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


class ToolkitLM(_Frozen):
    """A GPT-2 of models/gpt2."""

    def __init__(self, model: GPT2) -> None:
        self._gpt2 = model
        backbone = model.backbone
        super().__init__(model, backbone.token.weight, positions=backbone.position.num_embeddings)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return self._gpt2.backbone.token(tokens_BT)  # type: ignore[no-any-return]

    def logits(self, embedded_BTC: Tensor) -> Tensor:
        return self._gpt2.of_embedded(embedded_BTC)


class HuggingFaceLM(_Frozen):
    """A causal language model of Hugging Face transformers."""

    def __init__(self, model: Any) -> None:
        self._embedding, self._causal = model.get_input_embeddings(), model
        published = model.config
        known = published.to_dict()
        longest = known.get("max_position_embeddings", known.get("n_positions"))
        super().__init__(model, self._embedding.weight, positions=longest)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return self._embedding(tokens_BT)  # type: ignore[no-any-return]

    def logits(self, embedded_BTC: Tensor) -> Tensor:
        return self._causal(inputs_embeds=embedded_BTC, use_cache=False).logits  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class FrozenSource:
    """Where a frozen language model comes from.

    path: the file of weights of a model of the toolkit, None for random ones, which will do to measure what
    a run needs; of one of Hugging Face its directory.
    """

    side: Side
    path: Path | None

    def load(self, device: torch.device, dtype: torch.dtype) -> FrozenLM:
        """The model on `device`; within a simulation without contents. Raises DataError, ConfigError."""
        if self.side.name.startswith(HUGGING_FACE):
            assert self.path is not None
            return HuggingFaceLM(_placed(_of_hugging_face(self.path), device, dtype))
        model = unlearned(self.side)
        if self.path is not None and not simulated():
            model.load_state_dict(torch.load(self.path, weights_only=True))
        return ToolkitLM(_placed(model, device, dtype))


def text_spec(side: Side) -> TextSpec:
    """The texts of `side` for a language model that learns to write them."""
    return TextSpec(
        name=side.name,
        vocab_size=side.vocab_size,
        block_size=side.text_tokens,
        unit="token",
        validation_tokens=1,
        validation_bytes=None,
        synthetic=True,
    )


def size_options(side: Side) -> dict[str, Any]:
    """The options of models/gpt2 for a model of the toolkit."""
    size = SIZES[side.name]
    sizes = {"layers": size.layers, "heads": size.heads, "width": size.width}
    return {"size": "custom", "bias": True, "dropout": 0.0, "pad_vocab": 1, **sizes}


def unlearned(side: Side) -> GPT2:
    """A model of the toolkit with random weights."""
    model = build_model("gpt2", size_options(side), text_spec(side), seed=0)
    assert isinstance(model, GPT2)
    return model


def _of_hugging_face(folder: Path) -> nn.Module:
    package = transformers()
    try:
        if simulated():
            config = package.AutoConfig.from_pretrained(str(folder), local_files_only=True)
            model = package.AutoModelForCausalLM.from_config(config)
        else:
            model = package.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise not_there(folder, "causal language model", error) from error
    assert isinstance(model, nn.Module)
    return model


def _placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    model.eval().requires_grad_(False)
    # Fake tensors stand for the device already, and Module.to refuses them.
    return model if simulated() else model.to(device, dtype)

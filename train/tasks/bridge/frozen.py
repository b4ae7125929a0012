"""Language models that are not trained: what the bridge asks of them, and where they come from."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lib.data.datasets.question_answering.data import HUGGING_FACE, SIZES
from lib.data.datasets.question_answering.huggingface import not_there, transformers
from lib.data.datasets.question_answering.spec import AnswerSpec, Side
from lib.data.types import Spec, TextSpec
from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.memory.live import LiveBytes
from lib.memory.simulation import simulated, simulation
from lib.nn.model_code import build_model
from lib.plan.types import Branch, Plan
from models.gpt2.model import GPT2

ROWS = 2  # that operations are counted for
BACK_AND_FORTH = 2  # a product of which one factor is frozen has one more in its derivative


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
        single = torch.promote_types(table_VC.dtype, torch.float32)
        norm = torch.linalg.vector_norm(table_VC.detach(), dtype=single)  # makes no second table
        self.embedding_rms = norm / math.sqrt(table_VC.numel())
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
        with _made_as(device, dtype) if simulated() else contextlib.nullcontext():
            if self.side.name.startswith(HUGGING_FACE):
                assert self.path is not None
                return HuggingFaceLM(_placed(_of_hugging_face(self.path, dtype), device, dtype))
            model = unlearned(self.side)
            if self.path is not None and not simulated():
                model.load_state_dict(torch.load(self.path, weights_only=True))
            return ToolkitLM(_placed(model, device, dtype))


@dataclass(frozen=True, slots=True)
class FrozenPair:
    """Two frozen language models, made before the first job (`train.tasks.base.Prepared`)."""

    sources: tuple[FrozenSource, FrozenSource]

    def branches(self, build: Callable[[], nn.Module], spec: Spec) -> tuple[Branch, Branch]:
        """What each of the two takes. Raises DataError, ConfigError."""
        assert isinstance(spec, AnswerSpec)
        return branches_of(build, spec, self.sources)

    def load(self, plan: Plan, backend: Backend, dtype: torch.dtype) -> tuple[FrozenLM, FrozenLM]:
        """The first on the first of the backend's devices, the second on the last one."""
        first, second = self.sources
        # Autocast would make a copy of each weight whenever it is used, and keep it until backward.
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision, dtype)
        return first.load(backend.devices[0], dtype), second.load(backend.devices[-1], dtype)


def branches_of(
    build: Callable[[], nn.Module], spec: AnswerSpec, sources: tuple[FrozenSource, FrozenSource]
) -> tuple[Branch, Branch]:
    """What each of the two computes for a sample, and its size, found without data and without memory.

    build: makes the model whose prefixes they read. Raises DataError, ConfigError.
    """
    found = []
    with simulation("cpu"), LiveBytes() as live, torch.no_grad():
        bytes_BT = torch.zeros(ROWS, *spec.input_shape, dtype=torch.int64)
        for source, prefix_BMC in zip(sources, build().eval()(bytes_BT), strict=True):
            side, lm = source.side, source.load(torch.device("cpu"), torch.float32)
            tokens_BT = torch.zeros(ROWS, len(side.anchor) + side.answer_tokens - 1, dtype=torch.int64)
            _check_room(lm, side.name, needed=prefix_BMC.shape[1] + tokens_BT.shape[1])
            before = live.flop
            lm.logits(torch.cat((prefix_BMC, lm.embed(tokens_BT)), dim=1))
            flop = BACK_AND_FORTH * (live.flop - before) / ROWS
            parameters = sum(weight.numel() for weight in lm.weights())
            found.append(Branch(flop_per_sample=flop, parameters=parameters))
    return found[0], found[1]


def _check_room(lm: FrozenLM, name: str, *, needed: int) -> None:
    if lm.positions is not None and needed > lm.positions:
        raise ConfigError(
            f"{name} has {lm.positions} positions, and a prefix with anchor and answer takes {needed}",
            todo="take fewer latents (CONFIG_LATENTWIRE_LATENTS) or another model",
        )


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


@contextlib.contextmanager
def _made_as(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Fake tensors are made where and as they are to be: Module.to refuses them."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(usual)


def _of_hugging_face(folder: Path, dtype: torch.dtype) -> nn.Module:
    package = transformers()
    try:
        if simulated():
            config = package.AutoConfig.from_pretrained(str(folder), local_files_only=True)
            model = package.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = package.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise not_there(folder, "causal language model", error) from error
    assert isinstance(model, nn.Module)
    return model


def _placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    model.eval().requires_grad_(False)
    return model if simulated() else model.to(device, dtype)

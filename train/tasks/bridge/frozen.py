"""Frozen language models: their interface and sources."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lib.data.datasets.question_answering.data import HUGGING_FACE, SIZES
from lib.data.datasets.question_answering.huggingface import missing_error
from lib.data.datasets.question_answering.spec import AnswerSpec, Side
from lib.data.types import Spec, TextSpec
from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.memory.live import LiveBytes
from lib.memory.simulation import simulated, simulation
from lib.nn.model_code import build_model
from lib.nn.packages import import_extra
from lib.plan.types import Branch, Plan
from models.gpt2.model import GPT2

Copies: TypeAlias = "tuple[FrozenLM, ...]"  # of one model, each with a part of the samples
ROWS = 2  # for which FLOPs are counted
BACKWARD_FACTOR = 2  # FLOPs of forward and backward over those of forward, with one frozen factor per product


class FrozenLM(ABC):
    """A frozen language model; gradients are taken by its input only.

    positions: maximum sequence length, None if unknown. embedding_rms: (), root mean square of its
    embeddings, on the device that the model computes on. waits: its weights are in main memory, and on the
    device only within `resident`.
    """

    def __init__(self, model: nn.Module, table_VC: Tensor, *, positions: int | None) -> None:
        self.positions, self.waits = positions, False
        self._seen: Callable[[list[Tensor]], None] = lambda _: None
        single = torch.promote_types(table_VC.dtype, torch.float32)
        norm = torch.linalg.vector_norm(table_VC.detach(), dtype=single)  # without a copy of the table
        self.embedding_rms: Tensor = norm / math.sqrt(table_VC.numel())
        self._model = model

    @abstractmethod
    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Embed tokens: int64 (B, T) -> (B, T, C)."""

    @abstractmethod
    def logits(self, embedded_BTC: Tensor) -> Tensor:
        """Return the logits of the next tokens: (B, T, C) -> (B, T, V)."""

    def weights(self) -> list[Tensor]:
        """Return all its weights."""
        return [*self._model.parameters(), *self._model.buffers()]

    def watch(self, seen: Callable[[list[Tensor]], None]) -> None:
        """Call `seen` with the weights now, and with each copy of them on the device."""
        self._seen = seen
        seen(self.weights())

    def wait_for(self, device: torch.device) -> None:
        """Compute on `device` from now on, and keep the weights where they are until then."""
        self.waits, self.embedding_rms = True, self.embedding_rms.to(device)
        if device.type == "cuda":  # copies of pageable memory are slower
            for weight in self.weights():
                weight.data = weight.data.pin_memory()

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Keep the weights on the device within the context; copy and release those that wait."""
        if not self.waits:
            yield
            return
        device, copies = self.embedding_rms.device, dict[int, Tensor]()
        places = [
            (held, name, weight)
            for module in self._model.modules()
            for held in (module._parameters, module._buffers)
            for name, weight in held.items()
            if weight is not None
        ]
        for held, name, weight in places:
            if id(weight) not in copies:  # a weight may be shared
                copy = weight.detach().to(device, non_blocking=True)
                copies[id(weight)] = nn.Parameter(copy, False) if isinstance(weight, nn.Parameter) else copy
            held[name] = copies[id(weight)]  # type: ignore[assignment]
        self._seen([*copies.values()])
        try:
            yield
        finally:
            for held, name, weight in places:
                held[name] = weight  # type: ignore[assignment]


class ToolkitLM(FrozenLM):
    """A GPT-2 of models/gpt2."""

    def __init__(self, model: GPT2) -> None:
        self._gpt2 = model
        backbone = model.backbone
        super().__init__(model, backbone.token.weight, positions=backbone.position.num_embeddings)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Embed tokens."""
        return self._gpt2.backbone.token(tokens_BT)  # type: ignore[no-any-return]

    def logits(self, embedded_BTC: Tensor) -> Tensor:
        """Return logits for embeddings."""
        return self._gpt2.forward_embedded(embedded_BTC)


class HuggingFaceLM(FrozenLM):
    """A causal language model of Hugging Face transformers."""

    def __init__(self, model: Any) -> None:
        self._embedding, self._causal = model.get_input_embeddings(), model
        known = model.config.to_dict()
        longest = known.get("max_position_embeddings", known.get("n_positions"))
        super().__init__(model, self._embedding.weight, positions=longest)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Embed tokens."""
        return self._embedding(tokens_BT)  # type: ignore[no-any-return]

    def logits(self, embedded_BTC: Tensor) -> Tensor:
        """Return logits for embeddings."""
        return self._causal(inputs_embeds=embedded_BTC, use_cache=False).logits  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class FrozenSource:
    """Source of a frozen language model.

    path: weights of a toolkit model, None for random ones, which suffice for measurements; or the directory
    of a Hugging Face model.
    """

    side: Side
    path: Path | None

    def load(self, device: torch.device, dtype: torch.dtype) -> FrozenLM:
        """Load the model onto `device`; in a simulation without data. Raises DataError, ConfigError."""
        with _defaults(device, dtype) if simulated() else contextlib.nullcontext():
            if self.side.name.startswith(HUGGING_FACE):
                assert self.path is not None
                return HuggingFaceLM(_placed(_load_hugging_face(self.path, dtype), device, dtype))
            model = untrained(self.side)
            if self.path is not None and not simulated():
                model.load_state_dict(torch.load(self.path, weights_only=True))
            return ToolkitLM(_placed(model, device, dtype))


@dataclass(frozen=True, slots=True)
class FrozenPair:
    """Two frozen language models (`train.tasks.base.Prepared`)."""

    sources: tuple[FrozenSource, FrozenSource]

    def branches(self, build: Callable[[], nn.Module], spec: Spec) -> tuple[Branch, Branch]:
        """Count FLOPs and saved bytes per sample, and parameters of both models, without data and memory.

        build: makes the model whose prefixes they read. Raises DataError, ConfigError.
        """
        assert isinstance(spec, AnswerSpec)
        found = []
        with simulation("cpu"), LiveBytes() as live, torch.no_grad():
            bytes_BT = torch.zeros(ROWS, *spec.input_shape, dtype=torch.int64)
            for source, prefix_BMC in zip(self.sources, build().eval()(bytes_BT), strict=True):
                side, lm = source.side, source.load(torch.device("cpu"), torch.float32)
                tokens_BT = torch.zeros(ROWS, len(side.anchor) + side.answer_tokens - 1, dtype=torch.int64)
                _check_room(lm, side.name, needed=prefix_BMC.shape[1] + tokens_BT.shape[1])
                before = live.flop
                saved = dict[int, torch.UntypedStorage]()

                def keep(tensor: Tensor, saved: dict[int, torch.UntypedStorage] = saved) -> Tensor:
                    saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
                    return tensor

                with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
                    embedded_BTC = torch.cat((prefix_BMC, lm.embed(tokens_BT)), dim=1)
                    lm.logits(embedded_BTC.requires_grad_())
                flop = BACKWARD_FACTOR * (live.flop - before) / ROWS
                own = {weight.untyped_storage()._cdata for weight in lm.weights()}
                kept_bytes = sum(storage.nbytes() for key, storage in saved.items() if key not in own)
                parameters = sum(weight.numel() for weight in lm.weights())
                branch = Branch(
                    flop_per_sample=flop, parameters=parameters, bytes_per_sample=kept_bytes // ROWS
                )
                found.append(branch)
        return found[0], found[1]

    def load(self, plan: Plan, backend: Backend, dtype: torch.dtype) -> tuple[Copies, Copies]:
        """Load both onto the devices of the plan, or into main memory, to be copied from there."""
        # Autocast would copy each weight at every use, and keep the copy until backward.
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision, dtype)
        devices, first = backend.devices, (plan.branch_devices or (1,))[0]
        halves = (devices[:first], devices[first:]) if plan.branch_devices else (devices, devices)
        if plan.strategy == "sequential":
            halves = ((backend.host,), (backend.host,))
        found = []
        for source, own in zip(self.sources, halves, strict=True):
            found.append(tuple(source.load(device, dtype) for device in own))
            if plan.strategy == "sequential":
                found[-1][0].wait_for(backend.device)
        return found[0], found[1]


def _check_room(lm: FrozenLM, name: str, *, needed: int) -> None:
    if lm.positions is not None and needed > lm.positions:
        raise ConfigError(
            f"{name} has {lm.positions} positions, and a prefix with anchor and answer takes {needed}",
            todo="take fewer latents (CONFIG_LATENTWIRE_LATENTS) or another model",
        )


def text_spec(side: Side) -> TextSpec:
    """Return the spec of the texts of `side` for pretraining."""
    return TextSpec(
        name=side.name, vocab_size=side.vocab_size, block_size=side.text_tokens, unit="token", synthetic=True
    )


def size_options(side: Side) -> dict[str, Any]:
    """Return the options of models/gpt2 for a toolkit model."""
    return {
        "size": "custom",
        "bias": True,
        "dropout": 0.0,
        "pad_vocab": 1,
        "init_std": 0.02,
        **SIZES[side.name],
    }


def untrained(side: Side) -> GPT2:
    """Build a toolkit model with random weights."""
    model = build_model("gpt2", size_options(side), text_spec(side), seed=0)
    assert isinstance(model, GPT2)
    return model


@contextlib.contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Set default device and dtype, because Module.to does not support fake tensors."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(usual)


def _load_hugging_face(folder: Path, dtype: torch.dtype) -> nn.Module:
    package = import_extra("transformers")
    # Else a folder that names code of its own is asked about on standard input.
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        if simulated():
            config = package.AutoConfig.from_pretrained(str(folder), **options)
            model = package.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = package.AutoModelForCausalLM.from_pretrained(str(folder), **options)
    except (OSError, ValueError) as error:
        raise missing_error(folder, "causal language model", error) from error
    assert isinstance(model, nn.Module)
    return model


def _placed(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    model.eval().requires_grad_(False)
    return model if simulated() else model.to(device, dtype)

"""Changes of a configuration that need less memory, the nearest first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lib.config import Config
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import CHOICES, Recompute
from lib.plan.numerics import precision_problem
from lib.plan.placement import place
from lib.plan.sharding import DEVICES_PER_NODE
from lib.plan.types import OWN_MEMORY, Hardware, Precision
from train.training_data import TrainingData, built

_OTHER = " (not the same mathematics)"
_LORA: dict[str, Any] = {
    "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_targets": "all-linear", "lora_train": "",
    "freeze": None,
}  # fmt: skip
_SHORTEST = 128  # tokens of a sequence, below which none is offered
_WEIGHTS = ("parameters",)
_STATE = (*_WEIGHTS, "optimizer")


class Change(NamedTuple):
    """A change, as a user writes it, and what it makes of the configuration and the machine.

    beyond: name of the change that this one goes beyond, or "": it is of use where that one does not suffice.
    keeps: kinds of memory that it leaves as that one has them.
    """

    name: str
    config: Config
    hardware: Hardware
    keeps: tuple[str, ...] = ()
    beyond: str = ""


def changes(config: Config, hardware: Hardware, *, precision: Precision) -> Iterator[Change]:
    """Yield the single changes of `config` that need less memory for the same samples at a time.

    precision: of the plan.
    """
    recomputed = CHOICES[CHOICES.index(config.grad_checkpoint) + 1 :] if config.grad_checkpoint else ()
    for kind in recomputed:
        yield Change(_checkpoint(kind), config.replace(grad_checkpoint=kind), hardware, _STATE)
    if config.block_size is not None and not config.chunked_cross_entropy:
        changed = config.replace(chunked_cross_entropy=True)
        yield Change("CONFIG_CHUNKED_CROSS_ENTROPY=y", changed, hardware, _STATE)
    bf16_helps = precision == "fp32" and hardware.kind != "cpu"
    if bf16_helps and not precision_problem("bf16", place(config, hardware)):
        kept = _STATE if config.weights.adapt == "full" else ()  # frozen layers are halved
        yield Change("CONFIG_PRECISION_BF16=y", config.replace(precision="bf16"), hardware, kept)
    if hardware.kind in OWN_MEMORY and not config.activation_offload:
        name = "CONFIG_ACTIVATION_OFFLOAD=y (slow: all of it crosses the bus twice)"
        yield Change(name, config.replace(activation_offload=True), hardware, _STATE)
    if _has_large_state(config):
        yield Change(f"CONFIG_ADAM_8BIT=y{_OTHER}", config.replace(adam_8bit=True), hardware, _WEIGHTS)
    if _has_weights(config) and config.weights.adapt == "full":
        yield Change(f"CONFIG_ADAPT_LORA=y{_OTHER}", config.replace(adapt="lora", **_LORA), hardware)
    if config.optimizer != "sgd":
        changed = config.replace(optimizer="sgd", momentum=0.9, nesterov=False, adam_8bit=False)
        yield Change(f"CONFIG_OPTIMIZER_SGD=y{_OTHER}", changed, hardware, _WEIGHTS)
    if config.optim.ema:
        yield Change(f"CONFIG_EMA=n{_OTHER}", config.replace(ema=False), hardware, _STATE)


def further_changes(
    config: Config, hardware: Hardware, *, precision: Precision, recompute: Recompute
) -> Iterator[Change]:
    """Yield `changes`, then several together, shorter sequences, and more devices of the same kind.

    recompute: the choice that saves least of those that the model allows; it is beside each other change.
    """
    single = tuple(changes(config, hardware, precision=precision))
    yield from single
    known = {"", *(each.name for each in single)}
    is_new = recompute not in ("none", config.grad_checkpoint)
    again = config.replace(grad_checkpoint=recompute) if is_new else config
    beside = f" {_checkpoint(recompute)}" if is_new else ""
    together = [Change(beside.strip(), again, hardware, _STATE)]
    if _has_large_state(config):
        changed = again.replace(adam_8bit=True)
        together.append(Change(f"CONFIG_ADAM_8BIT=y{beside}{_OTHER}", changed, hardware, _WEIGHTS))
    if _has_weights(config):
        own = _LORA if config.weights.adapt == "full" else {}
        if own:
            changed = again.replace(adapt="lora", **own)
            together.append(Change(f"CONFIG_ADAPT_LORA=y{beside}{_OTHER}", changed, hardware))
        if config.weights.adapt != "qlora" and hardware.kind == "cuda":
            changed = again.replace(adapt="qlora", **own)
            together.append(Change(f"CONFIG_ADAPT_QLORA=y{beside}{_OTHER}", changed, hardware))
    yield from (each for each in together if each.name not in known)
    for name, changed, *_ in together:
        beyond, size = name, config.block_size or 0
        while (size := size // 2) >= _SHORTEST:
            shorter = f"{name.removesuffix(_OTHER)} CONFIG_BLOCK_SIZE={size}{_OTHER}".strip()
            yield Change(shorter, changed.replace(block_size=size), hardware, _STATE, beyond)
            beyond = shorter
    alone = config.num_devices in (0, 1) and len(hardware.devices) == 1 and not hardware.of_all_nodes
    if not alone or hardware.kind not in OWN_MEMORY:
        return
    beyond = ""
    for name, changed in (("", config), (beside, again)) if beside else (("", config),):
        count = 1
        while (count := 2 * count) <= DEVICES_PER_NODE:
            wider = dataclasses.replace(hardware, devices=hardware.devices * count)
            yield Change(f"{count} devices{name}", changed.replace(num_devices=0), wider, (), beyond)
            beyond = f"{count} devices{name}"


def most_recomputed(config: Config, data: TrainingData) -> Recompute:
    """Return the choice of recomputation that saves least of those that the model allows."""
    for kind in reversed(CHOICES) if config.grad_checkpoint else ():
        with contextlib.suppress(ConfigError), torch.device("meta"):
            built(config.replace(grad_checkpoint=kind), data.dataset.spec)
            return kind
    return "none"


def _checkpoint(kind: str) -> str:
    return f"CONFIG_GRAD_CHECKPOINT_{kind.upper()}=y"


def _has_weights(config: Config) -> bool:
    """Return True for a language model that does not start from random weights."""
    given = config.weights.initial_weights or config.model_options.get("dir")
    return config.block_size is not None and bool(given)


def _has_large_state(config: Config) -> bool:
    """Return True for an optimizer whose state can be stored in 8 bits, and is not."""
    return config.optimizer in ("adam", "adamw") and not config.adam_8bit

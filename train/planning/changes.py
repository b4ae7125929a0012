"""Changes that need less memory, the nearest first: of a configuration, or of what else is planned."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from lib.config import Config
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import CHOICES, Recompute
from lib.plan.fitting import predicted, step_settings
from lib.plan.numerics import precision_problem
from lib.plan.placement import place
from lib.plan.sharding import DEVICES_PER_NODE
from lib.plan.types import OWN_MEMORY, Hardware, Memory, Plan, Precision
from lib.units import bytes_text
from train.planning.memory_estimate import MemoryTraces
from train.training_data import TrainingData, built, describe_training_data, make_training_data

_OTHER = " (not the same mathematics)"
_LORA: dict[str, Any] = {
    "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_targets": "all-linear", "lora_train": "",
    "freeze": None,
}  # fmt: skip
LEAST_SHARE = 0.95  # of the memory; a change that leaves more is not worth a line
_SHORTEST = 128  # tokens of a sequence, below which none is offered
WEIGHTS = ("parameters",)
STATE = (*WEIGHTS, "optimizer")
_OF_UPDATE = ("optimizer", "update")
Subject = TypeVar("Subject")
Found = TypeVar("Found")


class Edit(NamedTuple, Generic[Subject]):
    """A change of one setting, as a user writes it, and how it is made.

    keeps: kinds of memory that it leaves as they are. devices: factor of their number. only: categories of
    memory that it changes, () for more than can be named.
    """

    name: str
    make: Callable[[Subject], Subject]
    keeps: tuple[str, ...] = ()
    is_exact: bool = True  # it does not change the mathematics
    devices: int = 1
    only: tuple[str, ...] = ()


class Change(NamedTuple, Generic[Subject]):
    """One or more edits, and what they make of the subject.

    beyond: name of the change that this one goes beyond, or "": it is of use where that one does not suffice.
    keeps: kinds of memory that it leaves as that one has them. only: that of a single edit.
    """

    name: str
    subject: Subject
    devices: int = 1
    keeps: tuple[str, ...] = ()
    beyond: str = ""
    only: tuple[str, ...] = ()

    @classmethod
    def of(cls, subject: Subject, edits: Sequence[Edit[Subject]], beyond: str = "") -> Change[Subject]:
        """Make `edits` of `subject`, of which the last one goes beyond the others where `beyond` has them."""
        for edit in edits:
            subject = edit.make(subject)
        settings = " ".join(edit.name for edit in edits if "=" in edit.name)
        name = ", ".join(filter(None, [settings, *(edit.name for edit in edits if "=" not in edit.name)]))
        kept = [edit.keeps for edit in (edits[-1:] if beyond else edits)]
        keeps = tuple(kind for kind in STATE if all(kind in each for each in kept))
        name += "" if all(edit.is_exact for edit in edits) else _OTHER
        only = edits[0].only if len(edits) == 1 else ()
        return cls(name, subject, math.prod(edit.devices for edit in edits), keeps, beyond, only)


def together(
    subject: Subject,
    singles: Sequence[Edit[Subject]],
    recompute: Edit[Subject] | None,
    smaller: Sequence[Sequence[Edit[Subject]]],
    *,
    tokens: int,
    shorter: Callable[[int], Edit[Subject]],
    wider: Callable[[int], Edit[Subject]] | None,
) -> Iterator[Change[Subject]]:
    """Yield the single changes, then several together, shorter sequences, and more devices.

    recompute: is beside all others, if given. smaller: edits that need less memory for weights and state.
    tokens: of a sequence, 0 for none. shorter, wider: the edits to fewer tokens and to more devices.
    """
    known = {""}
    for edit in singles:
        yield (change := Change.of(subject, [edit]))
        known.add(change.name)
    again = [] if recompute is None else [recompute]
    combined = [again, *([*edits, *again] for edits in smaller)]
    changed = [Change.of(subject, edits) for edits in combined if edits]
    yield from (each for each in changed if each.name not in known)

    def chain(edits: Sequence[Edit[Subject]], further: Sequence[Edit[Subject]], beyond: str) -> Iterator[Any]:
        for edit in further:
            yield (change := Change.of(subject, [*edits, edit], beyond))
            beyond = change.name

    lengths = itertools.takewhile(lambda size: size >= _SHORTEST, (tokens >> n for n in itertools.count(1)))
    shorts = [shorter(size) for size in lengths]
    for edits in combined:
        yield from chain(edits, shorts, Change.of(subject, edits).name)
    counts = (2**n for n in range(1, DEVICES_PER_NODE.bit_length()))
    wides = [wider(count) for count in counts] if wider else []
    for edits in ([], again) if again else ([],):
        yield from chain(edits, wides, "")


def attempts(
    changes: Iterable[Change[Subject]],
    memory: Memory,
    attempt: Callable[[Change[Subject]], tuple[Memory, Found]],
    *,
    peak_of: Callable[[Found], str] | None = None,
) -> Iterator[tuple[str, Found | None]]:
    """Yield the name of each change that fits with what `attempt` found, then lines on the others, and None.

    memory: without changes, which is too much. A change is not tried where what it keeps is too much already.
    attempt: returns the memory of a change; raises ConfigError where it cannot be made. peak_of: names where
    the peak is, for a change that needs hardly less than the one that it goes beyond.
    """
    too_little, refused = [], dict[str, None]()  # for the same reason once
    missed = {"": memory}  # needs that are too much, by the change
    for change in changes:
        if change.beyond not in missed:  # it fits, cannot be tried, or is hopeless
            continue
        kept = sum(missed[change.beyond].parts.get(kind, 0) for kind in change.keeps)
        if kept > missed[change.beyond].usable_bytes:
            too_little.append(f"{change.name} needs more than {bytes_text(kept)}")
            continue
        try:
            needed, found = attempt(change)
        except ConfigError as unable:
            refused[f"not tried: {unable}"] = None
            continue
        before = missed[change.beyond]
        if needed.fits:
            yield change.name, found
        else:
            missed[change.name] = needed
            text = f"{change.name} needs {bytes_text(needed.need_bytes)}"
            hardly_less = needed.peak_bytes >= LEAST_SHARE * before.peak_bytes
            if peak_of and change.devices == 1 and hardly_less:
                text += f" (hardly less: its peak is in the {peak_of(found)})"
            too_little.append(text)
    yield from refused.items()
    if too_little:
        yield f"not enough: {'; '.join(too_little)}", None


def changes(config: Config, hardware: Hardware, *, precision: Precision) -> Iterator[Change[Config]]:
    """Yield the single changes of `config` that need less memory for the same samples at a time.

    precision: of the plan.
    """
    return (Change.of(config, [edit]) for edit in _edits(config, hardware, precision))


def further_changes(
    config: Config, hardware: Hardware, *, precision: Precision, recompute: Recompute
) -> Iterator[Change[Config]]:
    """Yield `changes`, then several together, shorter sequences, and more devices of the same kind.

    recompute: the choice that saves least of those that the model allows; it is beside each other change.
    """
    smaller = [[_ADAM_8BIT]] if _has_large_state(config) else []
    if _has_weights(config):
        if config.weights.adapt == "full":
            smaller.append([_edit("CONFIG_ADAPT_LORA=y", is_exact=False, adapt="lora", **_LORA)])
        if config.weights.adapt != "qlora" and hardware.kind == "cuda":
            own = _LORA if config.weights.adapt == "full" else {}
            smaller.append([_edit("CONFIG_ADAPT_QLORA=y", is_exact=False, adapt="qlora", **own)])
    alone = config.num_devices in (0, 1) and len(hardware.devices) == 1 and not hardware.of_all_nodes

    def shorter(size: int) -> Edit[Config]:
        return _edit(f"CONFIG_BLOCK_SIZE={size}", STATE, is_exact=False, block_size=size)

    return together(
        config,
        list(_edits(config, hardware, precision)),
        None if recompute in ("none", config.grad_checkpoint) else _checkpoint(recompute),
        smaller,
        tokens=config.block_size or 0,
        shorter=shorter,
        wider=_devices if alone and hardware.kind in OWN_MEMORY else None,
    )


def _edits(config: Config, hardware: Hardware, precision: Precision) -> Iterator[Edit[Config]]:
    if config.grad_checkpoint:
        yield from map(_checkpoint, CHOICES[CHOICES.index(config.grad_checkpoint) + 1 :])
    if config.block_size is not None and not config.chunked_cross_entropy:
        yield _edit("CONFIG_CHUNKED_CROSS_ENTROPY=y", STATE, chunked_cross_entropy=True)
    bf16_helps = precision == "fp32" and hardware.kind != "cpu"
    if bf16_helps and not precision_problem("bf16", place(config, hardware)):
        kept = STATE if config.weights.adapt == "full" else ()  # frozen layers are halved
        yield _edit("CONFIG_PRECISION_BF16=y", kept, precision="bf16")
    if hardware.kind in OWN_MEMORY and not config.activation_offload:
        name = "CONFIG_ACTIVATION_OFFLOAD=y (slow: all of it crosses the bus twice)"
        yield _edit(name, STATE, activation_offload=True)
    if _has_large_state(config):
        yield _ADAM_8BIT
    if _has_weights(config) and config.weights.adapt == "full":
        yield _edit("CONFIG_ADAPT_LORA=y", is_exact=False, adapt="lora", **_LORA)
    if config.optimizer != "sgd":
        own: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "nesterov": False, "adam_8bit": False}
        yield _edit("CONFIG_OPTIMIZER_SGD=y", WEIGHTS, is_exact=False, only=_OF_UPDATE, **own)
    if config.optim.ema:
        yield _edit("CONFIG_EMA=n", STATE, is_exact=False, only=("averages", "update"), ema=False)


def smaller_peaks(
    known: MemoryTraces, config: Config, data: TrainingData, hardware: Hardware, decided: Plan
) -> Iterator[str]:
    """Yield the peak after each single change of the configuration, at the same micro-batch, or why none.

    known: traces of `config`. What they show to change little is not traced.
    """
    assert decided.memory is not None, "what was not predicted is not known to be short"
    step, now = step_settings(decided), decided.memory.peak_bytes
    for change in changes(config, hardware, precision=step.precision):
        only, changed = change.only, change.subject
        if only and known.least_peak(step, hardware, without=only) >= LEAST_SHARE * now:
            continue
        precision = step.precision if changed.precision == "auto" else changed.precision
        other = dataclasses.replace(step, precision=precision)
        try:
            traces = MemoryTraces(changed, data_for(changed, data, config))
            peak = predicted(other, traces.predictor(hardware, gaps=False), free_bytes=0).peak_bytes
        except ConfigError as error:  # a model whose blocks cannot be recomputed in that way, for one
            yield f"not tried: {error}"
            continue
        if peak < LEAST_SHARE * now:
            yield f"{change.name}: {bytes_text(peak)} of tensors at the peak instead of {bytes_text(now)}"


def data_for(
    changed: Config, data: TrainingData, config: Config, *, root: Path | None = None
) -> TrainingData:
    """Return `data` of `config` for the `changed` one, which differs in `further_changes`."""
    if changed.block_size != config.block_size:
        assert root is not None
        return describe_training_data(changed, root=root, log=lambda _: None)
    return data if changed.weights == config.weights else make_training_data(changed, data.dataset)


def most_recomputed(config: Config, data: TrainingData) -> Recompute:
    """Return the choice of recomputation that saves least of those that the model allows."""
    for kind in reversed(CHOICES) if config.grad_checkpoint else ():
        with contextlib.suppress(ConfigError), torch.device("meta"):
            built(config.replace(grad_checkpoint=kind), data.dataset.spec)
            return kind
    return "none"


def _edit(
    name: str,
    keeps: tuple[str, ...] = (),
    *,
    is_exact: bool = True,
    only: tuple[str, ...] = (),
    **values: Any,
) -> Edit[Config]:
    return Edit(name, lambda config: config.replace(**values), keeps, is_exact, only=only)


_ADAM_8BIT = _edit("CONFIG_ADAM_8BIT=y", WEIGHTS, is_exact=False, only=_OF_UPDATE, adam_8bit=True)


def _checkpoint(kind: str) -> Edit[Config]:
    return _edit(f"CONFIG_GRAD_CHECKPOINT_{kind.upper()}=y", STATE, grad_checkpoint=kind)


def _devices(count: int) -> Edit[Config]:
    return Edit(f"{count} devices", lambda config: config.replace(num_devices=0), devices=count)


def _has_weights(config: Config) -> bool:
    """Return True for a language model that does not start from random weights."""
    given = config.weights.initial_weights or config.model_options.get("dir")
    return config.block_size is not None and bool(given)


def _has_large_state(config: Config) -> bool:
    """Return True for an optimizer whose state can be stored in 8 bits, and is not."""
    return config.optimizer in ("adam", "adamw") and not config.adam_8bit

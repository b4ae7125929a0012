"""Layers whose results depend on how a batch is split into micro-batches, found by trying.

One batch runs whole and in two halves, in training mode, with another state of torch's generator each time. A
model that gives the same and draws no random number is exact. Of any other all modules are compared, and what
a half would pass on is replaced by what the whole batch gave, so that each module answers for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lib.nn.activation_checkpointing import stop_recomputing
from lib.nn.dropout import dropouts, key_samples

CLOSE = 1e-6  # some models compute parts in single precision
_PARTS = (None, 0, 1)  # all of the batch, and its halves


@torch.no_grad()
def inexact_modules(model: nn.Module, inputs: Tensor) -> list[str]:
    """Return the modules of `model` that depend on the split of `inputs` (N, ...), N even; [] if none does.

    model: on the CPU, in double precision, with keyed dropout and normalisation over at most N / 2 samples.
    "before" is said of a module whose input differs: something in no module is computed in front of it.
    """
    model.train()
    with torch.random.fork_rng(devices=[]):
        (whole, drew), *halves = [_run(model, inputs, part) for part in _PARTS]
        same = (
            _same(*pair, part)
            for part, (half, _) in enumerate(halves)
            for pair in zip(half, whole, strict=True)
        )
        if not drew and all(same):
            return []
        recorded, found = list[list[Tensor]](), list[str]()
        for part in _PARTS:
            with _watched(model, part, recorded, found):
                _run(model, inputs, part)
    return [*dict.fromkeys(found)]


def recomputes_exactly(model: nn.Module, inputs: Tensor) -> bool:
    """Return True if `model`, which recomputes activations, has the gradients that it has without."""
    gradients = []
    for _ in range(2):
        model.train().zero_grad()
        with torch.random.fork_rng(devices=[]):
            outputs = [leaf for leaf in _run(model, inputs, None)[0] if leaf.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
        stop_recomputing(model)
    again, plain = gradients
    return len(again) == len(plain) and all(map(torch.allclose, again, plain))


def _run(model: nn.Module, inputs: Tensor, part: int | None) -> tuple[list[Tensor], bool]:
    """Return the outputs for a half of `inputs`, or (None) all, and whether random numbers were drawn."""
    count = len(inputs) if part is None else len(inputs) // 2
    first = count * (part or 0)
    torch.default_generator.manual_seed(_PARTS.index(part))
    before = torch.get_rng_state()
    key_samples(dropouts(model), seed=0, first=first, count=count, device=inputs.device)
    outputs = tree_leaves(model(inputs[first : first + count]))
    drew = not torch.equal(before, torch.get_rng_state())
    return [leaf for leaf in outputs if isinstance(leaf, Tensor)], drew


@contextlib.contextmanager
def _watched(
    model: nn.Module, part: int | None, recorded: list[list[Tensor]], found: list[str]
) -> Iterator[None]:
    """Look at what goes into and out of modules, in order: record it, or compare and replace it in a half."""
    names, known = {module: name for name, module in model.named_modules()}, iter(recorded)
    state = list[Tensor]()  # of the generator, when a module began or ended last

    def look(module: nn.Module, value: Any, before: str) -> Any:
        now, label = torch.get_rng_state(), f"{before}{names[module]} ({_kind(module)})".lstrip()
        if state and not torch.equal(state.pop(), now):
            found.append(label)
        state[:] = [now]
        if part is None:  # copied, because activations may work in place
            recorded.append([leaf.clone() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)])
            return value
        whole = iter(next(known, []))

        def corrected(leaf: Tensor) -> Tensor:
            expected = next(whole, None)
            if expected is None or _same(leaf, expected, part):
                return leaf
            found.append(label)
            counterpart = _part_of(expected, leaf, part)
            return leaf if counterpart is None else counterpart.clone()

        return tree_map_only(Tensor, corrected, value)

    def start(module: nn.Module, given: Any, named: Any) -> Any:
        return look(module, (given, named), "before ")

    def end(module: nn.Module, _: Any, returned: Any) -> Any:
        return look(module, returned, "")

    with contextlib.ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_pre_hook(start, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(end).remove)
        yield


def _kind(module: nn.Module) -> str:
    """Return the name of the class that the model's author gave."""
    return type(module).__name__.removeprefix("Recomputed").removeprefix("Ghost")


def _same(half: Tensor, whole: Tensor, part: int) -> bool:
    expected = _part_of(whole, half, part)
    return expected is not None and torch.allclose(half, expected, rtol=CLOSE, atol=CLOSE, equal_nan=True)


def _part_of(whole: Tensor, half: Tensor, part: int) -> Tensor | None:
    """Return what `half` should be: its rows of `whole`, or all of what no sample is in."""
    if whole.shape == half.shape:
        return whole
    pairs = [*zip(whole.shape, half.shape, strict=False)]
    halved = [place for place, (all_of, some) in enumerate(pairs) if all_of == 2 * some]
    others = sum(all_of == some for all_of, some in pairs)
    if whole.dim() != half.dim() or len(halved) != 1 or others != whole.dim() - 1:
        return None
    size = half.shape[halved[0]]
    return whole.narrow(halved[0], part * size, size)

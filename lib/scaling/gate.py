"""Leak checks before a sweep: no output depends on a later token, and targets are the next tokens.

A model that sees its targets would have the best scaling law of all. The checks take seconds and use the
context length of the sweep, because a mask or a chunk may be correct up to some position only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from lib.data.loader import LoaderConfig, TrainLoader
from lib.data.types import TextSpec, TokenPart
from lib.nn.cross_entropy import cross_entropy

VOCAB = 16
# Per token of a deterministic text. A model that has learned it gets there after 60 to 80 steps; how near to
# zero it gets later depends on rounding. With misaligned targets the loss is above that of a guess, 2.8.
LEARNED_NATS = 0.1
_TOKENS, _LEARNING_RATE = 512, 0.01  # tokens per step
_MULTIPLIER, _INCREMENT = 5, 3  # of the text: successor = 5 token + 3 mod 16


def cycle_spec(length: int) -> TextSpec:
    """Return the spec of the deterministic text, for models with a context of `length` tokens."""
    return TextSpec(name="cycle", vocab_size=VOCAB, block_size=length, unit="token", synthetic=True)


def find_faults(
    build: Callable[[TextSpec], nn.Module],
    *,
    length: int,
    targets: Callable[[Tensor], Tensor] = lambda targets: targets,
) -> list[str]:
    """Return what is wrong with the model that `build` makes; empty if nothing is.

    length: context length in tokens. targets: a change of the training targets (B, T), to test the last
    check.
    """
    found, spec = [], cycle_spec(length)
    if leaking := list(leaks(build(spec), spec)):
        found.append(
            f"{len(leaking)} outputs change with a later token, first: (changed, output) {leaking[0]}"
        )
    if leaking := list(gradient_leaks(build(spec), spec)):
        found.append(f"{len(leaking)} outputs have a gradient from a later token, first: {leaking[0]}")
    if (loss := loss_after_training(build(spec), spec, targets)) >= LEARNED_NATS:
        found.append(f"trained on a deterministic text, the loss is {loss:.3f} nats: misaligned targets")
    return found


def leaks(model: nn.Module, spec: TextSpec) -> Iterator[tuple[int, int]]:
    """Yield (changed position, earlier position whose output differs in any bit), in both modes."""
    changes = torch.arange(1, spec.block_size)
    tokens_BT = _tokens(spec).expand(len(changes), -1)
    others_BT = tokens_BT.clone()
    others_BT[range(len(changes)), changes] += 1
    differs_BT = torch.zeros(len(changes), spec.block_size, dtype=torch.bool)
    with torch.no_grad():
        for training in (False, True):
            model.train(training)
            differs_BT |= (model(others_BT % spec.vocab_size) != model(tokens_BT)).any(dim=2)
    for changed, differs_T in zip(changes.tolist(), differs_BT, strict=True):
        yield from ((changed, position) for position in range(changed) if differs_T[position])


def gradient_leaks(model: nn.Module, spec: TextSpec) -> Iterator[tuple[int, int]]:
    """Yield (later position, earlier position whose output has a gradient by its embedding)."""
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        embedded.append(output)

    token_tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    hook = next(token_tables).register_forward_hook(keep)
    logits_BTV = model(_tokens(spec))
    hook.remove()
    for position in range(spec.block_size):
        output = logits_BTV[0, position].sum()
        (gradient_BTC,) = torch.autograd.grad(output, embedded[0], retain_graph=True)
        later_T = gradient_BTC[0].any(dim=1)
        yield from ((later, position) for later in range(position + 1, spec.block_size) if later_T[later])


def loss_after_training(
    model: nn.Module, spec: TextSpec, change: Callable[[Tensor], Tensor], *, steps: int = 400
) -> float:
    """Return the loss in nats per token after at most `steps` of training through the loader.

    Evaluation takes its targets from the text itself, so misaligned targets of the loader show.
    """
    text = _cycle(64 * spec.block_size)
    part = TokenPart(text, block_size=spec.block_size, shifted=True)
    loader_config = LoaderConfig(device=torch.device("cpu"), placement="resident")
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    evaluated_1T = torch.from_numpy(text[: spec.block_size + 1].astype(np.int64))[None]
    loss, rows = float("inf"), max(1, _TOKENS // spec.block_size)
    with TrainLoader(part, spec, loader_config, seed=0, augment="none", pad=0) as loader:
        for step in range(steps):
            (batch,) = loader.micro_batches(step=step, target=rows, sizes=(rows,))
            logits_BTV = model(batch.inputs)
            optimizer.zero_grad()
            loss_BT = cross_entropy(logits_BTV.flatten(0, 1), change(batch.targets).flatten())
            torch.autograd.backward(loss_BT.mean())
            optimizer.step()
            if step % 20 == 19:
                with torch.no_grad():
                    logits_TV = model(evaluated_1T[:, :-1])[0]
                    loss = cross_entropy(logits_TV, evaluated_1T[0, 1:]).mean().item()
                if loss < LEARNED_NATS:
                    break
    return loss


def _cycle(length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    text = np.zeros(length, np.uint8)
    for place in range(1, length):
        text[place] = (_MULTIPLIER * int(text[place - 1]) + _INCREMENT) % VOCAB
    return text


def _tokens(spec: TextSpec) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, spec.vocab_size, (1, spec.block_size), generator=generator, device="cpu")

"""What must hold before a scaling law is worth its name: no output sees the future, targets are what follows.

A model that sees what it is to predict has the best law of all. The three checks take seconds, at the length
that the sweep trains with: a mask or a chunk may be sound in front of a leak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from lib.data.loader import Delivery, TrainLoader
from lib.data.types import TextSpec, TokenPart
from lib.nn.cross_entropy import cross_entropy

VOCAB = 16
LEARNED_NATS = 0.01  # per token of a text without surprise
_STEPS, _TOKENS, _LEARNING_RATE = 400, 512, 0.01  # tokens of a step
_MULTIPLIER, _INCREMENT = 5, 3  # of the text: the successor of each token


def spec_of(length: int) -> TextSpec:
    """Of the text that the checks are made on, for models that see so many tokens at once."""
    return TextSpec(
        name="cycle",
        vocab_size=VOCAB,
        block_size=length,
        unit="token",
        validation_tokens=1,
        validation_bytes=None,
        synthetic=True,
    )


def faults(
    build: Callable[[TextSpec], nn.Module],
    *,
    length: int,
    targets: Callable[[Tensor], Tensor] = lambda targets: targets,
) -> list[str]:
    """What is wrong with the small model that `build` makes for a text, in words; empty where nothing is.

    length: tokens that the sweep's models see at once. targets: a change of the targets of training, (B, T);
    to see the last check fail.
    """
    found, spec = [], spec_of(length)
    if leaking := list(leaks(build(spec), spec)):
        found.append(
            f"{len(leaking)} outputs change with a later token, first: (changed, output) {leaking[0]}"
        )
    if leaking := list(gradient_leaks(build(spec), spec)):
        found.append(f"{len(leaking)} outputs have a gradient from a later token, first: {leaking[0]}")
    if (loss := loss_after_training(build(spec), spec, targets)) >= LEARNED_NATS:
        found.append(f"trained on a text without surprise, the next token costs {loss:.3f} nats: misaligned")
    return found


def leaks(model: nn.Module, spec: TextSpec) -> Iterator[tuple[int, int]]:
    """(changed position, earlier position whose output is not the same to the bit)."""
    changes = torch.arange(1, spec.block_size)
    tokens_BT = _tokens(spec).expand(len(changes), -1)
    others_BT = tokens_BT.clone()
    others_BT[range(len(changes)), changes] += 1
    with torch.no_grad():
        differs_BT = (model(others_BT % spec.vocab_size) != model(tokens_BT)).any(dim=2)
    for changed, differs_T in zip(changes.tolist(), differs_BT, strict=True):
        yield from ((changed, position) for position in range(changed) if differs_T[position])


def gradient_leaks(model: nn.Module, spec: TextSpec) -> Iterator[tuple[int, int]]:
    """(later position, earlier position whose output has a gradient with respect to its embedding)."""
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


def loss_after_training(model: nn.Module, spec: TextSpec, change: Callable[[Tensor], Tensor]) -> float:
    """Nats a token of the text itself, by a model that was trained on what the loader says of it.

    The targets of the evaluation are read off the text, not taken from the loader.
    """
    text = _cycle(64 * spec.block_size)
    part = TokenPart(text, block_size=spec.block_size, shifted=True)
    delivery = Delivery(
        device=torch.device("cpu"),
        dtype=torch.float32,
        channels_last=False,
        placement="resident",
        num_workers=1,
        prefetch=1,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    evaluated_1T = torch.from_numpy(text[: spec.block_size + 1].astype(np.int64))[None]
    loss, rows = float("inf"), max(1, _TOKENS // spec.block_size)
    with TrainLoader(part, spec, delivery, seed=0, augment="none", pad=0) as loader:
        for step in range(_STEPS):
            (batch,) = loader.micro_batches(step=step, target=rows, rank=0, world=1, sizes=(rows,))
            logits_BTV = model(batch.inputs)
            optimizer.zero_grad()
            loss_BT = cross_entropy(logits_BTV.flatten(0, 1), change(batch.targets).flatten())
            torch.autograd.backward(loss_BT.mean())
            optimizer.step()
            if step % 20 == 19:
                loss = _loss(model, evaluated_1T)
                if loss < LEARNED_NATS:
                    break
    return loss


def _loss(model: nn.Module, text_1T: Tensor) -> float:
    with torch.no_grad():
        logits_TV = model(text_1T[:, :-1])[0]
        return cross_entropy(logits_TV, text_1T[0, 1:]).mean().item()


def _cycle(length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    text = np.zeros(length, np.uint8)
    for place in range(1, length):
        text[place] = (_MULTIPLIER * int(text[place - 1]) + _INCREMENT) % VOCAB
    return text


def _tokens(spec: TextSpec) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, spec.vocab_size, (1, spec.block_size), generator=generator, device="cpu")

"""Autoregressive text generation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lib.data.types import Tokenizer
from train.job import Job, evaluated_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of sampling.

    temperature: of the softmax; 0 is greedy decoding.
    top_k:       draw among this many of the likeliest tokens; 0 = all.
    tokens:      number of new tokens.
    seed:        of the draws, which are made on the CPU and so the same for every device.
    end:         token to stop after, if any.
    """

    temperature: float
    top_k: int
    tokens: int
    seed: int
    end: int | None = None


def continued_text(job: Job, tokenizer: Tokenizer, prompt: Sequence[int], *, sampling: Sampling) -> str:
    """Return `prompt` and its continuation by the evaluated weights of `job`, as text."""
    added = continuation(job, prompt, sampling=sampling, vocab_size=tokenizer.vocab_size)
    return tokenizer.decode([*prompt, *added])


def _not_compiled(job: Job) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which nothing of the model is compiled, nor runs compiled."""
    return torch.compiler.set_stance("force_eager") if job.plan.compile else contextlib.nullcontext()


def continuation(job: Job, prompt: Sequence[int], *, sampling: Sampling, vocab_size: int) -> list[int]:
    """Return the tokens that follow `prompt` by the evaluated weights of `job`, each below `vocab_size`."""
    block_size = job.task.targets_per_sample

    def forward(tokens_1T: Tensor) -> Tensor:
        with job.backend.autocast(job.plan.precision):
            logits_1TV: Tensor = (job.pipeline.forward if job.pipeline else job.model)(tokens_1T)
        return logits_1TV[..., :vocab_size]  # some models have rows for more

    with evaluated_weights(job), _not_compiled(job):  # or each length would be a program
        return continue_tokens(
            forward, prompt, sampling=sampling, block_size=block_size, device=job.backend.device
        )


@torch.no_grad()
def continue_tokens(
    forward: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    block_size: int,
    device: torch.device,
) -> list[int]:
    """Return the tokens that follow `prompt` (not empty), each sampled given the last `block_size`.

    forward: int64 (1, T) tokens on `device` -> (1, T, V) logits.
    """
    assert prompt, "the prompt is empty"
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(sampling.tokens):
        window_1T = torch.tensor([tokens[-block_size:]], dtype=torch.int64, device=device)
        logits_V = forward(window_1T)[0, -1].cpu().double()
        tokens.append(_draw(logits_V, sampling, generator))
        if tokens[-1] == sampling.end:
            break
    return tokens[len(prompt) :]


def _draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    count = min(sampling.top_k or len(logits_V), len(logits_V))
    top = logits_V.topk(count)
    probabilities = (top.values / sampling.temperature).softmax(dim=0)
    return int(top.indices[torch.multinomial(probabilities, 1, generator=generator)])

"""Padding of rows of tokens: micro-batches of like lengths, whose rows are cut, and what is left of it."""

from __future__ import annotations

import itertools

from lib.data.sampler import HasLengths, by_length, cut_lengths, sample_stream
from lib.data.types import Dataset
from lib.plan.types import STATIC_SHAPES, Plan

LENGTHS, COMPILED_LENGTHS = 32, 4  # to which rows of tokens are cut; each is a program to compile
_SAMPLES = 1 << 18  # that are looked at


def dealt_firsts(plan: Plan, replica: int) -> list[int]:
    """Return the number of the first sample of each micro-batch of a replica, among those of a step.

    The n-th micro-batches of all replicas follow each other, so that each replica has samples of all lengths.
    """
    (_, large), (_, small) = (plan.micro_batches_of(each) for each in (0, plan.layout.replicas - 1))
    larger = plan.shares.count(plan.shares[0])  # replicas, which are the first
    before, after = min(replica, larger), max(replica - larger, 0)
    each = [larger * a + (plan.layout.replicas - larger) * b for a, b in zip(large, small, strict=True)]
    starts = itertools.accumulate(each[:-1], initial=0)
    return [start + before * a + after * b for start, a, b in zip(starts, large, small, strict=True)]


def lengths_of(plan: Plan) -> int:
    """Return to how many lengths rows of tokens are cut, for data that ask for it; 0: they are not cut."""
    if plan.strategy == "pipeline":  # whose stages expect one shape in a step
        return 0
    return COMPILED_LENGTHS if plan.compile or plan.device in STATIC_SHAPES else LENGTHS


def format_padding(dataset: Dataset, plan: Plan, *, seed: int) -> str:
    """Format the share of padding in the training part, and what bucketing by length leaves, if that is less.

    The latter is that of the micro-batches of the first epoch, and not of packed rows. "" for other data.
    """
    spec, choices = dataset.spec, lengths_of(plan)
    if not isinstance(spec, HasLengths):
        return ""
    lengths, size = spec.lengths(dataset.train), spec.input_shape[-1]
    whole = round(1 - lengths.mean() / size, 3)
    before = f"Padding: {whole:.1%} of the tokens in rows of {size:,}"
    if not choices or len(spec.input_shape) > 1:
        return before
    steps = max(1, min(len(lengths), _SAMPLES) // plan.effective_batch)
    _, indices = sample_stream(start=0, count=steps * plan.effective_batch, seed=seed, size=len(lengths))
    sorted_SN = by_length(indices.reshape(steps, -1), lengths)
    cut_SN = cut_lengths(lengths[sorted_SN], size=size, choices=choices)
    tokens = 0
    for replica in range(plan.layout.replicas):
        _, sizes = plan.micro_batches_of(replica)
        for first, count in zip(dealt_firsts(plan, replica), sizes, strict=True):
            tokens += count and count * int(cut_SN[:, first].sum())
    share = round(1 - lengths[sorted_SN].sum() / tokens, 3)
    if share >= whole and not spec.bucketed:
        return before
    cut = f"{share:.1%} of rows cut by length, in micro-batches of {plan.micro_batch}"
    return f"{before}; " + (cut if spec.bucketed else f"CONFIG_CHAT_BUCKETING=y would leave {cut}")

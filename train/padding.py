"""Padding of rows of tokens: its share of what training computes, with rows as they are and cut by length."""

from __future__ import annotations

from lib.data.sampler import HasLengths, by_length, cut_lengths, sample_stream
from lib.data.types import Dataset
from lib.plan.types import Plan
from train.loop import firsts_of, lengths_of

_SAMPLES = 1 << 18  # that are looked at


def format_padding(dataset: Dataset, plan: Plan, *, seed: int) -> str:
    """Format the share of padding in the training part, without and with bucketing by length.

    The latter is that of the micro-batches of the first epoch, and not of packed rows. "" for other data.
    """
    spec, choices = dataset.spec, lengths_of(plan)
    if not isinstance(spec, HasLengths):
        return ""
    lengths, size = spec.lengths(dataset.train), spec.input_shape[-1]
    before = f"Padding: {1 - lengths.mean() / size:.1%} of the tokens in rows of {size:,}"
    if not choices or len(spec.input_shape) > 1:
        return before
    steps = max(1, min(len(lengths), _SAMPLES) // plan.effective_batch)
    _, indices = sample_stream(start=0, count=steps * plan.effective_batch, seed=seed, size=len(lengths))
    sorted_SN = by_length(indices.reshape(steps, -1), lengths)
    cut_SN = cut_lengths(lengths[sorted_SN], size=size, choices=choices)
    tokens = 0
    for replica in range(plan.layout.replicas):
        _, sizes = plan.micro_batches_of(replica)
        for first, count in zip(firsts_of(plan, replica, dealt=True), sizes, strict=True):
            tokens += count and count * int(cut_SN[:, first].sum())
    share = f"{1 - lengths[sorted_SN].sum() / tokens:.1%}"
    cut = f"{share} of rows cut by length, in micro-batches of {plan.micro_batch}"
    return f"{before}; " + (cut if spec.bucketed else f"CONFIG_CHAT_BUCKETING=y would leave {cut}")

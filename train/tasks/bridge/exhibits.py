"""Exhibits of a bridge: exact match with its prefix, and with each control in place of it."""

from __future__ import annotations

from lib.reports.exhibits import Exhibit, Table
from train.job import TrainedModel, evaluate
from train.tasks.bridge.task import KINDS, NAMES

MEANINGS = {
    "latent": "the learned prefix",
    "zero_prefix": "control: a prefix of zeros",
    "shuffled_prefix": "control: the prefix of another sample",
    "text_budget": "the last tokens of the text, as many as the prefix has",
    "text": "the whole text",
}


def exhibits(trained: TrainedModel) -> list[Exhibit]:
    """Return the exact-match rates of both models, by what they read before the question."""
    result = evaluate(trained.job)
    rows = tuple((MEANINGS[kind], *(f"{result[f'{kind}_{name}']:.4f}" for name in NAMES)) for kind in KINDS)
    head = ("read before the question", *(f"exact match, model {name}" for name in NAMES))
    return [Table(title="Prefix and controls", head=head, rows=rows)]

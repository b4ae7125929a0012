"""Tags of words: the loss counts words, and entities are found as by a reader of one word after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.data.types import TokenTagSpec
from lib.devices.base import Backend
from lib.nn import IGNORED
from tests.support.labels import TAGS
from train.tasks.base import Totals
from train.tasks.tag.task import Options, Tag, fault, figures, is_bio, naive_loss

SPEC = TokenTagSpec(name="t", vocab_size=9, block_size=12, tags=TAGS, pad=8)
RANDOM = torch.Generator().manual_seed(0)
ROWS = 400


def spans(tags: list[str]) -> set[tuple[int, int, str]]:
    """First and last word, and kind, of each entity."""
    found, start, kind = set(), 0, ""
    for place, tag in enumerate([*tags, "O"]):
        starts = tag.startswith("B-") or (tag.startswith("I-") and tag[2:] != kind)
        if kind and (starts or tag == "O"):
            found.add((start, place - 1, kind))
            kind = ""
        if starts:
            start, kind = place, tag[2:]
    return found


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    """Logits and targets; where both are likely to have entities in common."""
    targets = torch.randint(0, len(TAGS), (rows, 12), generator=RANDOM)
    other = torch.randint(0, len(TAGS), (rows, 12), generator=RANDOM)
    predicted = torch.where(torch.rand(rows, 12, generator=RANDOM) < 0.7, targets, other)
    targets = targets.masked_fill(torch.rand(rows, 12, generator=RANDOM) < 0.3, IGNORED)
    logits = torch.nn.functional.one_hot(predicted, len(TAGS)).double() * 3
    return logits, targets


def report_of(
    logits: Tensor, targets: Tensor, *cuts: slice, weights: Tensor | None = None
) -> dict[str, float]:
    task, totals = Tag(SPEC), Totals()
    for cut in cuts:
        own = None if weights is None else weights[cut]
        totals.add(task.evaluation(lambda inputs: inputs, Batch(logits[cut], targets[cut], own)))
    return task.report(totals.means(Backend("cpu")))


def test_entities_are_those_of_a_reader() -> None:
    logits, targets = batch_of(ROWS)
    found = report_of(logits, targets, slice(0, ROWS))
    counts, right_words, words = [0, 0, 0], 0, 0
    for row, predicted in zip(targets.tolist(), logits.argmax(dim=2).tolist(), strict=True):
        pairs = [(TAGS[tag], TAGS[guess]) for tag, guess in zip(row, predicted, strict=True) if tag >= 0]
        actual, guessed = (spans([pair[at] for pair in pairs]) for at in (0, 1))
        counts = [a + b for a, b in zip(counts, map(len, (actual & guessed, guessed, actual)), strict=True)]
        right_words += sum(tag == guess for tag, guess in pairs)
        words += len(pairs)
    assert counts[0] > 100
    assert found["entity_f1"] == pytest.approx(2 * counts[0] / (counts[1] + counts[2]), rel=1e-12)
    assert found["accuracy"] == pytest.approx(right_words / words, rel=1e-12) and found["words"] == words
    assert [*found][1:] == [*figures(Options(), SPEC).always]


def test_neither_the_split_nor_padding_changes_a_figure() -> None:
    logits, targets = batch_of(12)
    whole = report_of(logits, targets, slice(0, 12))
    assert report_of(logits, targets, slice(0, 5), slice(5, 12)) == pytest.approx(whole, rel=1e-12)
    weights = (torch.arange(12) < 7).double()
    padded = report_of(logits, targets, slice(0, 12), weights=weights)
    assert padded == pytest.approx(report_of(logits, targets, slice(0, 7)), rel=1e-12)


def test_the_loss_is_the_mean_over_words() -> None:
    task, (logits, targets) = Tag(SPEC), batch_of(6)
    sums = task.training(lambda inputs: inputs, Batch(logits, targets))
    logs = logits.log_softmax(dim=2)
    total = sum(-logs[b, t, targets[b, t]] for b in range(6) for t in range(12) if targets[b, t] != IGNORED)
    assert float(sums.loss) == pytest.approx(float(total), rel=1e-12)
    assert int(sums.count) == int((targets != IGNORED).sum())
    uniform = task.training(lambda inputs: inputs, Batch(torch.zeros_like(logits), targets))
    assert float(uniform.loss) / int(uniform.count) == pytest.approx(naive_loss(SPEC))


def test_tags_that_tell_no_entities_have_accuracy_alone() -> None:
    assert is_bio(TAGS) and not is_bio(("NOUN", "VERB")) and not is_bio(("O",)) and not is_bio(("O", "S-PER"))
    spec = TokenTagSpec(name="t", vocab_size=9, block_size=12, tags=("NOUN", "VERB"), pad=8)
    assert figures(Options(), spec).always == ("loss", "accuracy")
    found = Tag(spec).report({"count": 4.0, "loss": 1.0, "accuracy": 0.5})
    assert Tag(spec).score(found) == 0.5
    none = dict.fromkeys(("entities_right", "entities_predicted", "entities_actual"), 0.0)
    assert math.isnan(Tag(SPEC).report({"count": 4.0, "loss": 1.0, "accuracy": 0.5, **none})["entity_f1"])


def test_what_is_no_logit_per_tag_is_told() -> None:
    assert fault(torch.zeros(2, 12, 5), SPEC, rows=2) == ""
    assert fault(torch.zeros(2, 5), SPEC, rows=2) == "not floating-point logits (2, 12, 5)"

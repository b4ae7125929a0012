"""The task lm: what is counted, what is reported, and that windows, cuts and padding change nothing."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.data.loader import Batch, EvalLoader, LoaderConfig, TrainLoader
from lib.data.types import TokenPart
from lib.nn import IGNORED, cross_entropy
from tests.support.tokens import BLOCK, VOCAB, cycle, oracle, small_lm_config, text_data, text_spec
from tests.support.training import (
    CPU,
    MemoryRecord,
    Wrapped,
    largest_difference,
    random_data,
    small_config,
    small_job,
    small_plan,
    trained,
)
from train.job import Progress, evaluate
from train.loop import train
from train.planning.memory_estimate import trace_memory
from train.record import format_evaluation
from train.tasks.base import Forward, Sums
from train.tasks.lm.task import LanguageModel, baseline

DELIVERY = LoaderConfig(
    device=torch.device("cpu"),
    dtype=torch.float32,
    channels_last=False,
    placement="resident",
    num_workers=1,
    prefetch=1,
)


def forward_of(seed: int = 0) -> Callable[..., Tensor]:
    """A random but fixed table of logits, one row for each token; with targets, the sum of their losses."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def forward(tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        if targets_BT is None:
            return table[tokens_BT]
        return F.cross_entropy(table[tokens_BT].flatten(0, 1), targets_BT.flatten(), reduction="sum")

    return forward


def noise(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.uint8)


def losses_of(forward: Forward, tokens: np.ndarray) -> list[float]:
    """Nats of each token but the first, one by one."""
    inputs, targets = torch.from_numpy(tokens[:-1].astype(np.int64)), torch.from_numpy(tokens[1:].astype(int))
    return F.cross_entropy(forward(inputs), targets, reduction="none").tolist()


KINDS = pytest.mark.parametrize(
    "kind",
    [{"chunked": False}, {"chunked": True}, {"chunked": True, "takes_targets": True}],
    ids=["logits", "chunked", "targets"],
)


@KINDS
def test_the_sum_is_over_tokens_and_the_count_needs_no_device(kind: dict[str, bool]) -> None:
    tokens = noise(2 * BLOCK + 1).astype(np.int64)
    rows = torch.from_numpy(np.lib.stride_tricks.sliding_window_view(tokens, BLOCK + 1)[::BLOCK].copy())
    task = LanguageModel(text_spec(), **kind)
    sums = task.training(forward_of(), Batch(rows[:, :-1], rows[:, 1:]))
    assert sums.count == 2 * BLOCK and isinstance(sums.count, int)
    assert sums.loss.item() == pytest.approx(sum(losses_of(forward_of(), tokens)))


@pytest.mark.slow
def test_the_loss_in_parts_takes_less_memory_and_the_prediction_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab = 4096  # so that logits are large beside the buffers of attention
    monkeypatch.setattr(cross_entropy, "GPU_ELEMENTS", vocab)
    config = small_lm_config(optimizer="sgd", model_options=small_lm_config().model_options | {"layers": 1})
    plan, data = small_plan(512, device="cuda", precision="bf16"), text_data(config)
    spec = dataclasses.replace(data.dataset.spec, vocab_size=vocab)  # type: ignore[arg-type]
    data = dataclasses.replace(data, dataset=dataclasses.replace(data.dataset, spec=spec))

    def peak(*, chunked: bool) -> int:
        changed = config.replace(chunked_cross_entropy=chunked)
        return trace_memory(changed, plan, data, hardware=CPU).trace.peak_bytes

    # In single precision, once as logits and once as their gradient.
    assert peak(chunked=False) - peak(chunked=True) > 512 * BLOCK * vocab * 4


@KINDS
def test_with_weights_what_is_ignored_does_not_count(kind: dict[str, bool]) -> None:
    inputs = torch.arange(12).view(3, 4)
    targets = (inputs + 1).clone()
    targets[1, 2:] = IGNORED
    task = LanguageModel(text_spec(), **kind)
    for losses in (task.training, task.evaluation):
        sums = losses(forward_of(), Batch(inputs, targets, torch.tensor([1.0, 1.0, 0.0])))
        assert isinstance(sums.count, Tensor) and sums.count.item() == 6
        expected = F.cross_entropy(
            forward_of()(inputs[:2]).flatten(0, 1), targets[:2].flatten(), reduction="sum"
        )
        assert sums.loss.item() == pytest.approx(expected.item())


@pytest.mark.slow
@pytest.mark.parametrize("length", [BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK + 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_predicts_every_token_but_the_first_once(length: int, batch_size: int) -> None:
    config, tokens = small_lm_config(), noise(length)
    job = small_job(config, small_plan(batch_size), text_data(config, test=tokens))
    job.forward = forward_of()
    result = evaluate(job)
    nats = sum(losses_of(forward_of(), tokens))
    assert result["bytes"] == length - 1
    assert result["loss"] == pytest.approx(nats / (length - 1), rel=1e-12)
    assert result["perplexity"] == pytest.approx(math.exp(nats / (length - 1)), rel=1e-12)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / (length - 1), rel=1e-12)


def test_bits_are_of_the_bytes_and_units_are_named() -> None:
    spec = text_spec(tokens=50)
    task = LanguageModel(dataclasses.replace(spec, unit="token", validation_bytes=200), chunked=True)
    result = task.report({"count": 50.0, "loss": 2.0})
    assert result["bits_per_byte"] == pytest.approx(50 * 2.0 / math.log(2) / 200)
    assert format_evaluation(result) == (
        "loss 2.0000 nats per token, perplexity 7.3891 per token, bits per byte 0.7213 over 50 tokens"
    )
    unknown = LanguageModel(dataclasses.replace(spec, validation_bytes=None), chunked=True).report(
        {"count": 50.0, "loss": 2.0}
    )
    assert list(unknown) == ["bytes", "loss", "perplexity"]
    assert task.report({"count": 1.0, "loss": 1e6})["perplexity"] == math.inf
    assert task.score({"loss": 1.0}) > task.score({"loss": 2.0})


@pytest.mark.slow
def test_the_best_checkpoint_has_the_smallest_loss() -> None:
    config = small_lm_config(max_steps=4, learning_rate=1.0, eval_interval_steps=1)
    record = MemoryRecord()
    job = small_job(config, small_plan(2), text_data(config), record=record)
    progress = Progress()
    train(job, progress)
    rows = record.of_kind("eval")
    best = min(rows, key=lambda row: row["loss"])
    assert progress.best == -best["loss"]
    assert [step for step, kept in record.saved if kept][-1] == best["step"]


def test_floors_are_told_of_a_text_and_of_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    text = text_data(small_lm_config()).dataset
    line = baseline(text, cache_dir=tmp_path, log=said.append)
    assert line is not None and re.fullmatch(
        r"N-gram baseline: \d\.\d\d( / \d\.\d\d){3} bits per byte by counting 1- to 4-grams of bytes", line
    )
    assert baseline(text, cache_dir=tmp_path, log=said.append) == line and len(said) == 1
    images = random_data(small_config(), shape=(1, 28, 28), train_size=4).dataset
    assert baseline(images, cache_dir=tmp_path, log=said.append) is None


class Ragged(Wrapped):
    """Batches with weights, in which every third sample of the stream misses the end of its targets."""

    seen = 0

    def training(self, forward: Forward, batch: Batch) -> Sums:
        targets, rows = batch.targets.clone(), len(batch.targets)
        for row in range(rows):
            if (self.seen + row) % 3 == 0:
                targets[row, 3:] = IGNORED
        self.seen += rows
        return self.task.training(forward, Batch(batch.inputs, targets, torch.ones(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [Wrapped, Ragged])
def test_the_cut_into_micro_batches_changes_nothing(wrap: type[Wrapped]) -> None:
    def state(*micro_batches: int) -> dict[str, Tensor]:
        config = small_lm_config()
        data = text_data(config, train=noise(40 * BLOCK))
        return trained(small_job(config, small_plan(*micro_batches), data, task=wrap))

    whole = state(6)
    assert largest_difference(whole, state(1, 1, 1, 1, 1, 1)) <= 1e-12
    assert largest_difference(whole, state(4, 2)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [Wrapped, Ragged])
def test_gradients_are_of_the_mean_over_counted_tokens(wrap: type[Wrapped]) -> None:
    config = small_lm_config(max_steps=1, momentum=0.0, nesterov=False, weight_decay=0.0)
    data = text_data(config, train=noise(40 * BLOCK))
    job = small_job(config, small_plan(4, 2), data, task=wrap)
    before = {name: p.detach().clone() for name, p in job.model.named_parameters()}

    [batch] = job.train_loader.micro_batches(step=0, target=6, sizes=[6])
    targets = batch.targets.clone()
    if wrap is Ragged:
        targets[[0, 3], 3:] = IGNORED
    logits = job.model(batch.inputs)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    gradients = {name: p.grad.clone() for name, p in job.model.named_parameters()}  # type: ignore[union-attr]
    job.model.zero_grad()

    after = trained(job)
    for name, gradient in gradients.items():
        torch.testing.assert_close(before[name] - 0.05 * gradient, after[name], rtol=1e-10, atol=1e-12)


# From the data to the loss: an oracle of what follows loses nothing where targets are aligned.


def lost_by_the_oracle(
    placement: Literal["resident", "stream"], change: Callable[[Batch], Batch] = lambda batch: batch
) -> list[float]:
    """Mean loss in training and in evaluation, with every batch changed."""
    tokens, spec, task = cycle(20 * BLOCK + 5), text_spec(), LanguageModel(text_spec(), chunked=True)
    loader_config = dataclasses.replace(DELIVERY, placement=placement)
    train_part = TokenPart(tokens, block_size=BLOCK, shifted=True)
    with TrainLoader(train_part, spec, loader_config, seed=3, augment="none", pad=0) as loader:
        batches = [*loader.micro_batches(step=0, target=BLOCK, sizes=[BLOCK])]
        sums = [task.training(oracle, change(batch)) for batch in batches]
    with EvalLoader(TokenPart(tokens, block_size=BLOCK), spec, loader_config) as evaluation:
        whole = [*evaluation.batches(rank=0, world=1, batch_size=BLOCK)]
        sums += [task.evaluation(oracle, change(batch)) for batch in whole]
    return [float(part.loss / part.count) for part in sums]


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_targets_follow_their_inputs(placement: Literal["resident", "stream"]) -> None:
    assert max(lost_by_the_oracle(placement)) < 1e-9


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda b: Batch(b.inputs, b.targets.t().contiguous(), b.weights), id="transposed"),
        pytest.param(lambda b: Batch(b.inputs, b.inputs, b.weights), id="the input itself"),
        pytest.param(lambda b: Batch(b.inputs, b.targets.roll(-1, 1), b.weights), id="one too far"),
    ],
)
def test_targets_that_do_not_follow_are_caught(
    placement: Literal["resident", "stream"], change: Callable[[Batch], Batch]
) -> None:
    assert min(lost_by_the_oracle(placement, change)) > 5

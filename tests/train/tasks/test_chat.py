"""The task chat: every token of an answer weighs the same, and exact match is what greedy decoding writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.data.datasets.chat.data import as_rows
from lib.data.loader import Batch
from lib.data.tokenizers import ByteTokenizer
from lib.devices.base import Backend
from lib.nn import IGNORED
from lib.nn.model_code import build_model
from tests.support.chats import PAD, chat_spec, random_chats, random_samples
from tests.support.fake_backend import FakeBackend
from tests.support.tokens import BLOCK, VOCAB, small_lm_config
from tests.support.training import MemoryRecord, Wrapped, largest_difference, small_job, small_plan, trained
from train.generate import Sampling, continue_tokens
from train.job import Progress, evaluate
from train.loop import accumulate_gradients
from train.padding import dealt_firsts, format_padding
from train.tasks.base import Forward, Sums, Totals, make_task
from train.tasks.chat import exhibits as chat_exhibits
from train.tasks.chat import task as chat

EXACT = 1e-12
CONFIG = small_lm_config(task="chat", max_steps=2, learning_rate=0.05)
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])


class MeanOfMeans(Wrapped):
    """The mean over micro-batches of the mean over their tokens: what is wrong elsewhere."""

    def training(self, forward: Forward, batch: Batch) -> Sums:
        sums = super().training(forward, batch)
        return Sums(sums.loss / sums.count, torch.ones((), dtype=torch.int64), {})


@pytest.mark.slow
@PACKED
def test_the_micro_batch_changes_no_gradient(packed: bool) -> None:
    data = random_chats(CONFIG, train=16, test=5, packed=packed)
    counts = (data.dataset.train.take()[1] != IGNORED).sum(axis=1)
    assert counts.max() >= 6 * counts.min()

    def weights(size: int, **wrapped: Any) -> dict[str, Tensor]:
        return trained(small_job(CONFIG, small_plan(*[size] * (8 // size)), data, **wrapped))

    expected = weights(8)
    for size in (1, 2, 4):
        assert largest_difference(expected, weights(size)) <= EXACT
    assert largest_difference(weights(8, task=MeanOfMeans), weights(1, task=MeanOfMeans)) > 1e-4


def gradients(bucketed: bool, *micro_batches: int, world: int = 1, **wrapped: Any) -> dict[str, Tensor]:
    """Mean over the tokens of the second step, 8 samples, by all ranks; and the tokens that were computed."""
    config = CONFIG.replace(model_options=dict(CONFIG.model_options) | {"dropout": 0.0 if wrapped else 0.1})
    data = random_chats(config, train=24, test=5, bucketed=bucketed)
    plan = small_plan(*micro_batches, world=world, effective_batch=8)
    totals, count = dict[str, Tensor](), 0
    for rank in range(world):
        job = small_job(config, plan, data, backend=FakeBackend(rank=rank, world=world), **wrapped)
        widths = list[int]()
        job.model.register_forward_pre_hook(lambda _, inputs, of=widths: of.append(inputs[0].shape[1]))
        parts = list(accumulate_gradients(job, Progress(step=1)))
        count += sum(int(part.count) for part in parts)
        assert bucketed or widths == [BLOCK] * len(parts)
        for name, weight in job.model.named_parameters():
            assert weight.grad is not None
            totals[name] = totals.get(name, 0) + weight.grad
        totals["widths"] = torch.tensor([*totals.get("widths", torch.empty(0)).tolist(), *widths])
    scale = 8 * BLOCK / world / count
    return {name: each if name == "widths" else each * scale for name, each in totals.items()}


SPLITS = [((8,), 1), ((4, 4), 1), ((2,) * 4, 1), ((1,) * 8, 1), ((3, 3, 2), 1), ((2, 2), 2), ((2, 1), 3)]


@pytest.mark.slow
def test_bucketing_by_length_changes_the_tokens_that_are_computed_and_no_gradient() -> None:
    plain, task = gradients(False, 8, task=Wrapped), {"task": Wrapped}
    dropped = gradients(True, 8)  # masks are those of places in the step, sorted by length
    for sizes, world in SPLITS:
        found = gradients(True, *sizes, world=world, **task)
        widths = found.pop("widths").tolist()
        expected = {name: each for name, each in plain.items() if name != "widths"}
        assert largest_difference(expected, found) <= EXACT
        found = gradients(True, *sizes, world=world)
        assert found.pop("widths").tolist() == widths
        expected = {name: each for name, each in dropped.items() if name != "widths"}
        assert largest_difference(expected, found) <= EXACT
        if world == 1:
            assert widths == sorted(widths, reverse=True) and widths[-1] <= widths[0] < BLOCK + 1
    assert 2 * widths[-1] < BLOCK, "rows of short conversations are cut"
    means = [gradients(True, *sizes, task=MeanOfMeans) for sizes in ((8,), (1,) * 8)]
    assert largest_difference(*means, only="weight") > 1e-4


@pytest.mark.parametrize("target", [8, 12, 31])
def test_micro_batches_of_like_lengths_are_dealt_to_the_replicas(target: int) -> None:
    for world, size in itertools.product((1, 2, 3, 5), (1, 2, 3, 7)):
        largest = -(-target // world)
        sizes = [size] * (largest // size) + [largest % size] * bool(largest % size)
        plan = small_plan(*sizes, world=world, effective_batch=target)
        firsts = [dealt_firsts(plan, replica) for replica in range(world)]
        counts = [plan.micro_batches_of(replica)[1] for replica in range(world)]
        dealt = [
            (first, count)
            for of_all in zip(zip(*firsts, strict=True), zip(*counts, strict=True), strict=True)
            for first, count in zip(*of_all, strict=True)
        ]
        starts = [*itertools.accumulate((count for _, count in dealt), initial=0)]
        assert [first for first, _ in dealt] == starts[:-1] and starts[-1] == target


@pytest.mark.slow
def test_the_padding_that_is_told_is_that_of_training() -> None:
    plan = small_plan(2, 1, world=3, effective_batch=8)
    told = {}
    for bucketed in (False, True):
        data = random_chats(CONFIG, train=24, test=5, bucketed=bucketed)
        told[bucketed], tokens = format_padding(data.dataset, plan, seed=CONFIG.seed), 0
        for rank, step in itertools.product(range(3), range(3)):
            job = small_job(CONFIG, plan, data, backend=FakeBackend(rank=rank, world=3))
            rows, sizes = plan.micro_batches_of(rank)
            starts = itertools.accumulate(sizes[:-1], initial=sum(plan.shares[:rank]))
            firsts = dealt_firsts(plan, rank) if bucketed else [*starts]
            options: dict[str, Any] = {"target": 8, "firsts": firsts, "sizes": sizes, "rows": rows}
            batches = job.train_loader.micro_batches(step=step, **options)
            tokens += sum(batch.inputs.numel() for batch in batches)
        counts = chat_spec().lengths(data.dataset.train).sum()
        assert f"{1 - counts / tokens:.1%} of " in told[bucketed]
    assert told[False].replace("CONFIG_CHAT_BUCKETING=y would leave ", "") == told[True]
    packed = random_chats(CONFIG, train=24, test=5, packed=True).dataset
    assert format_padding(packed, plan, seed=0).endswith(f" of the tokens in rows of {BLOCK}")
    compiled = dataclasses.replace(plan, compile=True)
    assert format_padding(data.dataset, compiled, seed=CONFIG.seed) != told[True]


def test_bucketing_is_offered_only_where_it_leaves_less_padding() -> None:
    data = random_chats(CONFIG, train=24, test=5).dataset
    plan = dataclasses.replace(small_plan(4, 4, effective_batch=8), compile=True)
    assert "CONFIG_CHAT_BUCKETING=y would leave " in format_padding(data, plan, seed=0)
    for targets in data.train.targets:  # in the last quarter of each row, to the end of which it is cut
        targets[-1], targets[-2] = IGNORED, 1
    assert format_padding(data, plan, seed=0) == f"Padding: {1 / BLOCK:.1%} of the tokens in rows of {BLOCK}"


def test_the_rows_of_a_step_are_cut_alike_whenever_it_is_read() -> None:
    data = random_chats(CONFIG, train=24, test=5, bucketed=True)
    job = small_job(CONFIG, small_plan(3, 3, 2), data)

    def widths(step: int) -> list[int]:
        batches = job.train_loader.micro_batches(step=step, target=8, sizes=(3, 3, 2))
        return [batch.inputs.shape[1] for batch in batches]

    found = [widths(step) for step in range(4)]
    assert len({tuple(each) for each in found}) > 1
    next(job.train_loader.micro_batches(step=2, target=8, sizes=(3, 3, 2)))  # and no further
    assert [widths(step) for step in (2, 0, 1, 3)] == [found[step] for step in (2, 0, 1, 3)]


@pytest.mark.slow
def test_an_evaluation_by_length_has_the_same_figures_and_fewer_tokens() -> None:
    found, tokens = list[dict[str, float]](), list[int]()
    for bucketed, size in ((False, 4), (True, 4), (True, 1)):
        data = random_chats(CONFIG, train=8, test=13, bucketed=bucketed)
        job, seen = small_job(CONFIG, small_plan(size, size), data), list[int]()
        job.model.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].numel()))
        found.append(evaluate(job))
        tokens.append(sum(seen))
    assert found[1] == pytest.approx(found[0], rel=EXACT) and found[2] == pytest.approx(found[0], rel=EXACT)
    assert tokens[0] > tokens[1] > tokens[2]


@pytest.mark.parametrize("chunked", [False, True])
def test_the_loss_is_the_mean_over_the_tokens_that_count(chunked: bool) -> None:
    config = CONFIG.replace(chunked_cross_entropy=chunked)
    data = random_chats(config, train=8, test=5)
    job = small_job(config, small_plan(2, 2), data)
    inputs, targets = map(torch.from_numpy, data.dataset.test.take())
    logits = job.model.eval()(inputs)
    expected = F.cross_entropy(logits.detach().flatten(0, 1), targets.long().flatten(), ignore_index=IGNORED)
    found = evaluate(job)
    assert found["loss"] == pytest.approx(float(expected), rel=EXACT)
    assert found["bytes"] == int((targets != IGNORED).sum())
    assert found["perplexity"] == pytest.approx(float(expected.exp()), rel=EXACT)


def table(seed: int = 0) -> Callable[[Tensor], Tensor]:
    """Logits that depend on the last token alone, of packed rows, too."""
    rows = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda inputs: rows[inputs[:, 0] if inputs.dim() == 3 else inputs]


@PACKED
def test_exact_match_is_what_greedy_decoding_writes(packed: bool) -> None:
    """Of conversations with one answer, half of which follow the model for as long as luck has it."""
    forward, random = table(), np.random.default_rng(0)
    likeliest = forward(torch.arange(VOCAB)[None])[0].argmax(dim=1).tolist()
    samples, exact = [], 0
    for sample in random_samples(200):
        length = int(random.integers(1, 4))
        ids = [*sample.ids[: int(random.integers(1, 3))]]
        start = len(ids)
        for _ in range(length):
            ids.append(likeliest[ids[-1]] if random.random() < 0.8 else int(random.integers(0, PAD)))
        samples.append(sample._replace(ids=ids, counts=[place >= start for place in range(len(ids))]))
        sampling = Sampling(temperature=0.0, top_k=0, tokens=length, seed=0)
        device = torch.device("cpu")
        given = continue_tokens(forward, ids[:start], sampling=sampling, block_size=BLOCK, device=device)
        exact += given == ids[start:]
    assert 60 < exact < 190
    spec, totals = chat_spec(packed=packed), Totals()
    inputs, targets = map(torch.from_numpy, as_rows(samples, spec).take())
    assert (len(inputs) < len(samples)) == packed
    task = make_task(CONFIG.replace(chunked_cross_entropy=False), spec)
    weights = torch.ones(len(inputs), dtype=torch.float64)
    for part in torch.arange(len(inputs)).split(7):
        totals.add(task.evaluation(forward, Batch(inputs[part], targets[part].long(), weights[part])))
    found = task.report(totals.means(Backend("cpu")))
    assert found["exact_match"] == pytest.approx(exact / len(samples), rel=EXACT)
    none = task.evaluation(forward, Batch(inputs, targets.long(), 0 * weights))
    assert [int(each) for each in (none.count, *none.metrics.values())] == [0, 0, 0]


def test_logits_of_all_rows_are_never_there_where_the_model_takes_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, rows = random_chats(CONFIG, train=8, test=6), list[int]()
    job = small_job(CONFIG, small_plan(6, 2), data)
    whole = evaluate(job)
    monkeypatch.setattr(chat, "_LOGITS", 2 * BLOCK * VOCAB)
    job.model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    assert evaluate(job) == pytest.approx(whole, rel=EXACT) and max(rows) == 2
    rows.clear()
    evaluate(
        dataclasses.replace(
            job, task=make_task(CONFIG.replace(chunked_cross_entropy=False), data.dataset.spec)
        )
    )
    assert max(rows) == 6


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_packed_conversations_do_not_see_each_other(recompute: str) -> None:
    config = CONFIG.replace(grad_checkpoint=recompute)
    job = small_job(config, small_plan(1), random_chats(config, train=4, test=2, packed=True))
    samples = [sample for sample in random_samples(40) if len(sample.ids) <= 3]
    inputs = torch.from_numpy(as_rows(samples, chat_spec(packed=True)).inputs)
    packed, leaking, alone = job.model(inputs), job.model(inputs[:, 0]), 0
    for row, (tokens, documents) in enumerate(inputs):
        for document in range(int(documents.max()) + 1):
            places = documents == document
            expected = job.model(tokens[places][None])[0]
            torch.testing.assert_close(packed[row, places], expected, rtol=0, atol=EXACT)
            alone += torch.allclose(leaking[row, places], expected, rtol=0, atol=1e-4)
    assert alone <= len(inputs) < len(samples) / 2, "only what is first in its row sees nothing before it"


def test_a_report_shows_answers_up_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_chats(CONFIG, train=4, test=4)

    class Names:
        vocab_size = PAD

        def decode(self, tokens: list[int]) -> str:
            return "".join(f"<{token}>" for token in tokens)

    dataset = dataclasses.replace(data.dataset, tokenizer=Names())  # type: ignore[arg-type]
    job = small_job(CONFIG, small_plan(4), data, record=MemoryRecord())
    monkeypatch.setattr(
        chat_exhibits, "continuation", lambda _, prompt, sampling, **__: [prompt[-1], sampling.end]
    )
    (block,) = chat_exhibits.exhibits(job, dataset, iter([7]))
    text = str(block["text"])
    assert block["title"] == "Answers after step 7" and text.count("Prompt: ") == chat_exhibits.SHOWN
    inputs, targets = (each[0] for each in dataset.test.take())
    last = int(np.flatnonzero(targets != IGNORED)[-1])
    assert text.splitlines()[1].endswith(f"<{targets[last]}>")
    assert text.splitlines()[2] == f"Given: <{inputs[last]}><end>" or targets[last - 1] != IGNORED


def test_an_answer_is_exact_that_is_the_wanted_one_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that are wanted one is given, and of the same without an end none."""
    spec = dataclasses.replace(chat_spec(), block_size=40, end=255, vocab_size=256)
    dataset = dataclasses.replace(random_chats(CONFIG, train=8, test=8).dataset, spec=spec)
    dataset = dataclasses.replace(dataset, tokenizer=ByteTokenizer())
    asked = [{"prompt": "x", "completion": wanted} for wanted in ("yes", "no")] + [{"prompt": "x" * 5}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, asked)))
    told, rooms, ends = list[str](), list[int](), [255]

    def given(_: Any, __: list[int], ___: Any, sampling: Sampling) -> Any:
        rooms.append(sampling.tokens)
        return np.array([*b" yes", *ends])

    monkeypatch.setattr(chat_exhibits, "_given", given)
    options: dict[str, Any] = {"log": told.append, "progress": lambda *_: None}
    options["sampling"] = Sampling(temperature=0.0, top_k=0, tokens=21, seed=1)

    def exact() -> list[Any]:
        _, columns = chat_exhibits.answered(None, dataset, [str(tmp_path)], **options)  # type: ignore[arg-type]
        assert [*columns["answer"]] == ["yes"] * 3 and [*columns["wanted"]] == ["yes", "no", None]
        return [*columns["exact"]]

    assert exact() == [True, False, None] and told == ["exact match 0.5000 over 2 answers that are there"]
    assert rooms == [21, 21, 40 - len("user: xxxxx\nassistant:")]
    ends.clear()
    assert exact() == [False, False, None] and told[1].startswith("3 of 3 answers are cut at TOKENS=21")


def test_generation_stops_at_the_end() -> None:
    forward = table()
    sampling = Sampling(temperature=0.0, top_k=0, tokens=5, seed=0)
    options: dict[str, Any] = {"block_size": BLOCK, "device": torch.device("cpu")}
    whole = continue_tokens(forward, [1], sampling=sampling, **options)
    ended = dataclasses.replace(sampling, end=whole[1])
    assert len(whole) == 5
    assert continue_tokens(forward, [1], sampling=ended, **options) == whole[: whole.index(whole[1]) + 1]


def test_what_is_no_logit_per_token_is_told() -> None:
    spec = chat_spec(packed=True)
    assert chat.fault(torch.zeros(2, BLOCK, VOCAB), spec, rows=2) == ""
    assert (
        chat.fault(torch.zeros(2, VOCAB), spec, rows=2) == f"not floating-point logits (2, {BLOCK}, {VOCAB})"
    )
    model = build_model("gpt2", CONFIG.model_options, spec, seed=0)
    assert not hasattr(model, "pipeline_stages"), "stages send hidden states of unpacked rows of a text"

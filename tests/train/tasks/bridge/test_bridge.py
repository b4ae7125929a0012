"""Learning by what two frozen language models say of a prefix, and what it is compared with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.datasets.question_answering.data import ANCHOR
from lib.data.datasets.question_answering.spec import AnswerSpec, Side
from lib.data.loader import Batch
from lib.errors import ConfigError, PlanError
from lib.nn import IGNORED
from tests.models.latentwire.answers import answer_set, answers_data, small_bridge_config, some_questions
from tests.support.training import MemoryRecord, small_job, small_plan, trained
from train import loop, training_data
from train.job import evaluate
from train.signals import Stopped
from train.tasks.bridge import pretrain
from train.tasks.bridge.frozen import FrozenLM, FrozenSource, HuggingFaceLM, ToolkitLM, untrained
from train.tasks.bridge.task import Bridge

CPU_DEVICE = torch.device("cpu")
A, LINE = 7, 9  # the anchor and the end of an answer, in a vocabulary of ten
SIDE = Side(name="stub", vocab_size=10, width=10, anchor=(A,), answer_tokens=2, text_tokens=6)
SPEC = AnswerSpec(name="stub", source_bytes=2, sides=(SIDE, SIDE), synthetic=True)


class Repeats(FrozenLM):
    """Says the first thing that it reads, then the end of the line. A token is embedded as itself."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), torch.ones(1, 1), positions=None)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        return F.one_hot(tokens_BT, 10).float()

    def logits(self, embedded_BTC: Tensor) -> Tensor:
        after_anchor_BT = embedded_BTC[:, :, A].cumsum(dim=1) - embedded_BTC[:, :, A] > 0
        first_BTC = embedded_BTC[:, :1].expand_as(embedded_BTC)
        return torch.where(after_anchor_BT[:, :, None], F.one_hot(torch.tensor(LINE), 10).float(), first_BTC)


def stub_forward(bytes_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Each byte is a latent."""
    prefix_BMC = F.one_hot(bytes_BT, 10).float()
    return prefix_BMC, prefix_BMC


def stub_batch() -> Batch:
    """Source 3 4 is to be answered by 3, source 4 5 by 5, and the last row is not to be counted."""
    pad = IGNORED
    rows = [
        [3, LINE, 3, 4, A, 3, LINE, pad] * 2 + [4, 5],
        [5, LINE, 4, 5, A, 5, LINE, pad] * 2 + [3, 4],
        [5, LINE, 5, 5, A, 5, LINE, pad] * 2 + [5, 5],
    ]
    inputs = torch.tensor([[3, 4], [4, 5], [5, 5]])
    return Batch(inputs, torch.tensor(rows), torch.tensor([1.0, 1.0, 0.0]))


def test_what_is_told_is_what_the_models_say() -> None:
    bridge = Bridge(SPEC, ((Repeats(),), (Repeats(),)), first_token_weight=0.5)
    sums = bridge.evaluation(stub_forward, stub_batch())
    found = {name: float(value) for name, value in sums.metrics.items()}
    for name in ("a", "b"):
        assert found[f"latent_{name}"] == 1, "3 is the first thing of its source, 5 is not"
        assert found[f"zero_prefix_{name}"] == 0 and found[f"shuffled_prefix_{name}"] == 0
        assert found[f"text_{name}"] == 1
    assert float(sums.count) == 2
    report = bridge.report({"count": 2.0, "loss": 1.0} | {name: value / 2 for name, value in found.items()})
    assert report["latent_a"] == 0.5 and bridge.score(report | {"latent_b": 0.25}) == 0.25


def test_a_text_of_the_budget_is_the_end_of_the_source() -> None:
    """Of two tokens with a budget of one, the second: then it is the other question that is answered."""

    def one_latent(bytes_BT: Tensor) -> tuple[Tensor, Tensor]:
        prefix_BMC, _ = stub_forward(bytes_BT[:, :1])
        return prefix_BMC, prefix_BMC

    bridge = Bridge(SPEC, ((Repeats(),), (Repeats(),)), first_token_weight=0.5)
    batch = stub_batch()
    only_first = dataclasses.replace(batch, weights=torch.tensor([1.0, 0.0, 0.0]))
    only_second = dataclasses.replace(batch, weights=torch.tensor([0.0, 1.0, 0.0]))
    found = [bridge.evaluation(one_latent, each).metrics for each in (only_first, only_second)]
    assert [float(each["text_budget_a"]) for each in found] == [0, 1]
    assert [float(each["text_a"]) for each in found] == [1, 0]


def frozen_of(dtype: torch.dtype) -> tuple[AnswerSpec, tuple[ToolkitLM, ToolkitLM]]:
    spec = answer_set(4, 2).spec
    assert isinstance(spec, AnswerSpec)
    first, second = (FrozenSource(side, None).load(CPU_DEVICE, dtype) for side in spec.sides)
    assert isinstance(first, ToolkitLM) and isinstance(second, ToolkitLM)
    return spec, (first, second)


@pytest.mark.slow
def test_a_prefix_of_embedded_tokens_has_the_loss_of_the_text() -> None:
    """The oracle: what the language model itself makes of the source as tokens."""
    spec, frozen = frozen_of(torch.float64)
    data = answers_data(small_bridge_config(), train=4, test=2)
    targets = torch.from_numpy(data.dataset.train.take()[1]).long()
    answer_a, text_a, answer_b, text_b, _ = targets.split(spec.columns, dim=1)
    weight, expected, prefixes = 0.25, torch.zeros(4, dtype=torch.float64), []
    told = zip(frozen, spec.sides, (text_a, text_b), (answer_a, answer_b), strict=True)
    for lm, side, text_BT, answer_BL in told:
        rows = []
        for number in range(4):
            text = text_BT[number][text_BT[number] != IGNORED]
            answer = int((answer_BL[number] != IGNORED).sum())
            source = len(text) - len(side.anchor) - answer
            model = untrained(side).double()
            losses = F.cross_entropy(model(text[None, :-1])[0], text[1:], reduction="none")[-answer:]
            expected[number] += (losses.mean() + weight * losses[0]).detach() / 2
            rows.append(lm.embed(text[:source]) / lm.embedding_rms)
        prefixes.append(rows)
    for number in range(4):
        batch = Batch(torch.zeros(1, 16).long(), targets[number : number + 1])
        given = tuple(rows[number][None] for rows in prefixes)
        sums = Bridge(spec, ((frozen[0],), (frozen[1],)), first_token_weight=weight).training(
            lambda _, g=given: g, batch
        )
        assert float(sums.loss) == pytest.approx(float(expected[number]), rel=1e-12)


@pytest.mark.slow
def test_nothing_but_the_bridge_is_trained_and_its_loss_falls() -> None:
    record = MemoryRecord()
    config = small_bridge_config(
        optimizer="adamw", learning_rate=0.01, max_steps=12, log_interval_steps=1, adam_beta1=0.9,
        adam_beta2=0.99, adam_eps=1e-8, momentum=None,
    )  # fmt: skip
    job = small_job(config, small_plan(16), answers_data(config, train=16), record=record)
    assert isinstance(job.task, Bridge)
    weights = [weight for lm in job.task.frozen for weight in lm.weights()]
    before = [weight.clone() for weight in weights]
    trained(job)
    assert all(torch.equal(*pair) for pair in zip(before, weights, strict=True))
    assert not any(weight.requires_grad for weight in weights)
    losses = [row["loss"] for row in record.of_kind("train")]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_figures_do_not_depend_on_the_micro_batch() -> None:
    found = []
    for rows in (1, 4, 10):
        config = small_bridge_config()
        job = small_job(config, small_plan(rows), answers_data(config))
        found.append(evaluate(job))
    assert all(each == pytest.approx(found[0], rel=1e-12) for each in found)
    assert {"latent_a", "zero_prefix_a", "shuffled_prefix_b", "text_budget_a", "text_b"} <= found[0].keys()


@pytest.mark.slow
def test_a_prefix_that_does_not_fit_is_refused() -> None:
    config = small_bridge_config(model_options={"latents": 30, "width": 8, "layers": 1, "heads": 2})
    with pytest.raises(ConfigError, match=r"toolkit:bytes has 18 positions.*CONFIG_LATENTWIRE_LATENTS"):
        answers_data(config)


def learned(folder: Path, said: list[str], **changes: Any) -> tuple[FrozenSource, FrozenSource]:
    config = small_bridge_config(frozen_steps=2, **changes)
    return pretrain.frozen_sources(config, answer_set(64, 8), root=folder, learned=True, log=said.append)


@pytest.mark.slow
def test_models_are_trained_once_and_kept_by_what_they_follow_from(tmp_path: Path) -> None:
    said: list[str] = []
    first = learned(tmp_path, said)
    assert sum("to be frozen" in line for line in said) == 2
    told = len(said)
    # Another bridge with another seed has the same frozen models.
    assert learned(tmp_path, said, seed=5, learning_rate=0.5) == first and len(said) == told
    longer = small_bridge_config(frozen_steps=3)
    again = pretrain.frozen_sources(longer, answer_set(64, 8), root=tmp_path, learned=True, log=said.append)
    assert {source.path for source in again}.isdisjoint(source.path for source in first)
    weights = [source.load(CPU_DEVICE, torch.float32).weights() for source in (first[0], again[0])]
    assert any(not torch.equal(*pair) for pair in zip(*weights, strict=True))


@pytest.mark.slow
def test_what_the_plan_refuses_is_refused_before_models_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def refuse(_: Any, data: training_data.TrainingData | None) -> None:
        if data is not None:
            assert data.facts.branches is not None, "the plan needs what the frozen models take"
            raise PlanError("no GPU for a split")

    monkeypatch.setattr(training_data, "open_configured", lambda *_, **__: answer_set(64, 8))
    config = small_bridge_config(frozen_steps=2)
    with pytest.raises(PlanError, match="no GPU for a split"):
        training_data.open_to_train(config, root=tmp_path, log=said.append, refuse=refuse)
    assert not said and not list(tmp_path.iterdir())
    assert learned(tmp_path, said) and len(said) == 4
    training_data.open_to_train(config, root=tmp_path, log=said.append, refuse=refuse)
    assert len(said) == 4, "trained before, so that the plan itself refuses"


@pytest.mark.slow
def test_texts_to_learn_from_are_whole_and_ask_for_the_answer_alone() -> None:
    for number, side in enumerate(("bytes", "pairs")):
        dataset = answer_set(6, 2)
        inputs, targets = pretrain.texts_of(dataset, number).train.take()
        for row, question in enumerate(some_questions(6)):
            requested = targets[row] != IGNORED
            last = int(requested.nonzero()[0][-1])
            assert (
                targets[row][requested][:-1] == inputs[row][1:][requested[:-1]][: requested.sum() - 1]
            ).all()
            assert targets[row][last] == ord("\n") and requested[last - requested.sum() + 1 : last + 1].all()
            if side == "bytes":
                assert bytes(targets[row][requested].astype("u1")).decode() == question.answer
                told = bytes(inputs[row].astype("u1")).decode()
                assert told == question.source + ANCHOR + question.answer


@pytest.mark.slow
def test_a_stop_in_between_says_that_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise Stopped(15, 1)

    monkeypatch.setattr(loop, "train", stopped)
    with pytest.raises(KeyboardInterrupt, match="stopped while toolkit:bytes was trained"):
        learned(tmp_path, [])
    assert not list(tmp_path.glob("frozen-*"))


def test_a_model_of_hugging_face_says_the_same_of_embedded_tokens(tmp_path: Path) -> None:
    package = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    sizes = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6}
    package.GPT2LMHeadModel(package.GPT2Config(**sizes)).save_pretrained(tmp_path)
    side = dataclasses.replace(SIDE, name=f"hf:{tmp_path}", vocab_size=11, width=8)
    lm = FrozenSource(side, tmp_path).load(CPU_DEVICE, torch.float32)
    assert isinstance(lm, HuggingFaceLM) and lm.positions == 6
    tokens = torch.tensor([[1, 2, 3]])
    whole = package.GPT2LMHeadModel.from_pretrained(tmp_path).eval()(tokens).logits
    torch.testing.assert_close(lm.logits(lm.embed(tokens)), whole)

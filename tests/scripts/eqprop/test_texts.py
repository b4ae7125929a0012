"""The experiments on equilibrium propagation, on sentences of different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.eqprop import __main__ as command
from scripts.eqprop import adaptive, gradients, training
from scripts.eqprop.setting import Setting, batch_of, model_of
from tests.scripts.eqprop.test_eqprop import resolved
from tests.support.tokens import sentences_data
from train.training_data import TrainingData

SENTENCES = {"LOOPED_PATCH": "", "LOOPED_INPUT_TEXT": "y", "DATASET_SST2": "y", "BLOCK_SIZE": "6"}


class Sentences(Setting):
    """Random ones."""

    def data(self, config: Any) -> TrainingData:
        return sentences_data(config, size=64)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Sentences(resolved=resolved(**SENTENCES), quick=True, out=tmp_path, log=lambda _: None)


@pytest.mark.slow
def test_gradients_of_sentences_are_right(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BETAS", (0.1, 0.03, 0.01))
    monkeypatch.setattr(gradients, "ROWS", 3)
    monkeypatch.setattr(gradients, "LOSS_BETA", 0.03)
    command.check("1", setting.config())
    report = gradients.run(setting)
    assert all(passed for passed, _ in report.passed), report.lines


@pytest.mark.slow
def test_sentences_train(setting: Setting) -> None:
    trained = training.train_once(setting, seed=1, symbols={}, way="ep", watched=True)
    assert trained.last["lowest_cosine"] > 0.999 and 0 <= trained.accuracy <= 1


@pytest.mark.slow
def test_what_fills_up_a_sentence_does_not_count(setting: Setting) -> None:
    config = setting.config()
    data = setting.data(config)
    model = model_of(config, data, seed=1)
    with torch.no_grad():
        model.embedding.token.weight[: model.pad] *= 100  # type: ignore[union-attr, operator, index, misc]
    inputs, targets = batch_of(data, rows=8)
    short = inputs[:, 1:].eq(model.pad).all(dim=1)  # one token, and one that sees only itself
    assert 0 < short.sum() < len(inputs)
    whole, _, _ = adaptive.per_sample(model, inputs, targets)
    alone = [adaptive.per_sample(model, row[None, row != model.pad], target[None])[0].item()
             for row, target in zip(inputs, targets, strict=True)]  # fmt: skip
    assert whole.tolist() == alone
    assert int(torch.stack([one.iterations.amax(dim=1) for one in model.solutions()]).amax()) > 0

"""The gate before a sweep: sound models pass, a leak from the future and misaligned targets do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lib.data.types import TextSpec
from lib.errors import ToolkitError
from lib.nn.model_code import build_model
from lib.scaling.experiments import ScalingExperiments
from lib.scaling.gate import (
    LEARNED_NATS,
    VOCAB,
    cycle_spec,
    find_faults,
    gradient_leaks,
    leaks,
    loss_after_training,
)
from lib.scaling.results import BLOCK, ScalingConfig
from tests.support.tokens import small_lm_config

pytestmark = pytest.mark.slow

Build = Callable[[TextSpec], nn.Module]
SPEC = cycle_spec(BLOCK)


def bk(form: str) -> Build:
    options = {"form": form, "layers": 2, "width": 16, "ffn_ratio": 2, "dropout": 0.0, "allow_leak": True}
    return lambda spec: build_model("resnet_bk", options, spec, seed=0)


def gpt2(spec: TextSpec) -> nn.Module:
    return build_model("gpt2", small_lm_config().model_options, spec, seed=0)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(bk("value"), id="value"),
        pytest.param(bk("features"), id="features", marks=pytest.mark.long),
        pytest.param(gpt2, id="gpt2"),
    ],
)
def test_sound_models_pass(build: Build) -> None:
    assert find_faults(build, length=BLOCK) == []


def test_the_original_is_caught_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lib.scaling.gate.loss_after_training", lambda *_: 0.0)
    model = bk("upstream")(SPEC)
    seen = set(leaks(model, SPEC))
    assert {(later, later - 1) for later in range(1, SPEC.block_size)} <= seen
    assert set(gradient_leaks(model, SPEC)) >= seen
    assert any("change with a later token" in fault for fault in find_faults(bk("upstream"), length=BLOCK))


@pytest.mark.slow
def test_what_learns_is_far_from_what_does_not_at_the_length_of_a_sweep() -> None:
    """A first limit was so near to zero that the rounding of a CPU decided."""
    options = {"form": "value", "layers": 2, "width": 16, "ffn_ratio": 4, "dropout": 0.0, "allow_leak": True}
    model = build_model("resnet_bk", options, cycle_spec(128), seed=1)
    assert loss_after_training(model, cycle_spec(128), lambda targets: targets, steps=100) < LEARNED_NATS


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda targets: targets.t().reshape(targets.shape), id="transposed", marks=pytest.mark.long
        ),
        pytest.param(lambda targets: (5 * targets + 3) % VOCAB, id="one too far", marks=pytest.mark.long),
        pytest.param(lambda targets: targets.roll(1, dims=1), id="one too near"),
    ],
)
def test_misaligned_targets_are_caught(change: Callable[[Tensor], Tensor]) -> None:
    (fault,) = find_faults(gpt2, length=BLOCK, targets=change)
    assert "misaligned" in fault


class Peeking(nn.Module):
    """A sound model, but that the outputs at some places see the token behind them."""

    def __init__(self, spec: TextSpec, places: range) -> None:
        super().__init__()
        self.sound, self.places = gpt2(spec), places
        self.head = nn.Linear(16, spec.vocab_size)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.sound(tokens_BT)
        table = next(module for module in self.sound.modules() if isinstance(module, nn.Embedding))
        later_BTV = self.head(nn.functional.embedding(tokens_BT.roll(-1, 1), table.weight))
        peeks_T1 = torch.isin(torch.arange(tokens_BT.shape[1]), torch.tensor(self.places))[:, None]
        return logits_BTV + peeks_T1 * later_BTV


class PeekingInEvaluation(Peeking):
    """A model that sees the next token in evaluation mode only."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.sound(tokens_BT) if self.training else super().forward(tokens_BT)  # type: ignore[no-any-return]


def test_a_leak_in_evaluation_mode_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lib.scaling.gate.loss_after_training", lambda *_: 0.0)
    (fault,) = find_faults(lambda spec: PeekingInEvaluation(spec, range(3, 4)), length=BLOCK)
    assert "change with a later token" in fault


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(range(32, BLOCK - 1), id="beyond 32"),
        pytest.param(range(BLOCK - 2, BLOCK - 1), id="at the end"),
        pytest.param(range(BLOCK // 2 - 1, BLOCK // 2), id="between two chunks"),
    ],
)
def test_a_leak_anywhere_in_the_length_of_the_sweep_is_caught(
    places: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(leaks(Peeking(SPEC, places), SPEC)) == [(place + 1, place) for place in places]
    monkeypatch.setattr("lib.scaling.gate.loss_after_training", lambda *_: 0.0)
    built = "lib.scaling.experiments.build_model"
    monkeypatch.setattr(built, lambda _name, _options, spec, **_: Peeking(spec, places))
    with pytest.raises(
        ToolkitError, match=rf"gpt does not pass the leak checks: {len(places)} outputs change"
    ):
        ScalingExperiments(workers=1).check_gate([ScalingConfig(64, 4, arch="gpt")])


def test_the_gate_is_as_long_as_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(
        "lib.scaling.gate.find_faults", lambda _build, *, length: lengths.append(length) or []
    )
    configs = [ScalingConfig(64, layers, n_seq=length) for layers in (4, 8) for length in (24, 40)]
    ScalingExperiments(workers=1, log=lambda _: None).check_gate(configs)
    assert lengths == [24, 40]

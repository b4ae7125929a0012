"""The gate before a sweep: sound models pass, a leak from the future and misaligned targets do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from lib.data.types import TextSpec
from lib.registry import build_model
from lib.scaling.gate import SPEC, faults, gradient_leaks, leaks
from tests.tokens import small_lm_config

pytestmark = pytest.mark.slow

Build = Callable[[TextSpec], nn.Module]


def bk(form: str) -> Build:
    options = {"form": form, "layers": 2, "width": 16, "ffn_ratio": 2, "dropout": 0.0, "allow_leak": True}
    return lambda spec: build_model("resnet_bk", options, spec, seed=0)


def gpt2(spec: TextSpec) -> nn.Module:
    return build_model("gpt2", small_lm_config().model_options, spec, seed=0)


@pytest.mark.parametrize("build", [bk("value"), bk("features"), gpt2], ids=["value", "features", "gpt2"])
def test_sound_models_pass(build: Build) -> None:
    assert faults(build) == []


def test_the_original_is_caught_both_ways() -> None:
    model = bk("upstream")(SPEC)
    seen = set(leaks(model, SPEC))
    assert {(later, later - 1) for later in range(1, SPEC.block_size)} <= seen
    assert set(gradient_leaks(model, SPEC)) >= seen
    assert any("change with a later token" in fault for fault in faults(bk("upstream")))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda targets: targets.t().reshape(targets.shape), id="transposed"),
        pytest.param(lambda targets: (5 * targets + 3) % SPEC.vocab_size, id="one too far"),
        pytest.param(lambda targets: targets.roll(1, dims=1), id="one too near"),
    ],
)
def test_misaligned_targets_are_caught(change: Callable[[Tensor], Tensor]) -> None:
    (fault,) = faults(gpt2, targets=change)
    assert "misaligned" in fault

"""Facts of models from the meta device agree with arithmetic and with real tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lib.data.types import ImageSpec, TextSpec
from lib.memory.facts import model_facts, saved_bytes
from lib.nn.model_code import build_model


def image_spec(channels: int, size: int, classes: int) -> ImageSpec:
    return ImageSpec(
        name="noise", channels=channels, height=size, width=size, classes=classes,
        mean=(0.5,) * channels, std=(0.25,) * channels, synthetic=True,
    )  # fmt: skip


def facts(name: str, options: dict[str, Any], spec: ImageSpec) -> Any:
    return model_facts(partial(build_model, name, options, spec, seed=0), spec, name=name, train_size=123)


def really_saved_bytes(model: nn.Module, images: torch.Tensor) -> int:
    """By address, on the CPU, where every storage has one of its own."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: _):
        model(images)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for address, size in storages.items() if address not in own)


def test_lenet5_is_what_arithmetic_and_real_tensors_say() -> None:
    spec = image_spec(1, 28, 10)
    found = facts("lenet5", {}, spec)
    # Inputs of the layers and results of the rectifiers in fp32; places of the maxima in int64.
    numbers = 28 * 28 + 6 * 28 * 28 + 6 * 14 * 14 + 16 * 10 * 10 + 16 * 5 * 5 + 120 + 84
    assert found.bytes_per_sample == 4 * numbers + 8 * (6 * 14 * 14 + 16 * 5 * 5)
    model = build_model("lenet5", {}, spec, seed=0)
    few, many = (really_saved_bytes(model, torch.zeros(rows, 1, 28, 28)) for rows in (3, 10))
    assert found.bytes_per_sample == (many - few) / 7
    assert (found.name, found.parameters, found.train_size, found.has_batchnorm) == (
        "lenet5", 61706, 123, False
    )  # fmt: skip


def test_training_of_lenet5_is_the_work_that_arithmetic_says() -> None:
    first, second = 28 * 28 * 6 * 25, 10 * 10 * 16 * 6 * 25  # multiplications of the convolutions
    linear = 400 * 120 + 120 * 84 + 84 * 10
    # Each has two products more in its derivative, but the first: nothing is derived by the image.
    assert facts("lenet5", {}, image_spec(1, 28, 10)).flop_per_sample == 2 * (
        2 * first + 3 * (second + linear)
    )


def test_a_model_of_tokens_is_given_integers() -> None:
    spec = TextSpec(
        name="noise", vocab_size=11, block_size=6, unit="byte", validation_tokens=1, validation_bytes=1
    )
    found = model_facts(
        lambda: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)), spec, name="toy", train_size=5
    )
    assert found.parameters == 11 * 4 + 4 * 11 + 11
    assert found.bytes_per_sample == 6 * 8 + 6 * 4 * 4, "the tokens as int64, and what the layer is given"


@pytest.mark.slow
def test_a_small_resnet_agrees_with_real_tensors() -> None:
    spec, options = image_spec(3, 16, 10), {"stem": "cifar", "width": 4}
    found = facts("resnet50", options, spec)
    model = build_model("resnet50", options, spec, seed=0)
    few, many = (really_saved_bytes(model, torch.zeros(rows, 3, 16, 16)) for rows in (2, 6))
    assert found.bytes_per_sample == (many - few) / 4
    assert found.has_batchnorm


@pytest.mark.slow
def test_resnet50_at_224_keeps_tens_of_megabytes_a_sample() -> None:
    found = facts("resnet50", {"stem": "imagenet", "width": 64}, image_spec(3, 224, 1000))
    assert found.parameters == 25_557_032
    # 22 million activations of convolutions (arXiv:2003.13678, table of complexities: 11.1 million
    # outputs), each kept before and after its normalisation.
    assert 2 * 11.0e6 * 4 * 0.9 < found.bytes_per_sample < 2 * 11.2e6 * 4


class Reuse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight  # keeps x
        return y.sin() + y.cos() + y * y + y * self.get_buffer("scale")  # keep y, all of them


def test_a_storage_counts_once_and_the_models_own_do_not_count() -> None:
    assert saved_bytes(Reuse(), torch.zeros(3, 5)) == 2 * 3 * 5 * 4
    with torch.device("meta"):
        assert saved_bytes(Reuse(), torch.zeros(3, 5)) == 2 * 3 * 5 * 4


def test_looking_changes_no_random_state() -> None:
    before = torch.get_rng_state()
    facts("lenet5", {}, image_spec(1, 28, 10))
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_refuses_the_images_says_so() -> None:
    with pytest.raises(Exception, match="28x28 or 32x32"):
        facts("lenet5", {}, image_spec(3, 224, 10))

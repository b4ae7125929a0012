"""Inputs and outputs of any module whose memory is predicted, and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.memory import estimate, fits, largest_batch


class Named(nn.Module):
    """With two outputs, as a dict, and a loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, token_ids: Tensor, *, labels: Tensor | None = None, flag: bool = False
    ) -> Any:
        assert flag and token_ids.dtype == torch.int64
        output = {"y": self.layer(x), "detached": x}
        if labels is not None:
            assert labels.shape == x.shape[:1] and labels.dtype == torch.int64
            output["loss"] = F.cross_entropy(output["y"], labels)
        return output


class Outputs(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        assert x.dtype == torch.bfloat16, "inputs are cast with the weights"
        return super().forward(x)


def test_inputs_are_shapes_types_or_tensors_by_name_or_position() -> None:
    named = {"x": (4, 8), "token_ids": (4, 3), "flag": True}
    report = estimate(Named(), named)
    assert report.batch == 4 and report.parts["data"] == 2 * 512
    assert estimate(Named(), {**named, "x": torch.zeros(4, 8)}).phases == report.phases
    assert estimate(Named(), {**named, "token_ids": ((4, 3), torch.int64)}).phases == report.phases
    estimate(Named(), {**named, "labels": (4,)})
    two = nn.Bilinear(4, 5, 6)
    shapes, tensors = [(2, 4), (2, 5)], (torch.zeros(2, 4), torch.zeros(2, 5))
    assert estimate(two, shapes).phases == estimate(two, tensors).phases


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        (
            nn.Linear(2, 2),
            (1, 2),
            {"precision": "int8"},
            "'int8' is not predicted for; use one of fp32, bf16, ",
        ),
        (nn.Linear(2, 2), (1, 2), {"optimizer": "adamw"}, "optimizer='adamw' is not a function; optimizer="),
        (nn.Linear(2, 2), (1, 2), {"loss": "mse"}, "loss='mse' is not a function; "),
        ("resnet50", (1, 2), {}, "model='resnet50' is not a function"),
        (nn.Linear(2, 2), {}, {}, "inputs={} has no tensor and no shape with samples; write (32, 128)"),
        (nn.Linear(2, 2), "x", {}, "inputs='x' has no tensor"),
        (
            nn.Linear(2, 2).requires_grad_(False),
            (1, 2),
            {},
            "no weight of the model is trained; set requires_grad",
        ),
        (nn.Linear(2, 2), (1, 2), {"accumulation": 0}, "accumulation=0 trains nothing; use 1 or more"),
        (nn.LazyLinear(2), (1, 2), {}, "the shape of weight is left open; run a batch through"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    model: Any, inputs: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        estimate(model, inputs, **options)


def test_outputs_without_gradients_are_refused_and_others_are_summed() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(ConfigError, match="no output of the model has gradients; pass loss="):
        estimate(Detached(2, 2), (1, 2))
    estimate(Outputs(2, 2), (1, 2), precision="bf16-true")


class Views(nn.Linear):
    """Buffers that share a storage, and a tensor that is neither weight nor buffer."""

    def __init__(self) -> None:
        super().__init__(128, 1, bias=False)
        self.register_buffer("whole", torch.zeros(1024))
        self.register_buffer("part", self.whole[:512].view(2, 256))
        self.plain = [torch.zeros(256)]


def test_a_storage_counts_once_and_so_does_a_tensor_that_is_no_weight() -> None:
    report = estimate(Views(), (1, 128))
    assert report.parts["parameters"] == 4 * (128 + 1024 + 256)
    assert report.parts["optimizer"] == 2 * 4 * 128 + 512, "two moments and a step count"


def test_only_first_dimensions_of_the_size_of_the_batch_are_changed() -> None:
    seen = set()

    class Looks(nn.Linear):
        def forward(self, x: Tensor, table: Tensor, other: Tensor) -> Tensor:
            seen.add((len(x), len(table), len(other)))
            return super().forward(x)

    batch = [(5, 8), (7, 8), ((5, 2), torch.int64)]
    assert largest_batch(Looks(8, 1), batch, gpu="rtx3090", limit=2) == 2
    assert seen == {(1, 7, 1), (2, 7, 2)}


def test_batch_normalisation_over_single_values_begins_with_two_samples() -> None:
    norm = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    assert [largest_batch(norm, (5, 8), gpu="rtx3090", limit=limit) for limit in (7, 2, 1)] == [7, 2, 0]

    def unlike(_: Any) -> Tensor:
        raise ValueError("another one")

    with pytest.raises(ValueError, match="another one"):
        largest_batch(norm, (5, 8), gpu="rtx3090", loss=unlike, limit=7)


def test_unknown_machines_and_a_machine_without_gpu() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        fits(nn.Linear(2, 2), (1, 2), gpu="rtx309")
    assert fits(nn.Linear(2, 2), (1, 2), gpu="cpu-24g")

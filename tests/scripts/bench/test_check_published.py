"""Predictions against the published lists: what is right, refused and unsafe, and how the step is counted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.memory import predict_peak, simulation
from scripts.bench import check_published
from scripts.bench.check_published import CARD_BYTES, _need, scores

SMALL = {"peak": CARD_BYTES // 2, "gaps": 0, "naive": 0}
LARGE = {"peak": CARD_BYTES, "gaps": 0, "naive": CARD_BYTES + 1}


def listed(**batches: int) -> dict[str, dict[str, str]]:
    return {name: {"train_batch_size": str(batch)} for name, batch in batches.items()}


def test_each_list_and_the_models_where_both_agree_are_scored() -> None:
    rows = [
        {"model": "right", "needs": {"64": SMALL, "96": LARGE}},
        {"model": "unsafe", "needs": {"64": SMALL, "96": SMALL}},
        {"model": "refused", "needs": {"48": LARGE, "64": LARGE}},
        {"model": "top", "needs": {"512": SMALL}},
        {"model": "disputed", "needs": {"64": SMALL, "96": SMALL, "128": LARGE}},
        {"model": "gone", "dropped": "cannot be built"},
    ]
    same = {"right": 64, "unsafe": 64, "refused": 48, "top": 512}
    found = scores(rows, {"nchw": listed(**same, disputed=64), "nhwc": listed(**same, disputed=96)})
    nchw, nhwc, agreed = (found["rule"][name] for name in ("nchw", "nhwc", "agreed"))
    assert (nchw["right"], nchw["decisions"], nchw["unsafe"]) == (6, 9, ["unsafe", "disputed"])
    assert (nhwc["right"], nhwc["decisions"], nhwc["unsafe"]) == (7, 9, ["unsafe"])
    assert (agreed["models"], agreed["right"], agreed["decisions"]) == (4, 5, 7)
    assert agreed["refused"] == ["refused"] and found["dropped"] == {"cannot be built": 1}
    assert found["scaled"][0.8]["unsafe"] == 3 and found["scaled"][1.25]["refused"] == 1
    assert found["naive"]["unsafe"] == ["unsafe"]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 1000))


def test_two_steps_of_the_script_are_two_accumulating_ones() -> None:
    held: list[Tensor] = []

    def loss(model: nn.Module, rows: int) -> Tensor:
        held.append(held[0] if held else torch.zeros(rows, 3, 8, 8))  # one batch for all steps
        return F.cross_entropy(model(held[0]).float(), torch.zeros(rows, dtype=torch.int64))

    with simulation.simulation("cuda"):
        found = _need(Net().train(), 8, 64)
    trace = predict_peak(
        Net, loss, micro_batch=64, precision="fp16", accumulation=2,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    )  # fmt: skip
    assert found["peak"] == trace.peak_bytes and found["gaps"] >= 0
    outputs = 64 * (8 * 36 * 3 + 288 + 1000)  # of the five modules
    weights = 3 * 8 * 9 + 8 + 16 + 288 * 1000 + 1000
    assert found["naive"] == 12 * weights + 2 * outputs


def test_the_next_size_of_the_ladder_is_the_one_that_failed() -> None:
    assert check_published.tried({"train_batch_size": "192"}) == (192, 256)
    assert check_published.tried({"train_batch_size": "512"}) == (512, None)

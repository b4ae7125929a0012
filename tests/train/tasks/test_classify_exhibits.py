"""What a classifier shows, against its definitions."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.training import CLASSES, random_data, small_config, small_job, small_plan
from train.job import evaluate
from train.tasks.classify import exhibits as shown
from train.tasks.classify.exhibits import Predictions, calibration, confusion, exhibits, png, predict


def predictions(
    targets: list[int], predicted: list[int], confidence: list[float] | None = None
) -> Predictions:
    return Predictions(
        torch.tensor(targets),
        torch.tensor(predicted),
        torch.tensor(confidence or [1.0] * len(targets)),
        torch.zeros(len(targets)),
        torch.zeros(len(targets)),
    )


def test_rows_are_true_classes_and_columns_predicted_ones() -> None:
    found = confusion(predictions([0, 0, 0, 2], [0, 1, 1, 2]), ["a", "b", "c"])
    assert found["kind"] == "matrix" and found["names"] == ["a", "b", "c"]
    assert found["counts"] == [[1, 2, 0], [0, 0, 0], [0, 0, 1]]


def test_of_many_classes_the_most_frequent_confusions_are_listed() -> None:
    found = confusion(predictions([5, 5, 99, 7], [6, 6, 98, 7]), [f"no. {number}" for number in range(100)])
    assert found["kind"] == "table" and found["rows"] == [
        ["no. 5", "no. 6", "2"],
        ["no. 99", "no. 98", "1"],
    ]


def test_the_calibration_error_is_the_weighted_gap_of_its_bins() -> None:
    """Guo et al. 2017, equation 3: two samples at 0.9, one right; two at 0.5, both right."""
    curve = calibration(predictions([1, 1, 1, 1], [1, 0, 1, 1], [0.9, 0.9, 0.5, 0.5]))
    model, ideal = curve["lines"]
    assert model["name"] == "model" and ideal["x"] == ideal["value"] == [0.0, 1.0]
    assert model["x"] == pytest.approx([0.5, 0.9]) and model["value"] == pytest.approx([1.0, 0.5])
    assert f"error {0.5 * 0.5 + 0.5 * 0.4:.4f}" in curve["note"]


@pytest.mark.slow
def test_exhibits_agree_with_the_evaluation() -> None:
    config = small_config()
    data = random_data(config, shape=(1, 28, 28), train_size=40, test_size=21)
    job = small_job(config, small_plan(8), data, dtype=torch.float32)
    with job.train_loader, job.eval_loader:
        result, found = evaluate(job), predict(job)
        made = exhibits(job, data.dataset, iter(()))
    assert len(found.targets_N) == 21, "padding is left out"
    assert np.array_equal(found.targets_N, data.dataset.test.take()[1])
    assert float(found.loss_N.double().mean()) == pytest.approx(result["loss"], rel=1e-5)
    right = float((found.targets_N == found.predicted_N).double().mean())
    assert right == pytest.approx(result["accuracy"])
    matrix, _, worst, _ = made
    assert [block["kind"] for block in made] == ["matrix", "chart", "pictures", "pictures"]
    assert sum(map(sum, matrix["counts"])) == 21
    assert sum(matrix["counts"][k][k] for k in range(CLASSES)) == round(21 * right)
    assert len(worst["pictures"]) == shown.SHOWN
    hardest = int(found.loss_N.argmax())
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(worst["pictures"][0]["png"]))))
    assert np.array_equal(pixels, data.dataset.test.take(np.array([hardest]))[0][0, 0])
    assert worst["pictures"][0]["caption"].startswith(str(int(found.targets_N[hardest])))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_large_picture_is_made_small(channels: int) -> None:
    pixels = np.arange(channels * 300 * 200, dtype=np.uint32).astype(np.uint8).reshape(channels, 300, 200)
    image = Image.open(io.BytesIO(base64.b64decode(png(pixels))))
    assert image.size == (64, 96)
    assert image.mode == ("L" if channels == 1 else "RGB")

"""Exhibits of a classifier: confusion matrix, calibration, and the samples that it finds hardest."""

from __future__ import annotations

import base64
import io
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lib.data.types import Dataset, ImageSpec, TextClassSpec
from lib.nn.precision import full_precision
from lib.reports.exhibits import Curve, Exhibit, Matrix, Picture, Pictures, Table
from train.job import Job, TrainedModel, evaluated_weights

SHOWN = 12  # samples of each kind
BINS = 15  # of confidence
_MOST_CLASSES = 20  # of a matrix; of more, the most frequent confusions are listed
_PIXELS = 96  # of the longer side of a picture


class Predictions(NamedTuple):
    """Predictions on the N samples of the evaluation part, in its order."""

    targets_N: Tensor
    predicted_N: Tensor
    confidence_N: Tensor  # probability of the predicted class
    loss_N: Tensor
    entropy_N: Tensor  # in nats


def exhibits(trained: TrainedModel) -> list[Exhibit]:
    """Return confusion, calibration, and the samples of the highest loss and the highest entropy."""
    job, dataset = trained.job, trained.dataset
    assert isinstance(dataset.spec, ImageSpec | TextClassSpec)
    found = predict(job)
    worst = found.loss_N.argsort(descending=True)[:SHOWN]
    uncertain = found.entropy_N.argsort(descending=True)[:SHOWN]
    return [
        confusion(found, classes=dataset.spec.classes),
        calibration(found),
        _samples("Worst samples", "Those of the highest loss.", worst, found, dataset),
        _samples("Most uncertain samples", "Those of the highest entropy.", uncertain, found, dataset),
    ]


@torch.no_grad()
def predict(job: Job) -> Predictions:
    """Predict every sample of the evaluation part with the weights that evaluation uses."""
    parts = []
    with evaluated_weights(job):
        for batch in job.eval_loader.batches(rank=0, world=1, batch_size=job.plan.micro_batch):
            with job.backend.autocast(job.plan.precision):
                logits_NK = full_precision(job.forward(batch.inputs))
            assert batch.weights is not None
            real_N = batch.weights > 0
            logs_NK, targets_N = logits_NK[real_N].log_softmax(dim=1), batch.targets[real_N]
            likeliest = logs_NK.max(dim=1)
            loss_N = F.nll_loss(logs_NK, targets_N, reduction="none")
            entropy_N = -(logs_NK.exp() * logs_NK).sum(dim=1)
            each = (targets_N, likeliest.indices, likeliest.values.exp(), loss_N, entropy_N)
            parts.append([column.cpu() for column in each])
    return Predictions(*map(torch.cat, zip(*parts, strict=True)))


def confusion(found: Predictions, *, classes: int) -> Exhibit:
    """Return the confusion matrix, or of many classes the most frequent confusions."""
    pairs_N = found.targets_N * classes + found.predicted_N
    counts_KK = pairs_N.bincount(minlength=classes * classes).view(classes, classes)
    note = f"Counts of {len(pairs_N):,} samples; rows are true classes, columns are predicted ones."
    if classes <= _MOST_CLASSES:
        counts = tuple(map(tuple, counts_KK.tolist()))
        return Matrix(
            title="Confusion matrix", note=note, names=tuple(map(str, range(classes))), counts=counts
        )
    wrong = counts_KK.clone().fill_diagonal_(0).flatten()
    order = [place for place in wrong.argsort(descending=True)[:SHOWN].tolist() if wrong[place]]
    rows = tuple((str(place // classes), str(place % classes), str(int(wrong[place]))) for place in order)
    return Table(title="Most frequent confusions", head=("true", "predicted", "samples"), rows=rows)


def calibration(found: Predictions) -> Curve:
    """Return the reliability curve with the expected calibration error (Guo et al. 2017, section 2)."""
    right_N = (found.predicted_N == found.targets_N).double()
    confidence_N = found.confidence_N.double()
    bins_N = (confidence_N * BINS).long().clamp(max=BINS - 1)
    points, error = [], 0.0
    for number in range(BINS):
        own_N = bins_N == number
        if own_N.any():
            confidence, accuracy = float(confidence_N[own_N].mean()), float(right_N[own_N].mean())
            points.append((confidence, accuracy))
            error += float(own_N.double().mean()) * abs(accuracy - confidence)
    return Curve(
        title="Reliability",
        note=f"Expected calibration error {error:.4f}, in {BINS} bins of confidence.",
        x="mean confidence",
        y="accuracy",
        lines=(("model", tuple(points)), ("perfect calibration", ((0.0, 0.0), (1.0, 1.0)))),
    )


def _samples(title: str, note: str, places_N: Tensor, found: Predictions, dataset: Dataset) -> Exhibit:
    """Return samples as pictures, or texts as a table."""
    inputs, _ = dataset.test.take(places_N.numpy())
    captions = [_caption(found, place) for place in places_N.tolist()]
    if isinstance(dataset.spec, ImageSpec):
        pictures = tuple(map(picture, inputs, captions))
        return Pictures(
            title=title, note=f"{note} True and predicted class, with its probability.", pictures=pictures
        )
    assert isinstance(dataset.spec, TextClassSpec)
    pad, tokenizer = dataset.spec.pad, dataset.tokenizer
    texts = [row[row != pad] for row in inputs]
    shown = [str(text.tolist()) if tokenizer is None else tokenizer.decode(text) for text in texts]
    return Table(
        title=title, note=note, head=("text", "class"), rows=tuple(zip(shown, captions, strict=True))
    )


def _caption(found: Predictions, place: int) -> str:
    target, predicted = int(found.targets_N[place]), int(found.predicted_N[place])
    what = f"{target}, right" if target == predicted else f"{target} taken for {predicted}"
    return f"{what} ({found.confidence_N[place]:.0%})"


def picture(pixels_CHW: npt.NDArray[np.uint8], caption: str) -> Picture:
    """Return an image as PNG, no larger than _PIXELS on its longer side."""
    channels = pixels_CHW.shape[0]
    image = Image.fromarray(pixels_CHW.transpose(1, 2, 0) if channels == 3 else pixels_CHW[0])
    image.thumbnail((_PIXELS, _PIXELS))
    data = io.BytesIO()
    image.save(data, format="PNG", optimize=True)
    png = base64.b64encode(data.getvalue()).decode()
    return Picture(png=png, caption=caption, width=image.width, height=image.height)

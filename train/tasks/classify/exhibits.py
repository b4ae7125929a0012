"""Exhibits of a classifier: confusion matrix, calibration, and the samples that it finds hardest."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lib.data.types import LABELLED, Dataset, ImageSpec, TableClassSpec, TextClassSpec, row_text
from lib.reports.page import Block, curve, table
from train.job import Job, evaluation_outputs

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


def exhibits(job: Job, dataset: Dataset, _: Iterator[int]) -> list[Block]:
    """Return confusion, calibration, and the samples of the highest loss and the highest entropy."""
    assert isinstance(dataset.spec, LABELLED)
    found, names = predict(job), dataset.class_names or [*map(str, range(dataset.spec.classes))]
    return [
        confusion(found, names),
        calibration(found),
        _samples("Worst samples", "loss", found.loss_N, found, dataset, names),
        _samples("Most uncertain samples", "entropy", found.entropy_N, found, dataset, names),
    ]


def predict(job: Job) -> Predictions:
    """Predict every sample of the evaluation part with the weights that evaluation uses."""
    parts = []
    for logits_NK, targets_N in evaluation_outputs(job):
        logs_NK = logits_NK.log_softmax(dim=1)
        likeliest = logs_NK.max(dim=1)
        loss_N = F.nll_loss(logs_NK, targets_N, reduction="none")
        entropy_N = -(logs_NK.exp() * logs_NK).sum(dim=1)
        each = (targets_N, likeliest.indices, likeliest.values.exp(), loss_N, entropy_N)
        parts.append([column.cpu() for column in each])
    return Predictions(*map(torch.cat, zip(*parts, strict=True)))


def confusion(found: Predictions, names: Sequence[str]) -> Block:
    """Return the confusion matrix, or of many classes the most frequent confusions. names: of the classes."""
    classes = len(names)
    pairs_N = found.targets_N * classes + found.predicted_N
    counts_KK = pairs_N.bincount(minlength=classes * classes).view(classes, classes)
    if classes <= _MOST_CLASSES:
        note = f"Counts of {len(pairs_N):,} samples; rows are true classes, columns are predicted ones."
        shown = {"note": note, "names": [*names], "counts": counts_KK.tolist()}
        return {"kind": "matrix", "title": "Confusion matrix", **shown}
    most = counts_KK.fill_diagonal_(0).flatten().topk(SHOWN)
    pairs = zip(most.indices.tolist(), most.values.tolist(), strict=True)
    rows = [(names[at // classes], names[at % classes], f"{count}") for at, count in pairs if count]
    return table("Most frequent confusions", ("true", "predicted", "samples"), rows)


def calibration(found: Predictions) -> Block:
    """Return the reliability curve with the expected calibration error (Guo et al. 2017, section 2)."""
    right_N = (found.predicted_N == found.targets_N).double()
    bins_N = (found.confidence_N.double() * BINS).long().clamp(max=BINS - 1)
    points, error = [], 0.0
    for own_N in (bins_N == number for number in sorted({*bins_N.tolist()})):
        confidence, accuracy = float(found.confidence_N[own_N].double().mean()), float(right_N[own_N].mean())
        points.append((confidence, accuracy))
        error += float(own_N.double().mean()) * abs(accuracy - confidence)
    return curve(
        "Reliability",
        {"model": points, "perfect calibration": [(0.0, 0.0), (1.0, 1.0)]},
        x="mean confidence",
        y="accuracy",
        note=f"Expected calibration error {error:.4f}, in {BINS} bins of confidence.",
    )


def _samples(
    title: str, what: str, order_N: Tensor, found: Predictions, dataset: Dataset, names: Sequence[str]
) -> Block:
    """Return the samples that are highest in an order: as pictures, or texts as a table."""
    places = order_N.argsort(descending=True)[:SHOWN].tolist()
    inputs, _ = dataset.test.take(np.array(places))
    note, captions = f"Those of the highest {what}.", []
    for target, predicted, confidence, *_ in zip(*(column[places] for column in found), strict=True):
        taken = ", right" if target == predicted else f" taken for {names[predicted]}"
        captions.append(f"{names[target]}{taken} ({confidence:.0%})")
    if isinstance(dataset.spec, ImageSpec):
        note += " True and predicted class, with its probability."
        shown = zip(inputs, captions, strict=True)
        pictures = [{"png": png(pixels), "caption": caption} for pixels, caption in shown]
        return {"kind": "pictures", "title": title, "note": note, "pictures": pictures}
    if isinstance(dataset.spec, TableClassSpec):
        texts = [row_text(dataset.spec.columns, row) for row in inputs]
        return table(title, ("row", "class"), zip(texts, captions, strict=True), note=note)
    assert isinstance(dataset.spec, TextClassSpec)
    rows = [row[row != dataset.spec.pad] for row in inputs]
    decode = str if dataset.tokenizer is None else dataset.tokenizer.decode
    return table(title, ("text", "class"), zip(map(decode, rows), captions, strict=True), note=note)


def png(pixels_CHW: npt.NDArray[np.uint8]) -> str:
    """Return an image as a PNG file in base64, no larger than _PIXELS on its longer side."""
    image = Image.fromarray(pixels_CHW.transpose(1, 2, 0) if len(pixels_CHW) == 3 else pixels_CHW[0])
    image.thumbnail((_PIXELS, _PIXELS))
    data = io.BytesIO()
    image.save(data, format="PNG", optimize=True)
    return base64.b64encode(data.getvalue()).decode()

"""Data sets, their order and their way to the device. Downloading and decoding are imported when used."""

from lib.data.loader import Batch, Delivery, EvalLoader, TrainLoader, choose_placement
from lib.data.opening import NAMES, open_dataset
from lib.data.order import epoch_order, sample_stream, subset
from lib.data.types import Dataset, ImageSpec, Part

__all__ = [
    "NAMES",
    "Batch",
    "Dataset",
    "Delivery",
    "EvalLoader",
    "ImageSpec",
    "Part",
    "TrainLoader",
    "choose_placement",
    "epoch_order",
    "open_dataset",
    "sample_stream",
    "subset",
]

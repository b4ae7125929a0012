"""Data: sets, their sampler, augmentation and loaders.

Nothing here knows models, tasks or plans. Imported by models, train and scripts.
"""

from lib.data.datasets.files import DataLocation, check_described, describe_dataset, open_dataset
from lib.data.loader import Batch, EvalLoader, LoaderConfig, TrainLoader, choose_placement
from lib.data.sampler import epoch_order, restrict, sample_stream, subset
from lib.data.types import ArrayPart, Dataset, ImageSpec, Part, Spec, TextClassSpec, TextSpec, TokenPart

__all__ = [
    "ArrayPart",
    "Batch",
    "DataLocation",
    "Dataset",
    "EvalLoader",
    "ImageSpec",
    "LoaderConfig",
    "Part",
    "Spec",
    "TextClassSpec",
    "TextSpec",
    "TokenPart",
    "TrainLoader",
    "check_described",
    "choose_placement",
    "describe_dataset",
    "epoch_order",
    "open_dataset",
    "restrict",
    "sample_stream",
    "subset",
]

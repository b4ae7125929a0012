"""Data: sets, their sampler, augmentation and loaders.

Nothing here knows models, tasks or plans. Imported by models, train and scripts.
"""

from lib.data.datasets.files import Place
from lib.data.datasets.opening import open_dataset, outline
from lib.data.datasets.question_answering.spec import AnswerSpec
from lib.data.loader import Batch, Delivery, EvalLoader, TrainLoader, choose_placement
from lib.data.sampler import epoch_order, sample_stream
from lib.data.subset import restrict, subset
from lib.data.types import (
    ArrayPart,
    Dataset,
    ImageSpec,
    Part,
    PuzzleSpec,
    Spec,
    TextClassSpec,
    TextSpec,
    TokenPart,
)

__all__ = [
    "AnswerSpec",
    "ArrayPart",
    "Batch",
    "Dataset",
    "Delivery",
    "EvalLoader",
    "ImageSpec",
    "Part",
    "Place",
    "PuzzleSpec",
    "Spec",
    "TextClassSpec",
    "TextSpec",
    "TokenPart",
    "TrainLoader",
    "choose_placement",
    "epoch_order",
    "open_dataset",
    "outline",
    "restrict",
    "sample_stream",
    "subset",
]

"""Open questions for two frozen language models, each in the tokens of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.data.datasets.files import Place
from lib.data.datasets.question_answering import huggingface, key_values
from lib.data.datasets.question_answering.key_values import Question
from lib.data.datasets.question_answering.packing import Encoder, pack, part_of, widen
from lib.data.datasets.question_answering.readers import ANCHOR, PUBLISHED, read_published
from lib.data.datasets.question_answering.spec import AnswerSpec, Side
from lib.data.tokenizers.byte_char import ByteTokenizer
from lib.data.tokenizers.pairs import learned
from lib.data.types import Dataset
from lib.errors import ConfigError

HUGGING_FACE = "hf:"
MERGES, LEARNED_FROM = 24, 4096  # pairs that are merged, and the texts they are learned from


@dataclass(frozen=True, slots=True)
class Size:
    """Of a GPT-2 that the toolkit trains to be frozen."""

    layers: int
    heads: int
    width: int


# Two families: other tokens, another width, another depth.
SIZES = {"toolkit:bytes": Size(2, 4, 64), "toolkit:pairs": Size(3, 4, 48)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/question_answering/Kconfig."""

    source_bytes: int
    frozen_model_a: str
    frozen_model_b: str

    @property
    def models(self) -> tuple[str, str]:
        """The two language models by name."""
        return self.frozen_model_a, self.frozen_model_b


def outline(_: Options, place: Place) -> None:
    """Only the questions tell how long an answer is in the tokens of a model."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What has to be known of a language model before it is there."""

    encoder: Encoder
    vocab_size: int
    width: int


def open_set(options: Options, place: Place) -> Dataset:
    """Questions in the tokens of both language models.

    Raises ConfigError for a language model that is not known or whose package is missing, DataError for one
    that is not there or damaged, and for such files.
    """
    name, root = place.name, place.root
    if name in PUBLISHED:
        train, test, folder = read_published(name, place.files)
        source = f"from {folder}"
        return packed(name, train, test, options, root=root, anchor=ANCHOR, source=source, synthetic=False)
    place.say(f"{name}: making {key_values.TRAIN_SIZE} + {key_values.TEST_SIZE} synthetic questions")
    train, test = key_values.questions("train"), key_values.questions("test")
    return packed(
        name,
        train,
        test,
        options,
        root=root,
        anchor=key_values.ANCHOR,
        source="generated",
        synthetic=True,
    )


def packed(
    name: str,
    train: Sequence[Question],
    test: Sequence[Question],
    options: Options,
    *,
    root: Path,
    anchor: str,
    source: str,
    synthetic: bool,
) -> Dataset:
    """A data set of these questions. source: where they come from, in words. Raises as `open_set`."""
    texts = [question.source + anchor + question.answer for question in train[:LEARNED_FROM]]
    known = [_known(model, texts, root=root) for model in options.models]
    encoders = [each.encoder for each in known]
    found = [
        pack(questions, encoders, anchor=anchor, source_bytes=options.source_bytes)
        for questions in (train, test)
    ]
    # The two parts share their columns.
    widths = [[max(each[1][side][kind].shape[1] for each in found) for kind in (0, 1)] for side in (0, 1)]
    sides = [
        Side(
            name=options.models[number],
            vocab_size=each.vocab_size,
            width=each.width,
            anchor=tuple(each.encoder.encode(anchor)),
            answer_tokens=widths[number][0],
            text_tokens=widths[number][1],
        )
        for number, each in enumerate(known)
    ]
    parts = [
        part_of(
            contents,
            [widen(rows[side][kind], widths[side][kind]) for side in (0, 1) for kind in (0, 1)],
        )
        for contents, rows in found
    ]
    spec = AnswerSpec(
        name=name, source_bytes=options.source_bytes, sides=(sides[0], sides[1]), synthetic=synthetic
    )
    told = f"{name}: {len(train)} + {len(test)} questions, {source}"
    return Dataset(spec, parts[0], parts[1], told)


def folder_of(model: str, *, root: Path) -> Path:
    """The directory that the name of a model of Hugging Face stands for."""
    return (root / Path(model.removeprefix(HUGGING_FACE)).expanduser()).resolve()


def _known(model: str, texts: Sequence[str], *, root: Path) -> _Known:
    if model.startswith(HUGGING_FACE):
        folder = folder_of(model, root=root)
        return _Known(huggingface.HuggingFaceTokenizer(folder), *huggingface.sizes(folder))
    if model not in SIZES:
        raise ConfigError(
            f"there is no language model {model!r}",
            todo=f"name {', '.join(SIZES)} or {HUGGING_FACE}DIRECTORY (CONFIG_FROZEN_MODEL_A, _B)",
        )
    width = SIZES[model].width
    if model == "toolkit:bytes":
        return _Known(ByteTokenizer(), ByteTokenizer.vocab_size, width)
    tokenizer = learned(texts, merges=MERGES)
    return _Known(tokenizer, tokenizer.vocab_size, width)

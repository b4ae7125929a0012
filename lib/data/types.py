"""What the rest of the toolkit must know of a data set."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lib.data.datasets.question_answering.spec import AnswerSpec
from lib.nn import IGNORED

Images = npt.NDArray[np.uint8]  # (N, C, H, W)
Labels = npt.NDArray[np.int64]  # (N,)
Indices = npt.NDArray[np.int64]  # (N,)
Tokens = npt.NDArray[np.unsignedinteger[Any]]  # (n,), uint8, uint16 or uint32

Unit: TypeAlias = Literal["byte", "char", "token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """What a model and its normalisation must know. mean and std are on the scale 0..1, one per channel."""

    name: str
    channels: int
    height: int
    width: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    synthetic: bool

    def __post_init__(self) -> None:
        assert len(self.mean) == len(self.std) == self.channels

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.channels, self.height, self.width

    @property
    def input_dtype(self) -> Literal["float32"]:
        """Of what a model is given, where nothing is said of precision."""
        return "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """What a language model must know, and what its evaluation is measured in.

    Inputs are int64 (N, block_size), each below vocab_size; targets are the tokens that follow,
    IGNORED where there is none.

    unit: what one token is, and what a figure per token is per.
    validation_tokens: targets of the evaluation part, each of which is predicted once.
    validation_bytes: how long they are as text in UTF-8; None where no tokenizer can tell.
    """

    name: str
    vocab_size: int
    block_size: int
    unit: Unit
    validation_tokens: int
    validation_bytes: int | None
    synthetic: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return (self.block_size,)

    @property
    def input_dtype(self) -> Literal["int64"]:
        """Of what a model is given."""
        return "int64"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClassSpec:
    """What a classifier of texts must know.

    Inputs are int64 (N, block_size): the tokens of a text, then `pad` up to the end. `pad` is the last of
    the vocab_size ids and stands for nothing else. Targets are one label for each text.
    """

    name: str
    vocab_size: int
    block_size: int
    classes: int
    pad: int
    synthetic: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return (self.block_size,)

    @property
    def input_dtype(self) -> Literal["int64"]:
        """Of what a model is given."""
        return "int64"


@dataclass(frozen=True, slots=True, kw_only=True)
class PuzzleSpec:
    """What must be known of puzzles on a square board.

    Inputs and targets are int64 (N, side * side): 0 stands for no cell, 1 for an empty one, and d + 1 for
    the digit d. Targets hold a digit for every cell.
    """

    name: str
    side: int
    synthetic: bool

    @property
    def vocab_size(self) -> int:
        """Tokens there are."""
        return self.side + 2

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return (self.side * self.side,)

    @property
    def input_dtype(self) -> Literal["int64"]:
        """Of what a model is given."""
        return "int64"


Spec: TypeAlias = ImageSpec | TextSpec | TextClassSpec | PuzzleSpec | AnswerSpec


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """Samples in rows: images or texts of one length with labels, or rows of tokens with rows of tokens.

    inputs:  (N, ...), uint8 (N, C, H, W) for images, int64 (N, T) for tokens, uint8 (N, L) for puzzles and
             bytes, possibly a memory map that does not fit in memory.
    targets: labels, int64 (N,); of puzzles uint8 (N, L); other tokens int32 (N, K).
    rows:    where the part is a selection, the N positions it takes from `inputs` and
             `targets` (which then hold more than N samples); None means all of them.
    """

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    rows: Indices | None = None

    def __post_init__(self) -> None:
        kind = self.inputs.ndim, self.inputs.dtype.name
        assert kind in ((4, "uint8"), (2, "int64"), (2, "uint8"))
        assert len(self.targets) == len(self.inputs)
        assert (self.targets.ndim, self.targets.dtype.name) in ((1, "int64"), (2, "uint8"), (2, "int32"))
        assert self.targets.dtype.name != "uint8" or self.targets.shape == self.inputs.shape
        assert self.targets.ndim == 2 or kind != (2, "uint8")

    @property
    def size(self) -> int:
        """Samples in this part."""
        return len(self.targets) if self.rows is None else len(self.rows)

    @property
    def byte_size(self) -> int:
        """Memory that the inputs of this part take as they are stored."""
        return self.size * int(np.prod(self.inputs.shape[1:])) * self.inputs.itemsize

    @property
    def stride(self) -> int:
        """From the place of a sample to that of the next: they are counted one by one."""
        return 1

    def take(self, places: Indices | None = None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Copies of the inputs and targets at `places`, which count within this part (default: all)."""
        if places is None:
            places = np.arange(self.size)
        rows = places if self.rows is None else self.rows[places]
        return np.take(self.inputs, rows, axis=0), np.take(self.targets, rows, axis=0)


class Shards:
    """Tokens in several arrays, read as if they were one."""

    def __init__(self, arrays: Sequence[Tokens]) -> None:
        assert arrays and len({array.dtype for array in arrays}) == 1
        self._arrays = arrays
        self._ends = [*accumulate(len(array) for array in arrays)]
        self.dtype, self.itemsize, self.ndim = arrays[0].dtype, arrays[0].itemsize, 1
        self.nbytes = self._ends[-1] * self.itemsize

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, cut: slice) -> Shards:
        """Consecutive tokens, still where they are."""
        start, stop, step = cut.indices(len(self))
        assert step == 1
        pieces: list[Tokens] = []
        number = bisect_right(self._ends, start)
        while number < len(self._arrays) and start < stop:
            array, offset = self._arrays[number], self._ends[number] - len(self._arrays[number])
            pieces.append(array[start - offset : stop - offset])
            start, number = self._ends[number], number + 1
        return Shards(pieces or [self._arrays[0][:0]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Tokens:
        """All of them in memory."""
        assert dtype is None and copy is not False
        return np.concatenate(self._arrays) if len(self._arrays) > 1 else self._arrays[0]


@dataclass(frozen=True, slots=True)
class TokenPart:
    """A text as one row of tokens, cut into windows of block_size, the next token being the target.

    tokens:  (n,), possibly a memory map, or several one after the other.
    shifted: for training. The windows of an epoch begin at some shift below block_size, and each
             is whole. Otherwise they begin at 0 and predict every token but the first exactly once:
             the last one is filled up with zeros, and targets that are not there are IGNORED.
    """

    tokens: Tokens | Shards
    block_size: int
    shifted: bool = False

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1 and self.tokens.dtype.name in ("uint8", "uint16", "uint32")
        assert self.block_size > 0 and self.size > 0, "shorter than a window"

    @property
    def size(self) -> int:
        """Windows in this part."""
        if self.shifted:
            return len(self.tokens) // self.block_size - 1
        return -(-(len(self.tokens) - 1) // self.block_size)

    @property
    def byte_size(self) -> int:
        """Memory that the tokens take as they are stored."""
        return self.tokens.nbytes

    @property
    def stride(self) -> int:
        """From the place of a window, its first token, to that of the next."""
        return self.block_size

    def take(self, places: Indices | None = None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and targets (N, block_size) of the windows that begin at the tokens `places` (default: all).

        Sample i is at place i * block_size, plus the shift of the epoch.
        """
        if places is None:
            places = np.arange(self.size) * self.stride
        width = self.block_size + 1
        if isinstance(self.tokens, np.ndarray) and places.max(initial=0) + width <= len(self.tokens):
            windows = np.lib.stride_tricks.sliding_window_view(self.tokens, width)[places].astype(np.int64)
            return windows[:, :-1].copy(), windows[:, 1:].copy()
        inputs = np.zeros((len(places), self.block_size), np.int64)
        targets = np.full_like(inputs, IGNORED)
        for row, place in enumerate(places.tolist()):
            window = np.asarray(self.tokens[place : place + width])
            inputs[row, : len(window)] = window[: self.block_size]
            targets[row, : len(window) - 1] = window[1:]
        return inputs, targets


Part: TypeAlias = ArrayPart | TokenPart


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> Unit: ...
    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Raises DataError where `text` has what the vocabulary lacks."""
        ...

    def encode_all(self, content: bytes) -> Tokens:
        """The tokens of a whole text, as narrow as the vocabulary allows. Also where it is no UTF-8."""
        ...

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Bytes that are no UTF-8 become the replacement character."""
        ...

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """(vocab_size,): the bytes of text that each token stands for, 0 where it is a mark and no text."""
        ...


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set. source: one line saying where it came from and how many samples it has.

    tokenizer: of a text. None for images, and where the tokens came ready-made from one that is not known.
    skipped: files that training does without, because they are damaged, each with the reason.
    """

    spec: Spec
    train: Part
    test: Part
    source: str
    tokenizer: Tokenizer | None = None
    skipped: tuple[str, ...] = ()

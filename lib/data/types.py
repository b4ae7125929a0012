"""Types of data sets: specs, parts and tokenizers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from lib.nn import IGNORED

Images = npt.NDArray[np.uint8]  # (N, C, H, W)
Labels = npt.NDArray[np.int64]  # (N,)
Indices = npt.NDArray[np.int64]  # (N,)
Tokens = npt.NDArray[np.unsignedinteger[Any]]  # (n,), uint8, uint16 or uint32

Unit: TypeAlias = Literal["byte", "char", "token"]
InputDtype: TypeAlias = Literal["float32", "int64"]
Channels: TypeAlias = tuple[float, ...]  # a number per channel


@runtime_checkable
class Spec(Protocol):
    """Facts about a data set that its model and task need: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    input_dtype: ClassVar[InputDtype]

    @property
    def name(self) -> str:
        """Name of the data set."""

    @property
    def synthetic(self) -> bool:
        """True for generated data."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """Images with labels. mean, std: one per channel, for pixels in 0..1."""

    input_dtype: ClassVar[InputDtype] = "float32"

    name: str
    channels: int
    height: int
    width: int
    classes: int
    mean: Channels
    std: Channels
    synthetic: bool

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(f"{self.channels} channels, mean {self.mean} and std {self.std}")
        if not all(each > 0 for each in self.std):  # which images are divided by
            raise ValueError(f"std {self.std} is not above 0")

    @classmethod
    def square(
        cls, name: str, size: int, classes: int, *, mean: Channels, std: Channels, synthetic: bool = False
    ) -> ImageSpec:
        """Return the spec of images of size x size pixels, with a channel per value of `mean`."""
        facts = {"channels": len(mean), "height": size, "width": size, "classes": classes}
        return cls(name=name, **facts, mean=mean, std=std, synthetic=synthetic)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.channels, self.height, self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSpec:
    """Rows of tokens: int64 (N, block_size), each below vocab_size."""

    input_dtype: ClassVar[InputDtype] = "int64"

    name: str
    vocab_size: int
    block_size: int
    synthetic: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (self.block_size,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec(TokensSpec):
    """Text for language modelling: TokenPart. Targets are the next tokens, IGNORED where there is none.

    unit: of tokens and per-token figures. validation_tokens: targets of the evaluation part.
    validation_bytes: their length in UTF-8; None without a tokenizer.
    """

    unit: Unit
    validation_tokens: int = 0
    validation_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PaddedSpec(TokensSpec):
    """Texts with padding, which none of them has: the last id, or, if `published`, one of the tokenizer's."""

    pad: int
    published: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClassSpec(_PaddedSpec):
    """Texts with one label each."""

    classes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTagSpec(_PaddedSpec):
    """Texts with a tag for each word.

    Targets are (N, block_size): the place in `tags` at the last token of each word, IGNORED elsewhere.
    """

    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    values:    its different texts, sorted, of a column of categories; () of a column of numbers.
    mean, std: of the numbers of the training part.
    """

    name: str
    values: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of_numbers(cls, name: str, numbers_N: npt.NDArray[np.float64]) -> Column:
        """Return the column with the mean and deviation of `numbers_N`, without those that are nan."""
        known = numbers_N[~np.isnan(numbers_N)]
        if not len(known):
            return cls(name=name)
        # Rounding of the mean gives equal fractions a deviation such as 1e-17.
        std = 1.0 if known.min() == known.max() else float(known.std())
        return cls(name=name, mean=float(known.mean()), std=std or 1.0)

    def normalised(self, numbers_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Return numbers in standard deviations from the mean, 0 for nan."""
        # In double precision: the mean of, say, a year is large beside its deviation.
        return np.nan_to_num((numbers_N - self.mean) / self.std).astype(np.float32)


def row_text(columns: Sequence[Column], row_F: npt.NDArray[np.float32]) -> str:
    """Return a row of inputs as text: the numbers in their own units, and the categories."""
    texts, place = [], 0
    for column in columns:
        own = row_F[place : place + (len(column.values) or 1)]
        number = float(own[0]) * column.std + column.mean
        value = f"{0 if abs(number) < 1e-6 * column.std else number:.6g}"  # less is rounding of float32
        if column.values:
            value = column.values[int(own.argmax())] if own.any() else "?"
        texts.append(f"{column.name} {value}")
        place += len(own)
    return ", ".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """Rows of a table.

    Inputs are float32 (N, width): numbers less their mean, divided by their standard deviation, and 0 and 1
    for categories, in the order of `columns`.
    """

    input_dtype: ClassVar[InputDtype] = "float32"

    name: str
    columns: tuple[Column, ...]
    synthetic: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (sum(len(column.values) or 1 for column in self.columns),)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec(_Table):
    """Rows of a table with numbers to predict: float32 (N, targets), normalised like inputs."""

    targets: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableClassSpec(_Table):
    """Rows of a table with labels: one per row."""

    classes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLabelsSpec(_Table):
    """Rows of a table with several labels: float32 (N, classes), 1 for those that a row has, else 0."""

    classes: int


LABELLED = ImageSpec, TextClassSpec, TableClassSpec  # specs of data with one label per sample
Labelled: TypeAlias = ImageSpec | TextClassSpec | TableClassSpec


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """Samples as rows of two arrays.

    inputs:  uint8 (N, C, H, W) for images, int64 (N, T) or (N, 2, T) for tokens, uint8 (N, L) for puzzles and
             bytes, float32 (N, F) for tables; possibly a memory map.
    targets: int64 labels (N,), float32 numbers (N, K), uint8 (N, L) for puzzles, int32 tokens or tags (N, K).
    rows:    positions of the part's samples in the arrays; None: all.
    """

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    rows: Indices | None = None

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.targets) if self.rows is None else len(self.rows)

    @property
    def sample_targets(self) -> npt.NDArray[Any]:
        """Targets of the part's samples, in order."""
        return self.targets if self.rows is None else self.targets[self.rows]

    @property
    def byte_size(self) -> int:
        """Size of the inputs as they are stored."""
        return self.size * int(np.prod(self.inputs.shape[1:])) * self.inputs.itemsize

    @property
    def stride(self) -> int:
        """Distance between the positions of consecutive samples."""
        return 1

    def take(self, places: Indices | None = None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return copies of the inputs and targets at positions `places` of this part (default: all)."""
        if places is None:
            places = np.arange(self.size)
        rows = places if self.rows is None else self.rows[places]
        return np.take(self.inputs, rows, axis=0), np.take(self.targets, rows, axis=0)


class Shards:
    """Concatenation of several arrays of tokens without a copy."""

    def __init__(self, arrays: Sequence[Tokens]) -> None:
        assert arrays and len({array.dtype for array in arrays}) == 1
        self._arrays = arrays
        self._ends = [*accumulate(len(array) for array in arrays)]
        self.dtype, self.itemsize, self.ndim = arrays[0].dtype, arrays[0].itemsize, arrays[0].ndim
        self.nbytes = self._ends[-1] * self.itemsize

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, part: slice) -> Shards:
        """Slice without a copy."""
        start, stop, step = part.indices(len(self))
        assert step == 1
        pieces: list[Tokens] = []
        number = bisect_right(self._ends, start)
        while number < len(self._arrays) and start < stop:
            array, offset = self._arrays[number], self._ends[number] - len(self._arrays[number])
            pieces.append(array[start - offset : stop - offset])
            start, number = self._ends[number], number + 1
        return Shards(pieces or [self._arrays[0][:0]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Tokens:
        """Copy all tokens into memory."""
        assert dtype is None and copy is not False
        return np.concatenate(self._arrays) if len(self._arrays) > 1 else self._arrays[0]


@dataclass(frozen=True, slots=True)
class TokenPart:
    """A text as one row of tokens (n,), split into windows of block_size; targets are the next tokens.

    shifted: for training: the windows of an epoch begin at a shift below block_size, and all are full.
             Otherwise they begin at 0 and predict every token but the first exactly once; the last one is
             padded with zeros, and its missing targets are IGNORED.
    """

    tokens: Tokens | Shards
    block_size: int
    shifted: bool = False

    @property
    def size(self) -> int:
        """Number of windows."""
        if self.shifted:
            return len(self.tokens) // self.block_size - 1
        return -(-(len(self.tokens) - 1) // self.block_size)

    @property
    def byte_size(self) -> int:
        """Size of the tokens as they are stored."""
        return self.tokens.nbytes

    @property
    def stride(self) -> int:
        """Distance between the first tokens of consecutive windows."""
        return self.block_size

    def take(self, places: Indices | None = None) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return inputs and targets (N, block_size) of the windows at the tokens `places` (default: all).

        Sample i begins at token i * block_size, plus the shift of the epoch.
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


@runtime_checkable
class Tokenizer(Protocol):
    """Conversion of text to token ids and back.

    name: in CONFIG_TOKENIZER. unit: kind of token, for figures. vocab_size: number of token ids.
    """

    name: str
    unit: Unit
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Encode a text. Raises DataError for characters outside the vocabulary."""

    def encode_all(self, content: bytes) -> Tokens:
        """Encode a whole file in the narrowest type of the vocabulary."""

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Decode tokens; invalid UTF-8 becomes the replacement character."""

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return the bytes of text per token id, (vocab_size,); 0 for special tokens."""

    def to_json(self) -> dict[str, Any]:
        """Return all that `lib.data.tokenizers.tokenizer_from_json` needs to make it again."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """An open data set.

    source: one line with its origin and number of samples. tokenizer: None if there is none or it is unknown.
    skipped: damaged files that are left out, each with the reason. class_names: by label; () for numbers.
    fills_missing: a missing value of a table is replaced, not an error.
    """

    spec: Spec
    train: Part
    test: Part
    source: str
    tokenizer: Tokenizer | None = None
    skipped: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    fills_missing: bool = False

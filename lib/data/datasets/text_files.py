"""Tokenizers and windows, shared by all data sets of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lib.data.datasets.files import DataLocation
from lib.data.datasets.published import Remote
from lib.data.sampler import with_lengths
from lib.data.tokenizers import ByteTokenizer, CharTokenizer, load_gpt2
from lib.data.types import Dataset, Shards, TextSpec, Tokenizer, TokenPart, Tokens, Unit
from lib.errors import ConfigError, DataError
from lib.nn.model_directory import FETCH

INSTEAD = "a language model on CONFIG_DATASET_PYSOURCE=y, which needs no files"

_GPT2 = ("https://openaipublic.blob.core.windows.net/gpt-2/encodings/main",)
GPT2_FOLDERS = ("gpt2_bpe", "gpt2", "")
GPT2_REMOTES = (
    Remote("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783", _GPT2),
    Remote("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5", _GPT2),
)


@runtime_checkable
class WholeTextTokenizer(Protocol):
    """A tokenizer that came with a model: it adds special tokens to a whole text, and has one for padding."""

    def check_rows(self, block_size: int) -> int:
        """Return the id of padding. Raises ConfigError where texts cannot be rows of `block_size` tokens."""

    def encode_whole(self, text: str, longest: int) -> tuple[list[int], bool]:
        """Encode a text with its special tokens, and return True if it is cut to `longest` tokens."""

    def encode_words(self, words: Sequence[str], longest: int) -> tuple[list[int], list[int | None]]:
        """Encode words with blanks between them likewise; return the place of the last token of each.

        None for a word that is cut. Raises DataError for a word without a token.
        """


def block_size_of(location: DataLocation) -> int:
    """Return the context length, which every text needs."""
    assert location.block_size is not None
    return location.block_size


def tokenizer_of(location: DataLocation, *, characters: str | None) -> Tokenizer:
    """Return the requested tokenizer; characters: of the text, for a character tokenizer."""
    if location.tokenizer == "byte":
        return ByteTokenizer()
    if location.tokenizer == "char":
        assert characters is not None
        return CharTokenizer(characters)
    if location.tokenizer == "huggingface":
        if not location.tokenizer_dir:
            todo = "set it to the folder with the model's tokenizer.json"
            raise ConfigError("CONFIG_TOKENIZER_DIR is empty", todo=todo)
        from lib.data.huggingface_tokenizer import HuggingFaceTokenizer  # needs an extra

        folder = (location.root / Path(location.tokenizer_dir).expanduser()).resolve()
        if not folder.is_dir():
            todo = f"name one that has a tokenizer.json; {FETCH} downloads one"
            raise ConfigError(
                f'CONFIG_TOKENIZER_DIR="{location.tokenizer_dir}" is no local directory', todo=todo
            )
        return HuggingFaceTokenizer(folder)
    return load_gpt2(*gpt2_files(location))


def gpt2_files(location: DataLocation) -> list[Path]:
    """Return the files of GPT-2's tokenizer, downloaded if missing. Raises DataError."""
    return location.find_all(
        GPT2_REMOTES, GPT2_FOLDERS, name="GPT-2's tokenizer", instead="CONFIG_TOKENIZER_BYTE=y"
    )


def row_facts(tokenizer: Tokenizer, location: DataLocation) -> dict[str, Any]:
    """Return what a spec of padded texts says of their tokens. Raises ConfigError if they cannot be rows."""
    block_size = block_size_of(location)
    if isinstance(tokenizer, WholeTextTokenizer):
        pad, size = tokenizer.check_rows(block_size), tokenizer.vocab_size
        return {"vocab_size": size, "block_size": block_size, "pad": pad, "published": True}
    return {"vocab_size": tokenizer.vocab_size + 1, "block_size": block_size, "pad": tokenizer.vocab_size}


def padded(
    texts: Sequence[str],
    *,
    tokenizer: Tokenizer,
    block_size: int,
    pad: int,
    places: Sequence[str] = (),
) -> tuple[npt.NDArray[np.int64], int]:
    """Return texts as rows of tokens (N, block_size) with `pad` at the end, and how many are truncated.

    places: of the texts, for messages. Raises DataError for a text that has the token of padding.
    """
    tokens: npt.NDArray[np.int64] = np.full((len(texts), block_size), pad, np.int64)
    truncated = 0
    for number, (row, text) in enumerate(zip(tokens, texts, strict=True)):
        if isinstance(tokenizer, WholeTextTokenizer):
            ids, cut = tokenizer.encode_whole(text, block_size)
        else:
            ids, cut = tokenizer.encode(text)[: block_size + 1], False
        if pad in ids:
            place = places[number] if places else f"text {number + 1}"
            what = f"{place} has the token of padding, {tokenizer.decode([pad])}"
            raise DataError(what, why="a model does not see padding", todo="remove it from the text")
        truncated += cut or len(ids) > block_size
        row[: len(ids)] = ids[:block_size]
    return tokens, truncated


def windows(
    location: DataLocation,
    train: Tokens | Shards,
    validation: Tokens | Shards,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    source: str,
) -> Dataset:
    """Return both parts split into windows of block_size. Raises ConfigError if they are too short."""
    name, block_size = location.name, block_size_of(location)
    if len(train) < 2 * block_size or len(validation) < 2:
        raise ConfigError(
            f"CONFIG_BLOCK_SIZE={block_size} is too large for {name}",
            why=f"it has {len(train)} + {len(validation)} tokens, and training needs two blocks",
            todo="add text" + (f", or set CONFIG_BLOCK_SIZE={most}" if (most := len(train) // 2) else ""),
        )
    unit: Unit = "token" if tokenizer is None else tokenizer.unit
    spec = TextSpec(
        name=name, vocab_size=vocab_size, block_size=block_size, unit=unit, synthetic=name == "markov"
    )
    test = TokenPart(validation, block_size)
    part = TokenPart(train, block_size, shifted=True)
    return Dataset(with_lengths(spec, test, tokenizer), part, test, source, tokenizer)

"""What sets of text share: their tokenizer, and how tokens are cut into windows."""

from __future__ import annotations

from pathlib import Path

from lib.data.datasets.catalogue import GPT2_FOLDERS, GPT2_REMOTES
from lib.data.datasets.files import Place
from lib.data.subset import measured
from lib.data.tokenizers.bpe import load_gpt2
from lib.data.tokenizers.byte_char import ByteTokenizer, CharTokenizer
from lib.data.types import Dataset, Shards, TextSpec, Tokenizer, TokenPart, Tokens, Unit
from lib.errors import ConfigError

INSTEAD = "a language model on CONFIG_DATASET_PYSOURCE=y, which needs no files"


def block_size_of(place: Place) -> int:
    """Tokens that a model sees at once, which is asked of every text."""
    assert place.block_size is not None
    return place.block_size


def check_lengths(name: str, train: int, validation: int, *, block_size: int) -> None:
    """Raise ConfigError where so many tokens are too few."""
    if train < 2 * block_size or validation < 2:
        raise ConfigError(
            f"CONFIG_BLOCK_SIZE={block_size} is too large for {name}",
            why=f"it has {train} + {validation} tokens, and training needs two blocks",
        )


def tokenizer_of(place: Place, *, characters: str | None) -> Tokenizer:
    """The tokenizer that is asked for; characters: those that a text has, for one of characters."""
    if place.tokenizer == "byte":
        return ByteTokenizer()
    if place.tokenizer == "char":
        assert characters is not None
        return CharTokenizer(characters)
    return load_gpt2(*gpt2_files(place))


def gpt2_files(place: Place) -> list[Path]:
    """Those of GPT-2's tokenizer, found or fetched. Raises DataError where that is not possible."""
    return place.have(GPT2_REMOTES, GPT2_FOLDERS, name="GPT-2's tokenizer", instead="CONFIG_TOKENIZER_BYTE=y")


def windows(
    place: Place,
    train: Tokens | Shards,
    validation: Tokens | Shards,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    source: str,
) -> Dataset:
    """Both parts, cut into windows of block_size. Raises ConfigError where they are too short.

    tokenizer: None where the tokens cannot be read as text.
    """
    name, block_size = place.name, block_size_of(place)
    check_lengths(name, len(train), len(validation), block_size=block_size)
    unit: Unit = "token" if tokenizer is None else tokenizer.unit
    spec = TextSpec(
        name=name,
        vocab_size=vocab_size,
        block_size=block_size,
        unit=unit,
        validation_tokens=0,
        validation_bytes=None,
        synthetic=name == "markov",
    )
    test = TokenPart(validation, block_size)
    part = TokenPart(train, block_size, shifted=True)
    return Dataset(measured(spec, test, tokenizer), part, test, source, tokenizer)

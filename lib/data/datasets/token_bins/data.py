"""Tokens that were made elsewhere, as a data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lib.data.datasets.catalogue import GPT2_FOLDERS, GPT2_REMOTES
from lib.data.datasets.files import Place, first_file
from lib.data.datasets.text_files import block_size_of, check_lengths, windows
from lib.data.datasets.token_bins.token_files import map_bins, open_bins
from lib.data.tokenizers.bpe import load_gpt2
from lib.data.types import Dataset, TextSpec, TokenPart

_GPT2_VOCAB_SIZE = 50_257


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/token_bins/Kconfig."""

    vocab_size: int


def outline(options: Options, place: Place) -> Dataset:
    """As many as the files have; where there are none, as many as never end.

    Raises what `open_set` does, but for tokens.
    """
    vocab_size, block_size, data_dir = options.vocab_size, block_size_of(place), place.data_dir
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    lengths, told = (10**8, 10**7), f"any number of tokens below {vocab_size}"
    bins = map_bins(data_dir, vocab_size=vocab_size) if data_dir is not None else None
    if bins is not None:
        lengths = len(bins.train), len(bins.validation)
        told = f"{lengths[0]} + {lengths[1]} tokens in {bins.place}, not opened"
    check_lengths("token_bins", *lengths, block_size=block_size)
    train, test = (
        TokenPart(np.broadcast_to(dtype(0), (length,)), block_size, shifted=shifted)
        for length, shifted in zip(lengths, (True, False), strict=True)
    )
    spec = TextSpec(
        name="token_bins",
        vocab_size=vocab_size,
        block_size=block_size,
        unit="token",
        validation_tokens=lengths[1] - 1,
        validation_bytes=None,
    )
    return Dataset(spec, train, test, f"token_bins: {told}")


def open_set(options: Options, place: Place) -> Dataset:
    """Memory maps of the files. Tokens of GPT-2's vocabulary can be read as text where its tokenizer is.

    Raises DataError where files are missing or damaged, or a token is not below VOCAB_SIZE.
    """
    bins = open_bins(place.files, cache_dir=place.cache_dir, vocab_size=options.vocab_size, say=place.say)
    tokenizer, note = None, "no tokenizer is known for them"
    if options.vocab_size == _GPT2_VOCAB_SIZE:
        folders = [place.files / folder for folder in GPT2_FOLDERS]
        files = [first_file(folder / remote.file for folder in folders) for remote in GPT2_REMOTES]
        if files[0] is not None and files[1] is not None:
            tokenizer, note = load_gpt2(files[0], files[1]), "read with GPT-2's tokenizer"
    source = f"token_bins: {len(bins.train)} + {len(bins.validation)} tokens from {bins.place}, {note}"
    return windows(
        place,
        bins.train,
        bins.validation,
        tokenizer=tokenizer,
        vocab_size=options.vocab_size,
        source=source,
    )

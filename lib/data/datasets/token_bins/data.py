"""Pretokenized data in files of uint16 or uint32, read through memory maps.

Either nothing but tokens (nanoGPT's train.bin and val.bin), or shards with a header of 256 int32: a magic
number, a version and the number of tokens (FineWeb in modded-nanogpt and llm.c).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lib.data.cache import cached_folder, fingerprint
from lib.data.datasets.files import DataLocation, damaged, file_in_place_of, first_file
from lib.data.datasets.text_files import GPT2_FOLDERS, GPT2_REMOTES, windows
from lib.data.datasets.user_files import marks
from lib.data.tokenizers import load_gpt2
from lib.data.types import Dataset, Shards, Tokens
from lib.errors import DataError, os_errors

_HEADER_BYTES = 1024
# (magic number, version) of a header, and the type of the tokens that follow it.
_LAYOUTS: dict[tuple[int, int], type[np.uint16] | type[np.uint32]] = {
    (20240520, 1): np.uint16,
    (20240801, 7): np.uint32,
}
_AT_ONCE = 1 << 26  # tokens scanned at a time


@dataclass(frozen=True, slots=True)
class Bins:
    """Files of the training and of the validation part, and the memory-mapped tokens of each."""

    files: tuple[list[Path], list[Path]]
    shards: tuple[list[Tokens], list[Tokens]]

    @property
    def parts(self) -> tuple[Tokens | Shards, Tokens | Shards]:
        """Tokens of both parts."""
        train, validation = (each[0] if len(each) == 1 else Shards(each) for each in self.shards)
        return train, validation

    @property
    def location(self) -> str:
        """Number and folder of the files."""
        return f"{len(self.files[0])} + {len(self.files[1])} files in {self.files[0][0].parent}"


def map_bins(data_dir: Path, *, vocab_size: int) -> Bins | None:
    """Map the files *train*.bin and *val*.bin of `data_dir`/token_bins or `data_dir`; None without any.

    Of a file of both names, such as retrieval_train.bin, the last word counts. Raises DataError if files
    are missing, damaged or do not belong together.
    """
    folders = (data_dir / "token_bins", data_dir)
    folder = next((path for path in folders if any(path.glob("*train*.bin"))), None)
    if folder is None:
        return None
    every = sorted({*folder.glob("*train*.bin"), *folder.glob("*val*.bin")})
    train = [file for file in every if file.name.rfind("train") > file.name.rfind("val")]
    validation = [file for file in every if file not in train]
    if not validation:
        raise DataError(f"{folder} has no *val*.bin", todo="token_bins needs a validation part, too")
    shards = [_read(file, vocab_size) for file in train], [_read(file, vocab_size) for file in validation]
    for files, arrays in zip((train, validation), shards, strict=True):
        for file, array in zip(files, arrays, strict=True):
            if array.dtype != arrays[0].dtype:
                sizes = f"{arrays[0].itemsize} and {array.itemsize} bytes"
                todo = "make all files of a part alike"
                raise DataError(f"{files[0]} and {file} have tokens of {sizes}", todo=todo)
    return Bins((train, validation), shards)


def _read(file: Path, vocab_size: int) -> Tokens:
    """Memory-map the tokens of one file."""
    with os_errors("read"):
        with file.open("rb") as opened:
            start = opened.read(_HEADER_BYTES)
        size_bytes = file.stat().st_size
    head: npt.NDArray[np.int32] = np.frombuffer(start[: len(start) // 4 * 4], np.int32)[:3]
    magic, version, count = (*head.tolist(), 0, 0, 0)[:3]
    if magic in (known for known, _ in _LAYOUTS):
        if (magic, version) not in _LAYOUTS:
            raise damaged(file, f"version {version} of its layout is not known")
        layout, offset = np.dtype(_LAYOUTS[magic, version]), _HEADER_BYTES
    else:
        layout, offset = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32), 0
        count = size_bytes // layout.itemsize
    if count < 1 or size_bytes != offset + count * layout.itemsize:
        expected = f"{count} tokens of {layout.itemsize} bytes after {offset} bytes"
        raise damaged(file, f"it has {size_bytes} bytes, and should have {expected}")
    return np.memmap(file, layout, mode="r", offset=offset, shape=(count,))


def _check(bins: Bins, location: DataLocation, vocab_size: int) -> None:
    """Raise DataError for a token beyond the vocabulary, which on a device is an obscure error.

    The files are scanned once, remembered in the cache.
    """
    files, shards = [*bins.files[0], *bins.files[1]], [*bins.shards[0], *bins.shards[1]]

    def fill(target: Path) -> None:
        location.log(f"token_bins: looking through {sum(map(len, shards))} tokens, once")
        largest = [
            max(int(shard[start : start + _AT_ONCE].max()) for start in range(0, len(shard), _AT_ONCE))
            for shard in shards
        ]
        (target / "largest.json").write_text(json.dumps(largest))

    folder = location.cache_dir / f"token_bins-{fingerprint(files[0].parent)[:8]}"
    dtypes = (shard.dtype.name for shard in shards)  # of files without a header VOCAB_SIZE decides
    identity = fingerprint("token_bins", *dtypes, *marks(files))
    cached_folder(folder, identity=identity, fill=fill, log=location.log)
    for file, largest in zip(files, json.loads((folder / "largest.json").read_text()), strict=True):
        if largest >= vocab_size:
            raise DataError(
                f"{file} has the token {largest}",
                why=f"CONFIG_VOCAB_SIZE={vocab_size}",
                todo="set CONFIG_VOCAB_SIZE to the size of the vocabulary it was made with",
            )


_GPT2_VOCAB_SIZE = 50_257


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/token_bins/Kconfig."""

    vocab_size: int


def describe(options: Options, location: DataLocation) -> Dataset:
    """Return the metadata by the sizes of the files, or of a large set without files. Raises DataError."""
    vocab_size, data_dir = options.vocab_size, location.data_dir
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    lengths, content = (10**8, 10**7), "no files yet; 100,000,000 + 10,000,000 tokens are assumed"
    bins = map_bins(data_dir, vocab_size=vocab_size) if data_dir is not None else None
    if bins is not None:
        lengths = len(bins.parts[0]), len(bins.parts[1])
        content = f"{lengths[0]} + {lengths[1]} tokens in {bins.location}, not opened"
    zeros: list[Tokens] = [np.broadcast_to(dtype(0), (length,)) for length in lengths]
    source = f"token_bins: {content}"
    return windows(location, zeros[0], zeros[1], tokenizer=None, vocab_size=vocab_size, source=source)


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Memory-map the files, with GPT-2's tokenizer for its vocabulary if it is there.

    Raises DataError if files are missing or damaged, or a token is not below VOCAB_SIZE.
    """
    data_dir, vocab_size = location.files, options.vocab_size
    bins = map_bins(data_dir, vocab_size=vocab_size)
    if bins is None:
        raise DataError(
            f"data set token_bins is not there: no *train*.bin in {data_dir / 'token_bins'} or {data_dir}",
            why=file_in_place_of(data_dir),
            todo="put train.bin and val.bin there, or shards such as fineweb_train_000001.bin",
        )
    _check(bins, location, vocab_size)
    tokenizer, note = None, "no tokenizer is known for them"
    if vocab_size == _GPT2_VOCAB_SIZE:
        folders = [data_dir / folder for folder in GPT2_FOLDERS]
        files = [first_file(folder / remote.file for folder in folders) for remote in GPT2_REMOTES]
        if files[0] is not None and files[1] is not None:
            tokenizer, note = load_gpt2(files[0], files[1]), "read with GPT-2's tokenizer"
    train, validation = bins.parts
    source = f"token_bins: {len(train)} + {len(validation)} tokens from {bins.location}, {note}"
    return windows(location, train, validation, tokenizer=tokenizer, vocab_size=vocab_size, source=source)

"""Open a data set of text: find it, make tokens of it once, cut it into windows or rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from lib.data.cache import cached_folder, fingerprint
from lib.data.datasets import sst2
from lib.data.datasets.catalogue import (
    GPT2_FOLDERS,
    GPT2_REMOTES,
    SHAKESPEARE_FOLDERS,
    SHAKESPEARE_REMOTES,
    SHAKESPEARE_TRAIN_SHARE,
    SST2_FOLDERS,
    SST2_REMOTES,
    WIKITEXT,
    WIKITEXT_FILES,
    Remote,
)
from lib.data.datasets.corpus import Corpus, one_file, python_library, text_files, two_files
from lib.data.datasets.files import find_or_fetch, first_file, marks
from lib.data.datasets.markov import markov
from lib.data.datasets.token_files import open_bins
from lib.data.subset import measured
from lib.data.tokenizers.bpe import load_gpt2
from lib.data.tokenizers.byte_char import ByteTokenizer, CharTokenizer, as_text
from lib.data.types import (
    Dataset,
    Shards,
    TextClassSpec,
    TextSpec,
    Tokenizer,
    TokenPart,
    Tokens,
    Unit,
)
from lib.errors import ConfigError, DataError

TokenizerName: TypeAlias = Literal["byte", "char", "gpt2"]

NAMES = ("pysource", "markov", "shakespeare", *WIKITEXT, "text_files", "token_bins", "sst2")
VERSION = 1  # raise it whenever a token changes
_GPT2_VOCAB_SIZE = 50_257
_INSTEAD = "a language model on CONFIG_DATASET_PYSOURCE=y, which needs no files"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What is asked of a text.

    tokenizer: None for token_bins, whose vocab_size (else None) is asked for instead.
    block_size: tokens that a model sees at once.
    """

    tokenizer: TokenizerName | None
    vocab_size: int | None
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where files are looked for (None: nowhere) and downloaded to, and where what is made is kept."""

    data_dir: Path | None
    cache_dir: Path
    download: bool
    say: Callable[[str], None]

    @property
    def files(self) -> Path:
        """DATA_DIR, for what is made of files."""
        assert self.data_dir is not None
        return self.data_dir

    def have(
        self, remotes: tuple[Remote, ...], folders: tuple[str, ...], *, name: str, instead: str
    ) -> list[Path]:
        """The files of `remotes`, all from one of `folders` below DATA_DIR, or fetched into the first."""
        for folder in folders:
            found = [self.files / folder / remote.file for remote in remotes]
            if all(file.is_file() for file in found):
                return found
        get = partial(find_or_fetch, name=name, download=self.download, instead=instead, say=self.say)
        return [get(remote, self.files / folders[0]) for remote in remotes]


def open_text(name: str, options: TextOptions, place: Place) -> Dataset:
    """Open the data set `name` (one of NAMES).

    Raises DataError where it or the files of its tokenizer are missing or damaged, ConfigError where
    it is shorter than block_size, ToolkitError where the disk fails.
    """
    if name == "token_bins":
        return _open_bins(options, place)
    if name == "sst2":
        return _open_sst2(options, place)
    corpus = _corpus(name, place)
    folder = _packed(name, corpus, options, place)
    known = json.loads((folder / "text.json").read_text())
    tokenizer = _tokenizer(options, place, characters=known["characters"])
    train, validation = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "validation"))
    source = (
        f"{name}: {len(train)} + {len(validation)} {tokenizer.unit}s from {corpus.place}, "
        f"{known['remark']}SHA-256 {known['sha256'][:16]}"
    )
    return _windows(name, train, validation, options, tokenizer=tokenizer, source=source)


def check_lengths(name: str, train: int, validation: int, *, block_size: int) -> None:
    """Raise ConfigError where so many tokens are too few."""
    if train < 2 * block_size or validation < 2:
        raise ConfigError(
            f"CONFIG_BLOCK_SIZE={block_size} is too large for {name}",
            why=f"it has {train} + {validation} tokens, and training needs two blocks",
        )


def _corpus(name: str, place: Place) -> Corpus:
    if name == "pysource":
        return python_library()
    if name == "markov":
        return markov()
    if name == "text_files":
        return text_files(_text_root(place), say=place.say)
    if name == "shakespeare":
        (file,) = place.have(
            SHAKESPEARE_REMOTES, SHAKESPEARE_FOLDERS, name=f"data set {name}", instead=_INSTEAD
        )
        return one_file(file, train_share=SHAKESPEARE_TRAIN_SHARE)
    wanted = WIKITEXT[name]
    for folder in wanted.folders:
        for train, validation in WIKITEXT_FILES:
            files = place.files / folder / train, place.files / folder / validation
            if all(file.is_file() for file in files):
                return two_files(*files, words=wanted.words)
    spellings = ", or ".join(f"{train} and {validation}" for train, validation in WIKITEXT_FILES)
    raise DataError(
        f"data set {name} is not there: no {spellings} in {place.files / wanted.folders[0]} or {place.files}",
        why="it cannot be downloaded: no mirror of it with a published hash is known",
        todo=f"put them there, or use {_INSTEAD}",
    )


def _text_root(place: Place) -> Path:
    """DATA_DIR/text_files, or DATA_DIR itself, which must then not be where caches are kept."""
    own = place.files / "text_files"
    if own.exists():
        return own
    if place.files.exists() and place.files.resolve() != place.cache_dir.resolve():
        return place.files
    raise DataError(
        f"data set text_files is not there: no {own}",
        todo="put a file or a folder of texts there, or point CONFIG_DATA_DIR to one",
    )


def _packed(name: str, corpus: Corpus, options: TextOptions, place: Place) -> Path:
    """A folder with the tokens of both parts, made once."""
    vocabulary = _gpt2_files(place) if options.tokenizer == "gpt2" else []

    def fill(folder: Path) -> None:
        texts = corpus.read()
        whole = texts.train + texts.validation
        place.say(f"{name}: making tokens of {len(whole)} bytes in {place.cache_dir}")
        characters = "".join(sorted(set(as_text(whole)))) if options.tokenizer == "char" else None
        tokenizer = _tokenizer(options, place, characters=characters)
        np.save(folder / "train.npy", tokenizer.encode_all(texts.train))
        np.save(folder / "validation.npy", tokenizer.encode_all(texts.validation))
        remark = f"{texts.remark}, " if texts.remark else ""
        known = {"sha256": hashlib.sha256(whole).hexdigest(), "characters": characters, "remark": remark}
        (folder / "text.json").write_text(json.dumps(known))

    return cached_folder(
        place.cache_dir / f"{name}-{options.tokenizer}-{fingerprint(corpus.place)[:8]}",
        identity=fingerprint("text", VERSION, options.tokenizer, corpus.identity, *marks(vocabulary)),
        fill=fill,
        say=place.say,
    )


def _tokenizer(options: TextOptions, place: Place, *, characters: str | None) -> Tokenizer:
    if options.tokenizer == "byte":
        return ByteTokenizer()
    if options.tokenizer == "char":
        assert characters is not None
        return CharTokenizer(characters)
    return load_gpt2(*_gpt2_files(place))


def _gpt2_files(place: Place) -> list[Path]:
    return place.have(GPT2_REMOTES, GPT2_FOLDERS, name="GPT-2's tokenizer", instead="CONFIG_TOKENIZER_BYTE=y")


def _windows(
    name: str,
    train: Tokens | Shards,
    validation: Tokens | Shards,
    options: TextOptions,
    *,
    tokenizer: Tokenizer | None,
    source: str,
) -> Dataset:
    check_lengths(name, len(train), len(validation), block_size=options.block_size)
    unit: Unit = "token" if tokenizer is None else tokenizer.unit
    vocab_size = options.vocab_size if tokenizer is None else tokenizer.vocab_size
    assert vocab_size is not None
    spec = TextSpec(
        name=name,
        vocab_size=vocab_size,
        block_size=options.block_size,
        unit=unit,
        validation_tokens=0,
        validation_bytes=None,
        synthetic=name == "markov",
    )
    test = TokenPart(validation, options.block_size)
    part = TokenPart(train, options.block_size, shifted=True)
    return Dataset(measured(spec, test, tokenizer), part, test, source, tokenizer)


def _open_bins(options: TextOptions, place: Place) -> Dataset:
    """Tokens of GPT-2's vocabulary can be read as text where the files of its tokenizer are."""
    assert options.vocab_size is not None
    bins = open_bins(place.files, cache_dir=place.cache_dir, vocab_size=options.vocab_size, say=place.say)
    tokenizer, note = None, "no tokenizer is known for them"
    if options.vocab_size == _GPT2_VOCAB_SIZE:
        folders = [place.files / folder for folder in GPT2_FOLDERS]
        files = [first_file(folder / remote.file for folder in folders) for remote in GPT2_REMOTES]
        if files[0] is not None and files[1] is not None:
            tokenizer, note = load_gpt2(files[0], files[1]), "read with GPT-2's tokenizer"
    source = f"token_bins: {len(bins.train)} + {len(bins.validation)} tokens from {bins.place}, {note}"
    return _windows("token_bins", bins.train, bins.validation, options, tokenizer=tokenizer, source=source)


def _open_sst2(options: TextOptions, place: Place) -> Dataset:
    files = place.have(SST2_REMOTES, SST2_FOLDERS, name="data set sst2", instead=_INSTEAD)
    read = [sst2.read_sentences(file) for file in files]
    characters = sorted({character for texts, _ in read for text in texts for character in text})
    tokenizer = _tokenizer(options, place, characters="".join(characters))
    pad = tokenizer.vocab_size
    (train, train_cut), (test, test_cut) = (
        sst2.rows(texts, labels, tokenizer=tokenizer, block_size=options.block_size, pad=pad)
        for texts, labels in read
    )
    spec = TextClassSpec(
        name="sst2",
        vocab_size=pad + 1,
        block_size=options.block_size,
        classes=sst2.CLASSES,
        pad=pad,
    )
    source = (
        f"sst2: {train.size} + {test.size} sentences from {files[0].parent}, "
        f"{train_cut} + {test_cut} of them cut at {options.block_size} {tokenizer.unit}s"
    )
    return Dataset(spec, train, test, source, tokenizer)

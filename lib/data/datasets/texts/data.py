"""Texts for language models: tokenized once, split into windows."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np

from lib.data.cache import cached_folder, fingerprint
from lib.data.datasets.files import DataLocation
from lib.data.datasets.published import Remote
from lib.data.datasets.text_files import INSTEAD, gpt2_files, tokenizer_of, windows
from lib.data.datasets.texts.corpus import Corpus, one_file, python_library, text_files, two_files
from lib.data.datasets.texts.markov import markov
from lib.data.datasets.user_files import marks
from lib.data.tokenizers import as_text
from lib.data.types import Dataset
from lib.errors import DataError
from lib.plugins import NoOptions as Options

VERSION = 1  # raise it whenever a token changes


# File names of WikiText; no mirror with a published SHA-256 is known.
WIKITEXT_FILES = tuple(
    (name.format("train"), name.format("valid")) for name in ("wiki.{}.tokens", "wiki.{}.raw", "{}.txt")
)
# Folders below DATA_DIR, in search order; words of the training and the validation file, line ends included.
WIKITEXT = {
    "wikitext2": (("wikitext2", "wikitext-2", "wikitext-2-raw", ""), (2_088_628, 217_646)),
    "wikitext103": (("wikitext103", "wikitext-103", "wikitext-103-raw", ""), (103_227_021, 217_646)),
}

SHAKESPEARE_FOLDERS = ("shakespeare", "tinyshakespeare", "")
_SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",)
SHAKESPEARE_REMOTES = (
    Remote("input.txt", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", _SHAKESPEARE),
)
SHAKESPEARE_TRAIN_SHARE = 0.9  # of its characters, as in nanoGPT


def open_set(_: Options, location: DataLocation) -> Dataset:
    """Open a text, tokenized into the cache on first use.

    Raises DataError for missing or damaged files, ConfigError if it is shorter than block_size, ToolkitError.
    """
    corpus = _corpus(location)
    folder = _packed(corpus, location)
    known = json.loads((folder / "text.json").read_text())
    tokenizer = tokenizer_of(location, characters=known["characters"])
    train, validation = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "validation"))
    source = (
        f"{location.name}: {len(train)} + {len(validation)} {tokenizer.unit}s from {corpus.location}, "
        f"{known['remark']}SHA-256 {known['sha256'][:16]}"
    )
    vocab_size = tokenizer.vocab_size
    return windows(location, train, validation, tokenizer=tokenizer, vocab_size=vocab_size, source=source)


def _corpus(location: DataLocation) -> Corpus:
    name, utf8 = location.name, location.tokenizer != "byte"
    if name == "pysource":
        return python_library()
    if name == "markov":
        return markov()
    if name == "text_files":
        return text_files(_text_root(location), utf8=utf8, log=location.log)
    if name == "shakespeare":
        (file,) = location.find_all(
            SHAKESPEARE_REMOTES, SHAKESPEARE_FOLDERS, name=f"data set {name}", instead=INSTEAD
        )
        return one_file(file, train_share=SHAKESPEARE_TRAIN_SHARE, utf8=utf8)
    (folders, words), files = WIKITEXT[name], location.files
    for folder, (train, validation) in itertools.product(folders, WIKITEXT_FILES):
        parts = files / folder / train, files / folder / validation
        if all(file.is_file() for file in parts):
            return two_files(*parts, words=words, utf8=utf8)
    spellings = ", or ".join(f"{train} and {validation}" for train, validation in WIKITEXT_FILES)
    raise DataError(
        f"data set {name} is not there: no {spellings} in {files / folders[0]} or {files}",
        why="it cannot be downloaded: no mirror of it with a published hash is known",
        todo=f"put them there, or use {INSTEAD}",
    )


def _text_root(location: DataLocation) -> Path:
    """Return DATA_DIR/text_files, or DATA_DIR itself unless it holds the caches."""
    own = location.files / "text_files"
    if own.exists():
        return own
    if location.files.exists() and location.files.resolve() != location.cache_dir.resolve():
        return location.files
    raise DataError(
        f"data set text_files is not there: no {own}",
        todo="put a file or a folder of texts there, or point CONFIG_DATA_DIR to one",
    )


def _packed(corpus: Corpus, location: DataLocation) -> Path:
    """Return the cached folder with the tokens of both parts."""
    name = location.name
    vocabulary = gpt2_files(location) if location.tokenizer == "gpt2" else []

    def fill(folder: Path) -> None:
        texts = corpus.read()
        whole = texts.train + texts.validation
        location.log(f"{name}: making tokens of {len(whole)} bytes in {location.cache_dir}")
        characters = "".join(sorted(set(as_text(whole)))) if location.tokenizer == "char" else None
        tokenizer = tokenizer_of(location, characters=characters)
        np.save(folder / "train.npy", tokenizer.encode_all(texts.train))
        np.save(folder / "validation.npy", tokenizer.encode_all(texts.validation))
        remark = f"{texts.remark}, " if texts.remark else ""
        known = {"sha256": hashlib.sha256(whole).hexdigest(), "characters": characters, "remark": remark}
        (folder / "text.json").write_text(json.dumps(known))

    return cached_folder(
        location.cache_dir / f"{name}-{location.tokenizer}-{fingerprint(corpus.location)[:8]}",
        identity=fingerprint("text", VERSION, location.tokenizer, corpus.identity, *marks(vocabulary)),
        fill=fill,
        log=location.log,
    )

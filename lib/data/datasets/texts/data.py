"""Texts for language models: found, made tokens of once, cut into windows."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.data.cache import cached_folder, fingerprint
from lib.data.datasets.catalogue import (
    SHAKESPEARE_FOLDERS,
    SHAKESPEARE_REMOTES,
    SHAKESPEARE_TRAIN_SHARE,
    WIKITEXT,
    WIKITEXT_FILES,
)
from lib.data.datasets.files import Place, marks
from lib.data.datasets.text_files import INSTEAD, gpt2_files, tokenizer_of, windows
from lib.data.datasets.texts.corpus import Corpus, one_file, python_library, text_files, two_files
from lib.data.datasets.texts.markov import markov
from lib.data.tokenizers.byte_char import as_text
from lib.data.types import Dataset
from lib.errors import DataError

VERSION = 1  # raise it whenever a token changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No symbols of its own."""


def outline(_: Options, place: Place) -> None:
    """Of a text only the contents tell the vocabulary and the length."""


def open_set(_: Options, place: Place) -> Dataset:
    """Tokens of the text, made into the cache on first use.

    Raises DataError where it or the files of its tokenizer are missing or damaged, ConfigError where
    it is shorter than block_size, ToolkitError where the disk fails.
    """
    corpus = _corpus(place)
    folder = _packed(corpus, place)
    known = json.loads((folder / "text.json").read_text())
    tokenizer = tokenizer_of(place, characters=known["characters"])
    train, validation = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "validation"))
    source = (
        f"{place.name}: {len(train)} + {len(validation)} {tokenizer.unit}s from {corpus.place}, "
        f"{known['remark']}SHA-256 {known['sha256'][:16]}"
    )
    vocab_size = tokenizer.vocab_size
    return windows(place, train, validation, tokenizer=tokenizer, vocab_size=vocab_size, source=source)


def _corpus(place: Place) -> Corpus:
    name = place.name
    if name == "pysource":
        return python_library()
    if name == "markov":
        return markov()
    if name == "text_files":
        return text_files(_text_root(place), say=place.say)
    if name == "shakespeare":
        (file,) = place.have(
            SHAKESPEARE_REMOTES, SHAKESPEARE_FOLDERS, name=f"data set {name}", instead=INSTEAD
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
        todo=f"put them there, or use {INSTEAD}",
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


def _packed(corpus: Corpus, place: Place) -> Path:
    """A folder with the tokens of both parts, made once."""
    name = place.name
    vocabulary = gpt2_files(place) if place.tokenizer == "gpt2" else []

    def fill(folder: Path) -> None:
        texts = corpus.read()
        whole = texts.train + texts.validation
        place.say(f"{name}: making tokens of {len(whole)} bytes in {place.cache_dir}")
        characters = "".join(sorted(set(as_text(whole)))) if place.tokenizer == "char" else None
        tokenizer = tokenizer_of(place, characters=characters)
        np.save(folder / "train.npy", tokenizer.encode_all(texts.train))
        np.save(folder / "validation.npy", tokenizer.encode_all(texts.validation))
        remark = f"{texts.remark}, " if texts.remark else ""
        known = {"sha256": hashlib.sha256(whole).hexdigest(), "characters": characters, "remark": remark}
        (folder / "text.json").write_text(json.dumps(known))

    return cached_folder(
        place.cache_dir / f"{name}-{place.tokenizer}-{fingerprint(corpus.place)[:8]}",
        identity=fingerprint("text", VERSION, place.tokenizer, corpus.identity, *marks(vocabulary)),
        fill=fill,
        say=place.say,
    )

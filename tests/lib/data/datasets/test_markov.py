"""The synthetic text: it is the chain that it says, its entropy rate is the one it tells, it is labelled."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from lib.data import TextSpec
from lib.data.datasets.texts import markov as markov_module
from lib.data.datasets.texts.markov import ALPHABET, entropy_bits, markov, transitions
from lib.data.ngram_baseline import cross_entropies
from tests.support.datasets import opened

ROOT = Path(__file__).resolve().parents[4]
SIZE = len(ALPHABET)


def chances() -> np.ndarray:
    """(before the last, last, next)."""
    slots = transitions()
    return np.stack([(slots == symbol).mean(axis=2) for symbol in range(SIZE)], axis=2)


def test_the_entropy_rate_is_that_of_the_chain() -> None:
    """The long way round: the stationary distribution over pairs, and the entropy after each."""
    chance = chances()
    step = np.zeros((SIZE * SIZE, SIZE * SIZE))
    for before in range(SIZE):
        for last in range(SIZE):
            step[before * SIZE + last, last * SIZE : (last + 1) * SIZE] = chance[before, last]
    pairs = np.full(SIZE * SIZE, 1 / SIZE**2)
    for _ in range(500):
        pairs = pairs @ step
    assert np.abs(pairs @ step - pairs).max() < 1e-12
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.nan_to_num(-chance * np.log2(chance))
    rate = float(pairs @ surprise.sum(axis=2).ravel())
    assert entropy_bits() == pytest.approx(rate, abs=1e-12)
    assert 1 < entropy_bits() < 4
    help_text = (ROOT / "lib/data/datasets/texts/Kconfig").read_text()
    assert f"{entropy_bits() * np.log(2):.4f} nats per character" in " ".join(help_text.split())


def test_the_last_character_alone_does_not_tell_all() -> None:
    """A model that sees one character only stays above the floor."""
    chance = chances()
    assert np.abs(chance[0] - chance[1]).max() > 0.1
    assert ((chance > 0).sum(axis=2) == 8).all()


@pytest.mark.slow
def test_the_text_is_a_walk_of_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markov_module, "TRAIN_BYTES", 200_000)
    monkeypatch.setattr(markov_module, "VALIDATION_BYTES", 50_000)
    texts = markov().read()
    assert (len(texts.train), len(texts.validation)) == (200_000, 50_000)
    symbols = np.array([ALPHABET.index(byte) for byte in texts.train + texts.validation])
    surprise = -np.log2(chances()[symbols[:-2], symbols[1:-1], symbols[2:]])
    assert np.isfinite(surprise).all(), "no character that the chain forbids"
    error = surprise.std() / len(surprise) ** 0.5
    assert surprise.mean() == pytest.approx(entropy_bits(), abs=4 * error)
    # Counting cannot get below the floor, and three characters are what there is to count.
    tokens = np.frombuffer(texts.train, np.uint8), np.frombuffer(texts.validation, np.uint8)
    bits = cross_entropies(*tokens, vocab_size=256)
    assert min(bits) > entropy_bits() and bits[2] < min(bits[:2]) and bits[2] < entropy_bits() + 0.2
    # The same on every machine.
    assert hashlib.sha256(texts.train).hexdigest()[:16] == "c447b1eca1281ce8"


def test_it_needs_no_files_and_is_labelled_synthetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markov_module, "TRAIN_BYTES", 2_000)
    monkeypatch.setattr(markov_module, "VALIDATION_BYTES", 500)
    dataset = opened("markov", cache_dir=tmp_path, tokenizer="char", block_size=8)
    spec = dataset.spec
    assert isinstance(spec, TextSpec) and spec.synthetic and spec.vocab_size <= SIZE
    assert re.search(r"2000 \+ 500 chars.*synthetic, entropy rate 2\.4\d+ bits per byte", dataset.source)

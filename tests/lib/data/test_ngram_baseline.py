"""Counting floors: probabilities that add up to one, and figures one can check by hand."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lib.data import Dataset, TextSpec, TokenPart
from lib.data import ngram_baseline as floors_module
from lib.data.ngram_baseline import cross_entropies, ngram_baseline
from lib.data.tokenizers import ByteTokenizer, CharTokenizer


def _text(length: int, vocab_size: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A chain in which each token depends on the two before it."""
    chance, tokens = np.random.default_rng(seed), [0, 1]
    for _ in range(length - 2):
        likely = (3 * tokens[-1] + tokens[-2]) % vocab_size
        tokens.append(likely if chance.random() < 0.7 else int(chance.integers(vocab_size)))
    return np.array(tokens, np.uint8)


@pytest.mark.parametrize("vocab_size", [3, 5])
def test_the_probabilities_of_all_tokens_add_up_to_one(vocab_size: int) -> None:
    counted, context = _text(60, vocab_size), _text(7, vocab_size, seed=5)
    for length in range(1, 7):
        # What the last token adds to the sum of bits is its own.
        before, sums = np.zeros(4), np.zeros(4)
        if length > 1:
            before += cross_entropies(counted, context[:length], vocab_size=vocab_size)
        for token in range(vocab_size):
            text = np.append(context[:length], token).astype(np.uint8)
            bits = np.array(cross_entropies(counted, text, vocab_size=vocab_size)) * length
            sums += 2.0 ** -(bits - before * (length - 1))
        assert np.allclose(sums, 1), length


def _plainly(counted: list[int], text: list[int], order: int, vocab_size: int) -> float:
    """Kneser-Ney with dictionaries, a token at a time."""

    def mixed(grams: Counter[tuple[int, ...]], gram: tuple[int, ...]) -> float:
        values = list(grams.values())
        once, twice = values.count(1), values.count(2)
        discount = once / (once + 2 * twice) if once else 0.5
        same = {g: count for g, count in grams.items() if g[:-1] == gram[:-1]}
        shorter = lower(gram[1:])
        if not same:
            return shorter
        left = max(grams[gram] - discount, 0) + discount * len(same) * shorter
        return left / sum(same.values())

    def grams_of(size: int) -> list[tuple[int, ...]]:
        return [tuple(counted[place : place + size]) for place in range(len(counted) - size + 1)]

    def lower(gram: tuple[int, ...]) -> float:
        if not gram:
            return 1 / vocab_size
        return mixed(Counter(longer[1:] for longer in set(grams_of(len(gram) + 1))), gram)

    total = 0.0
    for place in range(1, len(text)):
        gram = tuple(text[max(0, place - order + 1) : place + 1])
        # A context at the very beginning is a shorter one, and is treated as one that is backed off to.
        chance = mixed(Counter(grams_of(order)), gram) if len(gram) == order else lower(gram)
        total -= math.log2(chance)
    return total / (len(text) - 1)


def test_figures_agree_with_counting_one_by_one() -> None:
    counted, text = _text(150, 4), _text(40, 4, seed=2)
    expected = [_plainly(counted.tolist(), text.tolist(), order, 4) for order in (1, 2, 3, 4)]
    assert cross_entropies(counted, text, vocab_size=4) == pytest.approx(expected, rel=1e-12)


def test_one_gram_of_frequent_tokens_is_the_entropy_of_their_shares() -> None:
    counted = np.array([0] * 3000 + [1] * 1000, np.uint8)
    text = np.array([1, *[0] * 300, *[1] * 100], np.uint8)
    entropy = -0.75 * math.log2(0.75) - 0.25 * math.log2(0.25)
    assert cross_entropies(counted, text, vocab_size=2)[0] == pytest.approx(entropy, abs=1e-3)


@pytest.mark.parametrize("vocab_size", [5, 256, 50_257, 65_536])
def test_a_longer_context_helps_where_it_tells_something_whatever_the_vocabulary(vocab_size: int) -> None:
    counted, text = (_text(4000, 5, seed=seed).astype(np.uint32) for seed in (0, 1))
    high = vocab_size - 5  # the same text with the largest ids there are
    bits = cross_entropies(counted + high, text + high, vocab_size=vocab_size)
    assert len(bits) == 4 and bits[0] > bits[1] - 0.1 and bits[2] < bits[1] - 0.5
    few = cross_entropies(counted, text, vocab_size=5)
    assert bits == pytest.approx(few, rel=0.01), "only what was never seen depends on the vocabulary"


def test_a_huge_vocabulary_has_fewer_orders() -> None:
    assert len(cross_entropies(_text(99, 5), _text(20, 5), vocab_size=1 << 20)) == 3


def _dataset() -> Dataset:
    toy = TextSpec(
        name="toy", vocab_size=256, block_size=8, unit="byte", validation_tokens=0, validation_bytes=0
    )
    parts = (TokenPart(_text(500, 7), 8, shifted=True), TokenPart(_text(90, 7, seed=3), 8))
    return Dataset(toy, *parts, "toy", ByteTokenizer())


def test_floors_are_kept_and_made_again_for_another_text(tmp_path: Path) -> None:
    said: list[str] = []
    first = ngram_baseline(_dataset(), cache_dir=tmp_path, log=said.append)
    again = ngram_baseline(_dataset(), cache_dir=tmp_path, log=said.append)
    assert first == again and len(said) == 1 and "counting n-grams of 500 bytes" in said[0]
    assert first.bits == first.bits_per_byte and first.validation_tokens == 89 and first.train_tokens == 500
    assert str(first).endswith("bits per byte by counting 1- to 4-grams of bytes")
    dataset = _dataset()
    other = Dataset(dataset.spec, TokenPart(_text(500, 7, seed=9), 8, shifted=True), dataset.test, "toy")
    found = ngram_baseline(other, cache_dir=tmp_path, log=said.append)
    assert len(said) == 2 and found.bits != first.bits
    assert found.bits_per_byte is None and "bits per byte by" in str(found), "its unit is the byte"
    evaluated = Dataset(dataset.spec, dataset.train, TokenPart(_text(90, 7, seed=4), 8), "toy")
    assert ngram_baseline(evaluated, cache_dir=tmp_path, log=said.append).bits != first.bits
    assert len(said) == 3


def test_bits_per_byte_weigh_tokens_by_their_bytes(tmp_path: Path) -> None:
    tokenizer = CharTokenizer("aé")
    spec = TextSpec(
        name="toy", vocab_size=2, block_size=4, unit="char", validation_tokens=0, validation_bytes=0
    )
    text = tokenizer.encode_all(("aéé" * 30).encode())
    dataset = Dataset(spec, TokenPart(text, 4, shifted=True), TokenPart(text[:10], 4), "toy", tokenizer)
    found = ngram_baseline(dataset, cache_dir=tmp_path, log=lambda _: None)
    assert found.bits_per_byte == pytest.approx([bits * 9 / (6 * 2 + 3 * 1) for bits in found.bits])


def test_only_the_beginning_of_a_long_text_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floors_module, "_MAX_TOKENS", 50)
    found = ngram_baseline(_dataset(), cache_dir=tmp_path, log=lambda _: None)
    assert (found.train_tokens, found.validation_tokens) == (50, 49)
    assert str(found).endswith("of bytes, the first 50 of a part")
    dataset = _dataset()
    short = Dataset(dataset.spec, TokenPart(_text(40, 7), 8, shifted=True), dataset.test, "toy")
    assert ngram_baseline(short, cache_dir=tmp_path, log=lambda _: None).truncated

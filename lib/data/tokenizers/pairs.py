"""A tokenizer of pairs of bytes, learned from texts that are cut into words as GPT-2 cuts them.

Sennrich, Haddow and Birch 2016.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from lib.data.tokenizers.bpe import GPT2Tokenizer, pieces

Pair = tuple[bytes, bytes]


def learned(texts: Iterable[str], *, merges: int) -> GPT2Tokenizer:
    """All bytes, and what at most `merges` merges of the most frequent pair make.

    Of pairs that are as frequent the first by its bytes is merged first. Fewer, where words are used up.
    """
    counts = Counter(word.encode() for text in texts for word in pieces(text))
    words = [([bytes((byte,)) for byte in word], count) for word, count in sorted(counts.items())]
    found: list[Pair] = []
    for _ in range(merges):
        frequency: Counter[Pair] = Counter()
        for parts, count in words:
            for pair in pairwise(parts):
                frequency[pair] += count
        if not frequency:
            break
        best = min(frequency, key=lambda pair: (-frequency[pair], pair))
        found.append(best)
        words = [(_merged(parts, best), count) for parts, count in words]
    ids = {bytes((byte,)): byte for byte in range(256)}
    for left, right in found:
        ids.setdefault(left + right, len(ids))  # two pairs may make the same
    return GPT2Tokenizer(ids, found, end=None)


def _merged(parts: list[bytes], pair: Pair) -> list[bytes]:
    made: list[bytes] = []
    place = 0
    while place < len(parts):
        if tuple(parts[place : place + 2]) == pair:
            made.append(pair[0] + pair[1])
            place += 2
        else:
            made.append(parts[place])
            place += 1
    return made

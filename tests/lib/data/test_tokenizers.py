"""Tokenizers: bytes, characters, and GPT-2's pairs of bytes."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data import tokenizers as bpe
from lib.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    load_gpt2,
    narrowest,
    pieces,
    tokenizer_from_json,
)
from lib.errors import DataError, ToolkitError

# The published files, where a checkout has them.
FOLDER = Path(__file__).resolve().parents[3] / "data" / "gpt2_bpe"
PUBLISHED = FOLDER / "encoder.json", FOLDER / "vocab.bpe"
MERGES = (
    *("l l", "h e", "Ġ w", "ll o", "he llo", "o r", "Ġw or", "d s"),
    *("= =", "== ==", "' s", "Ċ Ċ", "a b", "b c"),
)
UNKNOWN = 10**9
TEXTS = st.text(st.sampled_from(" \n\t'hellowrdsabc=1½é日👩\u0301\x1c\xa0"), max_size=30)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A vocabulary in the published layout: 256 bytes, the merges, and the mark at the end."""
    folder = tmp_path_factory.mktemp("bpe")
    tokens = [*bpe._spelling().values(), *(merge.replace(" ", "") for merge in MERGES), bpe.END_OF_TEXT]
    (folder / "encoder.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")
    return folder / "encoder.json", folder / "vocab.bpe"


@pytest.fixture(scope="module")
def gpt2(files: tuple[Path, Path]) -> GPT2Tokenizer:
    return load_gpt2(*files)


def _shown(tokenizer: GPT2Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_every_tokenizer_gives_the_text_back(text: str, gpt2: GPT2Tokenizer) -> None:
    for tokenizer in (ByteTokenizer(), CharTokenizer("".join(sorted(set(text + "a")))), gpt2):
        ids = tokenizer.encode(text)
        again = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
        assert (again.encode(text), again.vocab_size, again.decode(ids)) == (ids, tokenizer.vocab_size, text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_all(text.encode()).tolist() == ids
        assert tokenizer.encode_all(text.encode()).dtype == narrowest(tokenizer.vocab_size)
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert tokenizer.byte_lengths()[np.array(ids, int)].sum() == len(text.encode())
        assert tokenizer.byte_lengths().shape == (tokenizer.vocab_size,)


def test_bytes_are_bytes_and_what_is_no_utf8_is_shown_as_unknown() -> None:
    assert ByteTokenizer().encode("aé") == [97, 0xC3, 0xA9]
    assert ByteTokenizer().decode([97, 0xC3, 98]) == "a\ufffdb"
    assert ByteTokenizer().encode_all(b"\xff\x00").tolist() == [255, 0]


def test_characters_are_numbered_in_their_order_and_others_are_refused() -> None:
    tokenizer = CharTokenizer("\nabzé日")
    assert tokenizer.encode("za\n日") == [3, 1, 0, 5]
    assert tokenizer.byte_lengths().tolist() == [1, 1, 1, 1, 2, 3]
    for text, named in (("aq", "'q'"), ("~", "'~'"), ("\uffff", "'\\uffff'"), ("\x00", "'\\x00'")):
        with pytest.raises(DataError, match="characters that the vocabulary lacks") as caught:
            tokenizer.encode(text)
        assert named in str(caught.value)
        assert (
            "it has the 6 of the data: abzé日; leave them out, or train with CONFIG_TOKENIZER_BYTE=y"
            in str(caught.value)
        )
    with pytest.raises(DataError, match="not UTF-8: byte 1 is 0xff"):
        tokenizer.encode_all(b"a\xff")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world", ["Hello", " world"]),
        ("I'm we'll they've", ["I", "'m", " we", "'ll", " they", "'ve"]),
        ("it's 'tis I'M", ["it", "'s", " '", "tis", " I", "'", "M"]),
        ("a  b", ["a", " ", " b"]),
        ("a \n b\n\n", ["a", " \n", " b", "\n\n"]),
        ("a\t\tb   ", ["a", "\t", "\t", "b", "   "]),
        ("x1 23½² Ⅷ٣", ["x", "1", " 23½²", " Ⅷ٣"]),
        ("été 日本! ...?", ["été", " 日本", "!", " ...?"]),
        ("e\u0301", ["e", "\u0301"]),
        ("a\u00a0b\u3000 c", ["a", "\u00a0", "b", "\u3000", " c"]),
        ("a\x1c\x1cb \x1f", ["a", "\x1c\x1c", "b", " \x1f"]),
        ("_a_1", ["_", "a", "_", "1"]),
        ("", []),
    ],
)
def test_words_are_cut_as_gpt2_cuts_them(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_words_joined_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text


def test_pairs_are_merged_in_the_order_they_were_learned(gpt2: GPT2Tokenizer) -> None:
    assert _shown(gpt2, "hello worlds") == ["hello", " wor", "l", "ds"]
    assert _shown(gpt2, "abc") == ["ab", "c"], "learned first, merged first"
    assert _shown(gpt2, "=======") == ["====", "==", "="]
    assert _shown(gpt2, "it's") == ["i", "t", "'s"]
    assert gpt2.vocab_size == 256 + len(MERGES) + 1


def _merged_plainly(word: bytes, ranks: dict[tuple[bytes, bytes], int]) -> list[bytes]:
    """All occurrences of the best pair at once, as long as there is one."""
    parts = [bytes((byte,)) for byte in word]
    while len(parts) > 1:
        rank, best = min((ranks.get(pair, UNKNOWN), pair) for pair in pairwise(parts))
        if rank == UNKNOWN:
            break
        merged: list[bytes] = []
        for part in parts:
            if merged and (merged[-1], part) == best:
                merged[-1] += part
            else:
                merged.append(part)
        parts = merged
    return parts


def test_of_equally_frequent_pairs_the_first_by_its_bytes_is_learned_first() -> None:
    assert bpe.learned(["cab"], merges=1).decode([256]) == "ab"


def test_a_heap_merges_like_looking_for_the_best_pair_each_time() -> None:
    chance = random.Random(3)
    ids, learned = {bytes((byte,)): byte for byte in range(256)}, list[tuple[bytes, bytes]]()
    while len(learned) < 60:
        left, right = (chance.choice([*(b"a", b"b", b"c"), *list(ids)[256:]]) for _ in range(2))
        if left + right not in ids and len(left + right) < 9:
            ids[left + right] = len(ids)
            learned.append((left, right))
    tokenizer = GPT2Tokenizer(ids, learned, end=None)
    ranks = {pair: rank for rank, pair in enumerate(learned)}
    for _ in range(400):
        word = bytes(chance.choices(b"abc", k=chance.randint(1, 24)))
        plainly = tuple(ids[part] for part in _merged_plainly(word, ranks))
        assert tokenizer.merged(word.decode()) == plainly, word


@pytest.mark.slow
def test_a_long_word_takes_no_square_of_its_length(gpt2: GPT2Tokenizer) -> None:
    assert len(gpt2.encode("=" * 40_000)) == 10_000


def test_a_text_is_cut_in_chunks_where_it_makes_no_difference(
    gpt2: GPT2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    text = "".join(chance.choices("hello \n\n  'swor=d", k=3000))
    whole = gpt2.encode(text)
    for size in (1, 7, 100):
        monkeypatch.setattr(bpe, "_CHUNK", size)
        assert len(list(bpe._chunks(text))) > 20
        assert gpt2.encode_all(text.encode()).tolist() == whole


def test_the_mark_at_the_end_of_a_text_is_no_text(gpt2: GPT2Tokenizer) -> None:
    assert gpt2.end == gpt2.vocab_size - 1 and gpt2.byte_lengths()[gpt2.end] == 0
    assert gpt2.decode([gpt2.end]) == bpe.END_OF_TEXT
    assert gpt2.end not in gpt2.encode(bpe.END_OF_TEXT)


@pytest.mark.parametrize(
    ("encoder", "merges"),
    [
        ("{", None),
        ("[]", None),
        ('{"日": 0}', None),
        ('{"a": 0}', None),
        (None, "a\n"),
        (None, "a z\n"),
        (None, "日 b\n"),
    ],
)
def test_damaged_vocabularies_are_refused(
    tmp_path: Path, files: tuple[Path, Path], encoder: str | None, merges: str | None
) -> None:
    for name, file, content in zip(("e", "m"), files, (encoder, merges), strict=True):
        (tmp_path / name).write_text(
            file.read_text(encoding="utf-8") if content is None else content, encoding="utf-8"
        )
    with pytest.raises(DataError, match=r"/e is damaged"):
        load_gpt2(tmp_path / "e", tmp_path / "m")


def test_a_vocabulary_that_is_not_there_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="cannot read"):
        load_gpt2(tmp_path / "e", tmp_path / "m")


@pytest.mark.skipif(not all(file.is_file() for file in PUBLISHED), reason=f"no GPT-2 vocabulary in {FOLDER}")
def test_published_vocabulary() -> None:
    tokenizer = load_gpt2(*PUBLISHED)
    assert (tokenizer.vocab_size, tokenizer.end) == (50_257, 50_256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("Hello, my dog is cute") == [15496, 11, 616, 3290, 318, 13779]
    assert tokenizer.encode("\n\n") == [628]

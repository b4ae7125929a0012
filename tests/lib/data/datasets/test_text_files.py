"""Sets of text: what is found, how it is split, that its tokens are made once, and what is told of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data import Dataset, TextSpec, TokenPart
from lib.data import tokenizers as bpe_module
from lib.data.datasets.texts import corpus
from lib.data.datasets.texts import data as text_module
from lib.data.datasets.texts.corpus import Corpus, python_library, split_by_content
from lib.errors import ConfigError, DataError, ToolkitError
from tests.support.datasets import opened


def _open(name: str, place: Path, said: list[str] | None = None, **changes: Any) -> Dataset:
    requested = {"tokenizer": "byte", "block_size": 8} | changes
    return opened(
        name,
        data_dir=place,
        cache_dir=place / "cache",
        download=False,
        log=(said if said is not None else []).append,
        **requested,
    )


def _texts(dataset: Dataset) -> tuple[str, str]:
    """Both parts, read back."""
    assert dataset.tokenizer is not None
    assert isinstance(dataset.train, TokenPart) and isinstance(dataset.test, TokenPart)
    train, test = (
        dataset.tokenizer.decode(np.asarray(part.tokens)) for part in (dataset.train, dataset.test)
    )
    return train, test


def _library(root: Path, count: int = 60) -> None:
    for number in range(count):
        file = root / ("package" if number % 2 else "") / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# module {number}\n" * (number + 1))


# The split


def test_a_piece_is_evaluated_on_by_its_hash_alone() -> None:
    pieces = [f"piece {number}".encode() for number in range(2000)]
    train, held = split_by_content(pieces, one_in=10)
    expected = [piece for piece in pieces if int(hashlib.sha256(piece).hexdigest(), 16) % 10 == 0]
    assert held == b"".join(expected) and len(train) + len(held) == sum(map(len, pieces))
    assert 150 < len(expected) < 250
    fewer = split_by_content(pieces[::2], one_in=10)[1]
    assert fewer == b"".join(piece for piece in pieces[::2] if piece in set(expected)), "no other one moves"


def test_copies_are_on_the_same_side_and_one_piece_is_always_held_back() -> None:
    train, held = split_by_content([b"a1", b"b2", b"a1", b"b2"], one_in=10**9)
    assert {train, held} == {b"a1a1", b"b2b2"}
    for few, told in (
        ([], "0 bytes in 0 pieces; add other texts"),
        ([b"one"], "3 bytes in 1 piece; add"),
        ([b"same", b"same"], "8 bytes in 2 pieces that are alike; add"),
    ):
        with pytest.raises(DataError, match=f"too little text in x to .*: {told}"):
            split_by_content(few, one_in=10, place=" in x")


# Python's library


def test_the_library_is_read_in_the_order_of_paths_without_tests_and_machine_facts(tmp_path: Path) -> None:
    _library(tmp_path)
    for name in ("test/a.py", "package/tests/b.py", "site-packages/c.py", "config-3.x/d.py", "note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("secret")
    (tmp_path / "_sysconfigdata_x.py").write_text("secret")
    found = python_library(tmp_path)
    texts = found.read()
    names = [f"module{number}.py" for number in range(0, 60, 2)]
    names += [f"package/module{number}.py" for number in range(1, 60, 2)]
    contents = [(tmp_path / name).read_bytes() for name in sorted(names)]
    assert (texts.train, texts.validation) == split_by_content(contents, one_in=20)
    assert b"secret" not in texts.train + texts.validation
    assert texts.remark == "60 files under the licence of the PSF" and "Python 3." in found.location


def test_python_without_sources_is_told(tmp_path: Path) -> None:
    (tmp_path / "os.pyc").write_bytes(b"")
    with pytest.raises(DataError, match="this Python has no sources of its standard library"):
        python_library(tmp_path)


def test_the_embedded_text_needs_no_directory_of_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _library(tmp_path / "library")
    monkeypatch.setattr(text_module, "python_library", lambda: python_library(tmp_path / "library"))
    dataset = opened(
        "pysource",
        data_dir=None,
        cache_dir=tmp_path,
        download=False,
        log=lambda _: None,
        tokenizer="byte",
        block_size=16,
    )
    train, test = _texts(dataset)
    assert isinstance(dataset.spec, TextSpec) and isinstance(dataset.test, TokenPart)
    assert (dataset.spec.vocab_size, dataset.spec.block_size, dataset.spec.unit) == (256, 16, "byte")
    assert dataset.spec.validation_tokens == dataset.spec.validation_bytes == len(test) - 1
    assert dataset.source.startswith(
        f"pysource: {len(train)} + {len(test)} bytes from the standard library of"
    )
    digest = hashlib.sha256((train + test).encode()).hexdigest()
    assert dataset.source.endswith(f"under the licence of the PSF, SHA-256 {digest[:16]}")


def test_the_real_library_is_large_and_split_as_stated() -> None:
    texts = python_library().read()
    share = len(texts.validation) / (len(texts.train) + len(texts.validation))
    assert len(texts.train) > 5_000_000 and 0.02 < share < 0.12


# Shakespeare, WikiText


def test_shakespeare_is_split_as_nanogpt_does_and_its_characters_are_the_vocabulary(tmp_path: Path) -> None:
    text = "Ä" * 50 + "First Citizen:\nspeak, speak.\n" * 20 + "é"
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(text, encoding="utf-8")
    dataset = _open("shakespeare", tmp_path, tokenizer="char")
    assert _texts(dataset) == (text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :])
    spec, characters = dataset.spec, sorted(set(text))
    assert isinstance(spec, TextSpec) and spec.vocab_size == len(characters) and spec.unit == "char"
    assert spec.validation_bytes is not None and spec.validation_bytes > spec.validation_tokens
    assert dataset.tokenizer is not None and dataset.tokenizer.decode(range(len(characters))) == "".join(
        characters
    )


@pytest.mark.parametrize("names", [("wiki.train.tokens", "wiki.valid.tokens"), ("train.txt", "valid.txt")])
def test_wikitext_says_how_much_of_it_is_there(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "wikitext-2").mkdir()
    for name, text in zip(names, (" = A = \n\n a b  c \n" * 9, " d e \nf"), strict=True):
        (tmp_path / "wikitext-2" / name).write_text(text)
    dataset = _open("wikitext2", tmp_path)
    assert _texts(dataset)[1] == " d e \nf"
    assert f"{9 * 9} (of 2088628) + 4 (of 217646) words" in dataset.source


def test_a_set_without_a_mirror_says_where_its_files_go(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no wiki\.train\.tokens and wiki\.valid\.tokens, .*/wikitext103 or"):
        _open("wikitext103", tmp_path)
    with pytest.raises(DataError, match=r"data set shakespeare .* no input\.txt in .*/shakespeare .*is off"):
        _open("shakespeare", tmp_path)


# Files of text


def _folder(root: Path) -> dict[str, str]:
    texts = {f"text/{number}.txt": f"text {number}\n" * 40 for number in range(30)} | {
        "read.me": "hello\n" * 9
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return texts


def test_a_folder_is_read_without_what_is_no_text(tmp_path: Path) -> None:
    texts = _folder(tmp_path / "text_files")
    (tmp_path / "text_files" / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "text_files" / ".hidden").write_text("secret")
    (tmp_path / "text_files" / ".git").mkdir()
    (tmp_path / "text_files" / ".git" / "config").write_text("secret")
    said: list[str] = []
    dataset = _open("text_files", tmp_path, said)
    train, test = _texts(dataset)
    assert sorted((train + test).splitlines()) == sorted("".join(texts.values()).splitlines())
    assert f"{tmp_path / 'text_files'}: files that are no text are left out: 1 .png" in said
    assert re.search(r"from .*text_files, 31 files \(.*\.txt, .* and 27 more\), SHA", dataset.source)


def test_a_folder_of_other_files_says_what_was_read(tmp_path: Path) -> None:
    folder = tmp_path / "text_files"
    folder.mkdir()
    for name in ("0.jpg", "1.jpg", "2.jpg", "README"):
        (folder / name).write_bytes(b"\xff\xd8\0")
    with pytest.raises(
        DataError, match=r"it has no file with text: it has 3 \.jpg, 1 README; put texts there"
    ):
        _open("text_files", tmp_path)
    (folder / "labels.csv").write_text("".join(f"{number}.jpg,label\n" for number in range(9000)))
    said: list[str] = []
    assert f"from {folder}, 1 file (labels.csv), SHA" in _open("text_files", tmp_path, said).source
    assert f"{folder}: files that are no text are left out: 3 .jpg, 1 README" in said


def test_a_text_of_one_line_says_how_to_break_it(tmp_path: Path) -> None:
    file = tmp_path / "text_files" / "one.txt"
    file.parent.mkdir()
    file.write_text("word " * 4000)
    told = (
        f"there is too little text in {file} to hold some of it back for evaluation: 20,000 bytes in 1 piece"
        ", which only the end of a line after 16,384 bytes can cut; break long lines, for example with "
        "fold -s"
    )
    with pytest.raises(DataError, match=re.escape(told)):
        _open("text_files", tmp_path)
    file.write_text("word " * 20)
    with pytest.raises(DataError, match="100 bytes in 1 piece; add other texts"):
        _open("text_files", tmp_path)


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
def test_a_file_that_is_not_utf8_is_named(tokenizer: str, tmp_path: Path) -> None:
    _folder(tmp_path / "text_files")
    _vocabulary(tmp_path / "gpt2_bpe")
    bad = tmp_path / "text_files" / "latin.txt"
    bad.write_bytes("Größe".encode("latin-1"))
    told = f"{bad} is not UTF-8: byte 2 is 0xf6; convert it, or set CONFIG_TOKENIZER_BYTE=y"
    with pytest.raises(DataError, match=re.escape(told)):
        _open("text_files", tmp_path, tokenizer=tokenizer)
    assert "latin.txt" in _open("text_files", tmp_path).source, "bytes are taken as they are"


def test_one_long_file_is_cut_into_pieces_at_ends_of_lines(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(40_000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    dataset = opened(
        "text_files",
        data_dir=tmp_path / "book.txt",
        cache_dir=tmp_path / "cache",
        download=False,
        log=lambda _: None,
        tokenizer="byte",
        block_size=8,
    )
    train, test = (text.splitlines(keepends=True) for text in _texts(dataset))
    assert sorted(train + test) == sorted(lines)
    assert 0.01 < len(test) / len(lines) < 0.3


def test_the_folder_of_caches_is_not_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    with pytest.raises(DataError, match="data set text_files is not there"):
        opened(
            "text_files",
            data_dir=tmp_path,
            cache_dir=tmp_path,
            download=False,
            log=lambda _: None,
            tokenizer="byte",
            block_size=8,
        )


# The cache


def test_tokens_are_made_once_and_again_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path / "text_files")
    said: list[str] = []
    first = _open("text_files", tmp_path, said)
    assert [line for line in said if "making tokens" in line] == said and len(said) == 1

    def unread(self: Corpus) -> None:
        raise AssertionError(f"{self.place} is read again")

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_content", unread)
        again = _open("text_files", tmp_path, said)
    assert _texts(again) == _texts(first) and again.source == first.source and len(said) == 1
    assert isinstance(again.train, TokenPart) and isinstance(again.train.tokens, np.memmap)
    (tmp_path / "text_files" / "read.me").write_text("other\n" * 9)
    os.utime(tmp_path / "text_files" / "read.me", ns=(1, 1))
    changed = _open("text_files", tmp_path, said)
    assert "other" in "".join(_texts(changed)) and changed.source != first.source
    assert "made from something else" in said[1]


def test_tokenizers_have_their_own_caches(tmp_path: Path) -> None:
    _folder(tmp_path / "text_files")
    said: list[str] = []
    texts = {
        name: _texts(_open("text_files", tmp_path, said, tokenizer=name)) for name in ("byte", "char", "byte")
    }
    assert texts["byte"] == texts["char"] and len(said) == 2


def _vocabulary(folder: Path, *merges: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*bpe_module._spelling().values(), *(merge.replace(" ", "") for merge in merges)]
    (folder / "encoder.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("\n".join(merges))


def test_gpt2_tokens_follow_the_files_of_the_vocabulary(tmp_path: Path) -> None:
    _folder(tmp_path / "text_files")
    with pytest.raises(
        DataError, match=r"GPT-2's tokenizer is not there: no encoder\.json .*CONFIG_TOKENIZER_BYTE=y"
    ):
        _open("text_files", tmp_path, tokenizer="gpt2")
    _vocabulary(tmp_path / "gpt2_bpe", "t e", "te x")
    dataset = _open("text_files", tmp_path, tokenizer="gpt2")
    spec = dataset.spec
    assert isinstance(spec, TextSpec) and (spec.vocab_size, spec.unit) == (258, "token")
    assert _texts(dataset) == _texts(_open("text_files", tmp_path))
    assert spec.validation_bytes is not None and spec.validation_tokens < spec.validation_bytes
    _vocabulary(tmp_path / "gpt2_bpe", "t e", "te x", "tex t")
    more = _open("text_files", tmp_path, tokenizer="gpt2")
    assert more.spec.vocab_size == 259 and more.train.byte_size < dataset.train.byte_size  # type: ignore[union-attr]
    assert _texts(more) == _texts(dataset)


def test_a_block_that_is_longer_than_the_text_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    _folder(tmp_path / "text_files")
    with pytest.raises(
        ConfigError, match=r"CONFIG_BLOCK_SIZE=9000 is too large for text_files: it has \d+ \+ \d+"
    ):
        _open("text_files", tmp_path, block_size=9000)


def test_a_folder_that_cannot_be_read_is_not_left_out_in_silence(tmp_path: Path) -> None:
    _folder(tmp_path / "text_files")

    def broken(path: Path, **options: Any) -> Any:
        options["onerror"](PermissionError(13, "Permission denied", str(path)))
        return iter(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus.os, "walk", broken)
        with pytest.raises(ToolkitError, match=r"cannot read .*text_files: Permission denied"):
            _open("text_files", tmp_path)

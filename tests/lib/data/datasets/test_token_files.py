"""Ready-made tokens: both layouts, several files read as one, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data import (
    Dataset,
    EvalLoader,
    LoaderConfig,
    TextSpec,
    TokenPart,
    TrainLoader,
)
from lib.data.types import Shards
from lib.errors import DataError
from tests.support.datasets import opened


def _open(
    data_dir: Path, said: list[str] | None = None, *, vocab_size: int = 1000, block_size: int = 4
) -> Dataset:
    return opened(
        "token_bins",
        {"vocab_size": vocab_size},
        data_dir=data_dir,
        cache_dir=data_dir / "cache",
        download=False,
        log=(said if said is not None else []).append,
        block_size=block_size,
    )


def _raw(file: Path, tokens: Any, dtype: Any = np.uint16) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    np.asarray(tokens, dtype).tofile(file)


def _shard(
    file: Path, tokens: Any, *, magic: int = 20240520, version: int = 1, dtype: Any = np.uint16
) -> None:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    file.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())


def _tokens(dataset: Dataset) -> tuple[list[int], list[int]]:
    assert isinstance(dataset.train, TokenPart) and isinstance(dataset.test, TokenPart)
    return np.asarray(dataset.train.tokens).tolist(), np.asarray(dataset.test.tokens).tolist()


def test_files_of_nothing_but_tokens_are_mapped(tmp_path: Path) -> None:
    _raw(tmp_path / "token_bins" / "train.bin", range(100, 140))
    _raw(tmp_path / "token_bins" / "val.bin", range(9))
    dataset = _open(tmp_path)
    assert _tokens(dataset) == (list(range(100, 140)), list(range(9)))
    assert isinstance(dataset.train, TokenPart) and isinstance(dataset.train.tokens, np.memmap)
    assert dataset.spec == TextSpec(
        name="token_bins",
        vocab_size=1000,
        block_size=4,
        unit="token",
        validation_tokens=8,
        validation_bytes=None,
    )
    assert dataset.tokenizer is None and "no tokenizer is known" in dataset.source
    _raw(tmp_path / "token_bins" / "train.bin", [70_000] * 20, np.uint32)
    _raw(tmp_path / "token_bins" / "val.bin", [5] * 20, np.uint32)
    assert _tokens(_open(tmp_path, vocab_size=100_000))[0] == [70_000] * 20


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
def test_shards_with_a_header_are_read_as_one_text(
    tmp_path: Path, magic: int, version: int, dtype: Any
) -> None:
    layout = {"magic": magic, "version": version, "dtype": dtype}
    for number in (5, 2, 4, 1, 3):
        tokens = range(8 * number - 8, 8 * number + (number == 5))
        _shard(tmp_path / f"fineweb_train_{number:06}.bin", tokens, **layout)
    _shard(tmp_path / "fineweb_val_000000.bin", range(500, 511), **layout)
    dataset = _open(tmp_path)
    assert _tokens(dataset) == (list(range(41)), list(range(500, 511)))
    assert "41 + 11 tokens from 5 + 1 files" in dataset.source
    batches = []
    for placement in ("resident", "stream"):
        loader_config = LoaderConfig(
            device=torch.device("cpu"),
            dtype=torch.float32,
            channels_last=False,
            placement=placement,  # type: ignore[arg-type]
            num_workers=1,
            prefetch=1,
        )
        with TrainLoader(dataset.train, dataset.spec, loader_config, seed=1, augment="none", pad=0) as loader:
            steps = [loader.micro_batches(step=step, target=3, sizes=[3]) for step in range(9)]
            batches.append(torch.cat([batch.inputs for step in steps for batch in step]))
            assert all(row == list(range(row[0], row[0] + 4)) for row in batches[-1].tolist()), (
                "across shards, too"
            )
        with EvalLoader(dataset.test, dataset.spec, loader_config) as evaluation:
            (batch,) = evaluation.batches(rank=0, world=1, batch_size=3)
            assert batch.targets[2].tolist() == [509, 510, -100, -100]
    assert torch.equal(*batches)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    start=st.integers(-30, 30),
    stop=st.integers(-30, 30),
)
def test_several_arrays_are_cut_like_one(lengths: list[int], start: int, stop: int) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    shards = Shards(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(shards) == len(whole) and shards.nbytes == whole.nbytes
    cut = shards[start:stop]
    assert np.array_equal(np.asarray(cut), whole[start:stop]) and len(cut) == len(whole[start:stop])
    assert np.array_equal(np.asarray(cut[1:]), whole[start:stop][1:])


def test_a_token_beyond_the_vocabulary_is_found_once_and_remembered(tmp_path: Path) -> None:
    _raw(tmp_path / "train.bin", [*range(40), 1000])
    _raw(tmp_path / "val.bin", range(9))
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"train\.bin has the token 1000: CONFIG_VOCAB_SIZE=1000; set CONF"
        ):
            _open(tmp_path, said)
    assert len(said) == 1 and "looking through 50 tokens, once" in said[0]
    assert _open(tmp_path, said, vocab_size=1001).spec.vocab_size == 1001 and len(said) == 1  # type: ignore[union-attr]
    _raw(tmp_path / "val.bin", [*range(9), 2000])
    with pytest.raises(DataError, match=r"val\.bin has the token 2000"):
        _open(tmp_path, said, vocab_size=1001)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda file: file.write_bytes(b""), r"it has 0 bytes"),
        (lambda file: file.write_bytes(b"abc"), r"it has 3 bytes, and should have 1 tokens of 2 bytes"),
        (lambda file: _shard(file, range(40), version=2), r"version 2 of its layout is not known"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-2]),
            r"should have 40 tokens of 2 bytes after 1024",
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:100]), r"it has 100 bytes"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Any, why: str) -> None:
    _shard(tmp_path / "train.bin", range(40))
    _raw(tmp_path / "val.bin", range(9))
    assert _open(tmp_path).train.size == 9
    damage(tmp_path / "train.bin")
    with pytest.raises(DataError, match=rf"train\.bin is damaged: .*{why}"):
        _open(tmp_path)


def test_missing_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data set token_bins is not there: no \*train\*\.bin in"):
        _open(tmp_path)
    _raw(tmp_path / "train.bin", range(40))
    with pytest.raises(DataError, match=r"has no \*val\*\.bin"):
        _open(tmp_path)


def test_files_for_training_are_not_for_validation_too(tmp_path: Path) -> None:
    _raw(tmp_path / "retrieval_train.bin", range(40))
    with pytest.raises(DataError, match=r"has no \*val\*\.bin"):
        _open(tmp_path)
    _raw(tmp_path / "retrieval_val.bin", range(9))
    assert _tokens(_open(tmp_path)) == (list(range(40)), list(range(9)))
    _raw(tmp_path / "trainset_val.bin", range(3))
    assert _tokens(_open(tmp_path)) == (list(range(40)), [*range(9), *range(3)]), "the last word counts"


def test_tokens_are_looked_through_again_where_they_are_read_by_another_type(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin"):
        _raw(tmp_path / name, [5, 70_000] * 20, np.uint32)
    assert len(_tokens(_open(tmp_path, vocab_size=100_000))[0]) == 40
    with pytest.raises(DataError, match=r"has the token 4464: CONFIG_VOCAB_SIZE=1000"):
        _open(tmp_path)
    _raw(tmp_path / "train.bin", [1] * 80)  # two of them are a token of 4 bytes
    _raw(tmp_path / "val.bin", [1] * 80)
    assert len(_tokens(_open(tmp_path))[0]) == 80
    with pytest.raises(DataError, match=r"has the token 65537: CONFIG_VOCAB_SIZE=65537"):
        _open(tmp_path, vocab_size=65_537)

"""SST-2: sentences as rows of tokens, with a label each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lib.data import (
    ArrayPart,
    Dataset,
    EvalLoader,
    LoaderConfig,
    TextClassSpec,
    TrainLoader,
)
from lib.data.datasets.files import TokenizerName
from lib.data.datasets.sst2.data import read_sentences
from lib.errors import DataError
from tests.support.datasets import opened


def _open(place: Path, tokenizer: TokenizerName = "byte") -> Dataset:
    return opened(
        "sst2",
        data_dir=place,
        cache_dir=place / "cache",
        download=False,
        log=print,
        tokenizer=tokenizer,
        block_size=8,
    )


def _sst2(root: Path, *, headings: bool = False) -> None:
    root.mkdir(parents=True, exist_ok=True)
    head = "sentence\tlabel\n" if headings else ""
    (root / "train.tsv").write_text(f"{head}good\t1\nbad , really bad \t0\n")
    (root / "dev.tsv").write_text(f"{head}fine\t1\n")


@pytest.mark.parametrize("headings", [False, True])
def test_sentences_are_rows_of_tokens_filled_up_with_a_token_of_their_own(
    tmp_path: Path, headings: bool
) -> None:
    _sst2(tmp_path / "SST-2", headings=headings)
    dataset = _open(tmp_path)
    assert dataset.spec == TextClassSpec(name="sst2", vocab_size=257, block_size=8, classes=2, pad=256)
    assert isinstance(dataset.train, ArrayPart) and isinstance(dataset.test, ArrayPart)
    assert dataset.train.inputs.tolist() == [[*b"good", *[256] * 4], [*b"bad , re"]]
    assert dataset.train.targets.tolist() == [1, 0]
    assert dataset.test.inputs.tolist() == [[*b"fine", *[256] * 4]]
    assert dataset.source.endswith(
        "2 + 1 sentences from " + str(tmp_path / "SST-2") + ", 1 + 0 of them cut at 8 bytes"
    )
    chars = _open(tmp_path, "char").spec
    assert (
        isinstance(chars, TextClassSpec)
        and chars.pad == len(set("goodbad , reallyfine")) == chars.vocab_size - 1
    )


@pytest.mark.slow
def test_sentences_reach_the_device_like_images_do(tmp_path: Path) -> None:
    _sst2(tmp_path / "sst2")
    dataset = _open(tmp_path)
    for placement in ("resident", "stream"):
        loader_config = LoaderConfig(
            device=torch.device("cpu"),
            dtype=torch.float32,
            channels_last=True,
            placement=placement,  # type: ignore[arg-type]
            num_workers=1,
            prefetch=1,
        )
        with TrainLoader(dataset.train, dataset.spec, loader_config, seed=1, augment="none", pad=0) as loader:
            (batch,) = loader.micro_batches(step=0, target=2, sizes=[2])
        assert batch.inputs.dtype == torch.int64 and sorted(batch.targets.tolist()) == [0, 1]
        with EvalLoader(dataset.test, dataset.spec, loader_config) as evaluation:
            (batch,) = evaluation.batches(rank=0, world=1, batch_size=2)
        assert batch.weights is not None and batch.weights.tolist() == [1, 0]
        assert batch.inputs[0].tolist() == [*b"fine", *[256] * 4]


@pytest.mark.parametrize("line", ["good 1", "good\t2", "\t1", "good\tlabel", ""])
def test_a_line_that_is_no_sentence_is_named(tmp_path: Path, line: str) -> None:
    _sst2(tmp_path / "sst2")
    (tmp_path / "sst2" / "train.tsv").write_text(f"good\t1\n{line}\nbad\t0\n")
    with pytest.raises(DataError, match=r"train\.tsv is damaged: line 2 is not a sentence, a tab and 0 or 1"):
        _open(tmp_path)
    (tmp_path / "sst2" / "train.tsv").write_text("")
    with pytest.raises(DataError, match=r"train\.tsv is damaged: it holds no sentences"):
        _open(tmp_path)


def test_lines_of_sentences_end_at_line_feeds_alone(tmp_path: Path) -> None:
    (file := tmp_path / "train.tsv").write_bytes("\ufeffsentence\tlabel\r\na\u2028b\x0cc\t1\r\n".encode())
    sentences, labels = read_sentences(file)
    assert sentences == ["a\u2028b\x0cc"] and labels.tolist() == [1]

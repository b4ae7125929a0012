"""Windows of a text: what each one holds, in what order, and that evaluation sees every token once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data import (
    Batch,
    Dataset,
    EvalLoader,
    LoaderConfig,
    TextSpec,
    TokenPart,
    TrainLoader,
    choose_placement,
    restrict,
    sample_stream,
    subset,
)
from lib.data.sampler import window_shifts
from lib.errors import ConfigError

BLOCK = 5
SPEC = TextSpec(
    name="toy", vocab_size=256, block_size=BLOCK, unit="byte", validation_tokens=0, validation_bytes=0
)
DELIVERY = LoaderConfig(
    device=torch.device("cpu"),
    dtype=torch.float32,
    channels_last=True,
    placement="resident",
    num_workers=2,
    prefetch=2,
)
PLACEMENTS = ("resident", "stream")
WIDEST = {np.uint8: 255, np.uint16: 65_535, np.uint32: 2**31 - 1}


def _text(length: int, dtype: Any = np.uint16) -> np.ndarray[Any, Any]:
    """Tokens that tell their place from all around, and among them the largest there can be."""
    tokens = (np.arange(length) * 7 % 251).astype(dtype)
    tokens[:: max(1, length // 3)] = WIDEST[dtype]
    return tokens


def _training(length: int = 64, dtype: Any = np.uint16) -> TokenPart:
    return TokenPart(_text(length, dtype), BLOCK, shifted=True)


def _loader(part: TokenPart, *, seed: int = 3, **changes: Any) -> TrainLoader:
    return TrainLoader(part, SPEC, replace(DELIVERY, **changes), seed=seed, augment="none", pad=0)


def _steps(loader: TrainLoader, steps: Sequence[int], sizes: Sequence[int], **ranks: int) -> list[Batch]:
    rank, world = ranks.get("rank", 0), ranks.get("world", 1)
    return [
        batch
        for step in steps
        for batch in loader.micro_batches(
            step=step,
            target=sum(sizes) * world,
            firsts=[*accumulate(sizes[:-1], initial=rank * sum(sizes))],
            sizes=sizes,
        )
    ]


def _joined(batches: Sequence[Batch]) -> torch.Tensor:
    """Inputs and targets side by side, (N, 2, T)."""
    return torch.cat([torch.stack((batch.inputs, batch.targets), dim=1) for batch in batches])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_window_is_the_text_at_its_place_and_its_target_the_next_token(placement: str, dtype: Any) -> None:
    part = _training(dtype=dtype)
    with _loader(part, placement=placement) as loader:
        found = _joined(_steps(loader, range(6), [4, 4]))
        assert found.dtype == torch.int64 and loader.size == 64 // BLOCK - 1
    epochs, indices = sample_stream(start=0, count=48, seed=3, size=part.size)
    starts = indices * BLOCK + window_shifts(epochs, seed=3, stride=BLOCK)
    text = part.tokens.tolist()
    for row, start in zip(found.tolist(), starts.tolist(), strict=True):
        assert row == [text[start : start + BLOCK], text[start + 1 : start + BLOCK + 1]]
    assert max(text) == WIDEST[dtype] and len(set(epochs.tolist())) > 3


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_micro_batches_ranks_and_restarts_do_not_change_the_windows(placement: str) -> None:
    steps = (0, 1, 2, 50, 51, 3)
    with _loader(_training()) as loader:
        whole = _joined(_steps(loader, steps, [12]))
    for sizes in ([4, 4, 4], [5, 5, 2]):
        with _loader(_training(), placement=placement) as loader:
            assert torch.equal(_joined(_steps(loader, steps, sizes)), whole)
    ranks = []
    for rank in range(2):
        with _loader(_training(), placement=placement) as loader:
            ranks.append(_joined(_steps(loader, steps, [4, 2], rank=rank, world=2)).split(6))
    pieces = [piece for step in zip(*ranks, strict=True) for piece in step]
    assert torch.equal(torch.cat(pieces), whole)


def test_the_shift_is_a_function_of_seed_and_epoch_and_takes_every_value() -> None:
    epochs = np.arange(4000)
    shifts = window_shifts(epochs, seed=1, stride=BLOCK)
    assert set(shifts.tolist()) == set(range(BLOCK))
    assert np.abs(np.bincount(shifts) - 800).max() < 120
    assert np.array_equal(shifts[1234:1240], window_shifts(epochs[1234:1240], seed=1, stride=BLOCK))
    assert np.mean(shifts == window_shifts(epochs, seed=2, stride=BLOCK)) < 0.25
    assert window_shifts(epochs, seed=1, stride=100_000).max() < 100_000


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(length=st.integers(2 * BLOCK, 60), seed=st.integers(0, 5))
def test_training_windows_of_an_epoch_are_whole_and_do_not_overlap(length: int, seed: int) -> None:
    part = TokenPart(np.arange(length, dtype=np.uint16), BLOCK, shifted=True)
    with _loader(part, seed=seed) as loader:
        for epoch in range(4):
            batches = _joined(_steps(loader, range(epoch * part.size, (epoch + 1) * part.size), [1]))
            targets = batches[:, 1].flatten()
            assert targets.min() >= 1 and targets.max() < length, "nothing is missing, nothing beyond the end"
            assert len(set(targets.tolist())) == len(targets)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(2, 40), world=st.integers(1, 3), batch_size=st.integers(1, 4))
def test_evaluation_predicts_every_token_but_the_first_exactly_once(
    length: int, world: int, batch_size: int
) -> None:
    part = TokenPart(np.arange(length, dtype=np.uint8), BLOCK)
    assert part.size == -(-(length - 1) // BLOCK)
    for placement in PLACEMENTS:
        seen: list[int] = []
        with EvalLoader(part, SPEC, replace(DELIVERY, placement=placement)) as loader:
            for rank in range(world):
                for batch in loader.batches(rank=rank, world=world, batch_size=batch_size):
                    assert batch.weights is not None and batch.inputs.shape == (batch_size, BLOCK)
                    targets = batch.targets[batch.weights == 1]
                    there = targets != -100
                    seen += targets[there].tolist()
                    assert torch.equal(batch.inputs[batch.weights == 1][there], targets[there] - 1)
                    assert batch.inputs.min() >= 0
        assert sorted(seen) == list(range(1, length))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_stream_and_resident_agree_on_ragged_ends(dtype: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", _text(23, dtype))
    parts = (
        TokenPart(_text(23, dtype), BLOCK),
        TokenPart(np.load(tmp_path / "tokens.npy", mmap_mode="r"), BLOCK),
    )
    found = []
    for part in parts:
        for placement in PLACEMENTS:
            with EvalLoader(part, SPEC, replace(DELIVERY, placement=placement)) as loader:
                found.append(_joined(list(loader.batches(rank=0, world=1, batch_size=3))))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert found[0][4, 1].tolist() == [*_text(23, dtype)[21:].tolist(), -100, -100, -100]
    assert found[0][4, 0, 2:].tolist() == [_text(23, dtype)[22], 0, 0]


def test_a_text_counts_as_stored_for_the_placement() -> None:
    part = _training(1000, np.uint32)
    assert choose_placement("auto", parts=[part], free_bytes=16_000)[0] == "resident"
    assert choose_placement("auto", parts=[part], free_bytes=15_999)[0] == "stream"


class Halves:
    """A tokenizer whose even tokens are one byte long and whose odd ones are three."""

    name, unit, vocab_size = "halves", "token", 256

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError(text)

    def decode(self, tokens: Any) -> str:
        raise NotImplementedError(tokens)

    def byte_lengths(self) -> np.ndarray[Any, Any]:
        return np.arange(256) % 2 * 2 + 1


def test_the_end_of_a_text_is_held_out_and_no_window_of_training_runs_into_it() -> None:
    part = TokenPart(np.arange(103, dtype=np.uint8), BLOCK, shifted=True)
    train, held_out = subset(part, holdout=4)
    assert isinstance(train, TokenPart) and isinstance(held_out, TokenPart)
    assert held_out.take()[1].flatten().tolist() == list(range(83, 103)) and held_out.size == 4
    assert train.tokens.max() == 79 and train.size == part.size - 4
    few, same = subset(part, limit=3, holdout=4)
    assert few.size == 3 and isinstance(same, TokenPart) and np.array_equal(same.tokens, held_out.tokens)
    with pytest.raises(ConfigError, match="the training part has 19"):
        subset(part, limit=16, holdout=4)


def test_the_lengths_of_evaluation_are_those_of_the_held_out_end() -> None:
    part = TokenPart(np.arange(103, dtype=np.uint8), BLOCK, shifted=True)
    dataset = Dataset(SPEC, part, TokenPart(np.arange(9, dtype=np.uint8), BLOCK), "toy", Halves())
    held = restrict(dataset, holdout=4)
    assert isinstance(held.spec, TextSpec) and held.spec.validation_tokens == 20
    assert held.spec.validation_bytes == 10 * 1 + 10 * 3
    assert restrict(dataset, limit=3).spec == SPEC
    unknown = restrict(replace(dataset, tokenizer=None), holdout=4).spec
    assert isinstance(unknown, TextSpec) and unknown.validation_bytes is None

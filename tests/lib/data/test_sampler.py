"""Order, subsets, random numbers and augmentation: pure functions of (seed, epoch, index)."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data import ArrayPart, epoch_order, sample_stream, sampler, subset
from lib.data.augment import Kind, apply, draw
from lib.data.types import Indices
from lib.errors import ConfigError
from lib.rng import integers, key, mix, mix_int, noise_bytes, uniform


def test_mix_is_splitmix64() -> None:
    # The generator's published first outputs for seed 1234567, as unsigned numbers.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = np.array([1234567 + step * 0x9E3779B97F4A7C15 for step in range(4)], dtype=object) % (1 << 64)
    found = mix(states.astype(np.uint64).view(np.int64)).view(np.uint64)
    assert found.tolist() == published


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_mix_is_the_same_for_numpy_torch_and_int(words: list[int]) -> None:
    by_numpy = mix(np.array(words, np.int64)).tolist()
    assert by_numpy == mix(torch.tensor(words)).tolist()
    assert by_numpy == [mix_int(word) for word in words]


def test_random_numbers_are_even_and_differ_by_key() -> None:
    numbers = uniform(key("a", 1), (100_000,), low=-1, high=3)
    assert numbers.dtype == np.float32 and numbers.min() >= -1 and numbers.max() < 3
    assert abs(numbers.mean() - 1) < 0.02
    counts = np.bincount(integers(key("a", 1), (70_000,), below=7), minlength=7)
    assert len(counts) == 7 and np.abs(counts - 10_000).max() < 500
    octets = np.bincount(noise_bytes(key("a", 1), (256_000,)), minlength=256)
    assert np.abs(octets - 1000).max() < 200
    assert len({key("a", 1), key("a", 2), key("b", 1), key(1, 2), key(2, 1)}) == 5
    assert abs(np.corrcoef(numbers, uniform(key("a", 2), (100_000,)))[0, 1]) < 0.02


def test_epoch_order_is_a_permutation_of_its_own_epoch_and_seed() -> None:
    first = epoch_order(seed=1, epoch=0, size=1000)
    assert first.dtype == np.int64 and sorted(first.tolist()) == list(range(1000))
    assert not np.array_equal(first, np.arange(1000))
    for other in (epoch_order(seed=1, epoch=1, size=1000), epoch_order(seed=2, epoch=0, size=1000)):
        assert sorted(other.tolist()) == list(range(1000))
        assert np.mean(other == first) < 0.02
    epoch_order.cache_clear()
    assert np.array_equal(first, epoch_order(seed=1, epoch=0, size=1000))


@pytest.mark.parametrize(("least", "expected"), [(100, ["MainThread", "order"]), (101, ["MainThread"] * 2)])
def test_the_next_order_is_computed_beside_training(
    least: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, compute = [], sampler._order

    def computed(*which: int) -> Indices:
        threads.append(threading.current_thread().name)
        return compute(*which)

    monkeypatch.setattr(sampler, "_order", computed)
    monkeypatch.setattr(sampler, "_AHEAD_SIZE", least)
    epoch_order.cache_clear()
    sample_stream(start=0, count=50, seed=1, size=100)
    assert threads == expected[:1]
    sample_stream(start=50, count=10, seed=1, size=100)
    found = sample_stream(start=95, count=10, seed=1, size=100)[1]
    assert threads == expected
    orders = [compute(1, epoch, 100) for epoch in (0, 1)]
    assert np.array_equal(found, np.concatenate(orders)[95:105])


def test_an_order_that_finds_no_memory_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: int) -> Indices:
        raise MemoryError("none left")

    epoch_order.cache_clear()
    sample_stream(start=0, count=10, seed=2, size=100)
    monkeypatch.setattr(sampler, "_AHEAD_SIZE", 100)
    monkeypatch.setattr(sampler, "_order", none)
    sample_stream(start=60, count=10, seed=2, size=100)
    with pytest.raises(MemoryError, match="none left"):
        sample_stream(start=100, count=1, seed=2, size=100)


def test_epoch_order_does_not_move_the_generators_of_numpy() -> None:
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    epoch_order(seed=9, epoch=9, size=99)
    assert np.random.rand() == expected


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(size=st.integers(1, 40), start=st.integers(0, 200), counts=st.lists(st.integers(0, 50), max_size=5))
def test_stream_does_not_depend_on_how_it_is_cut(size: int, start: int, counts: list[int]) -> None:
    whole = sample_stream(start=start, count=sum(counts), seed=5, size=size)
    cut, position = [], start
    for count in counts:
        cut.append(sample_stream(start=position, count=count, seed=5, size=size))
        position += count
    for which in (0, 1):
        pieces = [np.empty(0, np.int64), *(piece[which] for piece in cut)]
        assert np.array_equal(whole[which], np.concatenate(pieces))
    assert whole[0].tolist() == [place // size for place in range(start, start + sum(counts))]


def test_each_epoch_of_the_stream_has_each_sample_once() -> None:
    epochs, indices = sample_stream(start=0, count=3 * 17, seed=1, size=17)
    for epoch in range(3):
        assert sorted(indices[epochs == epoch].tolist()) == list(range(17))


def _part(size: int) -> ArrayPart:
    rng = np.random.default_rng(0)
    return ArrayPart(rng.integers(0, 256, (size, 1, 2, 2), dtype=np.uint8), np.arange(size, dtype=np.int64))


def test_subset_holds_out_the_same_samples_whatever_the_limit() -> None:
    part = _part(100)
    train, held_out = subset(part, limit=0, holdout=30)
    few, same = subset(part, limit=10, holdout=30)
    assert held_out is not None and same is not None
    names = {
        name: set(p.take()[1].tolist())
        for name, p in (("t", train), ("h", held_out), ("f", few), ("s", same))
    }
    assert names["h"] == names["s"] and len(names["h"]) == 30
    assert names["t"] | names["h"] == set(range(100)) and not names["t"] & names["h"]
    assert names["f"] < names["t"] and len(names["f"]) == few.size == 10
    images, labels = few.take(np.array([3]))
    assert np.array_equal(images[0], part.inputs[labels[0]])


def test_subset_of_a_subset_counts_within_it() -> None:
    inner, _ = subset(_part(100), limit=20)
    innermost, held_out = subset(inner, holdout=5)
    assert held_out is not None
    assert set(innermost.take()[1]) | set(held_out.take()[1]) == set(inner.take()[1])


def test_subset_leaves_a_whole_part_alone_and_refuses_too_much() -> None:
    part = _part(10)
    assert subset(part) == (part, None)
    for limit, holdout in ((11, 0), (6, 5), (0, 10), (0, 11)):
        with pytest.raises(ConfigError, match=r"DATA_LIMIT.*HOLDOUT.*has 10"):
            subset(part, limit=limit, holdout=holdout)
    train, held_out = subset(part, limit=6, holdout=4)
    assert held_out is not None and (train.size, held_out.size) == (6, 4), "all that there is may be used"


def _images(size: int, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (size, channels, 8, 10), dtype=torch.uint8, generator=generator)


def augmented(
    images: torch.Tensor, *, kind: Kind, pad: int, seed: int, epochs_N: torch.Tensor, indices_N: torch.Tensor
) -> torch.Tensor:
    return apply(images, draw(epochs_N, indices_N, kind=kind, pad=pad, seed=seed), kind=kind, pad=pad)


@pytest.mark.parametrize("kind", ["shift", "crop_flip", "crop_alternate"])
def test_augmentation_of_a_sample_does_not_depend_on_its_batch(kind: str) -> None:
    images, epochs, indices = _images(40), torch.arange(40) // 20, torch.arange(40) * 7
    whole = augmented(images, kind=kind, pad=2, seed=1, epochs_N=epochs, indices_N=indices)
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for rows in (*shuffled.split(7), shuffled):
        part = augmented(
            images[rows], kind=kind, pad=2, seed=1, epochs_N=epochs[rows], indices_N=indices[rows]
        )
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("kind", ["shift", "crop_flip", "crop_alternate"])
def test_augmentation_is_a_shift_with_zeros_and_a_mirror(kind: str) -> None:
    images = _images(60)
    epochs, indices = torch.zeros(60, dtype=torch.int64), torch.arange(60)
    found = augmented(images, kind=kind, pad=2, seed=4, epochs_N=epochs, indices_N=indices)
    rows, columns, mirrors = draw(epochs.numpy(), indices.numpy(), kind=kind, pad=2, seed=4)
    for number in range(60):
        padded = np.pad(images[number].numpy(), ((0, 0), (2, 2), (2, 2)))
        row, column = rows[number], columns[number]
        expected = padded[:, row : row + 8, column : column + 10]
        expected = expected[:, :, ::-1] if mirrors[number] else expected
        assert np.array_equal(found[number].numpy(), expected)
    assert set(rows) == set(columns) == set(range(5))
    assert set(mirrors) == ({0} if kind == "shift" else {0, 1})


def test_alternating_flips_show_both_sides_in_two_epochs() -> None:
    indices = np.arange(50_000)
    sides = {
        (seed, epoch): draw(np.full(50_000, epoch), indices, kind="crop_alternate", pad=2, seed=seed)[2]
        for seed in (0, 1)
        for epoch in range(3)
    }
    assert (sides[0, 0] + sides[0, 1] == 1).all() and (sides[0, 2] == sides[0, 0]).all()
    assert abs(sides[0, 0].mean() - 0.5) < 0.01 and abs((sides[0, 0] == sides[1, 0]).mean() - 0.5) < 0.01
    rows = [
        draw(np.full(50_000, epoch), indices, kind="crop_alternate", pad=2, seed=0)[0] for epoch in (0, 2)
    ]
    assert abs((rows[0] == rows[1]).mean() - 0.2) < 0.01, "shifts do not alternate"


def test_augmentation_changes_with_seed_and_epoch_and_is_even() -> None:
    indices = np.arange(50_000)
    draws = {
        (seed, epoch): draw(np.full(50_000, epoch), indices, kind="crop_flip", pad=1, seed=seed)
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    for row, column, mirror in draws.values():
        cells = np.bincount(row * 6 + column * 2 + mirror, minlength=18)
        assert np.abs(cells - 50_000 / 18).max() < 300
    rows = [draw_[0] for draw_ in draws.values()]
    for left in range(4):
        for right in range(left):
            assert abs(np.mean(rows[left] == rows[right]) - 1 / 3) < 0.02


def test_draws_are_the_same_for_numpy_and_torch() -> None:
    epochs, indices = np.arange(100) // 50, np.arange(100)
    for kind in ("crop_flip", "crop_alternate"):
        by_numpy = draw(epochs, indices, kind=kind, pad=4, seed=7)
        by_torch = draw(torch.from_numpy(epochs), torch.from_numpy(indices), kind=kind, pad=4, seed=7)
        for left, right in zip(by_numpy, by_torch, strict=True):
            assert left.tolist() == right.tolist()


def test_samples_of_a_step_go_by_length_the_longest_first_and_stay_in_it() -> None:
    lengths = np.array([3, 9, 1, 9, 5, 2])
    steps_SN = np.array([[0, 1, 2], [5, 3, 4]])
    assert sampler.by_length(steps_SN, lengths).tolist() == [[1, 0, 2], [3, 4, 5]]
    assert sampler.by_length(np.array([[3, 1]]), lengths).tolist() == [[3, 1]], "equal ones as they come"


def test_rows_are_cut_to_few_lengths_and_never_below_what_they_hold() -> None:
    lengths = np.arange(1, 101)
    for choices in (1, 4, 32):
        cut = sampler.cut_lengths(lengths, size=100, choices=choices)
        assert len({*cut.tolist()}) <= choices and (cut >= lengths).all() and cut.max() == 100
    assert sampler.cut_lengths(np.array([25, 26]), size=100, choices=4).tolist() == [25, 50]

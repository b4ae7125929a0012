"""Loaders: the same batches on any placement, rank and micro-batch; every evaluation sample once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data import (
    ArrayPart,
    Batch,
    EvalLoader,
    ImageSpec,
    LoaderConfig,
    TrainLoader,
    choose_placement,
    sample_stream,
)
from lib.data.augment import Kind, apply, draw
from lib.plan.fitting import split_evenly
from lib.plan.types import fixed_plan

CPU = torch.device("cpu")
STEPS = (0, 1, 2, 900, 901, 3)
SPEC = ImageSpec(
    name="toy",
    channels=3,
    height=6,
    width=5,
    classes=10,
    mean=(0.1, 0.5, 0.7),
    std=(0.2, 0.3, 0.9),
    synthetic=True,
)


DELIVERY = LoaderConfig(
    device=CPU,
    dtype=torch.float32,
    channels_last=True,
    placement="resident",
    num_workers=2,
    prefetch=3,
)


def _part(size: int = 37) -> ArrayPart:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (size, 3, 6, 5), dtype=np.uint8)
    return ArrayPart(images, np.arange(size, dtype=np.int64))


def _loader(part: ArrayPart, *, kind: Kind = "crop_flip", pad: int = 1, **changes: Any) -> TrainLoader:
    loader_config = replace(DELIVERY, **changes)
    return TrainLoader(part, SPEC, loader_config, seed=3, augment=kind, pad=pad)


def _steps(
    loader: TrainLoader, steps: Sequence[int], sizes: Sequence[int], *, rank: int = 0, world: int = 1
) -> list[Batch]:
    target, firsts = sum(sizes) * world, [*accumulate(sizes[:-1], initial=rank * sum(sizes))]
    return [
        batch
        for step in steps
        for batch in loader.micro_batches(step=step, target=target, firsts=firsts, sizes=sizes)
    ]


def _joined(batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([batch.inputs for batch in batches]), torch.cat([batch.targets for batch in batches])


def _equal(left: Sequence[Batch], right: Sequence[Batch]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_joined(left), _joined(right), strict=True))


def test_a_batch_is_the_stream_augmented_and_normalised() -> None:
    part = _part()
    with _loader(part) as loader:
        images, labels = _joined(_steps(loader, [0, 1, 2, 3], [8, 8]))
    epochs_N, indices_N = sample_stream(start=0, count=64, seed=3, size=37)
    assert labels.tolist() == indices_N.tolist() and epochs_N.max() == 1
    draws = draw(torch.from_numpy(epochs_N), torch.from_numpy(indices_N), kind="crop_flip", pad=1, seed=3)
    raw = apply(torch.from_numpy(part.inputs[indices_N]), draws, kind="crop_flip", pad=1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (SPEC.mean, SPEC.std))
    assert torch.allclose(images, (raw / 255 - mean) / std, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_micro_batches_and_ranks_do_not_change_the_samples(placement: str) -> None:
    part = _part()
    with _loader(part) as loader:
        whole = _steps(loader, STEPS, [24])
    for sizes in ([8, 8, 8], [10, 10, 4], [1] * 24):
        with _loader(part, placement=placement) as loader:
            assert _equal(_steps(loader, STEPS, sizes), whole)
    ranks = []
    for rank in range(3):
        with _loader(part, placement=placement) as loader:
            ranks.append(_steps(loader, STEPS, [5, 3], rank=rank, world=3))
    for step in range(len(STEPS)):
        pieces = [batch for batches in ranks for batch in batches[2 * step : 2 * step + 2]]
        assert _equal(pieces, [whole[step]])


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "shift", "crop_flip"])
def test_stream_equals_resident_bit_for_bit(channels_last: bool, dtype: torch.dtype, kind: str) -> None:
    changes = {"channels_last": channels_last, "dtype": dtype, "kind": kind}
    with _loader(_part(), **changes) as resident, _loader(_part(), placement="stream", **changes) as stream:
        for left, right in zip(
            _steps(resident, range(6), [7, 7, 2]), _steps(stream, range(6), [7, 7, 2]), strict=True
        ):
            assert left.inputs.dtype == dtype and left.weights is None
            assert torch.equal(left.inputs, right.inputs) and torch.equal(left.targets, right.targets)
            layout = torch.channels_last if channels_last else torch.contiguous_format
            assert left.inputs.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_any_step_can_be_asked_for_next(placement: str) -> None:
    with _loader(_part()) as fresh:
        expected = {step: _steps(fresh, [step], [9, 3]) for step in (0, 1, 2, 7, 900)}
    with _loader(_part(), placement=placement) as loader:
        for step in (0, 1, 7, 2, 900, 0):
            assert _equal(_steps(loader, [step], [9, 3]), expected[step])
        # A step left half-way, as after running out of memory, begins anew with other sizes.
        next(loader.micro_batches(step=1, target=12, sizes=[9, 3]))
        assert _equal(_steps(loader, [1, 2], [4, 4, 4]), [*expected[1], *expected[2]])
        _steps(loader, [0], [9, 3])
        next(loader.micro_batches(step=1, target=12, sizes=[9, 3]))
        assert _equal(_steps(loader, [1, 2], [9, 3]), [*expected[1], *expected[2]])


def test_a_selection_and_a_read_only_part_load_like_their_copy(tmp_path: Any) -> None:
    part = _part()
    rows = np.array([5, 1, 30, 7])
    np.save(tmp_path / "images.npy", part.inputs)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    copy = ArrayPart(part.inputs[rows], part.targets[rows])
    with _loader(copy) as loader:
        expected = _steps(loader, range(3), [4])
    for placement in ("resident", "stream"):
        with _loader(ArrayPart(mapped, part.targets, rows), placement=placement) as loader:
            assert _equal(_steps(loader, range(3), [4]), expected)


def test_stream_reads_ahead_across_steps_but_not_further_than_asked() -> None:
    part, taken = _part(), []

    class Spy(ArrayPart):
        def take(self, indices: Any = None) -> Any:
            taken.append(indices)
            return ArrayPart.take(self, indices)

    with _loader(Spy(part.inputs, part.targets), placement="stream", prefetch=3) as loader:
        _steps(loader, [0], [4, 4])
        deadline = time.monotonic() + 60
        while len(taken) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(taken) == 5  # two consumed, three ready


def test_an_exception_in_a_worker_reaches_the_consumer_and_close_stops_the_threads() -> None:
    class Broken(ArrayPart):
        def take(self, indices: Any = None) -> Any:
            if 20 in indices:
                raise OSError("the disk is on fire")
            return ArrayPart.take(self, indices)

    part, before = _part(), set(threading.enumerate())
    loader = _loader(Broken(part.inputs, part.targets), placement="stream")
    with pytest.raises(OSError, match="on fire"):
        _steps(loader, range(5), [8])
    loader.close()
    left = set(threading.enumerate()) - before  # other tests may have left some
    assert not [thread for thread in left if thread.name.startswith("data")]


@pytest.mark.slow
def test_close_and_another_step_are_prompt_while_much_is_wanted() -> None:
    class Slow(ArrayPart):
        def take(self, indices: Any = None) -> Any:
            time.sleep(0.3)  # 18 s for all that is wanted
            return ArrayPart.take(self, indices)

    part = _part()
    loader = _loader(Slow(part.inputs, part.targets), placement="stream", num_workers=1, prefetch=60)
    _steps(loader, [0], [8])
    begun = time.monotonic()
    next(loader.micro_batches(step=5, target=8, sizes=[8]))
    assert time.monotonic() - begun < 9
    begun = time.monotonic()
    loader.close()
    assert time.monotonic() - begun < 9


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 12, 37])
def test_evaluation_counts_every_sample_once(placement: Any, world: int, size: int) -> None:
    part, seen, counts = _part(size), [], set()
    for rank in range(world):
        loader_config = replace(DELIVERY, placement=placement, num_workers=1, prefetch=2)
        loader = EvalLoader(part, SPEC, loader_config)
        with loader:
            batches = list(loader.batches(rank=rank, world=world, batch_size=4))
        counts.add(len(batches))
        for batch in batches:
            assert batch.inputs.shape == (4, 3, 6, 5) and batch.weights is not None
            assert batch.weights.dtype == torch.float32 and set(batch.weights.tolist()) <= {0.0, 1.0}
            seen += batch.targets[batch.weights == 1].tolist()
            for image, label in zip(batch.inputs, batch.targets, strict=True):
                expected = (part.inputs[label][0] / 255 - 0.1) / 0.2
                assert np.allclose(image[0].numpy(), expected, atol=1e-5)
    assert sorted(seen) == list(range(size)) and len(counts) == 1


DOT = ImageSpec(name="dots", channels=1, height=1, width=1, classes=1, mean=(0,), std=(1,), synthetic=True)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 60),
    world=st.integers(1, 7),
    target=st.integers(7, 40),
    cut=st.integers(1, 9),
    step=st.integers(0, 20),
    compiled=st.booleans(),
)
def test_ranks_share_samples_out(
    size: int, world: int, target: int, cut: int, step: int, compiled: bool
) -> None:
    """Nothing twice and nothing left out, in training and in evaluation, whatever the number of ranks."""
    part = ArrayPart(np.zeros((size, 1, 1, 1), np.uint8), np.arange(size))
    split = split_evenly(-(-target // world), bound=cut)
    plan = fixed_plan(
        "of this test",
        **dataclasses.asdict(split),
        world=world,
        effective_batch=target,
        compile=compiled,
    )
    trained = list[list[int]]()
    with (
        mock.patch("lib.data.loader._POSITIONS_AT_ONCE", 1),  # no other steps: they are what takes long
        TrainLoader(part, DOT, DELIVERY, seed=3, augment="none", pad=0) as loader,
    ):
        for rank in range(world):
            rows, sizes = plan.micro_batches_of(rank)
            firsts = [*accumulate(sizes[:-1], initial=sum(plan.shares[:rank]))]
            batches = loader.micro_batches(step=step, target=target, firsts=firsts, sizes=sizes, rows=rows)
            for batch, count, own in zip(batches, rows, sizes, strict=True):
                assert len(batch.inputs) == len(batch.targets) == count
                assert batch.weights is None or batch.weights.tolist() == [1] * own + [0] * (count - own)
                assert batch.weights is not None or rows == sizes
                trained.append(batch.targets[:own].tolist())
                assert count == plan.micro_batch or not compiled
    epochs, indices = sample_stream(start=step * target, count=target, seed=3, size=size)
    assert [one for batch in trained for one in batch] == indices.tolist()
    assert len(set(zip(epochs.tolist(), indices.tolist(), strict=True))) == target
    with EvalLoader(part, DOT, DELIVERY) as loader:
        evaluated = [
            [
                batch.targets[batch.weights == 1].tolist()
                for batch in loader.batches(rank=rank, world=world, batch_size=cut)
            ]
            for rank in range(world)
        ]
    assert len({len(batches) for batches in evaluated}) == 1, "ranks would wait for each other"
    assert sorted(one for batches in evaluated for batch in batches for one in batch) == list(range(size))


def test_placement_is_chosen_by_the_free_memory() -> None:
    for parts in ([_part(100)], [_part(60), _part(40)], [_part(1), _part(99)]):  # 9000 bytes
        assert choose_placement("auto", parts=parts, free_bytes=36_000)[0] == "resident"
        placement, reason = choose_placement("auto", parts=parts, free_bytes=35_999)
        assert placement == "stream" and "more than a quarter" in reason
        assert choose_placement("stream", parts=parts, free_bytes=10**12)[0] == "stream"
        assert choose_placement("resident", parts=parts, free_bytes=0)[0] == "resident"


def test_wrong_sizes_are_our_own_mistake() -> None:
    with _loader(_part()) as loader, pytest.raises(AssertionError, match="exceed the target"):
        next(loader.micro_batches(step=0, target=9, firsts=[6], sizes=[4]))


def test_every_worker_is_busy_however_little_is_fetched_ahead() -> None:
    together = threading.Barrier(4, timeout=60)

    class Meeting(ArrayPart):
        def take(self, indices: Any = None) -> Any:
            together.wait()  # raises unless four requests are under way at once
            return ArrayPart.take(self, indices)

    part = _part(40)
    loader = EvalLoader(
        Meeting(part.inputs, part.targets),
        SPEC,
        replace(DELIVERY, placement="stream", num_workers=4, prefetch=1),
    )
    with loader:
        assert len(list(loader.batches(rank=0, world=1, batch_size=5))) == 8

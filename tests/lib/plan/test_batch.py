"""The arithmetic core against an independent oracle, exhaustively."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lib.plan.fitting import Split, largest_micro_batch, nearest_targets, split_by, split_under

MODES = [(norm_batch, divisor_only) for norm_batch in (0, 8, 32) for divisor_only in (False, True)]


def chosen_micro_batches(
    shares: int, bounds: int, *, norm_batch: int, divisor_only: bool
) -> NDArray[np.int32]:
    """[share, bound] -> micro-batch, 0 where refused; bounds below the norm batch are left at 0."""
    lowest = max(norm_batch, 1)
    found = np.zeros((shares + 1, bounds + 1), dtype=np.int32)
    for share in range(1, shares + 1):
        found[share, lowest:] = [
            largest_micro_batch(share, bound=bound, step=norm_batch, divisor_only=divisor_only) or 0
            for bound in range(lowest, bounds + 1)
        ]
    return found


def expected_micro_batches(
    shares: int, bounds: int, *, norm_batch: int, divisor_only: bool
) -> NDArray[np.int32]:
    """The same by sieving: no divisor lists, no bisection."""
    step = max(norm_batch, 1)
    share, size = np.ogrid[0 : shares + 1, 0 : bounds + 1]
    divides = (size >= step) & (size % step == 0) & (share % np.maximum(size, 1) == 0)
    best = np.maximum.accumulate(np.where(divides, size, 0), axis=1)
    fits = np.minimum(share, size)
    if divisor_only:
        micro = np.where(2 * best >= fits, best, 0)
    else:
        micro = np.where(10 * best >= 8 * fits, best, fits // step * step)
    return np.where((share > 0) & (share % step == 0) & (size >= step), micro, 0).astype(np.int32)


def check_core(shares: int, bounds: int, *, norm_batch: int, divisor_only: bool, offer_stride: int) -> None:
    mode = {"norm_batch": norm_batch, "divisor_only": divisor_only}
    found = chosen_micro_batches(shares, bounds, **mode)
    np.testing.assert_array_equal(found, expected_micro_batches(shares, bounds, **mode))
    share, bound = np.ogrid[0 : shares + 1, 0 : bounds + 1]
    assert (found <= np.minimum(share, bound)).all()
    assert (found % max(norm_batch, 1) == 0).all()
    if divisor_only:
        assert (share % np.maximum(found, 1) == 0).all()
    for one_bound in range(max(norm_batch, 1), bounds + 1, offer_stride):
        check_offers(found[:, one_bound] > 0, bound=one_bound, **mode)


def check_offers(accepted: NDArray[np.bool_], *, bound: int, norm_batch: int, divisor_only: bool) -> None:
    """Every refusal offers the nearest shares that do work, on both sides."""

    def works(share: int) -> bool:
        return split_under(share, bound=bound, step=norm_batch, divisor_only=divisor_only) is not None

    good = np.flatnonzero(accepted)
    for share in np.flatnonzero(~accepted)[1:].tolist():
        after = int(np.searchsorted(good, share))
        expected = (*good[after - 1 : after].tolist(), *good[after : after + 1].tolist()) if after else ()
        expected = expected or tuple(good[:1].tolist())
        if after < len(good):  # the offer above is in the examined range
            assert nearest_targets(share, works=works) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("norm_batch", "divisor_only"), MODES)
def test_core_on_small_shares(norm_batch: int, divisor_only: bool) -> None:
    check_core(300, 320, norm_batch=norm_batch, divisor_only=divisor_only, offer_stride=17)


@pytest.mark.long
@pytest.mark.parametrize(("norm_batch", "divisor_only"), MODES)
def test_core_exhaustively(norm_batch: int, divisor_only: bool) -> None:
    check_core(4096, 1024, norm_batch=norm_batch, divisor_only=divisor_only, offer_stride=61)


def check_splits_add_up(shares: range) -> None:
    for share in shares:
        for micro_batch in range(1, min(share, 1024) + 1):
            split = Split.of(share, micro_batch=micro_batch)
            last = share - micro_batch * (split.accumulation - 1)
            assert 0 < last == split.last_micro_batch <= micro_batch


def test_splits_add_up() -> None:
    check_splits_add_up(range(1, 400))


@pytest.mark.long
def test_splits_add_up_exhaustively() -> None:
    check_splits_add_up(range(1, 4097))


@pytest.mark.parametrize(
    ("share", "bound", "divisor_only", "sizes"),
    [
        (512, 64, True, (64, 8, 64)),
        (256, 24, True, (16, 16, 16)),
        (256, 192, True, (128, 2, 128)),
        (256, 48, True, (32, 8, 32)),
        (256, 24, False, (24, 11, 16)),
        (100, 24, False, (20, 5, 20)),
        (256, 384, True, (256, 1, 256)),
    ],
)
def test_worked_examples(share: int, bound: int, divisor_only: bool, sizes: tuple[int, int, int]) -> None:
    split = split_under(share, bound=bound, divisor_only=divisor_only)
    assert split is not None
    assert (split.micro_batch, split.accumulation, split.last_micro_batch) == sizes
    assert split.samples == share


def test_a_size_set_by_hand() -> None:
    assert split_by(256, micro_batch=48) == Split(micro_batch=48, accumulation=6, last_micro_batch=16)
    assert split_by(256, micro_batch=48, divisor_only=True) is None
    assert split_by(32, micro_batch=48) is None


def test_offers_are_targets_of_all_devices_within_the_largest() -> None:
    def works(target: int) -> bool:
        return target % 80 == 0

    for step in (1, 8):
        assert nearest_targets(512, works=works, step=step) == (480, 560)
        assert nearest_targets(512, works=works, step=step, largest=560) == (480, 560)
        assert nearest_targets(512, works=works, step=step, largest=559) == (480,)
        assert nearest_targets(512, works=works, step=step, largest=100) == (80,)
        assert nearest_targets(5, works=works, step=step) == (80,)
        assert nearest_targets(512, works=works, step=step, largest=7) == ()
    assert nearest_targets(16, works=lambda _: True, step=8) == (8, 24), "itself is none of them"

"""The simulated caching allocator: cases worked out by hand from the rules, and what must always hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.memory.allocator import (
    MIB,
    CachingAllocator,
    DoesNotFit,
    least_capacity,
    replay,
    segment_bytes_for,
)


def after(*steps: int | str, capacity_bytes: int | None = None) -> CachingAllocator:
    """Sizes are allocated under the names a, b, c, ...; a name is freed."""
    allocator = CachingAllocator(capacity_bytes)
    names = iter("abcdefghijklmnopqrstuvwxyz")
    for step in steps:
        if isinstance(step, str):
            allocator.free(step)
        else:
            allocator.allocate(next(names), step)
    return allocator


def bytes_of(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated_bytes, allocator.reserved_bytes


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (100 * MIB, 100 * MIB),
        (101 * MIB, 102 * MIB),
    ],
)
def test_sizes_of_segments(size: int, segment: int) -> None:
    assert segment_bytes_for(size) == segment
    assert after(size).reserved_bytes == segment


def test_sizes_are_rounded_to_512_bytes() -> None:
    assert bytes_of(after(1)) == (512, 2 * MIB)
    assert bytes_of(after(512)) == (512, 2 * MIB)
    assert bytes_of(after(513)) == (1024, 2 * MIB)
    assert bytes_of(after(MIB + 1)) == (MIB + 512, 20 * MIB)


def test_small_blocks_share_a_segment() -> None:
    assert bytes_of(after(*[MIB] * 2)) == (2 * MIB, 2 * MIB)
    assert bytes_of(after(*[MIB] * 3)) == (3 * MIB, 4 * MIB)
    assert bytes_of(after(2 * MIB - 512)) == (2 * MIB - 512, 20 * MIB), "that is not small any more"


def test_an_end_that_is_too_short_stays_with_its_block() -> None:
    # 11.5 MiB is in a segment of 12 MiB: half a MiB is not worth a large block of its own.
    assert bytes_of(after(11 * MIB + MIB // 2)) == (12 * MIB, 12 * MIB)
    # Two blocks just under 10 MiB fill 20 MiB: 1024 bytes at the end go with the second.
    assert bytes_of(after(10 * MIB - 512, 10 * MIB - 512)) == (20 * MIB, 20 * MIB)
    # Exactly 1 MiB of rest is too short, 512 bytes more are not.
    assert after(9 * MIB, 9 * MIB, 1 * MIB + 512).allocated_bytes == 18 * MIB + 2 * MIB
    assert after(9 * MIB, 9 * MIB - 512).allocated_bytes == 18 * MIB - 512
    # In a small segment 512 bytes are enough.
    assert after(MIB, MIB - 512).allocated_bytes == 2 * MIB - 512
    assert bytes_of(after(MIB, MIB - 512, 512)) == (2 * MIB, 2 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    # Segments of 30 and 12 MiB are unused; 11 MiB goes into the 12 and takes it whole.
    assert bytes_of(after(30 * MIB, 12 * MIB, "a", "b", 11 * MIB)) == (12 * MIB, 42 * MIB)
    # 13 MiB goes into the 30 and leaves 17, where another 17 finds its place.
    assert bytes_of(after(30 * MIB, 12 * MIB, "a", "b", 13 * MIB, 17 * MIB)) == (30 * MIB, 42 * MIB)


def test_of_equal_blocks_the_lower_address_is_taken() -> None:
    # Of four blocks of 4 MiB in a segment of 20 the first and third are free, and the end. The first is taken
    # again, so that the third, the fourth and the end become 12 MiB.
    allocator = after(4 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, "a", "c", 4 * MIB, "d", 12 * MIB)
    assert bytes_of(allocator) == (20 * MIB, 20 * MIB)


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_free_neighbours_become_one_block(order: str) -> None:
    # 6 + 6 + 6 MiB and a rest of 2 in one segment; joined again they hold 18 MiB.
    assert bytes_of(after(6 * MIB, 6 * MIB, 6 * MIB, *order, 18 * MIB)) == (18 * MIB, 20 * MIB)


def test_a_block_in_use_parts_its_neighbours() -> None:
    assert bytes_of(after(6 * MIB, 6 * MIB, 6 * MIB, "a", "c", 9 * MIB)) == (15 * MIB, 40 * MIB)


def test_small_and_large_blocks_do_not_mix() -> None:
    # 20 MiB are cached for large blocks, and 512 bytes take another segment all the same.
    assert bytes_of(after(2 * MIB, "a", 512)) == (512, 22 * MIB)


def test_unused_segments_are_given_back_before_giving_up() -> None:
    allocator = after(20 * MIB, "a", 24 * MIB, capacity_bytes=40 * MIB)
    assert bytes_of(allocator) == (24 * MIB, 24 * MIB) and allocator.retries == 1
    assert allocator.peak_reserved_bytes == 24 * MIB
    # Without need nothing is given back.
    allocator = after(20 * MIB, "a", 24 * MIB, capacity_bytes=44 * MIB)
    assert bytes_of(allocator) == (24 * MIB, 44 * MIB) and allocator.retries == 0


def test_a_segment_in_part_use_is_not_given_back() -> None:
    with pytest.raises(DoesNotFit, match=r"1049088 allocated and 20971520 reserved of 41943040"):
        after(MIB + 512, 24 * MIB, capacity_bytes=40 * MIB)


def test_fragments_add_up_to_enough_and_still_do_not_fit() -> None:
    steps: list[int | str] = [5 * MIB] * 8
    with pytest.raises(DoesNotFit):  # 20 MiB of 40 are unused, in pieces of 5
        after(*steps, "a", "c", "e", "g", 6 * MIB, capacity_bytes=40 * MIB)


def test_a_history_is_replayed() -> None:
    events = [
        ("before", None),
        (1, 3 * MIB),
        ("empty", 0),
        (2, 30 * MIB),
        (1, None),
        ("empty", None),
        (1, MIB),
    ]
    allocator = replay(events)
    assert allocator.peak_allocated_bytes == 33 * MIB
    assert bytes_of(allocator) == (31 * MIB, 52 * MIB)
    with pytest.raises(DoesNotFit):
        replay(events, capacity_bytes=49 * MIB)
    assert replay(events, capacity_bytes=52 * MIB).retries == 0


def test_the_least_that_does_is_between_what_is_allocated_and_what_is_cached() -> None:
    cached = [("a", 20 * MIB), ("a", None), ("b", 24 * MIB)]  # what held a can be given back for b
    assert least_capacity(cached) == pytest.approx(24 * MIB, rel=2e-3)
    assert replay(cached).peak_reserved_bytes == 44 * MIB
    # Half of two segments stays in use, and neither has room for the last one.
    torn: list[tuple[str, int | None]] = [(name, 5 * MIB) for name in "abcdefgh"]
    torn += [(name, None) for name in "aceg"]
    torn += [("last", 6 * MIB)]
    assert replay(torn).peak_allocated_bytes == 40 * MIB
    assert least_capacity(torn) == pytest.approx(60 * MIB, rel=2e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 24 * MIB) | st.integers(0, 2 * MIB)), max_size=60)
)
def test_what_always_holds(steps: list[tuple[int, int]]) -> None:
    allocator, live = CachingAllocator(), dict[int, int]()
    for name, size in steps:
        if name in live:
            allocator.free(name)
            del live[name]
        elif size:
            allocator.allocate(name, size)
            live[name] = size
        rounded = sum(-(-size // 512) * 512 for size in live.values())
        assert rounded <= allocator.allocated_bytes <= rounded + len(live) * MIB
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    for name in live:
        allocator.free(name)
    assert allocator.allocated_bytes == 0
    # All blocks are joined again, so everything can be given back.
    allocator.capacity_bytes = 24 * MIB
    allocator.allocate("last", 24 * MIB)
    assert allocator.reserved_bytes in (24 * MIB, allocator.peak_reserved_bytes)

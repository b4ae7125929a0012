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


def after(*steps: int | str, capacity_bytes: int | None = None, expandable: bool = False) -> CachingAllocator:
    """Sizes are allocated under the names a, b, c, ...; a name is freed."""
    allocator = CachingAllocator(capacity_bytes, expandable)
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


# Expandable segments


def expanded(*steps: int | str, capacity_bytes: int | None = None) -> CachingAllocator:
    return after(*steps, capacity_bytes=capacity_bytes, expandable=True)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ((512,), 2 * MIB),
        ((MIB, MIB, 512), 4 * MIB),
        ((MIB + 512,), 20 * MIB),
        ((20 * MIB,), 20 * MIB),
        ((20 * MIB, 512), 22 * MIB),  # small and large blocks have segments of their own
        ((21 * MIB,), 40 * MIB),
        ((21 * MIB, 19 * MIB), 40 * MIB),
        ((11 * MIB, 11 * MIB), 40 * MIB),  # across the border of a page
    ],
)
def test_pages_are_mapped_as_they_are_needed(sizes: tuple[int, ...], reserved: int) -> None:
    assert bytes_of(expanded(*sizes)) == (sum(sizes), reserved), "and no end stays with its block"


def test_the_end_of_the_segment_is_taken_last() -> None:
    # Free are 8 MiB between a and c, and the last 4 of the pages, which would fit 3 MiB more closely.
    steps: tuple[int | str, ...] = (4 * MIB, 8 * MIB, 4 * MIB, "b")
    assert bytes_of(expanded(*steps, 3 * MIB, 5 * MIB)) == (16 * MIB, 20 * MIB)
    assert bytes_of(expanded(*steps, 3 * MIB, 5 * MIB, 4 * MIB)) == (20 * MIB, 20 * MIB)


def test_what_is_torn_in_segments_is_not_in_an_expandable_one() -> None:
    # 200 MiB are reused for ten times 20, of which every second one is freed before 60 are wanted.
    torn: list[tuple[str, int | None]] = [("all", 200 * MIB), ("all", None)]
    torn += [(name, 20 * MIB) for name in "abcdefghij"] + [(name, None) for name in "acegi"]
    torn += [("last", 60 * MIB)]
    assert least_capacity(torn) == pytest.approx(260 * MIB, rel=2e-3)
    assert least_capacity(torn, expandable=True) == pytest.approx(200 * MIB, rel=2e-3)


def test_under_pressure_unused_pages_move_to_another_place() -> None:
    # b keeps the middle of three blocks; the pages of a are mapped behind c for 60 MiB.
    allocator = expanded(40 * MIB, 40 * MIB, 20 * MIB, "a", 60 * MIB, capacity_bytes=120 * MIB)
    assert bytes_of(allocator) == (120 * MIB, 120 * MIB) and allocator.retries == 1
    with pytest.raises(DoesNotFit):  # the addresses of a have no memory any more
        expanded(40 * MIB, 40 * MIB, 20 * MIB, "a", 60 * MIB, 40 * MIB, capacity_bytes=120 * MIB)
    # A page with a used block stays: of the two pages of a only one is unmapped.
    with pytest.raises(DoesNotFit):
        expanded(39 * MIB, 2 * MIB, 39 * MIB, "a", 80 * MIB, capacity_bytes=120 * MIB)
    # The freed addresses before the rest are mapped again first.
    allocator = expanded(40 * MIB, 40 * MIB, 20 * MIB, "a", 60 * MIB, "d", 40 * MIB, capacity_bytes=120 * MIB)
    assert bytes_of(allocator) == (100 * MIB, 120 * MIB)


def test_small_and_large_pages_go_back_to_one_device() -> None:
    allocator = expanded(MIB, MIB, "a", "b", 40 * MIB, capacity_bytes=41 * MIB)
    assert bytes_of(allocator) == (40 * MIB, 40 * MIB) and allocator.retries == 1


class ByPages:
    """The rules of expandable segments again, over sets of pages and lists of used addresses."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.retries = capacity_bytes, 0
        self.pages: dict[bool, set[int]] = {True: set(), False: set()}
        self.used: dict[int, tuple[bool, int, int]] = {}  # whether it is small, first and last address
        self.page = {True: 2 * MIB, False: 20 * MIB}

    @property
    def reserved_bytes(self) -> int:
        return sum(self.page[small] * len(pages) for small, pages in self.pages.items())

    def runs(self, small: bool, *, mapped: bool) -> list[tuple[int, int]]:
        """Maximal ranges of unused addresses, with memory or without."""
        page, pages = self.page[small], self.pages[small]
        end = max(pages, default=-1) + 1
        borders = sorted((first, last) for kind, first, last in self.used.values() if kind == small)
        found: list[tuple[int, int]] = []
        for number in range(end):
            if (number in pages) != mapped:
                continue
            first, last = number * page, (number + 1) * page
            for begin, stop in [*borders, (last, last)]:
                if begin > first and first < min(begin, last):
                    piece = first, min(begin, last)
                    if found and found[-1][1] == first:
                        piece = found.pop()[0], piece[1]
                    found.append(piece)
                if first < stop:
                    first = max(first, stop)
        return found if mapped else [*found, (end * page, 2**60)]

    def allocate(self, name: int, size: int) -> None:
        size, small = -(-size // 512) * 512, size <= MIB
        fitting = sorted((last - first, first) for first, last in self.runs(small, mapped=True))
        fitting = [each for each in fitting if each[0] >= size]
        behind = dict(self.runs(small, mapped=False))
        rooms = [each + behind.get(first + each, first + each) - first - each for each, first in fitting]
        place = 0
        while place + 1 < len(rooms) and rooms[place + 1] < rooms[place]:
            place += 1
        if fitting:
            self.used[name] = small, fitting[place][1], fitting[place][1] + size
            return
        if not self.mapped(name, small, size):
            self.retries += 1
            for kind in (True, False):
                for first, last in self.runs(kind, mapped=True):
                    page = self.page[kind]
                    self.pages[kind] -= set(range(-(-first // page), last // page))
            if not self.mapped(name, small, size):
                raise DoesNotFit

    def mapped(self, name: int, small: bool, size: int) -> bool:
        page, pages = self.page[small], self.pages[small]
        before = {last: first for first, last in self.runs(small, mapped=True)}
        used = sorted(first for kind, first, _ in self.used.values() if kind == small)
        for begin, _ in self.runs(small, mapped=False):
            first = before.get(begin, begin)
            if next((each for each in used if each >= begin), 2**61) - first < size:
                continue
            wanted = [each for each in range(first // page, -(-(first + size) // page)) if each not in pages]
            while wanted:  # range by range, each of them whole or not at all
                whole = [each for at, each in enumerate(wanted) if each == wanted[0] + at]
                if self.reserved_bytes + len(whole) * page > self.capacity_bytes:
                    return False
                pages |= set(whole)
                wanted = wanted[len(whole) :]
            self.used[name] = small, first, first + size
            return True
        raise AssertionError("the last addresses have no end")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 45).map(lambda n: n * MIB) | st.integers(1, 3 * MIB)),
        min_size=20,
        max_size=60,
    ),
    st.integers(60, 140),
)
def test_expandable_segments_are_those_of_pages(steps: list[tuple[int, int]], capacity_mib: int) -> None:
    allocator, pages = CachingAllocator(capacity_mib * MIB, True), ByPages(capacity_mib * MIB)
    for name, size in steps:
        if name in pages.used:
            allocator.free(name)
            del pages.used[name]
            continue
        failed = []
        for each in (allocator, pages):
            try:
                each.allocate(name, size)
            except DoesNotFit:
                failed.append(each)
        assert len(failed) != 1
        assert (allocator.reserved_bytes, allocator.retries) == (pages.reserved_bytes, pages.retries)


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

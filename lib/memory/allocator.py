"""Model of PyTorch's CUDA caching allocator: the memory reserved for a history of allocations.

It follows c10/cuda/CUDACachingAllocator.cpp on one stream, with its default settings or with
expandable_segments:True; limits on splitting are not modelled. With plentiful memory most of what is
reserved is cache, which is released under pressure; so the requirement of a history is the smallest capacity
at which it completes.

An expandable segment, one for small and one for large blocks, is a range of addresses. Pages are mapped to
the lowest with room for a block, and unmapped under pressure where nothing is used. Torch begins another
segment after 9/8 of the device's memory; here it has no end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

MIB = 2**20
SMALLEST_BLOCK = 512  # sizes are multiples of it
LARGEST_SMALL = MIB  # allocations up to this size are small
SMALL_SEGMENT = 2 * MIB  # segment that small allocations are split from
LARGE_SEGMENT = 20 * MIB  # segment that larger ones are split from, unless they have
OWN_SEGMENT = 10 * MIB  # at least this size, and so a segment of their own
OWN_SEGMENT_STEP = 2 * MIB  # rounded up to a multiple of this
_PAGE = {True: SMALL_SEGMENT, False: LARGE_SEGMENT}  # of the expandable segment of small and large blocks
_NO_END = 2**60  # bytes of its addresses


class DoesNotFit(Exception):
    """Raised for an allocation that does not fit, even after releasing every unused segment."""


def segment_bytes_for(size_bytes: int) -> int:
    """Return the bytes requested from the driver if no unused block is large enough for `size_bytes`."""
    if size_bytes <= LARGEST_SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size_bytes < OWN_SEGMENT else _round_up(size_bytes, OWN_SEGMENT_STEP)


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, linked to its neighbours."""

    size_bytes: int
    address: int
    small: bool
    used: bool = False
    previous: _Block | None = None
    following: _Block | None = None
    mapped: bool = True  # False: addresses of an expandable segment without memory

    @property
    def order(self) -> tuple[int, int]:
        """By size and address: the first that is large enough fits best. Without memory by address."""
        return self.size_bytes if self.mapped else 0, self.address

    @property
    def room(self) -> int:
        """Bytes with those that can be mapped behind it."""
        behind = self.following
        return self.size_bytes + (behind.size_bytes if behind and not behind.mapped else 0)


@dataclass(slots=True)
class CachingAllocator:
    """Allocator of one device.

    capacity_bytes: limit on the sum of its segments, of expandable ones on what is mapped; None for no limit.
    """

    capacity_bytes: int | None = None
    expandable: bool = False
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0  # times that unused segments were released to make room
    _live: dict[Hashable, _Block] = field(default_factory=dict)
    # Unused blocks in their order, by whether they are small and mapped.
    _unused: dict[tuple[bool, bool], list[tuple[tuple[int, int], _Block]]] = field(default_factory=dict)
    _next_address: int = 0

    def __post_init__(self) -> None:
        for small in (True, False):
            self._unused |= {(small, True): [], (small, False): []}
            self._keep(_Block(_NO_END, 0, small, mapped=False))

    def allocate(self, name: Hashable, size_bytes: int) -> None:
        """Allocate memory for `name`. Raises DoesNotFit."""
        assert name not in self._live, f"{name} is allocated twice"
        size = _round_up(size_bytes, SMALLEST_BLOCK) or SMALLEST_BLOCK
        block = self._best_fit(size) or self._from_driver(size)
        self._split(block, size)
        block.used = True
        self._live[name] = block
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, name: Hashable) -> None:
        """Return the memory of `name` to the cache."""
        block = self._live.pop(name)
        self.allocated_bytes -= block.size_bytes
        block.used = False
        self._keep(self._joined_with_neighbours(block))

    def _best_fit(self, size: int) -> _Block | None:
        unused = self._unused[size <= LARGEST_SMALL, True]
        place = bisect_left(unused, ((size, 0),))
        # The end of an expandable segment counts with what it can expand to.
        if self.expandable:
            while place + 1 < len(unused) and unused[place + 1][1].room < unused[place][1].room:
                place += 1
        return unused.pop(place)[1] if place < len(unused) else None

    def _from_driver(self, size: int) -> _Block:
        """Return an unused block of at least `size` in newly reserved memory. Raises DoesNotFit."""
        reserve = self._expanded if self.expandable else self._new_segment
        block = reserve(size)
        if block is None:
            self.retries += 1
            for small in (True, False):
                self._give_back_unused(small)
            block = reserve(size)
        if block is None:
            raise DoesNotFit(
                f"{size} bytes beside {self.allocated_bytes} allocated and {self.reserved_bytes} reserved "
                f"of {self.capacity_bytes}"
            )
        return block

    def _new_segment(self, size: int) -> _Block | None:
        segment_bytes = segment_bytes_for(size)
        if not self._reserve(segment_bytes):
            return None
        block = _Block(segment_bytes, self._next_address, small=size <= LARGEST_SMALL)
        self._next_address += segment_bytes
        return block

    def _expanded(self, size: int) -> _Block | None:
        """Map pages at the lowest addresses with room for `size`; None where memory does not suffice."""
        unmapped = self._unused[size <= LARGEST_SMALL, False]
        block = next(room for _, each in unmapped if (room := _with_room(each, size)))
        found = block if block.mapped else self._map(block, size)
        while found and found.size_bytes < size:
            assert found.following is not None, "the last block of a segment has no end"
            found = self._map(found.following, size - found.size_bytes)
        if found:
            self._take_out(found)
        return found

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Map pages for `size` at the beginning of `block`, or all; None where memory does not suffice."""
        mapped_bytes = min(_round_up(size, _PAGE[block.small]), block.size_bytes)
        if not self._reserve(mapped_bytes):
            return None
        self._take_out(block)
        if mapped_bytes < block.size_bytes:
            self._keep(_cut(block, mapped_bytes))
        block.mapped = True
        block = self._joined_with_neighbours(block)
        self._keep(block)
        return block

    def _reserve(self, byte_count: int) -> bool:
        if self.capacity_bytes is not None and self.reserved_bytes + byte_count > self.capacity_bytes:
            return False
        self.reserved_bytes += byte_count
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _give_back_unused(self, small: bool) -> None:
        """Give whole segments back, or whole pages of an expandable one."""
        page = _PAGE[small]
        for _, block in list(self._unused[small, True]):
            start, end = block.address, block.address + block.size_bytes
            first, stop = (_round_up(start, page), end // page * page) if self.expandable else (start, end)
            if first >= stop or (not self.expandable and (block.previous or block.following)):
                continue
            self._take_out(block)
            self.reserved_bytes -= stop - first
            if not self.expandable:
                continue
            if stop < end:
                self._keep(_cut(block, stop - start))
            if first > start:
                before, block = block, _cut(block, first - start)
                self._keep(before)
            block.mapped = False
            self._keep(self._joined_with_neighbours(block))

    def _joined_with_neighbours(self, block: _Block) -> _Block:
        for other in (block.previous, block.following):
            if other and not other.used and other.mapped == block.mapped:
                self._take_out(other)
                block = _joined(other, block) if other is block.previous else _joined(block, other)
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Split the unneeded end off `block`, if it is large enough for a block of its own."""
        rest = block.size_bytes - size
        if rest >= SMALLEST_BLOCK if block.small or self.expandable else rest > LARGEST_SMALL:
            self._keep(_cut(block, size))

    def _keep(self, block: _Block) -> None:
        insort(self._unused[block.small, block.mapped], (block.order, block))

    def _take_out(self, block: _Block) -> None:
        unused = self._unused[block.small, block.mapped]
        del unused[bisect_left(unused, (block.order,))]


def replay(
    events: Iterable[tuple[Hashable, int | None]],
    *,
    capacity_bytes: int | None = None,
    expandable: bool = False,
) -> CachingAllocator:
    """Replay (name, bytes) for each allocation and (name, None) for each release, in order.

    Allocations of 0 bytes, and releases of what was allocated before the history began, are ignored.
    Raises DoesNotFit.
    """
    allocator = CachingAllocator(capacity_bytes, expandable)
    for name, size_bytes in events:
        if size_bytes:
            allocator.allocate(name, size_bytes)
        elif size_bytes is None and name in allocator._live:
            allocator.free(name)
    return allocator


def least_capacity(events: Sequence[tuple[Hashable, int | None]], *, expandable: bool = False) -> int:
    """Return the smallest capacity in bytes, within a thousandth, at which `events` complete.

    It exceeds the allocated peak because of fragmentation: an unused part of a segment in use may be too
    small for the next allocation. Of expandable segments only pages with a used block are lost.
    """
    plenty = replay(events, expandable=expandable)
    low, high = plenty.peak_allocated_bytes, plenty.peak_reserved_bytes
    step = low // 1000 if expandable else high  # expandable segments mostly lose little, which is tried first
    while high - low > low // 1000:
        middle = min(low + step, (low + high) // 2)
        try:
            replay(events, capacity_bytes=middle, expandable=expandable)
        except DoesNotFit:
            low, step = middle, 2 * step
        else:
            high = middle
    return high


def _with_room(unmapped: _Block, size: int) -> _Block | None:
    """Return the first of the unused blocks around `unmapped` if from there on they have `size` bytes."""
    first = unmapped.previous if unmapped.previous and not unmapped.previous.used else unmapped
    block: _Block | None = first
    while size > 0 and block and not block.used:
        size -= block.size_bytes
        block = block.following
    return first if size <= 0 else None


def _cut(block: _Block, size: int) -> _Block:
    """Shorten `block` to `size`, and return the rest, which follows it."""
    rest = block.size_bytes - size
    end = _Block(rest, block.address + size, block.small, False, block, block.following, block.mapped)
    if block.following:
        block.following.previous = end
    block.following, block.size_bytes = end, size
    return end


def _joined(first: _Block, second: _Block) -> _Block:
    first.size_bytes += second.size_bytes
    first.following = second.following
    if second.following:
        second.following.previous = first
    return first


def _round_up(size_bytes: int, step: int) -> int:
    return -(-size_bytes // step) * step

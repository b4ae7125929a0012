"""Model of PyTorch's CUDA caching allocator: the memory reserved for a history of allocations.

It follows the default settings of c10/cuda/CUDACachingAllocator.cpp on one stream; expandable segments and
limits on splitting are not modelled. With plentiful memory most of what is reserved is cache, which is
released under pressure; so the requirement of a history is the smallest capacity at which it completes.
"""

from __future__ import annotations

import math
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


@dataclass(slots=True)
class CachingAllocator:
    """Allocator of one device. capacity_bytes: limit on the sum of its segments; None for no limit."""

    capacity_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0  # times that unused segments were released to make room
    _live: dict[Hashable, _Block] = field(default_factory=dict)
    # Unused blocks, small and large apart, by size and address: the first that is large enough fits best.
    _unused: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    _next_address: int = 0

    def allocate(self, name: Hashable, size_bytes: int) -> None:
        """Allocate memory for `name`. Raises DoesNotFit."""
        assert name not in self._live, f"{name} is allocated twice"
        size = max(SMALLEST_BLOCK, _round_up(size_bytes, SMALLEST_BLOCK))
        block = self._best_fit(size) or self._new_segment(size)
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
        if block.previous and not block.previous.used:
            self._take_out(block.previous)
            block = _joined(block.previous, block)
        if block.following and not block.following.used:
            self._take_out(block.following)
            block = _joined(block, block.following)
        self._keep(block)

    def _best_fit(self, size: int) -> _Block | None:
        unused = self._unused[size <= LARGEST_SMALL]
        place = bisect_left(unused, (size,))
        return unused.pop(place)[2] if place < len(unused) else None

    def _new_segment(self, size: int) -> _Block:
        segment_bytes = segment_bytes_for(size)
        capacity = math.inf if self.capacity_bytes is None else self.capacity_bytes
        if self.reserved_bytes + segment_bytes > capacity:
            self.retries += 1
            self._give_back_unused_segments()
        if self.reserved_bytes + segment_bytes > capacity:
            raise DoesNotFit(
                f"{size} bytes beside {self.allocated_bytes} allocated and {self.reserved_bytes} reserved "
                f"of {self.capacity_bytes}"
            )
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = _Block(segment_bytes, self._next_address, small=size <= LARGEST_SMALL)
        self._next_address += segment_bytes
        return block

    def _give_back_unused_segments(self) -> None:
        for small, unused in self._unused.items():
            parts = [entry for entry in unused if entry[2].previous or entry[2].following]
            self.reserved_bytes -= sum(entry[0] for entry in unused) - sum(entry[0] for entry in parts)
            self._unused[small] = parts

    def _split(self, block: _Block, size: int) -> None:
        """Split the unneeded end off `block`, if it is large enough for a block of its own."""
        rest = block.size_bytes - size
        if not (rest >= SMALLEST_BLOCK if block.small else rest > LARGEST_SMALL):
            return
        end = _Block(rest, block.address + size, block.small, previous=block, following=block.following)
        if block.following:
            block.following.previous = end
        block.following, block.size_bytes = end, size
        self._keep(end)

    def _keep(self, block: _Block) -> None:
        insort(self._unused[block.small], (block.size_bytes, block.address, block))

    def _take_out(self, block: _Block) -> None:
        unused = self._unused[block.small]
        del unused[bisect_left(unused, (block.size_bytes, block.address))]


def replay(
    events: Iterable[tuple[Hashable, int | None]], *, capacity_bytes: int | None = None
) -> CachingAllocator:
    """Replay (name, bytes) for each allocation and (name, None) for each release, in order.

    Allocations of 0 bytes, and releases of what was allocated before the history began, are ignored.
    Raises DoesNotFit.
    """
    allocator = CachingAllocator(capacity_bytes)
    known: set[Hashable] = set()
    for name, size_bytes in events:
        if size_bytes:
            known.add(name)
            allocator.allocate(name, size_bytes)
        elif size_bytes is None and name in known:
            known.remove(name)
            allocator.free(name)
    return allocator


def least_capacity(events: Sequence[tuple[Hashable, int | None]]) -> int:
    """Return the smallest capacity in bytes, within a thousandth, at which `events` complete.

    It exceeds the allocated peak because of fragmentation: an unused part of a segment in use may be too
    small for the next allocation.
    """
    plenty = replay(events)
    low, high = plenty.peak_allocated_bytes, plenty.peak_reserved_bytes
    while high - low > low // 1000:
        middle = (low + high) // 2
        try:
            replay(events, capacity_bytes=middle)
        except DoesNotFit:
            low = middle
        else:
            high = middle
    return high


def _joined(first: _Block, second: _Block) -> _Block:
    first.size_bytes += second.size_bytes
    first.following = second.following
    if second.following:
        second.following.previous = first
    return first


def _round_up(size_bytes: int, step: int) -> int:
    return -(-size_bytes // step) * step

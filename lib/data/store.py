"""Stores of a part: resident on the device or streamed from host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, TypeAlias

import numpy as np
import torch

from lib.data.types import ArrayPart, Indices, Part, TokenPart
from lib.devices.base import PINNED, send
from lib.nn import IGNORED

_ROWS = torch.contiguous_format

Placement: TypeAlias = Literal["resident", "stream", "shapes"]

# int64 (1 + K, N): the positions of N samples, and K rows of notes that are copied to the device with them.
Request: TypeAlias = Indices | torch.Tensor  # where `Store.place` has put it
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # inputs as stored, targets, notes
Fetch: TypeAlias = Callable[[Request], Rows]


class Store:
    """Source of rows of a part. fetch: makes those of one request, on the device."""

    def __init__(self, fetch: Fetch, *, device: torch.device) -> None:
        self._fetch, self._device = fetch, device

    def place(self, requests: Indices) -> Request:
        """Return requests of many steps for `read`: on a GPU, where sending each by itself costs more."""
        return send(requests, self._device) if self._device.type in PINNED else requests

    def read(self, requests: Iterator[Request]) -> Iterator[Rows]:
        """Yield inputs, targets (as from `Part.take`) and notes (K, N) on the device for each request."""
        yield from map(self._fetch, requests)

    def close(self) -> None:
        """Release resources."""


def open_store(
    part: Part, *, device: torch.device, placement: Placement, num_workers: int, prefetch: int
) -> Store:
    """Open the store of `part`. num_workers (at least 1) and prefetch (requests) are for the stream."""
    if placement == "stream":
        return _Stream(part, device=device, num_workers=num_workers, prefetch=prefetch)
    if placement == "shapes":
        return Store(_shapes(part, device), device=device)
    resident = _resident_tokens(part, device) if isinstance(part, TokenPart) else _resident_rows(part, device)
    return Store(resident, device=device)


def _shapes(part: Part, device: torch.device) -> Fetch:
    """Uninitialized rows of the right shapes and types, for measuring the memory of a step."""
    if isinstance(part, TokenPart):
        kinds = [(torch.int64, (part.block_size,))] * 2
    else:
        kinds = [(getattr(torch, each.dtype.name), each.shape[1:]) for each in (part.inputs, part.targets)]

    def fetch(request: Request) -> Rows:
        inputs, targets = (
            torch.empty(request.shape[1], *shape, dtype=dtype, device=device) for dtype, shape in kinds
        )
        return inputs, targets, send(request[1:], device)

    return fetch


def _resident_rows(part: ArrayPart, device: torch.device) -> Fetch:
    """Arrays in device memory."""
    arrays = (part.inputs, part.targets) if part.rows is None else part.take()
    # torch warns about read-only arrays, such as memory maps.
    writable = (np.require(array, requirements=["C", "W"]) for array in arrays)
    inputs, targets = (torch.from_numpy(array).to(device) for array in writable)

    def fetch(request: Request) -> Rows:
        sent = send(request, device)  # one copy for the whole request, unless `place` made it
        positions_N = sent[0]
        return inputs.index_select(0, positions_N), targets.index_select(0, positions_N), sent[1:]

    return fetch


def _resident_tokens(part: TokenPart, device: torch.device) -> Fetch:
    """A text in device memory, in its stored type."""
    tokens, length = np.asarray(part.tokens), len(part.tokens)
    # Few devices support uint16 and uint32. No id needs the sign bit of int32.
    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[tokens.itemsize]
    filled = np.concatenate((tokens, np.zeros(part.block_size, tokens.dtype))).view(signed)
    # All windows as a view (positions, block_size + 1): a batch is one gather.
    all_windows = torch.from_numpy(filled).to(device).unfold(0, part.block_size + 1, 1)
    mask = 0xFFFF if tokens.itemsize == 2 else None
    steps = None if part.shifted else torch.arange(1, part.block_size + 1, device=device)

    def fetch(request: Request) -> Rows:
        sent = send(request, device)
        windows = all_windows[sent[0]].to(torch.int64)
        if mask is not None:
            windows.bitwise_and_(mask)
        # clone also copies a single row, whose slices are contiguous views of shared memory.
        inputs, targets = (each.clone(memory_format=_ROWS) for each in (windows[:, :-1], windows[:, 1:]))
        if steps is not None:
            targets.masked_fill_(sent[0][:, None] + steps >= length, IGNORED)
        return inputs, targets, sent[1:]

    return fetch


def _host_rows(part: Part, device: torch.device) -> Fetch:
    """Rows in host memory, pinned for CUDA."""

    def fetch(request: Request) -> Rows:
        assert not isinstance(request, torch.Tensor), "`_Stream.place` leaves it in NumPy"
        inputs, targets = part.take(request[0])
        rows = torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(request[1:])
        if device.type in PINNED:
            return rows[0].pin_memory(), rows[1].pin_memory(), rows[2].pin_memory()
        return rows

    return fetch


class _Stream(Store):
    """Requests read ahead by threads, from memory or a memory map.

    The threads copy rows with NumPy, which releases the GIL, and for CUDA into pinned memory. They do not
    compute with torch, so that no second pool of OpenMP threads competes with training.
    """

    def __init__(self, part: Part, *, device: torch.device, num_workers: int, prefetch: int) -> None:
        super().__init__(_host_rows(part, device), device=device)
        self._ahead = max(prefetch, num_workers)  # at least one request per thread
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data")

    def place(self, requests: Indices) -> Request:
        return requests

    def read(self, requests: Iterator[Request]) -> Iterator[Rows]:
        ahead: deque[Future[Rows]] = deque()
        try:
            for request in requests:
                ahead.append(self._pool.submit(self._fetch, request))
                if len(ahead) > self._ahead:
                    yield self._send(ahead.popleft().result())
            while ahead:
                yield self._send(ahead.popleft().result())
        finally:
            for future in ahead:
                future.cancel()

    def _send(self, rows: Rows) -> Rows:
        inputs, targets, notes = (tensor.to(self._device, non_blocking=True) for tensor in rows)
        return inputs, targets, notes

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

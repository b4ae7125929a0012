"""Stores of a part: resident on the device or streamed from host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, TypeAlias

import numpy as np
import torch

from lib.data.types import ArrayPart, Indices, Part, TokenPart
from lib.nn import IGNORED

_ROWS = torch.contiguous_format

Placement: TypeAlias = Literal["resident", "stream", "shapes"]

# int64 (1 + K, N): the positions of N samples, and K rows of notes that are copied to the device with them.
Request: TypeAlias = Indices
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # inputs as stored, targets, notes


class Store:
    """Source of rows of a part, on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self, requests: Iterator[Request]) -> Iterator[Rows]:
        """Yield inputs, targets (as from `Part.take`) and notes (K, N) on the device for each request."""
        raise NotImplementedError

    def close(self) -> None:
        """Release resources."""


def open_store(
    part: Part, *, device: torch.device, placement: Placement, num_workers: int, prefetch: int
) -> Store:
    """Open the store of `part`. num_workers (at least 1) and prefetch (requests) are for the stream."""
    if placement == "shapes":
        return _Shapes(part, device=device)
    if placement == "resident":
        if isinstance(part, TokenPart):
            return _ResidentTokens(part, device=device)
        return _ResidentRows(part, device=device)
    return _Stream(part, device=device, num_workers=num_workers, prefetch=prefetch)


class _Shapes(Store):
    """Uninitialized rows of the right shapes and types, for measuring the memory of a step."""

    def __init__(self, part: Part, *, device: torch.device) -> None:
        super().__init__(device)
        self._kinds: list[tuple[torch.dtype, tuple[int, ...]]]
        if isinstance(part, TokenPart):
            self._kinds = [(torch.int64, (part.block_size,))] * 2
        else:
            arrays = part.inputs, part.targets
            self._kinds = [(getattr(torch, array.dtype.name), array.shape[1:]) for array in arrays]

    def read(self, requests: Iterator[Request]) -> Iterator[Rows]:
        for request in requests:
            inputs, targets = (
                torch.empty(request.shape[1], *shape, dtype=dtype, device=self._device)
                for dtype, shape in self._kinds
            )
            yield inputs, targets, torch.from_numpy(request[1:]).to(self._device)


class _ResidentRows(Store):
    """Arrays in device memory."""

    def __init__(self, part: ArrayPart, *, device: torch.device) -> None:
        super().__init__(device)
        arrays = (part.inputs, part.targets) if part.rows is None else part.take()
        # torch warns about read-only arrays, such as memory maps.
        writable = (np.require(array, requirements=["C", "W"]) for array in arrays)
        self._inputs, self._targets = (torch.from_numpy(array).to(device) for array in writable)

    def read(self, requests: Iterator[Request]) -> Iterator[Rows]:
        for request in requests:
            sent = torch.from_numpy(request).to(self._device)  # one copy for the whole request
            places = sent[0]
            yield self._inputs.index_select(0, places), self._targets.index_select(0, places), sent[1:]


class _ResidentTokens(Store):
    """A text in device memory, in its stored type."""

    def __init__(self, part: TokenPart, *, device: torch.device) -> None:
        super().__init__(device)
        tokens, self._length = np.asarray(part.tokens), len(part.tokens)
        # Few devices support uint16 and uint32. No id needs the sign bit of int32.
        signed = {1: np.uint8, 2: np.int16, 4: np.int32}[tokens.itemsize]
        filled = np.concatenate((tokens, np.zeros(part.block_size, tokens.dtype))).view(signed)
        # All windows as a view (positions, block_size + 1): a batch is one gather.
        self._windows = torch.from_numpy(filled).to(device).unfold(0, part.block_size + 1, 1)
        self._mask = 0xFFFF if tokens.itemsize == 2 else None
        self._steps = None if part.shifted else torch.arange(1, part.block_size + 1, device=device)

    def read(self, requests: Iterator[Request]) -> Iterator[Rows]:
        for request in requests:
            sent = torch.from_numpy(request).to(self._device)
            windows = self._windows[sent[0]].to(torch.int64)
            if self._mask is not None:
                windows.bitwise_and_(self._mask)
            # clone also copies a single row, whose slices are contiguous views of shared memory.
            inputs, targets = (part.clone(memory_format=_ROWS) for part in (windows[:, :-1], windows[:, 1:]))
            if self._steps is not None:
                targets.masked_fill_(sent[0][:, None] + self._steps >= self._length, IGNORED)
            yield inputs, targets, sent[1:]


class _Stream(Store):
    """Requests read ahead by threads, from memory or a memory map.

    The threads copy rows with NumPy, which releases the GIL, and for CUDA into pinned memory. They do not
    compute with torch, so that no second pool of OpenMP threads competes with training.
    """

    def __init__(self, part: Part, *, device: torch.device, num_workers: int, prefetch: int) -> None:
        super().__init__(device)
        self._part = part
        self._ahead = max(prefetch, num_workers)  # at least one request per thread
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="data")

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

    def _fetch(self, request: Request) -> Rows:
        inputs, targets = self._part.take(request[0])
        rows = torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(request[1:])
        if self._device.type == "cuda":
            return rows[0].pin_memory(), rows[1].pin_memory(), rows[2].pin_memory()
        return rows

    def _send(self, rows: Rows) -> Rows:
        inputs, targets, notes = (tensor.to(self._device, non_blocking=True) for tensor in rows)
        return inputs, targets, notes

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

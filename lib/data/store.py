"""Where the bytes of a part are kept, and how rows of them reach the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch

from lib.data.types import Part

# int64 (1 + K, N): the indices of N samples, and K rows of notes that travel with them to the device.
Request: TypeAlias = torch.Tensor
Rows: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # images uint8, labels, notes


class Store(Protocol):
    """Gives rows of a part."""

    def read(self, requests: Iterator[Request]) -> Iterator[Rows]:
        """Images uint8 (N, C, H, W), labels (N,) and notes (K, N) on the device, request by request."""
        ...

    def close(self) -> None:
        """Give up what is held."""
        ...


def open_store(
    part: Part,
    *,
    device: torch.device,
    placement: Literal["resident", "stream"],
    num_workers: int,
    prefetch: int,
) -> Store:
    """num_workers, at least 1, and prefetch (requests kept ready) are of the stream."""
    if placement == "resident":
        return _Resident(part, device=device)
    return _Stream(part, device=device, num_workers=num_workers, prefetch=prefetch)


class _Resident:
    """The whole part in the memory of the device."""

    def __init__(self, part: Part, *, device: torch.device) -> None:
        images, labels = (part.images, part.labels) if part.rows is None else part.take()
        # torch wants arrays it might write to; an array read from a file may not be.
        self._images = torch.from_numpy(np.require(images, requirements=["C", "W"])).to(device)
        self._labels = torch.from_numpy(np.require(labels, requirements=["C", "W"])).to(device)
        self._device = device

    def read(self, requests: Iterator[Request]) -> Iterator[Rows]:
        for request in requests:
            sent = request.to(self._device)  # one copy for all that the batch needs
            indices = sent[0]
            yield self._images.index_select(0, indices), self._labels.index_select(0, indices), sent[1:]

    def close(self) -> None:
        pass


class _Stream:
    """A few requests read ahead by threads, from memory or a memory map.

    The threads copy rows, which NumPy does without holding the interpreter lock, and for a CUDA device
    into pinned memory. They compute nothing with torch, so that no second pool of OpenMP threads
    competes with training.
    """

    def __init__(self, part: Part, *, device: torch.device, num_workers: int, prefetch: int) -> None:
        self._part, self._device = part, device
        self._ahead = max(prefetch, num_workers)  # with fewer requests than threads some would idle
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
        images, labels = self._part.take(request[0].numpy())
        rows = torch.from_numpy(images), torch.from_numpy(labels), request[1:]
        if self._device.type == "cuda":
            return rows[0].pin_memory(), rows[1].pin_memory(), rows[2].pin_memory()
        return rows

    def _send(self, rows: Rows) -> Rows:
        images, labels, notes = (tensor.to(self._device, non_blocking=True) for tensor in rows)
        return images, labels, notes

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

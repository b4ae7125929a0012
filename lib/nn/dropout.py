"""Dropout with masks that are a pure function of (seed, sample of the training stream, layer).

Torch's masks depend on how a batch is split into micro-batches and ranks. For these the training loop
passes every module the numbers of its rows in the endless training stream (`key_samples`), so masks are
also equal when a step is repeated after a resume or an out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lib.rng import key, mix

LEVELS = 1 << 16  # 16 bits per element: a 64-bit hash serves four


class Dropout(nn.Module):
    """In training, zero elements with probability `rate` and scale up the others to the same mean.

    rate: rounded to a multiple of 2**-16. site: number that distinguishes this module's masks.
    """

    def __init__(self, rate: float, *, site: int) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"a dropout rate of {rate} is not below 1")
        self.rate, self.site = rate, site
        self._threshold = round(rate * LEVELS)
        self.sample_keys: Tensor | None = None  # int64 (N,), one per row

    def extra_repr(self) -> str:
        """Return the rate and the site."""
        return f"rate={self.rate}, site={self.site}"

    def forward(self, x_NX: Tensor) -> Tensor:
        """(N, ...) -> the same shape; each of the N rows has a mask of its own."""
        if not self.training or self._threshold == 0:
            return x_NX
        scaled_NX = x_NX * (LEVELS / (LEVELS - self._threshold))
        return torch.where(self._kept(x_NX), scaled_NX, 0.0)

    def _kept(self, x_NX: Tensor) -> Tensor:
        """Return the mask of kept elements: bool, in the shape of `x_NX`."""
        if x_NX.is_meta:  # only shapes matter
            return torch.empty(x_NX.shape, dtype=torch.bool, device=x_NX.device)
        assert self.sample_keys is not None and len(self.sample_keys) == len(x_NX), "key_samples comes first"
        elements = x_NX[0].numel()
        words = torch.arange(-(-elements // 4), dtype=torch.int64, device=x_NX.device)
        words_NW = mix(mix(words ^ key("site", self.site)) ^ self.sample_keys[:, None])
        levels_NE = words_NW.view(torch.int16)[:, :elements]
        return (levels_NE >= self._threshold - LEVELS // 2).view(x_NX.shape)


def dropouts(model: nn.Module) -> tuple[Dropout, ...]:
    """Return the dropout modules of `model`, to be passed to `key_samples` for every micro-batch."""
    return tuple(module for module in model.modules() if isinstance(module, Dropout))


def key_samples(
    modules: Sequence[Dropout], *, seed: int, first: int, count: int, device: torch.device
) -> None:
    """Set the rows of the next training forward pass: `count` samples of the stream from number `first`."""
    # `first` as a tensor, because a Python number would give every step another graph.
    samples = torch.arange(count, device=device) + torch.tensor(first, device=device)
    keys = mix(samples ^ key("dropout", seed))
    for module in modules:
        module.sample_keys = keys

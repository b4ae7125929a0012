"""Dropout with masks that are a pure function of (seed, sample of the training stream, layer).

Torch's masks depend on how a batch is split into micro-batches and ranks. For these the training loop
passes every module the numbers of its rows in the endless training stream (`key_samples`), so masks are
also equal when a step is repeated after a resume or an out-of-memory error. `key_stock_dropouts` gives the
layers of torch and of other packages such masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lib.devices.base import send
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
        self.set_rate(rate, site=site)

    def set_rate(self, rate: float, *, site: int, own_dims: int = 0, scales: bool = True) -> None:
        """Set what the layer does.

        own_dims: the first dimensions, whose elements are kept or zeroed as a whole; 0 for all dimensions.
        scales: what is kept is scaled up.
        """
        self.rate, self.site, self._own_dims, self._scales = rate, site, own_dims, scales
        self._threshold = round(rate * LEVELS)
        self.sample_keys: Tensor | None = None  # int64 (N,), one per sample
        # int64 (), a tensor so that equal layers are one compiled program
        self.site_key: Tensor | None = None

    def extra_repr(self) -> str:
        """Return the rate and the site."""
        return f"rate={self.rate}, site={self.site}"

    def forward(self, x_NX: Tensor) -> Tensor:
        """(N, ...) -> the same shape; each of the N samples has a mask of its own.

        N may also be a multiple of the number of samples: their tokens or windows, sample by sample.
        """
        if not self.training or self._threshold == 0:
            return x_NX
        scaled_NX = x_NX * (LEVELS / (LEVELS - self._threshold)) if self._scales else x_NX
        own = self._own_dims or x_NX.dim()
        kept = self._kept((*x_NX.shape[:own], *(1 for _ in x_NX.shape[own:])), x_NX)
        return torch.where(kept, scaled_NX, 0.0)

    def _kept(self, shape: Sequence[int], x_NX: Tensor) -> Tensor:
        """Return the mask of kept elements: bool, in `shape`, which `x_NX` is broadcast with."""
        if x_NX.is_meta:  # only shapes matter
            return torch.empty(shape, dtype=torch.bool, device=x_NX.device)
        assert self.sample_keys is not None and self.site_key is not None, "key_samples comes first"
        elements, rest = divmod(math.prod(shape), len(self.sample_keys))
        if rest or len(x_NX) % len(self.sample_keys):
            raise RuntimeError(
                f"{len(x_NX)} rows of dropout are not those of {len(self.sample_keys)} samples"
            )
        words = torch.arange(-(-elements // 4), dtype=torch.int64, device=x_NX.device)
        words_NW = mix(mix(words ^ self.site_key) ^ self.sample_keys[:, None])
        levels_NE = words_NW.view(torch.int16)[:, :elements]
        return (levels_NE >= self._threshold - LEVELS // 2).view(shape)


# Torch's layers: the dimensions that have decisions of their own, 0 for all.
_OF_TORCH: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 2, nn.Dropout2d: 2, nn.Dropout3d: 2}


def key_stock_dropouts(model: nn.Module) -> tuple[int, list[str]]:
    """Turn torch's dropout, and depth dropped by timm and transformers (DropPath), into `Dropout` in place.

    Attributes of the layers stay. Fused attention, which would draw its own mask, is switched off beside
    them. Returns the number of layers that drop something, and the names of those modules of attention.
    """
    own_sites = (module.site for module in model.modules() if isinstance(module, Dropout))
    first, count, unfused = 1 + max(own_sites, default=-1), 0, list[str]()
    for name, module in model.named_modules():
        kind = type(module)
        path = kind.__name__.endswith("DropPath")
        rate = getattr(module, "p" if kind in _OF_TORCH else "drop_prob", 0) or 0
        if (kind in _OF_TORCH or path) and 0 < rate < 1:
            # The class is changed in place, because other references to the module must stay valid.
            module.__class__ = Dropout
            scales, own = getattr(module, "scale_by_keep", True), _OF_TORCH.get(kind, 1)
            cast(Dropout, module).set_rate(rate, site=first + count, own_dims=own, scales=scales)
            count += 1
        if getattr(module, "fused_attn", False) and getattr(getattr(module, "attn_drop", None), "p", 0):
            vars(module)["fused_attn"] = False
            unfused.append(name)
    return count, unfused


def dropouts(model: nn.Module) -> tuple[Dropout, ...]:
    """Return the modules of `model` that drop anything, for `key_samples` before each micro-batch."""
    return tuple(module for module in model.modules() if isinstance(module, Dropout) and module._threshold)


def key_samples(
    modules: Sequence[Dropout],
    *,
    seed: int,
    first: int,
    count: int,
    device: torch.device,
    reseeds: bool = False,
    in_place: bool = False,
) -> None:
    """Set the samples of the next training forward pass: `count` of the stream from number `first`.

    reseeds: seed torch's generator by the first sample, too, for layers that draw from it.
    in_place: the keys are where those of the pass before were, as CUDA graphs need them.
    """
    if reseeds:
        torch.manual_seed(key("layers", seed, first))
    if not modules:
        return
    # `first` as a tensor, because a Python number would give every step another graph.
    samples = torch.arange(count, device=device) + send(first, device)
    keys = mix(samples ^ key("dropout", seed))
    held = modules[0].sample_keys
    if in_place and held is not None and held.shape == keys.shape:
        keys = held.copy_(keys)
    for module in with_sites(modules, device):
        module.sample_keys = keys


def with_sites(modules: Sequence[Dropout], device: torch.device) -> tuple[Dropout, ...]:
    """Return `modules` with their sites on `device`, sent once: a step that did would leave them behind."""
    for module in modules:
        if module.site_key is None or module.site_key.device.type != device.type:
            module.site_key = send(key("site", module.site), device)
    return tuple(modules)

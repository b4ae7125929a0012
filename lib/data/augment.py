"""Random change of training samples, a pure function of (seed, epoch, index) for each sample.

No per-sample loop and no generator with a state: whatever batch, worker, rank or device an
sample is in, it comes out the same, bit for bit.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch.nn import functional

from lib.memory.simulation import simulated
from lib.rng import Words, key, mix

Kind: TypeAlias = Literal["none", "shift", "crop_flip", "symmetries"]

# Fields of the hash of a sample that its random numbers are cut from.
_FIELD_BITS = 20
_FIELD_MASK = (1 << _FIELD_BITS) - 1


def draw(
    epochs_N: Words, indices_N: Words, *, kind: Kind, pad: int, seed: int, fixed: int = 0
) -> tuple[Words, ...]:
    """What happens to each sample: the row and column to cut at, in [0, 2 pad], and 1 to mirror, else 0;
    of "symmetries" one hash, from which `lib.data.datasets.sudoku.symmetry` takes all that it needs.

    fixed: symmetries there are of each sample, the same in every epoch; 0 for a new one each. There is then a
    second number: 0 for the sample as it is, which is as likely as each of its symmetries.

    Takes and gives int64 arrays of NumPy or tensors of torch, with equal numbers.
    """
    assert kind != "none" and pad >= 0
    hashes = mix(mix(indices_N ^ mix(epochs_N ^ key("augment", seed))))
    if kind == "symmetries" and fixed:
        chosen = ((hashes >> 32) & 0x7FFFFFFF) * (fixed + 1) >> 31
        return mix(mix(indices_N ^ mix(chosen ^ key("fixed", seed)))), chosen
    if kind == "symmetries":
        return (hashes,)
    places = 2 * pad + 1
    row = ((hashes & _FIELD_MASK) * places) >> _FIELD_BITS
    column = (((hashes >> _FIELD_BITS) & _FIELD_MASK) * places) >> _FIELD_BITS
    mirror = (hashes >> (2 * _FIELD_BITS)) & (1 if kind == "crop_flip" else 0)
    return row, column, mirror


def apply(
    images_NCHW: torch.Tensor, draws: tuple[torch.Tensor, torch.Tensor, torch.Tensor], *, kind: Kind, pad: int
) -> torch.Tensor:
    """Shift uint8 images by up to `pad` pixels (zeros come in) and mirror some, as `draw` drew.

    draws: int64 tensors (N,) on the device of the images. Returns uint8 (N, C, H, W).
    """
    row, column, mirror = draws
    count, _, height, width = images_NCHW.shape
    padded = functional.pad(images_NCHW, (pad, pad, pad, pad))
    # Every window of every image as a view (N, row, column, C, H, W): cutting is then one gather.
    windows = padded.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
    sample = torch.arange(count, device=images_NCHW.device)
    if images_NCHW.device.type == "cpu" and not simulated():
        # The same gather on the same memory: NumPy copies a row of pixels at once, torch a byte.
        cut = torch.from_numpy(windows.numpy()[sample.numpy(), row.numpy(), column.numpy()])
    else:
        cut = windows[sample, row, column]
    if kind == "crop_flip":
        # Choosing by a mask of all bits or none is faster than torch.where on bytes.
        mask = mirror.neg().to(torch.uint8)[:, None, None, None]
        cut = cut ^ ((cut ^ cut.flip(3)) & mask)
    return cut

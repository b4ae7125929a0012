"""Further augmentations of images: resized crop, flips, colour jitter, erasing, mixup and cutmix.

Random numbers are drawn on the host, and bytes are changed on their device, in integer arithmetic: every
device makes the same bits. Powers and cosines are rounded, for their last bits differ between CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lib.config import AugmentOptions
from lib.data.augment import ONE, DrawnRows, Operation, Random, mirrored
from lib.data.types import ImageSpec, Indices, Spec
from lib.devices.base import send
from lib.errors import ConfigError
from lib.units import counted

Size: TypeAlias = tuple[int, int]  # height and width of images in pixels
Numbers: TypeAlias = npt.NDArray[np.float64]
Strength: TypeAlias = float | None  # None, as 0, for nothing

_BITS, _HALF = 16, ONE // 2  # of numbers in fixed point
_QUANTILES = 4096  # equally likely values of a number that is not uniform
_ERASED: dict[str, Any] = {"areas": (0.02, 0.33), "ratio": 3.3}  # of Zhong et al. 2020


def _rounded(numbers: Numbers) -> Indices:
    return np.rint(numbers * ONE).astype(np.int64)


def _placed(random: Random, sides: Sequence[Numbers], *, size: Size) -> list[Indices]:
    """Draw a place inside the image: start and length in rows, then in columns, in pixels, in fixed point."""
    found = []
    for pixels, side_N in zip(size, sides, strict=True):
        length_N = (side_N * (pixels * ONE)).astype(np.int64)
        found += [random.below(pixels * ONE - length_N + 1), length_N]
    return found


def draw_part(
    random: Random, *, size: Size, areas: tuple[float, float], ratio: float, percent: int = 100
) -> list[Indices]:
    """Draw parts of `percent` of the images, empty in the others, with an area uniform in `areas`.

    Width over height changes by a factor from 1 / ratio to ratio, uniform in its logarithm, and nearer to 1
    where a side would exceed the image's.
    """
    area_N = (areas[0] + (areas[1] - areas[0]) * (random.below(ONE + 1) / ONE)).clip(max=areas[1])
    ratios = _rounded(ratio ** np.linspace(-1, 1, _QUANTILES))
    ratio_N = (ratios[random.below(_QUANTILES)] / ONE).clip(area_N, 1 / area_N)
    some_N = random.below(100) < percent
    sides = np.sqrt(area_N / ratio_N) * some_N, np.sqrt(area_N * ratio_N) * some_N
    return _placed(random, sides, size=size)


def crop(images_NCHW: Tensor, rows: DrawnRows) -> Tensor:
    """Resize parts of images to all of them, by linear interpolation between the centres of pixels."""
    for dim in (2, 3):
        start_N1, length_N1, size = next(rows)[:, None], next(rows)[:, None], images_NCHW.shape[dim]
        centres = 2 * torch.arange(size, device=images_NCHW.device) + 1
        place_NS = (start_N1 + centres * length_N1 // (2 * size) - _HALF).clamp(0, (size - 1) * ONE)
        place = place_NS[:, None, :, None] if dim == 2 else place_NS[:, None, None, :]
        low, weight = place >> _BITS, ((place & (ONE - 1)) >> 8).to(torch.int32)  # of 256
        one, other = (
            images_NCHW.gather(dim, index.expand_as(images_NCHW)).to(torch.int32)
            for index in (low, (low + 1).clamp(max=size - 1))
        )
        images_NCHW = (one + (((other - one) * weight + 128) >> 8)).to(torch.uint8)
    return images_NCHW


def draw_half(random: Random) -> list[Indices]:
    """Draw 1 for half of the images, else 0."""
    return [random.below(2)]


def draw_jitter(random: Random, *, hue: Strength, factors: Sequence[Strength]) -> list[Indices]:
    """Draw cosine and sine / sqrt(3) of the turn of the hue, and the factors of the others."""
    turn_N = (random.around(hue) - ONE) * (2 * np.pi / ONE)
    turned = [_rounded(np.cos(turn_N)), _rounded(np.sin(turn_N) / np.sqrt(3.0))]
    return turned + [random.around(each) for each in factors]


def jitter(images_NCHW: Tensor, rows: DrawnRows) -> Tensor:
    """Change hue, saturation, contrast and brightness; only the result is clipped."""
    cosine, sine, *factors = (next(rows).to(torch.int32)[:, None, None, None] for _ in range(5))
    x = grey = images_NCHW.to(torch.int32)
    if images_NCHW.shape[1] == 3:
        middle = x.sum(1, keepdim=True, dtype=torch.int32) // 3  # a turn about the axis of greys
        turned = (x - middle) * cosine + (x.roll(1, 1) - x.roll(-1, 1)) * sine
        x = middle + ((turned + _HALF) >> _BITS)
        grey = (77 * x[:, :1] + 150 * x[:, 1:2] + 29 * x[:, 2:]) >> 8  # of ITU-R BT.601
    mean = grey.sum((1, 2, 3), keepdim=True).to(torch.int32) // grey[0].numel()
    for origin, factor in zip((grey, mean, 0 * mean), factors, strict=True):  # a factor of 1 changes no bit
        x = origin + (((x - origin) * factor + _HALF) >> _BITS)
    return x.clamp(0, 255).to(torch.uint8)


def erase(images_NCHW: Tensor, rows: DrawnRows, *, colour: Sequence[int]) -> Tensor:
    """Fill parts of images with a colour."""
    colour_C = send(torch.tensor(colour, dtype=torch.uint8), images_NCHW.device)
    return torch.where(_inside(images_NCHW, rows), colour_C[:, None, None], images_NCHW)


def _inside(images_NCHW: Tensor, rows: DrawnRows) -> Tensor:
    """Return which whole pixels are in a part, (N, 1, H, W)."""
    inside = []
    for size in images_NCHW.shape[2:]:
        start_N1, place = next(rows)[:, None], torch.arange(size, device=images_NCHW.device)
        inside.append((place >= start_N1 >> _BITS) & (place < (start_N1 + next(rows)[:, None]) >> _BITS))
    return inside[0][:, None, :, None] & inside[1][:, None, None, :]


@functools.cache
def beta_quantiles(alpha: float) -> Indices:
    """Return equally likely values of Beta(alpha, alpha), rising, in fixed point.

    By the trapezoidal rule over its lower half, in u = x ** min(alpha, 1), in which the density is bounded.
    """
    power = min(alpha, 1.0)
    u = np.linspace(0, 0.5**power, 1 << 16)
    x = u ** (1 / power)
    density = x ** (alpha - power) * (1 - x) ** (alpha - 1)
    mass = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    places = (np.arange(_QUANTILES // 2) + 0.5) * (mass[-1] / (_QUANTILES // 2))
    lower = _rounded(np.interp(places, mass, u) ** (1 / power))
    return np.concatenate((lower, ONE - lower[::-1]))


def draw_mix(random: Random, *, size: Size, mixup: Strength, cutmix: Strength) -> list[Indices]:
    """Draw a part of images, the weight of the sample in it, and the sample's share of the target.

    By mixup it is all of the image (Zhang et al. 2018). By cutmix it is the partner's, and lies inside, so
    that it has the area that is drawn (Yun et al. 2019). mixup, cutmix: alpha; of both, half and half.
    """
    place_N, cuts_N = random.below(_QUANTILES), random.below(2) if mixup and cutmix else bool(cutmix)
    share_N = np.where(cuts_N, beta_quantiles(cutmix or 1.0)[place_N], beta_quantiles(mixup or 1.0)[place_N])
    side_N = np.where(cuts_N, np.sqrt(1 - share_N / ONE), 1.0)
    box = _placed(random, [side_N, side_N], size=size)
    height_N, width_N = (((a + b) >> _BITS) - (a >> _BITS) for a, b in (box[:2], box[2:]))
    kept_N = _rounded(1 - height_N * width_N / (size[0] * size[1]))  # by whole pixels
    return [*box, np.where(cuts_N, 0, share_N), np.where(cuts_N, kept_N, share_N)]


def mix_pairs(images_NCHW: Tensor, rows: DrawnRows) -> Tensor:
    """Mix samples, the first half of the images, with their partners, the second."""
    own, other = images_NCHW.chunk(2)
    inside, weight_N = _inside(images_NCHW, rows)[: len(own)], next(rows)[: len(own), None, None, None]
    weight = torch.where(inside, weight_N, ONE).to(torch.int32)
    return ((own * weight + other * (ONE - weight) + _HALF) >> _BITS).to(torch.uint8)


def operations(augmentation: AugmentOptions, spec: Spec) -> list[Operation]:
    """Return the augmentations that are set, in their order; the last one may be "mix", of pairs.

    Raises ConfigError where `spec` has no images, or no colours that could change.
    """
    if not isinstance(spec, ImageSpec):
        todo = "remove what is set below CONFIG_AUGMENT_CHOICE"
        raise ConfigError(f"augmentation of images is not for {spec.name}", todo=todo)
    hue, saturation = augmentation.augment_hue, augmentation.augment_saturation
    if (saturation or hue) and spec.channels != 3:
        what = f"CONFIG_AUGMENT_{'SATURATION' if saturation else 'HUE'} is for colours"
        raise ConfigError(
            what, why=f"{spec.name} has {counted(spec.channels, 'channel')}", todo="set it to 0"
        )
    factors = saturation, augmentation.augment_contrast, augmentation.augment_brightness
    mixup, cutmix = augmentation.augment_mixup_alpha, augmentation.augment_cutmix_alpha
    least, erased = augmentation.augment_crop_pct or 0, augmentation.augment_erase_pct or 0
    part = partial(draw_part, size=(spec.height, spec.width))
    cropped = partial(part, areas=(least / 100, 1.0), ratio=augmentation.augment_crop_ratio or 1.0)
    coloured = partial(draw_jitter, hue=hue, factors=factors)
    filled = partial(erase, colour=[round(255 * mean) for mean in spec.mean])
    mixed = partial(draw_mix, size=(spec.height, spec.width), mixup=mixup, cutmix=cutmix)
    known = (
        (least, Operation("crop", cropped, crop)),
        (augmentation.augment_flip_horizontal, Operation("flip3", draw_half, partial(mirrored, dim=3))),
        (augmentation.augment_flip_vertical, Operation("flip2", draw_half, partial(mirrored, dim=2))),
        (hue or any(factors), Operation("jitter", coloured, jitter)),
        (erased, Operation("erase", partial(part, **_ERASED, percent=erased), filled)),
        (mixup or cutmix, Operation("mix", mixed, mix_pairs)),
    )
    return [operation for is_set, operation in known if is_set]

"""Augmentations of images: pure functions of (seed, epoch, index), in the ranges that are set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.config import AugmentOptions
from lib.data.augment import ONE, Kind, Operation, Random
from lib.data.image_augment import beta_quantiles, draw_mix, draw_part, operations
from lib.data.loader import Batch, EvalLoader, LoaderConfig, TrainLoader
from lib.data.sampler import sample_stream
from lib.data.types import ArrayPart, Column, ImageSpec, TableClassSpec
from lib.errors import ConfigError

OFF = AugmentOptions(
    augment_crop_pct=None,
    augment_crop_ratio=None,
    augment_flip_horizontal=False,
    augment_flip_vertical=False,
    augment_brightness=0.0,
    augment_contrast=0.0,
    augment_saturation=0.0,
    augment_hue=0.0,
    augment_erase_pct=0,
    augment_mixup_alpha=0.0,
    augment_cutmix_alpha=0.0,
)
EACH: dict[str, dict[str, Any]] = {
    "crop": {"augment_crop_pct": 20, "augment_crop_ratio": 1.5},
    "horizontal flip": {"augment_flip_horizontal": True},
    "vertical flip": {"augment_flip_vertical": True},
    "brightness": {"augment_brightness": 0.4},
    "contrast": {"augment_contrast": 0.4},
    "saturation": {"augment_saturation": 0.4},
    "hue": {"augment_hue": 0.2},
    "erasing": {"augment_erase_pct": 40},
    "mixup": {"augment_mixup_alpha": 0.8},
    "cutmix": {"augment_cutmix_alpha": 1.0},
}
TOGETHER = {name: value for one in EACH.values() for name, value in one.items()}
# Set, and without effect: the same bits come out.
NEUTRAL: dict[str, dict[str, Any]] = {
    "crop": {"augment_crop_pct": 100, "augment_crop_ratio": 1.0},
    "jitter": dict.fromkeys(("augment_brightness", "augment_saturation", "augment_hue"), 1e-9),
}
SPEC = replace(ImageSpec.square("toy", 12, 10, mean=(0.1, 0.5, 0.7), std=(0.2, 0.3, 0.9)), width=10)
MANY, SIZE = 20_000, 37
DELIVERY = LoaderConfig(device=torch.device("cpu"), placement="resident", num_workers=2, prefetch=3)
EVERY = pytest.mark.parametrize("options", [*EACH.values(), TOGETHER], ids=[*EACH, "together"])


def made(spec: ImageSpec = SPEC, **options: Any) -> list[Operation]:
    return operations(replace(OFF, **options), spec)


def random_of(size: int = MANY, *, seed: int = 1, epoch: int = 0) -> Random:
    return Random(np.full(size, epoch), np.arange(size), seed=seed, name="test")


def images(size: int = 64, spec: ImageSpec = SPEC) -> Tensor:
    shape = size, *spec.input_shape
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def applied(raw: Tensor, found: Sequence[Operation], *, seed: int = 1) -> tuple[Tensor, list[Tensor]]:
    zeros, numbers = np.zeros(len(raw), np.int64), np.arange(len(raw))
    drawn = [each.draw(Random(zeros, numbers, seed=seed, name=each.name)) for each in found]
    rows = [torch.from_numpy(row) for rows in drawn for row in rows]
    left = iter(rows)
    for each in found:
        raw = each.apply(raw, left)
    return raw, rows


def part() -> ArrayPart:
    return ArrayPart(images(SIZE).numpy(), np.arange(SIZE, dtype=np.int64))


def loader(options: dict[str, Any], *, kind: Kind = "shift", **changes: Any) -> TrainLoader:
    found = operations(replace(OFF, **options), SPEC)
    return TrainLoader(
        part(),
        SPEC,
        replace(DELIVERY, **changes),
        seed=3,
        augment=kind,
        pad=1,
        operations=found,
    )


def columns(batches: Sequence[Batch]) -> list[Tensor]:
    """All that the batches have, one row a sample."""
    each = [(batch.inputs, batch.targets, *(batch.mixed or ())) for batch in batches]
    return [torch.cat(column) for column in zip(*each, strict=True)]


def equal(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    pairs = zip(columns(one), columns(other), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_no_split_changes_a_sample(options: dict[str, Any], placement: str) -> None:
    """Equal and unequal shares of ranks, any micro-batches, and steps in any order, into later epochs."""
    target, steps = 24, (0, 1, 900, 2)
    with loader(options) as whole:
        expected = {step: [*whole.micro_batches(step=step, target=target, sizes=(target,))] for step in steps}
    for shares in ((24,), (12, 12), (13, 9, 2)):
        found: dict[int, list[Batch]] = {step: [] for step in steps}
        for rank, share in enumerate(shares):
            sizes = (5,) * (share // 5) + (share % 5,) * (share % 5 > 0)
            firsts = [*accumulate(sizes[:-1], initial=sum(shares[:rank]))]
            request: dict[str, Any] = {"target": target, "firsts": firsts, "sizes": sizes}
            with loader(options, placement=placement) as one:
                for step in steps:
                    found[step] += one.micro_batches(step=step, **request)
        assert all(equal(found[step], expected[step]) for step in steps), shares


@EVERY
def test_a_sample_changes_with_seed_and_epoch(options: dict[str, Any]) -> None:
    with loader(options, kind="none") as one:
        both = [columns([*one.micro_batches(step=step, target=SIZE, sizes=(SIZE,))]) for step in (0, 1)]
    first, second = (inputs[labels.argsort()] for inputs, labels, *_ in both)
    assert not torch.equal(first, second), "of two epochs"
    raw = images()
    assert not torch.equal(applied(raw, made(**options))[0], applied(raw, made(**options), seed=2)[0])


@pytest.mark.slow
@EVERY
def test_padding_repeats_a_sample_and_has_no_weight(options: dict[str, Any]) -> None:
    request: dict[str, Any] = {"step": 0, "target": 7, "sizes": (4, 3)}
    with loader(options) as one:
        whole = columns([*one.micro_batches(**request)])
        padded = [*one.micro_batches(**request, rows=(4, 4))]
    assert torch.cat([batch.weights for batch in padded if batch.weights is not None]).tolist() == [1] * 7 + [
        0
    ]
    for column, expected in zip(columns(padded), whole, strict=True):
        assert torch.equal(column[:7], expected) and torch.equal(column[7], expected[6])


@pytest.mark.parametrize("options", NEUTRAL.values(), ids=NEUTRAL)
def test_without_strength_no_bit_changes(options: dict[str, Any]) -> None:
    raw = images()
    assert torch.equal(applied(raw, made(**options))[0], raw)
    assert made() == []


def test_evaluation_is_never_augmented() -> None:
    with loader(TOGETHER) as train, EvalLoader(part(), SPEC, DELIVERY) as evaluation:
        (batch,) = evaluation.batches(rank=0, world=1, batch_size=SIZE)
        (trained,) = train.micro_batches(step=0, target=SIZE, sizes=(SIZE,))
    scale, offset = (torch.tensor(values)[:, None, None] for values in (SPEC.std, SPEC.mean))
    restored = ((batch.inputs * scale + offset) * 255).round().to(torch.uint8)
    assert torch.equal(restored, images(SIZE)) and batch.mixed is None
    assert not torch.equal(trained.inputs, batch.inputs[trained.targets])


def test_crops_have_the_area_and_ratio_that_are_set_and_lie_anywhere() -> None:
    size = (SPEC.height, SPEC.width)
    top, height, left, width = draw_part(random_of(), size=size, areas=(0.2, 1.0), ratio=1.5)
    parts = np.stack((height / size[0], width / size[1])) / ONE
    area, ratio = parts.prod(axis=0), parts[1] / parts[0]
    assert 0.2 - 1e-4 <= area.min() < 0.21 and 0.99 < area.max() <= 1
    assert area.mean() == pytest.approx(0.6, abs=0.01), "uniform"
    assert 1 / 1.5 - 1e-4 <= ratio.min() < 0.68 and 1.48 < ratio.max() <= 1.5 + 1e-4
    assert np.log(ratio).mean() == pytest.approx(0, abs=0.01)
    small = area < 0.5  # where every ratio fits
    assert np.log(ratio[small]).std() == pytest.approx(2 * np.log(1.5) / 12**0.5, rel=0.03)
    for start, length, pixels in ((top, height, size[0]), (left, width, size[1])):
        assert start.min() >= 0 and (start + length <= pixels * ONE).all()
        assert np.mean((start / (pixels * ONE - length + 1))[small]) == pytest.approx(0.5, abs=0.01)


def test_a_crop_is_a_linear_interpolation() -> None:
    """Against torch's, up to the rounding of two passes."""
    raw = images(30)
    found, (top, height, left, width) = applied(raw, made(**EACH["crop"]))
    for number in range(30):
        axes = []
        for start, length, pixels in ((top, height, 12), (left, width, 10)):
            centre = (torch.arange(pixels) + 0.5) * float(length[number]) / ONE / pixels + float(
                start[number]
            ) / ONE
            axes.append(2 * centre / pixels - 1)
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij")[::-1], dim=-1)[None]
        expected = torch.nn.functional.grid_sample(
            raw[number : number + 1].float(), grid.float(), padding_mode="border", align_corners=False
        )
        assert (found[number] - expected[0]).abs().max() < 2.5


@pytest.mark.parametrize(("name", "dim"), [("horizontal flip", 3), ("vertical flip", 2)])
def test_half_of_the_images_are_flipped(name: str, dim: int) -> None:
    raw = images(2000)
    found, (flipped,) = applied(raw, made(**EACH[name]))
    expected = torch.where(flipped[:, None, None, None] == 1, raw.flip(dim), raw)
    assert torch.equal(found, expected) and abs(float(flipped.double().mean()) - 0.5) < 0.04


def grey_of(x: Tensor) -> Tensor:
    return ((77 * x[:, 0] + 150 * x[:, 1] + 29 * x[:, 2]) / 256)[:, None]


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "saturation": lambda x, factor: grey_of(x) + (x - grey_of(x)) * factor,
    "contrast": lambda x, factor: (mean := grey_of(x).mean((2, 3), keepdim=True)) + (x - mean) * factor,
    "brightness": lambda x, factor: x * factor,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_colours_change_by_a_factor_around_one(name: str) -> None:
    raw = images(3000)
    found, rows = applied(raw, made(**EACH[name]))
    factors = dict(zip(FORMULAS, (row.double() / ONE for row in rows[2:]), strict=True))
    factor = factors.pop(name)
    assert 0.6 <= factor.min() < 0.61 and 1.39 < factor.max() <= 1.4 and abs(factor.mean() - 1) < 0.02
    assert all((other == 1).all() for other in factors.values())
    expected = FORMULAS[name](raw.double(), factor[:, None, None, None]).clamp(0, 255)
    assert (found - expected).abs().max() < 2.5, "greys and means are whole numbers"


def test_hue_turns_colours_about_grey() -> None:
    raw = images(2000) // 2 + 60  # nothing is clipped
    found, (cosine, sine, *_) = applied(raw, made(augment_hue=0.2))
    turn = torch.atan2(sine.double() * 3**0.5, cosine.double()) / (2 * torch.pi)
    assert -0.2001 < turn.min() < -0.19 and 0.19 < turn.max() < 0.2001
    before, after = ((x - x.mean(1, keepdim=True)) for x in (raw.double(), found.double()))
    assert (before.norm(dim=1) - after.norm(dim=1)).abs().max() < 2
    assert (raw.double().mean(1) - found.double().mean(1)).abs().max() < 1.5
    # A third of a turn passes the channels on.
    third = [torch.tensor([value], dtype=torch.int64) for value in (-ONE // 2, ONE // 2, ONE, ONE, ONE)]
    (operation,) = made(augment_hue=0.2)
    assert (operation.apply(raw[:1], iter(third)).int() - raw[:1].roll(1, 1).int()).abs().max() <= 1


def test_erased_parts_have_the_mean_colour_and_the_area_of_the_paper() -> None:
    _, height, _, width = made(**EACH["erasing"])[0].draw(random_of())
    area = height / ONE * (width / ONE) / (SPEC.height * SPEC.width)
    assert np.mean(area > 0) == pytest.approx(0.4, abs=0.01)
    assert area[area > 0].min() > 0.019 and 0.32 < area.max() < 0.331
    raw = images(500)
    found, _ = applied(raw, made(**EACH["erasing"]))
    colour = torch.tensor([26, 128, 178], dtype=torch.uint8)[:, None, None]  # 255 * mean
    changed = (found != raw).any(1, keepdim=True)
    assert torch.equal(torch.where(changed, colour, raw), found)
    assert float(changed.flatten(1).any(1).double().mean()) == pytest.approx(0.4, abs=0.07)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 4.0])
def test_quantiles_are_those_of_the_beta_distribution(alpha: float) -> None:
    found = beta_quantiles(alpha) / ONE
    assert (np.diff(found) >= 0).all() and found.mean() == pytest.approx(0.5, abs=1e-9)
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=1e-3)
    drawn = np.sort(np.random.default_rng(0).beta(alpha, alpha, 400_000))[50::100]  # 4000 quantiles
    assert np.abs(np.interp(np.linspace(0, 1, 4000), np.linspace(0, 1, 4096), found) - drawn).max() < 0.01


def test_mixup_weighs_two_images_and_their_labels_alike() -> None:
    raw = images(SIZE).double()
    with loader(EACH["mixup"], kind="none") as one:
        (batch,) = one.micro_batches(step=0, target=SIZE, sizes=(SIZE,))
    assert batch.mixed is not None
    partners, shares = batch.mixed
    scale, offset = (torch.tensor(values)[:, None, None] for values in (SPEC.std, SPEC.mean))
    pixels = (batch.inputs * scale + offset) * 255
    weight = shares.double()[:, None, None, None]
    expected = weight * raw[batch.targets] + (1 - weight) * raw[partners]
    assert (pixels - expected).abs().max() < 0.51
    _, indices = sample_stream(start=0, count=SIZE, seed=3, size=SIZE)
    assert batch.targets.tolist() == indices.tolist() and 10 < len(set(partners.tolist())) < SIZE


def test_cutmix_puts_a_part_of_the_partner_and_shares_by_pixels() -> None:
    raw = images(SIZE)
    with loader(EACH["cutmix"], kind="none") as one:
        (batch,) = one.micro_batches(step=0, target=SIZE, sizes=(SIZE,))
    assert batch.mixed is not None
    partners, shares = batch.mixed
    scale, offset = (torch.tensor(values)[:, None, None] for values in (SPEC.std, SPEC.mean))
    pixels = ((batch.inputs * scale + offset) * 255).round().to(torch.uint8)
    own = (pixels == raw[batch.targets]).all(1)
    assert (own | (pixels == raw[partners]).all(1)).all()
    kept = own.double().mean((1, 2))
    assert torch.allclose(
        kept[partners != batch.targets].float(), shares[partners != batch.targets], atol=1e-4
    )
    *_, drawn = draw_mix(random_of(), size=(224, 224), mixup=0.0, cutmix=1.0)
    assert np.mean(drawn / ONE) == pytest.approx(0.5, abs=0.01)


def test_of_mixup_and_cutmix_each_has_half_of_the_samples() -> None:
    rows = draw_mix(random_of(), size=(12, 10), mixup=0.8, cutmix=1.0)
    is_mixup = (rows[1] == 12 * ONE) & (rows[3] == 10 * ONE) & (rows[4] == rows[5])
    assert np.mean(is_mixup) == pytest.approx(0.5, abs=0.02)
    assert (rows[4][~is_mixup] == 0).all()


def test_each_part_of_an_image_is_drawn_alone() -> None:
    """One more augmentation changes nothing of the others'."""
    raw = images()
    _, alone = applied(raw, made(**EACH["crop"]))
    _, both = applied(raw, made(**EACH["crop"], **EACH["vertical flip"], **EACH["erasing"]))
    assert all(torch.equal(one, other) for one, other in zip(alone, both[:4], strict=True))


@pytest.mark.parametrize("name", ["saturation", "hue"])
def test_colours_of_grey_images_are_refused(name: str) -> None:
    grey = ImageSpec.square("grey", 8, 10, mean=(0.5,), std=(0.2,))
    what = f"CONFIG_AUGMENT_{name.upper()} is for colours: grey has 1 channel"
    with pytest.raises(ConfigError, match=what):
        made(grey, **EACH[name])
    raw = images(spec=grey)
    factors = {"augment_brightness": 0.4, "augment_contrast": 0.4}
    assert not torch.equal(applied(raw, made(grey, **factors))[0], raw)


def test_data_without_images_are_refused() -> None:
    table = TableClassSpec(name="table", columns=(Column(name="a"),), classes=2)
    with pytest.raises(ConfigError, match="augmentation of images is not for table"):
        operations(replace(OFF, augment_flip_vertical=True), table)

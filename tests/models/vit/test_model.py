"""The vision transformer: images of any size, and blocks that change nothing at first."""

from __future__ import annotations

import pytest
import torch

from lib.data.types import ImageSpec
from lib.errors import ConfigError
from models.vit.model import Options, build

OPTIONS = {"width": 8, "layers": 2, "heads": 2, "halvings": 2}


def spec_of(height: int, width: int) -> ImageSpec:
    colours = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    return ImageSpec(
        name="noise", channels=3, height=height, width=width, classes=5, synthetic=True, **colours
    )


@pytest.mark.parametrize(("height", "width"), [(32, 32), (9, 13), (1, 1), (17, 4)])
@pytest.mark.parametrize("halvings", [2, 3, 5])
def test_sides_need_not_be_multiples_of_a_patch(height: int, width: int, halvings: int) -> None:
    model = build(Options(**OPTIONS | {"halvings": halvings}), spec_of(height, width))
    assert model(torch.randn(2, 3, height, width)).shape == (2, 5)


def test_a_block_changes_nothing_at_first_and_then_mixes_tokens() -> None:
    torch.manual_seed(0)
    model = build(Options(**OPTIONS), spec_of(8, 8))
    block, x_NTC = model.blocks[0], torch.randn(2, 4, 8)
    assert torch.equal(block(x_NTC), x_NTC)
    torch.nn.init.normal_(block.attention_out.weight)
    other = x_NTC.clone()
    other[:, 3] += torch.randn(8)
    changed = (block(x_NTC) - block(other)).abs().amax(dim=-1)
    assert (changed[:, :3] > 1e-6).all(), "every token sees the last one"


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="CONFIG_VIT_WIDTH=8 is not a multiple of CONFIG_VIT_HEADS=3"):
        build(Options(**OPTIONS | {"heads": 3}), spec_of(8, 8))

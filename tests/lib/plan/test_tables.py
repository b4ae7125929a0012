"""The free-memory table: every cell, every boundary, and agreement with the models' own Kconfig."""

from __future__ import annotations

import math

import pytest

from lib.hyperparams import auto_detect_hyperparams
from lib.plan.tables import MODELS, TIERS, cpu_table_batch, table_batch
from lib.units import GB
from tests.support.configs import make_config

USABLE_GB = (128, 64, 32, 16, 8, 4, 0)
CELLS = {
    ("gpt2", True): (256, 128, 32, 16, 8, 4, 2),
    ("gpt2", False): (128, 64, 16, 8, 4, 2, 1),
    ("resnet50", True): (384, 192, 48, 24, 12, 6, 3),
    ("resnet50", False): (192, 96, 24, 12, 6, 3, 1),
    ("resnet18", True): (512, 256, 64, 32, 16, 8, 4),
    ("resnet18", False): (256, 128, 32, 16, 8, 4, 2),
    ("lenet5", True): (1024, 512, 128, 64, 32, 16, 8),
    ("lenet5", False): (512, 256, 64, 32, 16, 8, 4),
}


class Foreign:
    """An object with upper-case attributes."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(("model", "compiled"), CELLS)
@pytest.mark.parametrize("row", range(len(USABLE_GB)))
def test_every_cell_inside_its_tier(model: str, compiled: bool, row: int) -> None:
    lower = USABLE_GB[row]
    upper = USABLE_GB[row - 1] if row else 200
    free_gb = (lower + upper) / 2 / 0.8
    assert (
        table_batch(int(free_gb * GB), scale=MODELS[model].scale, compiled=compiled)
        == CELLS[model, compiled][row]
    )
    requested = Foreign(
        BATCH_TABLE_STRICT=True, COMPILE_MANUAL=True, COMPILE_MODEL=compiled, TARGET_EFFECTIVE_BATCH=4096
    )
    info = {
        "gpu_name": "NVIDIA Test",
        "gpu_count": 1,
        "gpu_mem_gb": 256.0,
        "gpu_free_gb": free_gb,
        "has_gpu": True,
    }
    found = auto_detect_hyperparams(requested, model_type=model, gpu_info=info)
    assert found["batch_size"] == CELLS[model, compiled][row]
    assert found["gradient_accumulation"] == max(1, 4096 // CELLS[model, compiled][row])


@pytest.mark.parametrize("row", range(len(USABLE_GB) - 1))
def test_boundaries_are_inclusive_to_the_byte_and_to_the_last_bit(row: int) -> None:
    free_gb = USABLE_GB[row] / 0.8  # exact in binary for every tier
    assert free_gb * 0.8 == USABLE_GB[row]
    at, below = CELLS["gpt2", True][row], CELLS["gpt2", True][row + 1]
    assert table_batch(int(free_gb) * GB, scale=1.0, compiled=True) == at
    assert table_batch(int(free_gb) * GB - 1, scale=1.0, compiled=True) == below
    info = {"gpu_name": "NVIDIA Test", "gpu_count": 1, "gpu_mem_gb": 256.0, "has_gpu": True}
    for free, expected in ((free_gb, at), (math.nextafter(free_gb, 0), below)):
        found = auto_detect_hyperparams(Foreign(), gpu_info={**info, "gpu_free_gb": free})
        assert found["batch_size"] == expected


def test_processor_batches() -> None:
    batches = {model: cpu_table_batch(scale=row.scale) for model, row in MODELS.items()}
    assert batches == {"gpt2": 16, "resnet50": 24, "resnet18": 32, "lenet5": 64}


def test_no_scale_gives_an_empty_batch() -> None:
    assert table_batch(0, scale=0.6, compiled=False) == 1


def test_tiers_fall_and_end_at_zero() -> None:
    edges = [tier.usable_gb for tier in TIERS]
    assert edges == sorted(edges, reverse=True) and edges[-1] == 0


@pytest.mark.parametrize("model", ["lenet5", "resnet18", "resnet50"])
def test_rows_agree_with_the_kconfig_of_the_model(model: str) -> None:
    config, row = make_config(model), MODELS[model]
    assert (config.table_scale, config.recommended_target) == (row.scale, row.recommended_target)
    assert (config.norm_batch is not None) == row.has_batchnorm

"""The benchmark of the configured model: one short round, to see that both loops run and are told of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.forked import Forked
from tests.e2e.runner import Runner

pytestmark = pytest.mark.slow

LANGUAGE = {
    "CONFIG_GPT2_SIZE_CUSTOM": "y",
    "CONFIG_GPT2_LAYERS": "1",
    "CONFIG_GPT2_HEADS": "2",
    "CONFIG_GPT2_WIDTH": "16",
    "CONFIG_GPT2_DROPOUT": "0.1",
    "CONFIG_DATASET_TEXT_FILES": "y",
    "CONFIG_BLOCK_SIZE": "8",
}


def benched(runner: Runner) -> str:
    """What it says."""
    words = ("--rounds", "1", "--seconds", "0.01")
    output = runner.folder / "output"
    process = Forked("scripts.bench.throughput", words, environment=runner.environment(), output=output)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize(
    ("defconfig", "settings", "layout"),
    [
        ("gpt2-tiny", LANGUAGE, ""),
        pytest.param(
            "resnet18",
            {"CONFIG_RESNET18_WIDTH": "4", "CONFIG_NORM_BATCH": "16"},
            " with channels last",
            marks=pytest.mark.long,
        ),
    ],
)
def test_rates_are_compared(defconfig: str, settings: Mapping[str, str], layout: str, tmp_path: Path) -> None:
    if "CONFIG_DATASET_TEXT_FILES" in settings:
        (tmp_path / "text.txt").write_text("What is written is read again.\n" * 2000)
        settings = {**settings, "CONFIG_DATA_DIR": str(tmp_path / "text.txt")}
    runner = Runner(tmp_path)
    runner.configure(defconfig, {**settings, "CONFIG_DEVICE_CPU": "y"})
    said = benched(runner)
    rates = r"^{} .*\n{} .* \d+\.\d{{3}} +\d+\.\d{{3}}"
    assert re.search(rates.format("a bare loop", "the toolkit"), said, flags=re.MULTILINE)
    told = re.search(rates.format("fp32", f"bf16{layout}"), said, flags=re.MULTILINE)
    assert told or "this CPU has no bf16 instructions" in said
    assert re.search(r"a step has .* GFLOP; .*\nfp32 .* GFLOP/s .* GFLOP/s .*% of it", said)

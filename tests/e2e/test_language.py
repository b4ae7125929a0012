"""A language model from its defconfig to a sample and to a file, the way the make targets call it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from lib import metrics
from tests.e2e.runner import Runner

pytestmark = pytest.mark.slow

SMALL = {
    "CONFIG_GPT2_SIZE_CUSTOM": "y",
    "CONFIG_GPT2_LAYERS": "2",
    "CONFIG_GPT2_HEADS": "2",
    "CONFIG_GPT2_WIDTH": "32",
    "CONFIG_GPT2_DROPOUT": "0.1",
    "CONFIG_DATASET_TEXT_FILES": "y",
    "CONFIG_BLOCK_SIZE": "16",
    "CONFIG_MAX_STEPS": "30",
    "CONFIG_LOG_INTERVAL_STEPS": "5",
    "CONFIG_PRECISION_FP32": "y",
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder = tmp_path_factory.mktemp("language")
    text = "".join(f"{number} is followed by {number + 1}.\n" for number in range(9000))
    (folder / "text.txt").write_text(text)
    runner = Runner(folder)
    runner.configure("gpt2-tiny", SMALL | {"CONFIG_DATA_DIR": str(folder / "text.txt")})
    runner.run("train")
    return runner


def test_a_run_ends_with_a_sample_and_bits_per_byte(runner: Runner) -> None:
    run = runner.newest()
    log = run.log.read_text()
    assert "Sample: " in log
    last = metrics.read(run.metrics)[-1]
    assert last["kind"] == "eval" and last["loss"] < math.log(256) / 1.5
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2), rel=1e-9)
    told = re.search(r"Done: loss ([\d.]+) nats per byte, perplexity .* per byte, bits per byte", log)
    assert told and float(told[1]) == pytest.approx(last["loss"], abs=1e-4)
    assert f"bits per byte {last['bits_per_byte']:.4f}" in runner.run("eval")


def test_a_sample_follows_from_its_options(runner: Runner) -> None:
    def sample(*options: str) -> str:
        return runner.run("sample", "--prompt", "12 is ", "--tokens", "20", *options)

    one = sample("--seed", "1")
    assert one.startswith("12 is ") and len(one.encode()) >= 20
    assert one == sample("--seed", "1") != sample("--seed", "2")
    assert sample("--temperature", "0") == sample("--top-k", "1", "--seed", "7")


def test_what_cannot_be_sampled_is_told(runner: Runner) -> None:
    assert "give some text as PROMPT=" in runner.run("sample", "--prompt", "", status=2)
    assert "--top-k" in runner.run("sample", "--top-k", "-1", status=2)
    assert "--temperature" in runner.run("sample", "--temperature", "nan", status=2)


def test_weights_are_written_or_the_extra_is_named(runner: Runner, tmp_path: Path) -> None:
    try:
        from safetensors.torch import load_file
    except ImportError:
        done = runner.run("export", "--directory", str(tmp_path / "out"), status=2)
        assert "the package safetensors is not installed" in done
        return
    runner.run("export", "--directory", str(tmp_path / "out"))
    assert load_file(tmp_path / "out/model.safetensors")["transformer.wte.weight"].shape == (256, 32)

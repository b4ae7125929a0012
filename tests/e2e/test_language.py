"""A language model from its defconfig to a sample and to a file, the way the make targets call it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from lib.runs import metrics
from tests.e2e.runner import Runner, assert_same_bits

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
BASELINE = r"N-gram baseline: \d\.\d\d( / \d\.\d\d){3} bits per byte by counting 1- to 4-grams of bytes$"


def a_runner(folder: Path, settings: Mapping[str, str] = MappingProxyType({})) -> Runner:
    """Its text is in `folder`."""
    text = "".join(f"{number} is followed by {number + 1}.\n" for number in range(9000))
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(text)
    runner = Runner(folder)
    runner.configure("gpt2-tiny", SMALL | {"CONFIG_DATA_DIR": str(folder / "text.txt")} | settings)
    return runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = a_runner(tmp_path_factory.mktemp("language"))
    runner.run("train")
    return runner


def last_evaluation(runner: Runner) -> dict[str, Any]:
    return [row for row in metrics.read(runner.newest().metrics) if row["kind"] == "eval"][-1]


def test_a_run_ends_with_a_sample_and_bits_per_byte_beside_the_floors(runner: Runner) -> None:
    run = runner.newest()
    log = run.log.read_text()
    assert "Sample: " in log and re.search(BASELINE, log, re.MULTILINE)
    last = last_evaluation(runner)
    assert last["loss"] < math.log(256) / 1.5
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2), rel=1e-9)
    told = re.search(r"Done: loss ([\d.]+) nats per byte, perplexity .* per byte, bits per byte", log)
    assert told and float(told[1]) == pytest.approx(last["loss"], abs=1e-4)
    evaluated = runner.run("eval")
    assert f"bits per byte {last['bits_per_byte']:.4f}" in evaluated
    assert re.search(BASELINE, evaluated, re.MULTILINE) and "counting n-grams" not in evaluated


def test_a_run_that_is_stopped_goes_on_to_the_same_bits(runner: Runner, tmp_path: Path) -> None:
    other = a_runner(tmp_path, {"CONFIG_CHECKPOINT_INTERVAL_STEPS": "1"})
    process = other.start("train")
    deadline = time.monotonic() + 60
    while not list(other.runs.glob("*/*/ckpt/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert "Starting after step " in other.run("resume")
    assert_same_bits(runner.weights(), other.weights())


def test_a_sample_follows_from_its_options(runner: Runner) -> None:
    def sample(*options: str) -> str:
        run, _, text = runner.run("sample", "--prompt", "12 is ", "--tokens", "20", *options).partition("\n")
        assert run == f"{runner.newest().path}, step {runner.newest().status().step}:"
        return text

    one = sample("--seed", "1")
    assert one.startswith("12 is ") and len(one.encode()) >= 20
    assert one == sample("--seed", "1") != sample("--seed", "2")
    assert sample("--temperature", "0") == sample("--top-k", "1", "--seed", "7")


def test_what_cannot_be_sampled_is_told(runner: Runner) -> None:
    assert "give some text as PROMPT=" in runner.run("sample", "--prompt", "", status=2)
    assert "TOP_K=-1 is not a whole number from 0" in runner.run("sample", "--top-k", "-1", status=2)
    assert "TEMPERATURE=nan is not a" in runner.run("sample", "--temperature", "nan", status=2)


def test_weights_are_written_or_the_extra_is_named(runner: Runner, tmp_path: Path) -> None:
    try:
        from safetensors.torch import load_file
    except ImportError:
        done = runner.run("export", "--directory", str(tmp_path / "out"), status=2)
        assert "the package safetensors is not installed" in done
        return
    runner.run("export", "--directory", str(tmp_path / "out"))
    weights = tmp_path / "out/model.safetensors"
    assert load_file(weights)["transformer.wte.weight"].shape == (256, 32)
    # What has learnt goes on from there.
    other = a_runner(tmp_path / "other", {"CONFIG_INITIAL_WEIGHTS": str(weights), "CONFIG_MAX_STEPS": "1"})
    assert "Weights: " in other.run("train")
    before, after = (last_evaluation(which)["loss"] for which in (runner, other))
    assert after == pytest.approx(before, abs=0.1)


def test_sentences_are_classified_and_have_no_floors(tmp_path: Path) -> None:
    folder = tmp_path / "sst2"
    folder.mkdir()
    lines = [f"{('bad', 'good')[number % 2] * 4} {number}\t{number % 2}\n" for number in range(512)]
    (folder / "train.tsv").write_text("".join(lines[:448]))
    (folder / "dev.tsv").write_text("".join(lines[448:]))
    runner = Runner(tmp_path)
    settings = {
        name: SMALL[name] for name in SMALL if "GPT2" in name or "STEPS" in name or "PRECISION" in name
    }
    runner.configure(
        "gpt2-sst2",
        settings
        | {
            "CONFIG_DATA_DIR": str(tmp_path),
            "CONFIG_TOKENIZER_BYTE": "y",
            "CONFIG_BLOCK_SIZE": "32",
            "CONFIG_BUDGET_STEPS": "y",
            "CONFIG_LEARNING_RATE": "0.01",
            "CONFIG_GPT2_DROPOUT": "0.0",
        },
    )
    done = runner.run("train")
    assert "NgramBaseline" not in done and "Sample" not in done
    assert last_evaluation(runner)["accuracy"] > 0.9
    refused = runner.run("export", "--directory", str(tmp_path / "out"), status=2)
    assert "a classifier of texts cannot be written" in refused and not (tmp_path / "out").exists()
    assert "is not a language model" in runner.run("sample", status=2)

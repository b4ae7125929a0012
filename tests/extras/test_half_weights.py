"""Frozen linear layers that stay in the half precision of their files, beside adapters."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.nn import lora
from lib.plan.fitting import StepSettings, step_settings
from lib.plan.gpus import parse_gpu
from lib.plan.sharding import held
from lib.plan.types import Layout
from tests.e2e.forked import ROOT
from tests.e2e.runner import Runner
from tests.extras.foreign import config_of
from tests.extras.half_ranks_worker import STRATEGIES, of_directory, token_data, trained_by
from tests.extras.test_adapters import model_of
from tests.extras.test_causal import folder_of, with_weights
from tests.extras.test_chat import TALK, tokenizer_at
from tests.support.training import (
    ADAPTERS,
    CPU,
    MemoryRecord,
    largest_difference,
    small_job,
    small_plan,
    trained,
)
from train import adapters
from train.build import check_run, make_job
from train.planning.memory_estimate import MemoryTraces
from train.planning.run_plan import predicted_plan
from train.training_data import stored_units


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # the head of the second is tied to its embedding
def test_frozen_layers_stay_in_the_type_of_their_files_and_no_bit_changes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_weights(family, tmp_path, dtype=torch.bfloat16)
    own = {"model_options": {"dir": str(folder), "input": "causal"}, "precision": "bf16"}
    config = config_of("lm-llama", tmp_path / "other", **ADAPTERS, **own)
    data, plan = token_data(config), small_plan(4, 4, precision="bf16")
    device = parse_gpu("rtx4090")
    found, parts = list[dict[str, torch.Tensor]](), list[int]()
    for halves in (True, False):
        if not halves:
            monkeypatch.setattr(adapters, "halve", lambda *_: False)
        job = small_job(config, plan, data, dtype=torch.float32)
        linear = {each.weight.dtype for each in lora.adapted(job.model).values()}
        assert linear == {torch.bfloat16 if halves else torch.float32}
        assert job.model.get_input_embeddings().weight.dtype == torch.float32
        tied = job.model.lm_head.weight is job.model.get_input_embeddings().weight
        assert tied == (family == "qwen2")
        found.append(trained(job))
        decided, predict = predicted_plan(config, data, device)
        parts.append(predict(step_settings(decided))["parameters"])
    assert largest_difference(*found) == 0
    layers = lora.adapted(job.model)
    less = 2 * (
        sum(each.weight.numel() for each in layers.values()) + (not tied) * job.model.lm_head.weight.numel()
    )
    assert parts[1] - parts[0] == less


@pytest.mark.parametrize("case", ["fp32", "initial weights", "files in fp32", "all weights are trained"])
def test_frozen_layers_are_not_rounded(case: str, tmp_path: Path) -> None:
    dtype = torch.float32 if case == "files in fp32" else torch.bfloat16
    own = {"model_options": {"dir": str(with_weights("llama", tmp_path, dtype=dtype)), "input": "causal"}}
    config = config_of("lm-llama", tmp_path / "other", **ADAPTERS, **own)
    config = config.replace(initial_weights="a.safetensors" if case == "initial weights" else "")
    config = config.replace(adapt="full") if case.startswith("all") else config
    model = model_of("llama")
    assert not adapters.halve(model, config, "fp32" if case == "fp32" else "bf16")
    assert {each.dtype for each in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", ""])
def test_a_directory_without_files_is_planned_as_if_it_had_them(key: str, tmp_path: Path) -> None:
    bare = folder_of("llama", tmp_path / "bare", **({key: "bfloat16"} if key else {}))
    found = []
    for folder in (bare, with_weights("llama", tmp_path, dtype=torch.bfloat16)):
        config = of_directory(folder, tmp_path)
        decided, predict = predicted_plan(config, token_data(config), parse_gpu("rtx4090"))
        found.append((predict(step_settings(decided))["parameters"], adapters.without_files(config)))
    (ours, note), (theirs, none) = found
    assert (ours == theirs) == bool(key) and (key or ours > theirs)
    assert note.endswith(f" has none; planned as if it had, in {'bfloat16' if key else 'float32'}")
    assert none == ""


def test_random_weights_of_a_directory_are_not_adapted_and_their_training_says_so(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path, dtype="bfloat16")
    config, plan = of_directory(folder, tmp_path), small_plan(4)
    data = token_data(config)
    with pytest.raises(
        ConfigError, match=r"^CONFIG_ADAPT_LORA=y has nothing to adapt: .*/llama has no weights;"
    ):
        check_run(config, plan, data)
    whole = config.replace(adapt="full")
    for changed in (whole, config.replace(initial_weights="a.safetensors")):
        check_run(changed, plan, data)
    record = MemoryRecord()
    options: dict[str, Any] = {"hardware": CPU, "backend": Backend("cpu"), "record": record}
    make_job(whole, plan, data, whole_run=True, **options)
    assert f"Weights: random ones, for {folder} has none" in record.said
    unknown = of_directory(folder_of("llama", tmp_path, dtype="int8"), tmp_path)
    with pytest.raises(ConfigError, match=r"config.json has weights of int8; write dtype=bfloat16"):
        adapters.without_files(unknown)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model, and what two ranks trained from it."""
    folder = with_weights("qwen2", tmp_path_factory.mktemp("ranks"), dtype=torch.bfloat16)  # of tied weights
    command = [sys.executable, "-m", "tests.extras.half_ranks_worker", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_keep_frozen_layers_in_half_precision_and_no_bit_changes(strategy: str, of_ranks: Path) -> None:
    halved, whole = (torch.load(of_ranks / f"{strategy}-{each}.pt") for each in (True, False))
    assert largest_difference(halved["trained"], whole["trained"]) == 0
    config = of_directory(of_ranks, of_ranks, optimizer="adamw", momentum=None)
    alone = trained_by(config, Backend("cpu"), "single")
    assert max(float(each.abs().max()) for each in alone["trained"].values()) > 0
    assert largest_difference(alone["trained"], halved["trained"]) < 1e-5
    data, machine = token_data(config), parse_gpu("h100-80gx2")
    world = Layout(strategy=cast(Any, strategy), world=2, shard=STRATEGIES[strategy])
    units = stored_units(data, config, "bf16")
    sizes = [[replace(each, shape=(*each.shape, each.element_bytes)) for each in unit] for unit in units]
    assert halved["bytes"] == held(sizes, world).parameters < 0.85 * whole["bytes"]
    assert whole["bytes"] == 4 * held(stored_units(data, config, "fp32"), world).parameters
    settings = StepSettings(
        device="cuda", several_devices=True, micro_batch=4, norm_batch=0, precision="bf16",
        channels_last=False, compile=False, layout=world,
    )  # fmt: skip
    predicted = MemoryTraces(config, data).predictor(machine, gaps=False)(settings)["parameters"]
    gathered = held(sizes, world).gathered_parameters
    assert predicted == pytest.approx(halved["bytes"] + gathered, rel=0.1)  # rounded up to 512 bytes each


TRAINS = """
import os, runpy, signal, sys
from train import adapters
from train.record import RunRecord

halve, last = adapters.halve, int(sys.argv.pop(1))

def told(*given):
    print("halved:", done := halve(*given))
    return done

def progress(self, step, fraction):
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)

adapters.halve, RunRecord.progress = told, progress
runpy.run_module("train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["n", "y"])
def test_a_killed_run_is_resumed_to_the_bytes_of_its_adapters(packing: str, tmp_path: Path) -> None:
    """Killed in the step after the first checkpoint, which is computed again."""
    folder = tokenizer_at(with_weights("llama", tmp_path, dtype=torch.bfloat16))
    talks = [[{**each, "content": each["content"] * (1 + n % 3)} for each in TALK[:2]] for n in range(24)]
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in talks))
    settings = {
        "MODEL_HUGGINGFACE": "y", "HUGGINGFACE_INPUT_CAUSAL": "y", "HUGGINGFACE_DIR": str(folder),
        "DATASET_CHAT": "y", "DATA_DIR": str(tmp_path), "CHAT_PACKING": packing, "BLOCK_SIZE": "64",
        "ADAPT_LORA": "y", "LORA_DROPOUT": "0.2", "MAX_STEPS": "5", "TARGET_EFFECTIVE_BATCH": "4",
        "CHAT_VALIDATION_OTHER": "y", "CHAT_VALIDATION_FILE": "chat.jsonl", "PRECISION_BF16": "y",
        "CHECKPOINT_INTERVAL_STEPS": "2", "LEARNING_RATE": "0.05",
    }  # fmt: skip

    def train(runner: Runner, last: int) -> int:
        command = [sys.executable, "-c", TRAINS, str(last), "--runs", str(runner.runs), "train"]
        environment = runner.environment() | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert "halved: True" in done.stdout and "halved: False" not in done.stdout, done.stderr
        return done.returncode

    found = []
    for name, kills in (("whole", [0]), ("killed", [3, 0])):
        (tmp_path / name).mkdir()
        runner = Runner(tmp_path / name)
        runner.configure("gpt2-tiny", {f"CONFIG_{key}": value for key, value in settings.items()})
        assert [train(runner, last) for last in kills] == [-signal.SIGKILL] * (len(kills) - 1) + [0]
        assert len(list(runner.runs.glob("*/*/status.json"))) == 1
        runner.run("export", "--format", "adapter", "--directory", str(runner.folder / "adapters"))
        stored = (runner.folder / "adapters/adapter_model.safetensors").read_bytes()
        start = 8 + int.from_bytes(stored[:8], "little")
        found.append((json.loads(stored[8:start]), stored[start:]))  # safetensors' header is in any order
    assert found[0] == found[1]

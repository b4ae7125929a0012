"""Adapters of transformers' models in plain PEFT, and frozen weights in 4 bits by bitsandbytes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from lib.errors import ConfigError
from lib.nn import four_bit, lora
from lib.nn.weights import head_of, is_adapter
from lib.runs.weight_files import find_weights
from tests.e2e.runner import TINY, Runner
from tests.extras import foreign, zoo
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import (
    ADAPTERS,
    clone,
    largest_difference,
    small_config,
    small_job,
    small_plan,
    trained,
)
from train import adapters, loop
from train.initial_weights import load_weights
from train.job import Progress
from train.training_data import built

FAMILIES = ("llama", "qwen2", "mistral", "gemma3")
CONFIG = small_config(**ADAPTERS | {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0})


def model_of(family: str, **options: Any) -> nn.Module:
    if family == "gemma3":
        kind, config = transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig
        options = zoo._DECODER | {"head_dim": 16} | options
    else:
        own, name, known = zoo.HUGGING_FACE[family]
        kind, config, options = getattr(transformers, name), getattr(transformers, own), known | options
    torch.manual_seed(0)
    model: nn.Module = kind(config(**options)).eval()
    return model


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    """A copy with adapters that are not 0, and other values of what is trained whole."""
    own = copy.deepcopy(model)
    lora.adapt(own, **{"rank": 4, "alpha": 8, "head": head_of(own, None)} | options)
    for name, weight in own.named_parameters():
        if weight.requires_grad and not name.endswith("lora_A"):
            nn.init.normal_(weight.detach(), std=0.1)
    return own


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) * 13 % 320
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found.detach()


def written(model: nn.Module, folder: Path) -> Path:
    adapters.write(model, CONFIG, adapters.base_facts(model, CONFIG, contents=True), folder)
    return folder


def in_peft(base: nn.Module, folder: Path) -> nn.Module:
    found: nn.Module = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    return found


@pytest.mark.parametrize(
    "train", ["", "lm_head", "model.embed_tokens", "model.norm"], ids=lambda each: each or "adapters alone"
)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_computes_the_same_to_the_bit(family: str, tied: bool, train: str, tmp_path: Path) -> None:
    base = model_of(family, tie_word_embeddings=tied)
    own = adapted(base, train=train)
    before = logits(own)
    assert (before - logits(base)).abs().max() > 0.1
    folder = written(own, tmp_path)
    theirs = in_peft(base, folder)
    assert (logits(theirs) - before).abs().max() == 0.0
    theirs.save_pretrained(tmp_path / "theirs")
    assert load_file(tmp_path / "theirs" / adapters.FILE).keys() == load_file(folder / adapters.FILE).keys()
    settings, known = (
        json.loads((path / adapters.SETTINGS).read_text()) for path in (folder, tmp_path / "theirs")
    )
    assert settings.keys() <= known.keys() and sorted(known["target_modules"]) == settings["target_modules"]
    assert lora.merge(merged := copy.deepcopy(own)) == 0
    assert (logits(merged) - before).abs().max() <= 1e-5
    assert (logits(theirs.merge_and_unload()) - logits(merged)).abs().max() <= 1e-5


def test_settings_of_peft_are_either_supported_or_refused() -> None:
    """Also those of later versions: what is not known here has to be off."""
    plain = json.loads(json.dumps(peft.LoraConfig().to_dict(), default=str)) | {"peft_type": "LORA"}
    assert adapters._other_function(plain) == ""
    assert adapters._other_function(plain | {"init_lora_weights": "gaussian", "lora_dropout": 0.1}) == ""
    for name in plain.keys() - adapters._ANY_VALUE:
        assert adapters._other_function(plain | {name: "other"}).startswith(name)


def test_a_scale_that_is_no_power_of_two_differs_by_rounding(tmp_path: Path) -> None:
    base = model_of("llama")
    own = adapted(base, alpha=7)
    config = CONFIG.replace(lora_alpha=7)
    adapters.write(own, config, {}, tmp_path)
    assert (logits(in_peft(base, tmp_path)) - logits(own)).abs().max() < 1e-6


def test_bf16_is_merged_once_and_rounding_is_seen_in_the_logits() -> None:
    base = model_of("llama").bfloat16()
    own = adapted(base)
    lora.merge(exact := copy.deepcopy(own).float())
    lora.merge(own)
    assert {each.dtype for each in own.parameters()} == {torch.bfloat16}
    rounded = (logits(copy.deepcopy(own).float()) - logits(exact)).abs().max()
    assert 0 < rounded < 0.2


@pytest.mark.parametrize(
    ("train", "base"), [("qwen2", "llama"), ("deeper", "llama"), ("llama", "deeper")], ids=str
)
def test_what_peft_takes_from_another_model_is_refused(train: str, base: str, tmp_path: Path) -> None:
    """With shapes and names that are equal, or layers that are too many, PEFT says nothing."""
    sizes = {"deeper": ("llama", {"num_hidden_layers": 3})}
    (one, own), (other, theirs) = (sizes.get(each, (each, {})) for each in (train, base))
    folder = written(adapted(model_of(one, **own)), tmp_path)
    model = adapted(model_of(other, **theirs))
    with pytest.raises(ConfigError, match="its adapters are for another model: its frozen weights had other"):
        adapters.check_fit(model, find_weights(str(folder), root=tmp_path), CONFIG)
    assert in_peft(model_of(other, **theirs), folder) is not None


def test_experts_and_layers_that_are_no_linear_ones_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"mlp.experts.\w+, .* cannot have an adapter: .* of experts in one"
    ):
        adapted(model_of("mixtral"))
    adapted(model_of("mixtral"), targets="q_proj v_proj")
    with pytest.raises(ConfigError, match=r"c_attn.* cannot have an adapter: .* a Conv1D of transformers"):
        adapted(model_of("gpt2"))


@pytest.mark.parametrize("name", ["vit", "hf-bert", "hf-vit"])
def test_models_of_packages_train_adapters_and_their_head_alone(name: str, tmp_path: Path) -> None:
    config = foreign.config_of(name, tmp_path, **ADAPTERS)
    data = foreign.data_of(name, config)
    whole, split = (trained(small_job(config, small_plan(*sizes), data)) for sizes in ((8,), (3, 3, 2)))
    assert largest_difference(whole, split) < 1e-12
    before = small_job(config, small_plan(8), data).model.state_dict()
    moved = {name for name in whole if not torch.equal(before[name], whole[name])}
    of_head = {each for each in moved if not is_adapter(each)}
    assert moved - of_head == {each for each in whole if is_adapter(each)}
    assert of_head and all(each.startswith(("head.", "classifier.", "score.")) for each in of_head)


def test_weights_that_a_layer_of_timm_does_not_use_itself_are_refused(tmp_path: Path) -> None:
    """Its attention computes with the weight of qkv and a bias of its own: PEFT trains nothing there."""
    config = foreign.config_of("vit", tmp_path, **ADAPTERS)
    small = "patch_size=8 depth=2 embed_dim=16 num_heads=2"
    config = config.replace(model_options={"name": "beit_base_patch16_224", "options": small})
    with pytest.raises(ConfigError, match=r"the adapters of blocks.0.attn.qkv, .* have no effect: .*; leave"):
        foreign.data_of("vit", config)


# 4 bits


@pytest.mark.parametrize(
    ("shape", "name"), [((64, 128), "blocks"), ((48, 80), "ragged rows"), ((7, 9), "odd")]
)
def test_4_bits_restore_weights_to_a_tenth_whatever_the_shape(shape: tuple[int, int], name: str) -> None:
    """Given rows that are no multiple of a block, the kernel for CPUs makes other numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[1], shape[0]), nn.Linear(shape[0], 2))
    dense = model[0].weight.detach().clone()
    lora.adapt(model, rank=2, alpha=2, head="1", four_bit=True)
    four_bit.pack(model, torch.device("cpu"))
    restored, dtype = four_bit.dense_weight(model[0])
    assert dtype == torch.float32 and restored.shape == shape
    assert 0.05 < (restored - dense).norm() / dense.norm() < 0.13, name
    x = torch.randn(3, shape[1], requires_grad=True)
    y = model[0](x)
    assert torch.allclose(y, x @ restored.T + model[0].bias, atol=1e-6)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(gradient, restored.sum(0).expand_as(x), atol=1e-5)
    bits = (
        8 * sum(model[0].get_buffer(each).nbytes for each in ("weight", "scales", "groups")) / dense.numel()
    )
    assert name == "odd" or bits < 4.2


def test_a_simulated_layer_in_4_bits_has_the_sizes_of_a_real_one() -> None:
    def sizes(device: str) -> dict[str, Any]:
        with torch.device(device):
            model = nn.Sequential(nn.Linear(80, 300), nn.Linear(300, 2))
        lora.adapt(model, rank=2, alpha=2, head="1", four_bit=True)
        four_bit.pack(model, torch.device(device))
        return {name: (each.numel(), each.dtype) for name, each in model[0].named_buffers()}

    assert sizes("meta") == sizes("cpu")


def test_a_run_in_4_bits_resumes_bit_for_bit_and_is_merged_into_restored_weights() -> None:
    config = small_lm_config(**ADAPTERS | {"adapt": "qlora"}, optimizer="adamw")
    data, plan = text_data(config), small_plan(4)
    job, progress = small_job(config, plan, data, dtype=torch.float32), Progress()
    loop.optimizer_step(job, progress)
    progress.step = 1
    state = clone(loop.state_dict(job, progress))
    assert all(map(is_adapter, state["model"]))
    other = small_job(config, plan, data, dtype=torch.float32)
    resumed = loop.load_state_dict(other, state)
    for each, at in ((job, progress), (other, resumed)):
        loop.optimizer_step(each, at)
    assert largest_difference(job.model.state_dict(), other.model.state_dict()) == 0
    model, tokens = job.model.eval(), torch.arange(8)[None]
    before, layers = model(tokens), len(lora.adapted(model))
    assert lora.merge(model) == layers == 8
    assert (model(tokens) - before).abs().max() < 1e-5


def test_a_run_in_4_bits_does_not_depend_on_the_micro_batch() -> None:
    config = small_lm_config(**ADAPTERS | {"adapt": "qlora"})
    data = text_data(config)
    whole, split = (trained(small_job(config, small_plan(*sizes), data)) for sizes in ((8,), (3, 3, 2)))
    assert largest_difference(whole, split) < 1e-12


# Adapters that PEFT trained


def test_adapters_of_peft_are_continued(tmp_path: Path) -> None:
    place = tmp_path / "model"
    place.mkdir()
    own = ADAPTERS | {"lora_rank": 4, "lora_alpha": 8}
    config = foreign.config_of("hf-bert", place, **own)
    data = foreign.data_of("hf-bert", config)
    base = built(config.replace(**dict.fromkeys(own) | {"adapt": "full"}), data.dataset.spec)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=["classifier"])
    theirs = peft.get_peft_model(base, settings)
    for name, weight in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight.detach())
    theirs.save_pretrained(tmp_path / "peft")
    model, said = built(config, data.dataset.spec), list[str]()
    started = config.replace(initial_weights=str(tmp_path / "peft"))
    load_weights(model, find_weights(str(tmp_path / "peft"), root=tmp_path), started, log=said.append)
    assert "their base is not recorded, and names and shapes fit" in said[0]
    tokens = torch.arange(12)[None] + 1
    assert (model.eval()(tokens) - theirs.eval().base_model.model(tokens)).abs().max() < 1e-6


def test_files_tell_what_they_belong_to(tmp_path: Path) -> None:
    folder = written(adapted(model_of("llama")), tmp_path)
    with safe_open(folder / adapters.FILE, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["anneal"]).keys() == {"rank", "alpha", "shapes", "weights"}
    assert metadata["format"] == "pt"


# Whole runs

GPT2 = {"SIZE_CUSTOM": "y", "LAYERS": "2", "HEADS": "2", "WIDTH": "32", "PAD_VOCAB": "64"}


def test_a_run_in_4_bits_from_a_run_to_files_and_to_another_run(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(3000)))
    settings = {name: value for name, value in TINY.items() if name != "CONFIG_DATA_LIMIT"}
    settings |= {f"CONFIG_GPT2_{name}": value for name, value in GPT2.items()} | {
        "CONFIG_DATASET_TEXT_FILES": "y",
        "CONFIG_DATA_DIR": str(text),
        "CONFIG_BLOCK_SIZE": "16",
        "CONFIG_MAX_STEPS": "3",
        "CONFIG_DEVICE_CPU": "y",
    }
    base, own, more = (Runner(tmp_path / name) for name in ("base", "own", "more"))
    for runner in (base, own, more):
        runner.folder.mkdir()
    base.configure("gpt2-tiny", settings)
    base.run("train")
    start = {"CONFIG_INITIAL_WEIGHTS": str(base.runs), "CONFIG_ADAPT_QLORA": "y", "CONFIG_LORA_RANK": "4"}
    own.configure("gpt2-tiny", settings | start)
    assert "Adapters: 8 layers, rank 4, of frozen weights in 4 bits; trained: 4,096 of" in own.run("train")
    out, merged = tmp_path / "adapters", tmp_path / "merged"
    own.run("export", "--format", "adapter", "--directory", str(out))
    files = {path.name for path in out.iterdir()}
    assert files == {adapters.FILE, adapters.SETTINGS, "README.md", "model.json", "check.npz"}
    told = own.run("export", "--merge", "y", "--directory", str(merged))
    assert "8 layers were in 4 bits: their merged weights are not those of the base" in told
    assert "merged, in float32: loss" in told and "at most " in told
    assert {"config.json", "model.safetensors"} <= {path.name for path in merged.iterdir()}
    more.configure("gpt2-tiny", settings | start | {"CONFIG_INITIAL_WEIGHTS": str(out)})
    assert "28 weights match; adapters: 16 weights match" in more.run("train")

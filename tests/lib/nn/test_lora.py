"""Adapters of linear layers: what they compute, what is trained, and what has none."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.distributed.fsdp import blocks_of
from lib.errors import CheckpointError, ConfigError
from lib.nn.batch_norm import FrozenNorm
from lib.nn.dropout import dropouts, key_samples
from lib.nn.four_bit import FourBitLinear, pack
from lib.nn.lora import LoraLinear, adapt, adapted, base_facts, merge
from lib.nn.weights import is_adapter
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import (
    ADAPTERS,
    CPU,
    CPU_TRIAL,
    clone,
    largest_difference,
    random_data,
    small_config,
    small_job,
    small_plan,
    trained,
)
from train import loop
from train.job import Progress
from train.planning.memory_estimate import plan_of, trace_memory
from train.training_data import make_training_data


class Conv1D(nn.Module):
    """As that of transformers: its weight is (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.nf, self.weight = 4, nn.Parameter(torch.ones(4, 4))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(3, 4, 4))


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight)


def net(**more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers = {"norm": nn.BatchNorm1d(4), "first": nn.Linear(4, 6), "second": nn.Linear(6, 4), **more}
    model = nn.Sequential()
    for name, layer in (layers | {"head": nn.Linear(4, 2)}).items():
        model.add_module(name, layer)
    return model


def with_some(model: nn.Module, **options: Any) -> nn.Module:
    """Adapters that are not 0, as B is at first."""
    adapt(model, **{"rank": 2, "alpha": 3, "head": "head"} | options)
    for name, weight in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(weight.detach())
    return model


# What a layer computes


def test_a_layer_adds_the_scaled_product_and_starts_without_it() -> None:
    model, x = net().double(), torch.randn(5, 4, dtype=torch.float64)
    before = model.first(x)
    adapt(model, rank=2, alpha=3, head="head")
    layer: Any = model.first
    assert isinstance(layer, LoraLinear) and torch.equal(layer(x), before)
    assert {layer.lora_A.dtype, layer.lora_B.dtype} == {torch.float32}
    assert layer.lora_A.shape == (2, 4) and layer.lora_B.shape == (6, 2)
    assert 0 < layer.lora_A.abs().max() <= 0.5, "uniform up to 1 / sqrt(inputs)"
    nn.init.normal_(layer.lora_B.detach())
    model.double()
    expected = before + 1.5 * x @ layer.lora_A.T @ layer.lora_B.T
    assert (layer(x) - expected).abs().max() < 1e-14


def test_adapters_are_a_function_of_the_seed() -> None:
    state = torch.get_rng_state()
    one, same, other = (with_some(net(), seed=seed).first.lora_A for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    torch.set_rng_state(state)
    assert not torch.equal(one, with_some(net(), seed=1).second.lora_A[:, :4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_compute_in_float32_beside_half_precision(dtype: torch.dtype) -> None:
    model = with_some(net().to(dtype))
    x, layer = torch.randn(5, 4).to(dtype), model.first
    exact = layer.lora_scale * x.float() @ layer.lora_A.T @ layer.lora_B.T
    added = layer(x) - F.linear(x, layer.weight, layer.bias)
    assert layer(x).dtype == dtype and layer.lora_A.dtype == torch.float32
    assert (added.float() - exact).abs().max() < 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.first(torch.randn(5, 4)).dtype == torch.bfloat16


def test_dropout_is_before_the_adapter_and_each_layer_has_its_own_masks() -> None:
    model = with_some(net(), dropout=0.5).train()
    layers = [model.first, model.second]
    assert len({each.site for each in dropouts(model)}) == 2
    key_samples(dropouts(model), seed=1, first=0, count=3, device=torch.device("cpu"))
    x = torch.ones(3, 4)
    masked = layers[0].lora_dropout(x)
    assert set(masked.unique().tolist()) == {0.0, 2.0}
    low = layers[0].lora_scale * masked @ layers[0].lora_A.T @ layers[0].lora_B.T
    assert torch.allclose(layers[0](x), F.linear(x, layers[0].weight, layers[0].bias) + low)
    model.eval()
    assert not torch.allclose(layers[0](x), F.linear(x, layers[0].weight, layers[0].bias) + low)
    assert blocks_of(model) == [], "a layer with dropout is no block of its own"


# Which layers, and what is trained


@pytest.mark.parametrize(
    ("options", "layers", "whole"),
    [
        ({}, {"first", "second"}, set()),
        ({"head": ""}, {"first", "second", "head"}, set()),
        ({"trains_head": True}, {"first", "second"}, {"head.weight", "head.bias"}),
        ({"targets": "first"}, {"first"}, set()),
        ({"targets": "f* second"}, {"first", "second"}, set()),
        ({"targets": "inner.first", "nested": True}, {"inner.first"}, set()),
        ({"targets": "first", "nested": True}, {"first", "inner.first"}, set()),
        ({"train": "norm head.bias"}, {"first", "second"}, {"norm.weight", "norm.bias", "head.bias"}),
        ({"targets": "second", "train": "first"}, {"second"}, {"first.weight", "first.bias"}),
    ],
)
def test_names_choose_layers_and_weights_and_the_others_are_frozen(
    options: dict[str, Any], layers: set[str], whole: set[str]
) -> None:
    options = dict(options)
    model = net(**{"inner": nn.ModuleDict({"first": nn.Linear(2, 2)})} if options.pop("nested", 0) else {})
    names = set(model.state_dict())
    adapt(model, **{"rank": 2, "alpha": 2, "head": "head"} | options)
    assert adapted(model).keys() == layers
    adapters = {f"{layer}.{own}" for layer in layers for own in ("lora_A", "lora_B")}
    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == adapters | whole
    assert set(model.state_dict()) == names | adapters and {*filter(is_adapter, adapters)} == adapters
    assert isinstance(model.norm, FrozenNorm) == ("norm.weight" not in whole)


def test_a_tied_weight_is_trained_by_any_of_its_names() -> None:
    model = net(other=nn.Linear(4, 2))
    model.head.weight = model.other.weight
    adapt(model, rank=2, alpha=2, targets="first", train="head.weight", four_bit=True)
    assert model.other.weight.requires_grad
    assert isinstance(model.first, FourBitLinear) and not isinstance(model.other, FourBitLinear)


REFUSED: dict[str, tuple[dict[str, nn.Module], dict[str, Any], str]] = {
    "unknown target": ({}, {"targets": "frist"}, r"^CONFIG_LORA_TARGETS: no weight matches frist: .*first"),
    "a target twice": ({}, {"targets": "first,second"}, "no weight matches first,second: .*; correct or"),
    "head": (
        {},
        {"targets": "head"},
        "^CONFIG_LORA_TARGETS names the head head: .*; name it in CONFIG_LORA_TRAIN",
    ),
    "unknown weight": ({}, {"train": "embed"}, "^CONFIG_LORA_TRAIN: no weight matches embed: close to it"),
    "weight of an adapted layer": (
        {},
        {"train": "*.bias"},
        "^CONFIG_LORA_TRAIN names weights that adapters change: their layers have adapters: first.bias, "
        "second.bias; leave them out of CONFIG_LORA_TRAIN",
    ),
    "Conv1D": (
        {"c_attn": Conv1D()},
        {},
        "^c_attn cannot have an .* is a Conv1D of transformers; name",
    ),
    "Conv1D by name": ({"c_attn": Conv1D()}, {"targets": "c_attn"}, "^c_attn cannot have an adapter"),
    "experts": (
        {"experts": Experts()},
        {},
        r"^experts.gate_up_proj cannot have an adapter: .*\(3, 4, 4\) of experts in one; name linear layers",
    ),
    "no bits": (
        {"own": Own(4, 4)},
        {"four_bit": True},
        "^own cannot be stored in 4 bits: Own has a forward pass of its own; set CONFIG_ADAPT_LORA=y",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adapted_is_refused_with_its_name(name: str) -> None:
    more, options, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        adapt(net(**more), **{"rank": 2, "alpha": 2, "head": "head"} | options)
    assert "\n" not in str(caught.value)


def test_a_network_without_linear_layers_beside_its_head_is_refused() -> None:
    """So is a part of it by name where experts are left out."""
    only = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="no linear layer for an adapter beside its head 2; set"):
        adapt(only, rank=2, alpha=2, head="2")
    adapt(model := net(experts=Experts()), rank=2, alpha=2, targets="first")
    assert adapted(model).keys() == {"first"}
    # Weights of three dimensions that multiply nothing, such as positions (1, T, C) and (heads, 1, 1).
    small = nn.ParameterList([nn.Parameter(torch.ones(1, 4, 4)), nn.Parameter(torch.ones(4, 1, 1))])
    adapt(net(small=small), rank=2, alpha=2, head="head")


# Merging


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_a_merged_layer_is_what_it_was_and_computes_the_same(dtype: torch.dtype, bound: float) -> None:
    model, x = with_some(net().to(dtype), dropout=0.5).to(dtype).eval(), torch.randn(5, 4).to(dtype)
    before, names = model(x), set(net().state_dict())
    assert merge(model) == 0
    assert type(model.first) is nn.Linear and set(model.state_dict()) == names
    assert (model(x) - before).abs().max() <= bound
    assert not any(isinstance(each, LoraLinear) for each in copy.deepcopy(model).modules())


def test_half_precision_is_merged_in_float32_and_rounded_once() -> None:
    model = with_some(net().bfloat16())
    layer, own = model.first, model.first.weight.clone()
    exact = own.float() + layer.lora_scale * layer.lora_B @ layer.lora_A
    merge(model)
    assert model.first.weight.dtype == torch.bfloat16 and torch.equal(model.first.weight, exact.bfloat16())
    twice = own + (layer.lora_scale * (exact - own.float())).bfloat16()
    assert not torch.equal(model.first.weight, twice)
    merge(rounded := with_some(net()), torch.bfloat16)
    assert torch.equal(rounded.first.weight, rounded.first.weight.bfloat16().float())


# Runs


def lm(**changes: Any) -> Any:
    config = small_lm_config(**ADAPTERS | changes)
    return config, text_data(config)


@pytest.mark.slow
@pytest.mark.parametrize("ema", [False, True])
def test_adapters_move_and_nothing_else_has_state(ema: bool) -> None:
    averaged = {"ema": True, "ema_decay": 0.5} if ema else {}
    config, data = lm(optimizer="adamw", grad_clip=0.1, **averaged)
    job = small_job(config, small_plan(4, 4), data)
    before = clone(job.model.state_dict())
    after = trained(job)
    assert {name for name in after if not torch.equal(before[name], after[name])} == {
        name for name in after if is_adapter(name)
    }
    held = {id(weight) for group in job.optimizer.param_groups for weight in group["params"]}
    assert held == {id(weight) for name, weight in job.model.named_parameters() if is_adapter(name)}
    assert job.ema is None or all(map(is_adapter, job.ema.state_dict()))
    state = loop.state_dict(job, Progress())
    assert all(map(is_adapter, state["model"])) and len(state["model"]) == 16


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "blocks", "all"])
def test_adapters_are_the_same_however_a_batch_is_split_or_recomputed(checkpointing: str) -> None:
    whole = trained(small_job(*(lambda c, d: (c, small_plan(8), d))(*lm())))
    config, data = lm(grad_checkpoint=checkpointing)
    assert largest_difference(whole, trained(small_job(config, small_plan(3, 3, 2), data))) < 1e-12
    config, data = lm(lora_dropout=0.0)
    assert largest_difference(whole, trained(small_job(config, small_plan(8), data))) > 1e-4


@pytest.mark.slow
def test_the_head_of_a_classifier_is_trained_with_the_adapters_and_convolutions_stay() -> None:
    config = small_config(augment="none", **ADAPTERS)
    job = small_job(config, small_plan(8), random_data(config, shape=(1, 28, 28), train_size=16))
    before, after = clone(job.model.state_dict()), trained(job)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {
        *(f"linear{n}.lora_{each}" for n in (1, 2) for each in "AB"), "linear3.weight", "linear3.bias",
    }  # fmt: skip


@pytest.mark.slow
def test_a_checkpoint_without_the_base_resumes_bit_for_bit_and_on_that_base_alone() -> None:
    config, data = lm(optimizer="adamw", ema=True, ema_decay=0.5)
    plan = small_plan(4)
    job, progress = small_job(config, plan, data), Progress()
    loop.optimizer_step(job, progress)
    progress.step = 1
    state = clone(loop.state_dict(job, progress))
    assert state["adapters"].keys() == {"rank", "alpha", "shapes", "weights"}
    other = small_job(config, plan, data)
    resumed = loop.load_state_dict(other, state)
    for each, at in ((job, progress), (other, resumed)):
        loop.optimizer_step(each, at)
    assert largest_difference(job.model.state_dict(), other.model.state_dict()) == 0
    foreign = small_job(config.replace(seed=2), plan, data)
    with pytest.raises(CheckpointError, match=r"belong to other weights: weights of the .* differ; give"):
        loop.load_state_dict(foreign, state)
    full = small_job(small_lm_config(), plan, data)
    with pytest.raises(CheckpointError, match="belong to other weights: rank, alpha, shapes, weights of the"):
        loop.load_state_dict(full, state)


@pytest.mark.slow
def test_layers_whose_weights_are_read_and_that_are_not_called_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from models.gpt2.model import Block

    config, data = lm()
    monkeypatch.setattr(
        Block, "_attend", lambda self, x, _: F.linear(x, self.qkv.weight, self.qkv.bias)[..., : x.shape[-1]]
    )
    message = r"^the adapters of backbone.blocks.0.qkv, backbone.blocks.1.qkv have no effect: the model reads"
    with pytest.raises(ConfigError, match=message):
        make_training_data(config, data.dataset)
    make_training_data(config.replace(lora_targets="mlp_in"), data.dataset)


def test_what_adapters_belong_to_is_shapes_and_values_of_the_frozen_weights() -> None:
    def facts(model: nn.Module, **options: Any) -> dict[str, Any]:
        return base_facts(with_some(model, **options), rank=2, alpha=3, contents=True)

    one, same = facts(net()), facts(net())
    assert one == same == facts(net(), seed=3), "adapters are no part of it"
    other = net()
    other.first.weight.detach()[0, 0] += 1e-6
    changed = facts(other)
    assert changed["shapes"] == one["shapes"] and changed["weights"] != one["weights"]
    assert facts(net(more=nn.Linear(4, 4)))["shapes"] != one["shapes"]
    scaled = net()
    scaled.register_parameter("scale", nn.Parameter(torch.tensor(1.0), requires_grad=False))
    assert facts(scaled)["weights"] != one["weights"], "a number by itself is one of them"
    half = net().bfloat16()
    assert facts(copy.deepcopy(half))["weights"] == facts(half.float())["weights"], "whatever type holds them"


# Memory


def storages(config: Any, data: Any, **changes: Any) -> dict[str, int]:
    step = dataclasses.replace(CPU_TRIAL, accumulates=False, **changes)
    trace = trace_memory(config, plan_of(step), data, hardware=CPU).trace
    return trace.at_peak() | {"peak": trace.peak_bytes}


@pytest.mark.slow
def test_the_prediction_knows_what_adapters_and_4_bits_save() -> None:
    """A prediction in 4 bits needs no package, and what the dense weights were is not counted."""
    own = {"optimizer": "adamw", "data_placement": "stream", "lora_dropout": 0.0}
    full_config = small_lm_config(optimizer="adamw", data_placement="stream")
    full_config = full_config.replace(model_options={**full_config.model_options, "width": 128})
    adapters = ADAPTERS | own
    data = text_data(full_config)
    full, lora, qlora = (
        storages(full_config.replace(**each), data) for each in ({}, adapters, adapters | {"adapt": "qlora"})
    )
    job = small_job(full_config.replace(**adapters), small_plan(8), data, dtype=torch.float32)
    weights = dict(job.model.named_parameters())
    small = sum(4 * each.numel() for name, each in weights.items() if is_adapter(name))
    dense = sum(each.weight.numel() for each in job.model.modules() if isinstance(each, LoraLinear))
    assert lora["parameters"] == full["parameters"] + small
    assert abs(lora["optimizer"] - 2 * small) < 4 * 32 < full["optimizer"]
    tables = 8 * 4 * (1 + 16 + 256)
    packed = (
        dense // 2
        + dense // 64
        + 4 * sum(-(-n // 64 // 256) for n in (3 * 128**2, 128**2, *[4 * 128**2] * 2) * 2)
    )
    assert qlora["parameters"] == lora["parameters"] - 4 * dense + packed + tables
    assert qlora["peak"] < lora["peak"] < full["peak"]


def test_simulated_and_meta_layers_in_4_bits_have_shapes_alone() -> None:
    with torch.device("meta"):
        model = with_some(net(), four_bit=True)
    pack(model, torch.device("meta"))
    assert model(torch.empty(3, 4, device="meta")).shape == (3, 2)
    assert model.first.weight.dtype == torch.uint8 and "first.weight" not in model.state_dict()

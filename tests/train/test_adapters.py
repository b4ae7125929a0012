"""Stored adapters: continued on the weights they were trained on, and refused on any others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib import kconf
from lib.config import Config
from lib.errors import ConfigError, PlanError
from lib.nn.weights import is_adapter
from lib.plan.gpus import parse_gpu
from lib.runs.weight_files import find_weights
from tests.support.configs import ROOT
from tests.support.stored_weights import safetensors
from tests.support.tokens import small_lm_config, text_data, text_spec
from tests.support.training import ADAPTERS, largest_difference, small_plan
from train import adapters
from train.build import check_run
from train.export import export
from train.initial_weights import check_weights, load_weights
from train.planning.run_plan import predicted_plan
from train.training_data import built, open_to_train

Change = Callable[[dict[str, Tensor], dict[str, Any], dict[str, Any]], None]


def lm(**changes: Any) -> Config:
    return small_lm_config(**ADAPTERS | {"initial_weights": "adapters"} | changes)


def filled(config: Config, *, seed: int = 1) -> nn.Module:
    """A model whose adapters are not 0."""
    model = built(config.replace(seed=seed), text_spec())
    for name, weight in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(weight.detach())
    return model


def nothing(*_: object) -> None: ...


def stored(folder: Path, config: Config, change: Change = nothing) -> nn.Module:
    """Weights of a base, and adapters: `change` alters their tensors, settings and what they fit."""
    model = filled(config)
    state = model.state_dict()
    torch.save({name: each for name, each in state.items() if not is_adapter(name)}, folder / "base.pt")
    tensors = {f"base_model.model.{n}.weight": each for n, each in state.items() if is_adapter(n)}
    tensors |= {
        f"base_model.model.{name}": each.detach()
        for name, each in model.named_parameters()
        if each.requires_grad and not is_adapter(name)
    }
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 3,
        "base_model_name_or_path": str(folder / "base.pt"),
    }
    facts = adapters.base_facts(model, config, contents=True)
    change(tensors, settings, facts)
    (folder / "adapters").mkdir()
    own = {"anneal": json.dumps(facts)} if facts else {}
    (folder / "adapters" / adapters.FILE).write_bytes(safetensors(tensors, **own))
    if settings:
        (folder / "adapters" / adapters.SETTINGS).write_text(json.dumps(settings))
    return model


def started(folder: Path, config: Config, *, seed: int = 2) -> tuple[nn.Module, str]:
    """A model of another seed that starts from the adapters, and what is said."""
    said: list[str] = []
    model = built(config.replace(seed=seed), text_spec())
    load_weights(model, find_weights("adapters", root=folder), config, log=said.append)
    return model, said[0]


@pytest.mark.slow
@pytest.mark.parametrize("train", ["", "backbone.position backbone.norm.bias"])
def test_adapters_are_continued_on_their_base(tmp_path: Path, train: str) -> None:
    config = lm(lora_train=train)
    model = stored(tmp_path, config)
    check_weights(config, text_spec(), tmp_path, log=(said := []).append)
    assert said[0].endswith(f"base.pt: 28 weights match; adapters: {16 + 2 * bool(train)} weights match")
    found, line = started(tmp_path, config)
    assert largest_difference(found.state_dict(), model.state_dict()) == 0
    assert line.endswith(f"adapters: {16 + 2 * bool(train)} weights match") and "warning" not in line


def test_files_of_peft_do_not_tell_their_base_which_is_said(tmp_path: Path) -> None:
    stored(tmp_path, lm(), lambda _tensors, _settings, facts: facts.clear())
    assert (
        "adapters: their base is not recorded, and names and shapes fit; 16 weights"
        in started(tmp_path, lm())[1]
    )


def test_other_values_of_the_base_are_said(tmp_path: Path) -> None:
    stored(tmp_path, lm())
    torch.save({n: each + 0.1 for n, each in torch.load(tmp_path / "base.pt").items()}, tmp_path / "base.pt")
    assert (
        "warning: they were trained on other values of the frozen weights; 16" in started(tmp_path, lm())[1]
    )


def test_weights_of_a_base_start_new_adapters(tmp_path: Path) -> None:
    model = stored(tmp_path, lm())
    (tmp_path / "base.pt").rename(tmp_path / "b")
    config = lm(initial_weights="b")
    found = built(config, text_spec())
    load_weights(found, find_weights("b", root=tmp_path), config, log=print)
    for name, weight in found.named_parameters():
        same = torch.equal(weight, model.get_parameter(name))
        assert same != is_adapter(name) and (not name.endswith("lora_B") or not weight.any())


# What is refused


def without_layer(tensors: dict[str, Tensor], *_: object) -> None:
    for name in [name for name in tensors if "blocks.1." in name]:
        del tensors[name]


def with_layer(tensors: dict[str, Tensor], *_: object) -> None:
    tensors |= {name.replace("blocks.1.", "blocks.2."): each for name, each in tensors.items()}


def wider(tensors: dict[str, Tensor], *_: object) -> None:
    tensors |= {name: torch.cat([each, each], dim=1) for name, each in tensors.items() if "lora_A" in name}


def wider_layer(tensors: dict[str, Tensor], *_: object) -> None:
    tensors |= {
        name: torch.cat([each, each]) for name, each in tensors.items() if "blocks.0.qkv.lora_B" in name
    }


def of_settings(**changes: Any) -> Change:
    return lambda _, settings, __: settings.update(changes)


REFUSED: dict[str, tuple[Change, dict[str, Any], str]] = {
    "a layer less": (
        without_layer, {"lora_alpha": 4},
        r"another model: layers in backbone.blocks with adapters: 1, of this configuration: 2; use adapters",
    ),
    "a layer more": (
        with_layer, {"lora_alpha": 4},
        r"layers in backbone.blocks with adapters: 3, of this configuration: 2; use",
    ),
    "other sizes": (
        wider, {"lora_alpha": 4},
        r"of other sizes: backbone.blocks.0.\w+ is from (\d+) to \d+, here from \d+ to \d+, and 7 more; use",
    ),
    "one layer of another size": (
        wider_layer, {},
        r"of other sizes: backbone.blocks.0.qkv is from \d+ to \d+, here from \d+ to \d+; use",
    ),
    "a target less": (nothing, {"lora_targets": "qkv"}, "attention_out.lora_A is not of the model"),
    "foreign": (
        lambda _, __, facts: facts.update(shapes="0"), {},
        "its adapters are for another model: its frozen weights had other names or shapes; give",
    ),
    "rank": (nothing, {"lora_rank": 4}, "have rank 2, and CONFIG_LORA_RANK=4; set CONFIG_LORA_RANK=2"),
    "alpha": (nothing, {"lora_alpha": 4}, "have alpha 3, and CONFIG_LORA_ALPHA=4; set CONFIG_LORA_ALPHA=3"),
    "rsLoRA": (of_settings(use_rslora=True), {}, "its use_rslora is true, and false is supported; merge"),
    "DoRA": (of_settings(use_dora=True), {}, "its use_dora is true"),
    "another method": (of_settings(peft_type="LOHA"), {}, 'its peft_type is "LOHA", and "LORA" is supported'),
    "several ranks": (of_settings(rank_pattern={"qkv": 4}), {}, r'its rank_pattern is {"qkv": 4}, and {} is'),
    "layers twice": (
        of_settings(layer_replication=[[0, 2]]), {}, r"its layer_replication is \[\[0, 2\]\], which is not",
    ),
    "PiSSA": (
        of_settings(init_lora_weights="pissa_niter_4"), {}, 'weights is "pissa_niter_4", which changes',
    ),
    "half an alpha": (of_settings(lora_alpha=1.5), {}, "lora_alpha is 1.5, and a whole number is supported"),
    "no settings": (
        lambda _, settings, __: settings.clear(), {}, "adapter_config.json beside them: .*; give the",
    ),
    "no rank": (of_settings(r=None), {}, "has adapters: adapter_config.json beside them: "),
    "no base": (of_settings(base_model_name_or_path="gone.pt"), {}, "gone.pt cannot be read: No such file"),
    "full": (
        nothing, {"adapt": "full"}, "has adapters, and CONFIG_ADAPT_FULL=y; set CONFIG_ADAPT_LORA=y, or",
    ),
    "not finite": (
        lambda tensors, *_: next(iter(tensors.values())).fill_(torch.nan), {}, "lora_A.weight has values",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_do_not_fit_are_refused_before_there_is_a_run(name: str, tmp_path: Path) -> None:
    """PEFT loads most of them without a word."""
    change, options, message = REFUSED[name]
    stored(tmp_path, lm(), change)
    with pytest.raises(ConfigError, match=message) as caught:
        check_weights(lm(**options), text_spec(), tmp_path, log=print)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"LORA_RANK": "0"}, "LORA_RANK.*0"),
        ({"LORA_DROPOUT": "1.0"}, "LORA_DROPOUT"),
        ({"FREEZE": "conv1"}, "FREEZE"),
        ({"ADAPT_FULL": "y"}, "ADAPT"),
    ],
)
def test_options_that_contradict_adapters_are_refused(options: dict[str, str], message: str) -> None:
    settings = {f"CONFIG_{name}": value for name, value in ({"ADAPT_LORA": "y"} | options).items()}
    with pytest.raises(ConfigError) as caught:
        kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5", overrides=settings)
    assert message.partition(".")[0] in " ".join([str(caught.value), *caught.value.findings])


def test_4_bits_need_a_package_to_train_and_none_to_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = lm(adapt="qlora", initial_weights="")
    data = text_data(config)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"package bitsandbytes is needed here: .*pip install bits"):
        open_to_train(config, root=tmp_path, log=print)
    assert not [*tmp_path.iterdir()]
    check_run(config, small_plan(4), data)


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_weights_in_4_bits_are_not_planned_in_shards(strategy: Any) -> None:
    config = lm(adapt="qlora", initial_weights="", dist_strategy=strategy, precision="bf16")
    why = f"^CONFIG_DIST_STRATEGY_{strategy.upper()}=y is not possible: weights in 4 bits are not sharded"
    with pytest.raises(PlanError, match=why):
        predicted_plan(config, text_data(config), parse_gpu("a100-40gx2"))


@pytest.mark.parametrize(
    ("adapt", "layout", "merge", "message"),
    [
        (
            "lora",
            "pt2",
            False,
            "MERGE=n: FORMAT=pt2 has one weight for each layer; add MERGE=y, or write FORMAT=adap",
        ),
        ("lora", "adapter", True, "MERGE=y: FORMAT=adapter has adapters alone; leave out one of them"),
        ("full", "adapter", False, "FORMAT=adapter is for a run with adapters, and all was trained; leave"),
        ("full", "pt2", True, "MERGE=y is for a run with adapters, and all was trained; leave it out"),
    ],
)
def test_formats_that_a_run_cannot_have_are_refused(
    adapt: str, layout: str, merge: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr("train.export._check_request", lambda *_: None)
    config = lm() if adapt == "lora" else small_lm_config()
    own: Any = SimpleNamespace(
        job=SimpleNamespace(config=config), data=SimpleNamespace(dataset=SimpleNamespace(spec=text_spec()))
    )
    with pytest.raises(ConfigError, match=message):
        export(own, directory=tmp_path / "out", layout=layout, merge=merge)
    assert not [*tmp_path.iterdir()]

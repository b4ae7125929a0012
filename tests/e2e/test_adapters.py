"""From a run to adapters on its weights, to more of them, and to one model of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lib.nn.weights import is_adapter
from tests.e2e.runner import TINY, Runner

pytestmark = pytest.mark.slow

SHORT = TINY | {"CONFIG_DEVICE_CPU": "y", "CONFIG_AUTO_METHOD_TABLE": "y", "CONFIG_DATA_LIMIT": "256"}
ADAPT = {"CONFIG_ADAPT_LORA": "y", "CONFIG_LORA_RANK": "4", "CONFIG_LORA_DROPOUT": "0.1", "CONFIG_EMA": "y"}


def runner(folder: Path) -> Runner:
    folder.mkdir()
    return Runner(folder)


@pytest.mark.long
def test_adapters_are_trained_continued_evaluated_and_merged(tmp_path: Path) -> None:
    base, adapters, more = (runner(tmp_path / name) for name in ("base", "adapters", "more"))
    base.configure("lenet5", SHORT | {"CONFIG_MAX_STEPS": "3"})
    base.run("train")
    stored = tmp_path / "stored"
    stored.mkdir()
    rounded = {name: weight.bfloat16() for name, weight in base.weights().items()}
    torch.save(rounded, stored / "base.pt")
    (stored / "LICENSE").write_text("as you like")
    start = {"CONFIG_INITIAL_WEIGHTS": str(stored / "base.pt")}
    adapters.configure("lenet5", SHORT | ADAPT | start)
    output = adapters.run("train")
    assert "base.pt: 10 weights match" in output
    trained = "trained: 3,746 of 64,602 parameters, with all of linear3.weight, linear3.bias"
    assert f"Adapters: 2 layers, rank 4; {trained}" in output
    held = adapters.weights()
    assert {name for name in held if not is_adapter(name)} == {"linear3.weight", "linear3.bias"}
    result = output.partition("Done: ")[2].partition(" (")[0]
    assert result and result in adapters.run("eval")

    # Without the base there is nothing to evaluate, and with another one neither.
    (stored / "base.pt").rename(stored / "b.pt")
    assert "base.pt cannot be read" in adapters.run("eval", status=2)
    torch.save({name: weight + 0.01 for name, weight in rounded.items()}, stored / "base.pt")
    assert "the adapters of the checkpoint belong to other weights: weights of the" in adapters.run(
        "eval", status=1
    )
    (stored / "b.pt").rename(stored / "base.pt")

    out = tmp_path / "out"
    export = ("export", "--format", "pt2", "--directory", str(out))
    assert "add MERGE=y, or write FORMAT=adapter" in adapters.run(*export, status=2) and not out.exists()
    told = adapters.run(*export, "--merge", "y")
    assert f"With adapters: {result}; merged, in bfloat16: loss " in told
    assert (out / "LICENSE").read_text() == "as you like"
    graph = torch.export.load(out / "model.pt2").state_dict
    weights = {name[6:]: each for name, each in graph.items() if name.startswith("model.")}
    assert weights.keys() == rounded.keys()
    same = {name for name in weights if torch.equal(weights[name], rounded[name].float())}
    assert same == {
        name for name in rounded if name.startswith("conv") or name in ("linear1.bias", "linear2.bias")
    }
    assert all(torch.equal(each, each.bfloat16().float()) for each in weights.values())

    more.configure("lenet5", SHORT | ADAPT | {"CONFIG_INITIAL_WEIGHTS": str(adapters.runs)})
    output = more.run("train")
    assert "base.pt: 10 weights match; adapters: 6 weights match" in output
    more.configure("lenet5", SHORT | {"CONFIG_INITIAL_WEIGHTS": str(adapters.runs)})
    assert "has adapters, and CONFIG_ADAPT_FULL=y; set CONFIG_ADAPT_LORA=y" in more.run("train", status=2)


def test_what_has_no_layer_for_an_adapter_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    own = runner(tmp_path / "resnet")
    own.configure("pretrain-resnet", {"CONFIG_ADAPT_LORA": "y"})
    output = own.run("train", status=2)
    assert (
        "ResNet has no linear layer for an adapter beside its head classifier; set CONFIG_ADAPT_FULL=y"
        in output
    )
    assert not own.runs.exists()

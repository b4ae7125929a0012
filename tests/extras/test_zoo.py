"""Models of timm, transformers and PEFT are traced, and on the CPU to the byte.

Not collected by make test: make test-extras runs it, with an environment of its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lib.errors import ConfigError
from lib.memory import estimate
from lib.memory.live import LiveBytes
from scripts import fits
from tests.extras import zoo

ROOT = Path(__file__).resolve().parents[2]
# By default a third of the combinations, with each model and each precision; -m "long or not long" runs all.
COMBINATIONS = [
    pytest.param(name, precision, marks=() if index % 3 == number else pytest.mark.long)
    for index, name in enumerate(zoo.TIMM)
    for number, precision in enumerate(zoo.PRECISIONS)
]
HUGGING_FACE = [
    pytest.param(
        name,
        precision,
        attention,
        lora,
        marks=() if (number + len(attention) + lora + index) % 3 == 0 else pytest.mark.long,
    )
    for index, name in enumerate(zoo.HUGGING_FACE)
    for number, precision in enumerate(zoo.PRECISIONS)
    for attention in zoo.attentions(name)
    for lora in (False, True)
]


@pytest.mark.parametrize(("name", "precision"), COMBINATIONS)
def test_timm(name: str, precision: Any) -> None:
    report = estimate(zoo.timm_build(name), zoo.timm_inputs(name, batch=4), precision=precision)
    weights = sum(each.numel() for each in on_meta(zoo.timm_build(name)).parameters())
    bytes_each = 2 if precision == "bf16-true" else 4
    assert report.trace.peak_bytes > 2 * bytes_each * weights, "weights and state at the least"


def on_meta(build: zoo.Build) -> nn.Module:
    from lib.memory.simulation import simulation
    from lib.memory.twin import RealConstants

    with simulation("cuda"), RealConstants():
        return build()


@pytest.mark.parametrize("name", zoo.TIMM_TRANSFORMERS)
def test_timm_with_lora(name: str) -> None:
    build, inputs = zoo.timm_build(name), zoo.timm_inputs(name, batch=4)
    full = estimate(build, inputs, precision="bf16")
    lora = estimate(zoo.with_lora(build, zoo.TIMM_LORA), inputs, precision="bf16")
    assert lora.parts["optimizer"] < 0.2 * full.parts["optimizer"]


@pytest.mark.parametrize(("name", "precision", "attention", "lora"), HUGGING_FACE)
def test_hugging_face(name: str, precision: Any, attention: str, lora: bool) -> None:
    build = zoo.hugging_face_build(name, attention=attention)
    report = estimate(
        zoo.with_lora(build, zoo.lora_target(name)) if lora else build,
        zoo.hugging_face_inputs(name),
        precision=precision,
    )
    assert report.parts["parameters"] > 0 and report.parts["optimizer"] > 0
    if lora:
        assert report.parts["optimizer"] < 2 * report.parts["parameters"]


CPU_CASES = {
    "timm resnet": (lambda: zoo.timm_build("resnet10t"), (2, 3, 64, 64)),
    "timm vit": (lambda: zoo.timm_build("vit_tiny_patch16_224", img_size=64, depth=2), (2, 3, 64, 64)),
    "timm swin": (
        lambda: zoo.timm_build("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1)),
        (2, 3, 56, 56),
    ),
    "llama with lora": (
        lambda: zoo.with_lora(zoo.hugging_face_build("llama")),
        zoo.hugging_face_inputs("llama"),
    ),
    "gpt2": (lambda: zoo.hugging_face_build("gpt2"), zoo.hugging_face_inputs("gpt2")),
    "bert with lora": (
        lambda: zoo.with_lora(zoo.hugging_face_build("bert", attention="eager")),
        zoo.hugging_face_inputs("bert"),
    ),
    "t5": (lambda: zoo.hugging_face_build("t5", attention="eager"), zoo.hugging_face_inputs("t5")),
}


@pytest.mark.parametrize("name", CPU_CASES)
def test_on_the_cpu_predicted_storages_are_the_real_ones_to_the_byte(name: str) -> None:
    build, inputs = CPU_CASES[name]
    model = build()()
    report = estimate(model, inputs, device="cpu")
    peak, sizes = real_storages(model.train(), inputs)
    assert report.peak_bytes == peak
    assert Counter(byte_count for _, byte_count in report.trace.events if byte_count > 0) == sizes


def real_storages(model: nn.Module, inputs: Any) -> tuple[int, Counter[int]]:
    """Peak and allocated sizes of two real steps on the CPU."""
    live = LiveBytes()
    named = inputs if isinstance(inputs, dict) else {"": inputs}
    batch = {
        name: torch.zeros(shape, dtype=torch.int64 if name.endswith(("ids", "labels")) else torch.float32)
        for name, shape in named.items()
    }
    live.add([*model.parameters(), *model.buffers(), *batch.values()])
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    with live:
        for _ in range(2):
            if "" in batch:
                model(batch[""]).sum().backward()
            else:
                model(**batch).loss.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = live.trace()
    return trace.peak_bytes, Counter(byte_count for _, byte_count in trace.events if byte_count > 0)


def test_routing_by_values_is_refused_in_one_line() -> None:
    """The library itself cannot be asked for less: this model of timm reads the positions of its patches."""
    with pytest.raises(ConfigError, match=r"depends on the values of a tensor: aten\.") as caught:
        estimate(ByRouting(), (4, 8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "configuration", "options"),
    [
        ("timm:vit_tiny_patch16_224", {}, {"target": "96", "checkpoint": "y"}),
        (
            "hf:config.json",
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **zoo._DECODER},
            {"seq": "64", "lora": "4", "checkpoint": "y", "target": "96"},
        ),
    ],
)
def test_make_fits(
    model: str,
    configuration: dict[str, Any],
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    zoo.import_extra("timm")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(configuration))
    words = {"model": model, "gpu": "rtx3090", **options}
    monkeypatch.setattr("sys.argv", ["fits", *(f"--{name}={value}" for name, value in words.items())])
    assert fits.main() == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:5] == ["rtx3090", "96", "1", "x", "96"]


class ByRouting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x.sum(1) > 0
        return torch.cat([self.experts[0](x[chosen]), self.experts[1](x[~chosen])])


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/memory-any-module.md").read_text()
    (example,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "transformers" in text)
    exec(example, {"__name__": "example"})
    assert int(capsys.readouterr().out) > 0

"""Memory of any module: against real tensors to the byte, and whatever a caller may pass."""

from __future__ import annotations

import contextlib
import copy
import re
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.errors import ConfigError
from lib.memory import Report, any_module, estimate, fits, largest_batch
from lib.memory.live import LiveBytes, Trace
from lib.memory.simulation import simulation
from lib.plan.tables import COMPILED_PEAK_FACTOR, PEAK_FACTOR

ROOT = Path(__file__).resolve().parents[3]
CONTEXT_BYTES = 1_610_612_736  # of a GPU: 1.5 GiB


class Tied(nn.Module):
    """A language model whose head is its embedding; blocks may be checkpointed, as torch has it."""

    def __init__(self, *, blocks: int = 2, recomputed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(blocks))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.recomputed = recomputed

    def forward(self, tokens: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens)
        for block in self.blocks:
            x_BTC = checkpoint(block, x_BTC, use_reentrant=False) if self.recomputed else block(x_BTC)
        return self.head(x_BTC * self.scale.sum())


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(8 * 36, 5),
        )


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.layers = cell(8, 16, batch_first=True, **options)
        self.head = nn.LazyLinear(4)
        self.head(self.layers(torch.zeros(1, 1, 8))[0])

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.head(self.layers(x_BTC)[0])


TOKENS = ((4, 12), torch.int64)
CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "tied": (Tied, TOKENS),
    "checkpointed": (lambda: Tied(recomputed=True), TOKENS),
    "images": (Images, (4, 3, 8, 8)),
    "lstm": (lambda: Recurrent(num_layers=2, bidirectional=True), (4, 12, 8)),
    "gru": (lambda: Recurrent(nn.GRU), (4, 12, 8)),
}


def real_storages(model: nn.Module, batch: Tensor) -> tuple[int, Counter[int]]:
    """Peak and allocated sizes of two steps on the CPU, in a loop of this test's own."""
    live = LiveBytes()
    live.add([*model.parameters(), *model.buffers(), batch])
    optimizer = torch.optim.AdamW(model.parameters())
    with live:
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = live.trace()
    return trace.peak_bytes, allocated(trace)


def allocated(trace: Trace) -> Counter[int]:
    return Counter(byte_count for _, byte_count in trace.events if byte_count > 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_predicted_storages_are_the_real_ones_to_the_byte(name: str) -> None:
    build, spec = CASES[name]
    model = build()
    shape, dtype = spec if isinstance(spec[0], tuple) else (spec, torch.float32)
    # oneDNN has an LSTM of its own, with workspace that no tensor shows until it ran.
    torch._C._set_mkldnn_enabled(name != "lstm")
    try:
        report = estimate(model, spec, device="cpu")
        peak, sizes = real_storages(model, torch.zeros(shape, dtype=dtype))
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert report.peak_bytes == sum(report.parts.values()) == peak and report.gaps_bytes == 0
    assert allocated(report.trace) == sizes


def same(one: Report, other: Report) -> bool:
    """Equal storages, peaks and categories."""
    return allocated(one.trace) == allocated(other.trace) and (one.parts, one.phases) == (
        other.parts,
        other.phases,
    )


@pytest.mark.slow
def test_real_meta_and_simulated_modules_and_functions_are_the_same() -> None:
    real = estimate(Tied(), TOKENS)
    with torch.device("meta"):
        on_meta = Tied()
    assert same(estimate(on_meta, TOKENS), real)
    assert same(estimate(Tied, TOKENS), real)
    with simulation("cuda"):
        fake = Images()
    assert same(estimate(fake, (4, 3, 8, 8)), estimate(Images(), (4, 3, 8, 8)))
    weights = 64 * 32 + 2 * (4 * 32 * 32 + 4 * 32 + 2 * 32 * 64 + 64 + 32 + 4 * 32)
    blocks = 512  # each tensor is a multiple of it
    assert 4 * weights <= real.parts["parameters"] <= 4 * weights + blocks * 26
    assert real.parts["optimizer"] >= 8 * weights, "the tied weight counts once"
    assert real.parts["optimizer"] < 8 * weights + 3 * blocks * 26


@pytest.mark.slow
def test_the_module_of_the_caller_is_left_alone() -> None:
    model = Images()
    before = {name: (id(each), each.clone()) for name, each in model.state_dict(keep_vars=True).items()}
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model.eval()
    estimate(model, (4, 3, 8, 8), precision="bf16-true")
    after = model.state_dict(keep_vars=True)
    assert {name: id(each) for name, each in after.items()} == {
        name: one for name, (one, _) in before.items()
    }
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    assert after["0.weight"].dtype == torch.float32 and not model.training and not model[1].training
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


@pytest.mark.slow
def test_modes_of_parts_are_kept_in_training_only() -> None:
    model = Images()
    training = estimate(model, (64, 3, 8, 8))
    model[3].eval()  # no mask
    assert estimate(model, (64, 3, 8, 8)).peak_bytes < training.peak_bytes
    assert same(estimate(model.eval(), (64, 3, 8, 8)), training)


@pytest.mark.slow
def test_sizes_between_traced_ones_are_calculated_and_the_same() -> None:
    with mock.patch.object(any_module, "estimate", wraps=estimate) as traced:
        report_of = any_module.reports(Images, (1, 3, 8, 8), device="cuda")
        found = {size: report_of(size) for size in (8, 64, 32, 48, 70)}
        assert traced.call_count == 3, "the third is on the line through the first two"
        assert report_of(71).batch == 71 and traced.call_count == 4, "too far beyond them"
    assert found[48] == estimate(Images, (48, 3, 8, 8)) and found[70] == estimate(Images, (70, 3, 8, 8))
    assert found[48].flop > found[32].flop > 0 < found[48].launches == found[32].launches


def test_gaps_are_of_the_allocator_that_the_caller_will_use() -> None:
    default, expandable = (
        estimate(Images, (20000, 3, 8, 8), expandable_segments=each) for each in (False, True)
    )
    assert default.trace == expandable.trace and default.gaps_bytes != expandable.gaps_bytes
    other = estimate(Images, (20000, 3, 8, 8), expandable_segments=True, device="rocm")
    assert other.gaps_bytes == default.gaps_bytes, "torch has them on CUDA"


def cast_when_made() -> nn.Module:
    model = Tied()
    kept = weakref.ref(model.embedding.weight)
    model.to(torch.bfloat16)
    assert kept() is model.head.weight is model.embedding.weight, "still tied, and the same object"
    return model


@pytest.mark.slow
def test_a_cast_module_has_half_the_weights_and_state() -> None:
    single, half = estimate(Tied, TOKENS), estimate(Tied, TOKENS, precision="bf16-true")
    assert half.parts["parameters"] < 0.56 * single.parts["parameters"], "rounded up to 512 bytes"
    assert half.parts["optimizer"] < 0.56 * single.parts["optimizer"] + 512 * 26
    for build in (cast_when_made, lambda: Tied().to(torch.bfloat16)):
        assert same(estimate(build, TOKENS), half)
    assert same(estimate(cast_when_made(), TOKENS), half)


def test_casting_in_a_simulation_changes_gradients_and_buffers_too() -> None:
    with simulation("cuda"):
        layer = nn.BatchNorm1d(4)
        layer(torch.zeros(2, 4)).sum().backward()
        layer.half()
        assert layer.weight.dtype == layer.weight.grad.dtype == layer.running_mean.dtype == torch.float16
        image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        assert image.weight.is_contiguous(memory_format=torch.channels_last)
        assert image.weight.is_leaf and image.weight.requires_grad
    assert torch.utils.swap_tensors.__module__ == "torch.utils", "restored"


class Steers(nn.Module):
    """Its forward pass reads the value of a tensor."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        self.read(x)
        return self.layer(x)


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x.nonzero(), lambda x: x[x > 0]]
)
def test_a_model_that_depends_on_values_is_named_with_its_line(read: Callable[[Tensor], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Steers(read))
    line = read.__code__.co_firstlineno
    with pytest.raises(ConfigError) as caught:
        estimate(model, (2, 4))
    assert re.match(
        rf"1 \(Steers\), {__file__}:{line} depends on the values of a tensor: aten\.", str(caught.value)
    )
    assert "\n" not in str(caught.value)


def test_a_function_that_depends_on_values_of_weights_makes_them_for_real() -> None:
    """Such as timm's relative positions, made by torch.unique, and its pruned models."""
    sizes = []

    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        sizes.append(len(layer.weight[layer.weight > -2].unique()))
        return nn.Linear(4, sizes[-1])

    found = estimate(build, (2, 4))
    assert sizes == [16] and found.parts == estimate(nn.Linear(4, 16), (2, 4)).parts
    assert fits(build, (2, 4), gpu="rtx3090") and largest_batch(build, (2, 4), gpu="rtx3090", limit=64) == 64


def test_a_function_that_fails_shows_its_own_error() -> None:
    def build() -> nn.Module:
        raise RuntimeError("no such weights")

    with pytest.raises(RuntimeError, match=r"^no such weights$"):
        estimate(build, (2, 4))


class OwnAutocast(nn.Module):
    def __init__(self, **region: Any) -> None:
        super().__init__()
        self.layer, self.region, self.found = nn.Linear(64, 64), region, []

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(**self.region) if self.region else contextlib.nullcontext():
            y = self.layer(x)
        self.found.append((y.dtype, y.softmax(1, torch.float32).dtype, y.sum(1).dtype))
        return y


@pytest.mark.parametrize(
    ("region", "precision", "dtype"),
    [
        ({"device_type": "cuda"}, "fp32", torch.float16),
        ({"device_type": "cuda", "dtype": torch.bfloat16}, "fp32", torch.bfloat16),
        ({"device_type": "cuda", "enabled": False}, "bf16", torch.float32),
        ({}, "bf16", torch.bfloat16),
        ({}, "fp32", torch.float32),
    ],
)
def test_autocast_is_as_the_model_has_it(region: dict[str, Any], precision: Any, dtype: torch.dtype) -> None:
    found: list[Any] = []

    def build() -> nn.Module:
        model = OwnAutocast(**region)
        model.register_forward_hook(lambda *called: found.append(called[2].dtype))
        return model

    estimate(build, (4, 64), precision=precision)
    assert set(found) == {dtype}
    assert torch.autocast.__init__.__module__ == "torch.amp.autocast_mode", "restored"


def test_a_report_by_arithmetic() -> None:
    """One layer of 256 x 256 with SGD and momentum; every tensor is a multiple of 512 bytes."""
    weight, batch = 4 * 256 * 256, 4 * 512 * 256
    model = nn.Linear(256, 256, bias=False)
    report = estimate(
        model, (512, 256), optimizer=lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9)
    )
    assert report.phases["update"][1] == 2 * weight + batch, "gradients are gone"
    assert report.phases["forward"] == (2 * weight + 2 * batch + 512, 2 * weight + batch + 512)
    # The gradient of the sum is one number, expanded; its product needs it in full or not at all.
    assert report.phases["backward"][1] == 3 * weight + batch
    assert report.peak_bytes == max(peak for peak, _ in report.phases.values())
    assert report.parts["data"] == batch and report.parts["parameters"] == weight == report.parts["optimizer"]
    assert report.context_bytes == CONTEXT_BYTES + round(0.02 * report.peak_bytes)
    assert report.need_bytes == report.peak_bytes + report.gaps_bytes + report.context_bytes
    assert report.batch == 512 and not report.compiled
    plain = estimate(model, (512, 256), optimizer=lambda weights: torch.optim.SGD(weights, 0.1)).phases
    twice = estimate(model, (512, 256), optimizer=lambda each: torch.optim.SGD(each, 0.1), accumulation=2)
    assert twice.phases["forward"][0] == plain["forward"][0] + weight, "the gradient is kept"
    assert (twice.accumulation, twice.flop, twice.batch) == (2, 2 * report.flop, 512)
    assert plain["update"] == (plain["backward"][1], plain["backward"][1] - weight), "in place"
    assert re.search(r"^need +\d\.\d\d GB$", str(report), re.M) and "peaks: forward 1.6 MB" in str(report)


@pytest.mark.slow
def test_the_update_is_the_one_of_the_device() -> None:
    weight = 4 * 1024 * 1024

    def peak(**options: Any) -> int:
        def optimizer(weights: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(weights, **options)

        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        return estimate(model, (1, 1024), optimizer=optimizer).phases["update"][0]

    assert peak() == peak(foreach=True), "torch's default on a GPU"
    assert peak() - peak(fused=True) == pytest.approx(4 * weight, rel=0.01), "a temporary of all weights"
    assert peak(foreach=False) < peak(), "temporaries of one weight after the other"


@pytest.mark.slow
def test_checkpointing_saves_activations() -> None:
    shape = ((16, 64), torch.int64)
    plain, recomputed = (
        estimate(lambda each=each: Tied(blocks=3, recomputed=each), shape) for each in (False, True)
    )
    assert recomputed.phases["forward"][1] < 0.6 * plain.phases["forward"][1]


def never(*_: Any) -> Any:
    raise AssertionError("simulated code is not compiled")


@torch.compile(backend=never, fullgraph=True)
def compiled_function(x: Tensor) -> Tensor:
    return x.relu() * 2


class CallsCompiled(Images):
    def forward(self, x: Tensor) -> Tensor:
        return compiled_function(super().forward(x))


@pytest.mark.slow
def test_compiled_modules_are_traced_as_they_were_written_with_a_margin() -> None:
    plain = estimate(Images(), (4, 3, 8, 8))
    compiled = estimate(torch.compile(Images(), backend=never), (4, 3, 8, 8))
    assert same(compiled, plain) and compiled.compiled
    margin = (COMPILED_PEAK_FACTOR - 1) * PEAK_FACTOR * plain.peak_bytes
    assert compiled.context_bytes - plain.context_bytes == pytest.approx(margin, abs=2)
    inside = nn.Sequential(torch.compile(Images(), backend=never))
    assert estimate(inside, (4, 3, 8, 8)).compiled
    in_place = Images()
    in_place.compile(backend=never)
    assert same(estimate(in_place, (4, 3, 8, 8)), plain)
    estimate(CallsCompiled(), (4, 3, 8, 8))


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    model, gpu = nn.Linear(2**20, 1), "rtx3090:2Gi"  # 4 MiB a sample
    largest = largest_batch(model, (1, 2**20), gpu=gpu)
    assert 90 < largest < 128
    assert fits(model, (largest, 2**20), gpu=gpu) and not fits(model, (largest + 1, 2**20), gpu=gpu)
    assert largest_batch(lambda: nn.Linear(2**20, 1), (7, 2**20), gpu=gpu) == largest
    assert largest_batch(model, (1, 2**20), gpu=gpu, limit=10) == 10
    assert largest_batch(model, (1, 2**20), gpu="rtx3090:1Gi") == 0
    masked = largest_batch(nn.Linear(8, 1), [(5, 8)], gpu=gpu, limit=3, loss=lambda y: y[:3].sum() * len(y))
    assert masked == 3

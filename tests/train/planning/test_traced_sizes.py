"""Which micro-batches of a run are traced, and which follow from traces of others."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest

from lib.memory.live import Trace
from lib.nn import linear_cross_entropy
from lib.plan.fitting import plan_of
from lib.plan.types import Plan
from tests.support.examples import examples
from tests.support.training import CPU, CPU_TRIAL, data_of, small_config
from train.planning import memory_estimate
from train.planning.memory_estimate import MemoryTraces, affine, trace_memory, with_gaps
from train.planning.traced_steps import Launches

pytestmark = pytest.mark.slow

TRIAL = CPU_TRIAL
# Those of the plug-ins that learn from images, too.
IMAGE_MODELS = [name for name, example in examples().items() if not hasattr(example, "data")]
# Every kind of model, and the smallest one on every device.
EACH_ONCE = {
    ("lenet5", "cpu", "fp32"),
    ("lenet5", "cuda", "bf16"),
    ("lenet5", "rocm", "fp16"),
    ("gpt2", "cuda", "bf16"),
    ("resnet_bk", "cpu", "fp32"),
}


@pytest.mark.parametrize(
    ("model", "device", "precision"),
    [
        pytest.param(model, *where, marks=[] if (model, *where) in EACH_ONCE else [pytest.mark.long])
        for model in ("lenet5", "gpt2", "resnet_bk", *(each for each in IMAGE_MODELS if each != "lenet5"))
        for where in (("cpu", "fp32"), ("cuda", "bf16"), ("rocm", "fp16"))
    ],
)
def test_a_size_on_the_line_is_what_its_own_trace_says(
    model: str, device: Any, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_sizes_on_the_line(model, device, precision, monkeypatch)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cuda", "bf16"),
        pytest.param("cpu", "fp32", marks=pytest.mark.long),
        pytest.param("rocm", "fp16", marks=pytest.mark.long),
    ],
)
def test_so_it_is_in_a_deep_network(device: Any, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_sizes_on_the_line("resnet50", device, precision, monkeypatch)


def assert_sizes_on_the_line(
    model: str, device: Any, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_cross_entropy, "_ROWS", 1)  # as many chunks of the head for every size
    config = small_config(model, optimizer="adamw", augment="none", data_placement="stream", grad_clip=1.0)
    trial, data = dataclasses.replace(TRIAL, device=device, precision=precision), data_of(config)
    traces, sizes = MemoryTraces(config, data), (3, 24, 17, 21, 13, 5, 26)
    with mock.patch.object(memory_estimate, "trace_memory", wraps=trace_memory) as traced:
        found = {size: traces.of(dataclasses.replace(trial, micro_batch=size), CPU) for size in sizes}
    assert traced.call_count == 3 or (model in IMAGE_MODELS and traced.call_count <= len(sizes))
    for size in sizes[-2:]:
        step = dataclasses.replace(trial, micro_batch=size)
        assert found[size] == trace_memory(config, plan_of(step), data, hardware=CPU)
        assert with_gaps(found[size].trace, device)


def test_a_line_that_misses_a_trace_is_not_believed() -> None:
    """Ghost batches have a kernel per group: the steps of two sizes are not the same operations."""
    config = small_config("resnet18", optimizer="sgd", data_placement="stream")
    data, trial = data_of(config), dataclasses.replace(TRIAL, norm_batch=4)
    traces, sizes = MemoryTraces(config, data), (4, 32, 16, 24)
    with mock.patch.object(memory_estimate, "trace_memory", wraps=trace_memory) as traced:
        for size in sizes:
            traces.of(dataclasses.replace(trial, micro_batch=size), CPU)
    assert traced.call_count == len(sizes)


def test_a_line_is_not_believed_where_sizes_or_work_bend() -> None:
    def at(byte_count: int, flop: int, copied: int = 8) -> memory_estimate.MemoryTrace:
        events = ((0, 512 * -(-byte_count // 512)), (0, -512 * -(-byte_count // 512)))
        return memory_estimate.MemoryTrace(
            Trace(events, {0: "data"}, {0: byte_count}, 512), flop, Launches(1, 2, 3), copied
        )

    line = {size: at(100 + 700 * size, 5 * size, 3 * size) for size in (2, 10)}
    assert affine(line, 2, 10, 7) == at(5000, 35, 21)
    assert affine(line, 2, 10, 11) == at(7800, 55, 33)
    assert affine(line, 2, 10, 7) != at(5000, 35, 22)
    assert affine(line, 2, 10, 7) != at(5001, 35, 21), "rounded alike"
    assert affine(line, 2, 10, 7) != at(5000, 36, 21)
    other = dataclasses.replace(line[10], launches=Launches(1, 2, 4))
    assert affine({**line, 10: other}, 2, 10, 7) is None


def test_a_line_stays_believed_between_its_sizes() -> None:
    def at(size: int) -> memory_estimate.MemoryTrace:
        byte_count = 512 * size * (1 if size <= 40 else 3)
        trace = Trace(((0, byte_count), (0, -byte_count)), {0: "data"}, {0: byte_count}, 512)
        return memory_estimate.MemoryTrace(trace, size, Launches(1, 2, 3), 0)

    config, traced = small_config("lenet5"), list[int]()

    def trace(_: object, plan: Plan, *__: object, **___: object) -> memory_estimate.MemoryTrace:
        traced.append(plan.micro_batch)
        return at(plan.micro_batch)

    traces = MemoryTraces(config, data_of(config))
    with mock.patch.object(memory_estimate, "trace_memory", trace):
        for size in (1, 10, 40, 100, 30, 5, 43, 45):
            assert traces.of(dataclasses.replace(TRIAL, micro_batch=size), CPU).trace.sizes[0] > 0
        assert traces.of(dataclasses.replace(TRIAL, micro_batch=30), CPU) == at(30)
    assert traced == [1, 10, 40, 100, 45]


@pytest.mark.parametrize("model", ["lenet5", pytest.param("resnet18", marks=pytest.mark.long), "gpt2"])
@pytest.mark.parametrize(("field", "values"), [("precision", ("bf16", "fp16")), ("device", ("cuda", "mps"))])
def test_what_has_the_traces_of_another_is_not_traced_again(
    model: str, field: str, values: tuple[str, str]
) -> None:
    config = small_config(model, optimizer="adamw", data_placement="stream")
    data = data_of(config)
    traces, own = MemoryTraces(config, data), {"device": "cuda", "precision": "fp32"}
    steps = [
        dataclasses.replace(TRIAL, **own | {field: value}, micro_batch=size, accumulates=accumulates)
        for size, accumulates in ((4, True), (16, True), (8, False))
        for value in (*values, *values)
    ]
    with mock.patch.object(memory_estimate, "trace_memory", wraps=trace_memory) as traced:
        found = [traces.of(step, CPU) for step in steps]
    asked = [(getattr(call.args[1], field), call.args[1].micro_batch) for call in traced.call_args_list]
    first, other = values
    if (model, field) == ("gpt2", "device"):  # whose attention is another kernel
        assert asked == [(value, size) for size in (4, 16, 8) for value in values]
    else:
        assert asked == [(first, 4), (other, 4), (first, 16), (first, 8)]
    for step, trace in zip(steps[-2:], found[-2:], strict=True):
        assert trace == trace_memory(config, plan_of(step), data, hardware=CPU)


def test_a_half_precision_with_another_trace_is_traced() -> None:
    """Also fp32, whose trace may be the same by chance, is no half precision."""
    config, seen = small_config("lenet5"), list[str]()

    def trace(_: object, plan: Plan, *__: object, **___: object) -> memory_estimate.MemoryTrace:
        seen.append(plan.precision)
        events = ((0, 512 * plan.micro_batch),)
        flop = 1 if plan.precision == "fp16" else 2
        return memory_estimate.MemoryTrace(Trace(events, {}, {}), flop, Launches(1, 2, 3), 0)

    traces, asked = MemoryTraces(config, data_of(config)), ("bf16", "fp16", "fp32")
    with mock.patch.object(memory_estimate, "trace_memory", trace):
        for size in (1, 2):
            for precision in asked:
                step: Any = dataclasses.replace(TRIAL, device="cuda", precision=precision, micro_batch=size)
                assert traces.of(step, CPU).step_flop == (1 if precision == "fp16" else 2)
    assert seen == [*asked, *asked]

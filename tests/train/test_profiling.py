"""Figures of traces: one made by hand for each kind of device, and one of real steps."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runner import TINY, Runner
from train.profiling import _without_marks, self_times, summarize, union

Event = dict[str, Any]


def span(name: str, ts: float, dur: float, cat: str = "cpu_op", *, tid: int = 1, **args: Any) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "pid": 1, "args": args}


STEPS = [span(f"ProfilerStep#{number}", number * 100.0, 100.0, "user_annotation") for number in (5, 6)]
OUTSIDE = [
    {"ph": "M", "name": "process_name", "pid": 1},
    {"ph": "s", "name": "fwdbwd", "cat": "fwdbwd", "ts": 510.0, "tid": 1, "pid": 1},
    span("aten::mm", 400.0, 90.0),  # before the first step
    span("Trace", 0.0, 900.0, "Trace", tid=9),
]


def test_a_trace_of_a_cpu() -> None:
    """Two steps of 100 us: 30 of data, 120 in operators of this thread, of which 70 are products."""
    found = summarize(
        [
            *STEPS,
            *OUTSIDE,
            span("anneal.data_wait", 500.0, 20.0, "user_annotation"),
            span("anneal.data_wait", 600.0, 10.0, "user_annotation"),
            span("aten::linear", 520.0, 60.0),
            span("aten::addmm", 525.0, 50.0),
            span("aten::copy_", 530.0, 5.0),
            span("aten::scaled_dot_product_attention", 620.0, 15.0),
            span("aten::item", 640.0, 20.0),
            span("aten::_local_scalar_dense", 641.0, 18.0),
            span("c10d::allreduce_", 670.0, 25.0),
            span("gloo:all_reduce", 680.0, 18.0, "user_annotation", tid=2),
            span("aten::index_select", 510.0, 40.0, tid=3),  # of a loader's thread
        ]
    )
    assert (found.steps, found.duration, found.data_wait, found.on_device) == (2, 200.0, 30.0, False)
    assert found.idle == pytest.approx(200 - 60 - 15 - 20 - 25)
    assert found.communication == pytest.approx(28.0) and found.exposed == 0.0
    assert found.products == pytest.approx((60 - 50) + (50 - 5) + 15)
    assert found.counts == {".item()": 1}
    assert found.operations[:2] == [("aten::addmm", 45.0, 1), ("aten::index_select", 40.0, 1)]
    lines = [*found.lines()]
    assert lines[0].startswith("2 steps, 100 us each")
    assert "  15.0%  of it the loop waits for data" in lines and any(".item() 0.5" in one for one in lines)


def kernel(name: str, ts: float, dur: float, of: int, *, stream: int = 7) -> Event:
    event = span(name, ts, dur, "kernel", tid=stream)
    return {**event, "args": {"External id": of, "stream": stream}}


def test_a_trace_of_a_gpu() -> None:
    """Kernels count for the operation that started them; communication is hidden where another one runs."""
    found = summarize(
        [
            *STEPS,
            *OUTSIDE,
            span("ProfilerStep#5", 505.0, 400.0, "gpu_user_annotation", tid=7),
            span("aten::addmm", 510.0, 8.0, **{"External id": 41}),
            span("aten::convolution_backward", 520.0, 8.0, tid=2, **{"External id": 42}),
            span("aten::gelu", 530.0, 8.0, **{"External id": 43}),
            span("c10d::allreduce_", 540.0, 8.0, **{"External id": 44}),
            kernel("sm90_xmma_gemm_bf16", 520.0, 40.0, 41),
            kernel("cudnn_dgrad", 570.0, 20.0, 42),
            kernel("vectorized_elementwise_kernel", 600.0, 10.0, 43),
            kernel("triton_fused", 620.0, 5.0, 99),
            kernel("ncclDevKernel_AllReduce", 580.0, 30.0, 44, stream=20),
            {**kernel("Memcpy HtoD", 690.0, 30.0, 0), "cat": "gpu_memcpy"},  # runs on after the last step
            span("cudaStreamSynchronize", 650.0, 20.0, "cuda_runtime"),
            span("cudaLaunchKernel", 515.0, 2.0, "cuda_runtime"),
            span("cudaDeviceSynchronize", 705.0, 20.0, "cuda_runtime"),  # the profiler's own
        ]
    )
    assert (found.steps, found.duration, found.on_device) == (2, 200.0, True)
    assert found.idle == pytest.approx(200 - 40 - 40 - 5 - 10)
    assert (found.communication, found.exposed) == (pytest.approx(30.0), pytest.approx(10.0))
    assert found.products == pytest.approx(60.0) and found.counts == {"cudaStreamSynchronize": 1}
    assert found.operations[0] == ("aten::addmm", 40.0, 1)
    assert ("triton_fused", 5.0, 1) in found.operations
    assert "  15.0%  communication between processes, 5.0% not hidden by computation" in [*found.lines()]


@pytest.mark.parametrize(
    ("name", "is_product"),
    [
        ("aten::mkldnn_convolution", True),
        ("aten::cudnn_convolution", True),
        ("aten::_slow_conv2d_forward", True),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", True),
        ("aten::_scaled_mm", True),
        ("mkldnn::_linear_pointwise", True),
        ("aten::mul", False),
        ("aten::_convert_indices_from_coo_to_csr", False),
        ("autograd::engine::evaluate_function: MmBackward0", False),
    ],
)
def test_products_are_known_by_name(name: str, is_product: bool) -> None:
    found = summarize([*STEPS, span(name, 510.0, 10.0)])
    assert found.products == (10.0 if is_product else 0.0)


def test_a_union_counts_what_overlaps_once() -> None:
    spans = [span("", *times) for times in ((0.0, 10.0), (2.0, 3.0), (8.0, 4.0), (20.0, 10.0))]
    assert union(spans, until=25.0) == 17.0 and union([], until=1.0) == 0.0


def test_self_times_add_up_to_those_of_the_outermost() -> None:
    spans = [span("a", 0.0, 10.0), span("b", 1.0, 4.0), span("c", 2.0, 1.0), span("b", 6.0, 4.0)]
    spans += [span("a", 10.0, 5.0), span("d", 3.0, 100.0, tid=2)]
    assert sorted(self_times(spans)) == [
        ("a", 2.0),
        ("a", 5.0),
        ("b", 3.0),
        ("b", 4.0),
        ("c", 1.0),
        ("d", 100.0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_real_steps(tmp_path: Path, processes: int) -> None:
    runner, out = Runner(tmp_path, forks=processes > 1), tmp_path / "out"
    cpu = {"CONFIG_DEVICE_CPU": "y", "CONFIG_NUM_DEVICES": str(processes), "CONFIG_MAX_STEPS": "3"}
    runner.configure("lenet5", TINY | cpu)
    output = runner.run("profile", "--steps=4", f"--out={out}")
    assert sorted(path.name for path in out.iterdir()) == ["profiler.log", "summary.txt", "trace.json.gz"]
    assert "USDT" not in output and (out / "profiler.log").read_text().count("USDT") == 2
    assert (out / "summary.txt").read_text() in output and not runner.runs.exists()
    events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
    found = summarize(events)
    assert found.steps == 4 and not found.on_device and len(found.operations) > 20
    calls = {name: count for name, _, count in found.operations}
    assert calls["aten::convolution_backward"] % (4 * 2) == 0, "two convolutions in each micro-batch"
    assert 0 < found.data_wait < found.duration and 0 < found.idle < found.duration
    assert 0 < found.products < sum(time for _, time, _ in found.operations)
    assert (found.communication > 0) == (processes > 1)


def test_what_is_no_mark_of_the_profiler_is_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log"
    file.write_text("before\n")
    with pytest.raises(ValueError, match="inside"), _without_marks(file):
        os.write(2, b"USDT:2026-01-01 Handler.cpp:52] profiler_start\nERROR: no counters\n")
        raise ValueError("inside")
    assert capfd.readouterr().err == "ERROR: no counters\n"
    assert file.read_text().splitlines()[0] == "before" and "profiler_start" in file.read_text()


@pytest.mark.slow
def test_no_steps_are_refused(tmp_path: Path) -> None:
    output = Runner(tmp_path).run("profile", "--steps=0", status=2)
    assert "error: STEPS=0 is not a whole number from 1" in output
    runner = Runner(tmp_path)
    runner.configure("lenet5", TINY)
    output = runner.run("profile", "--steps=1", f"--out={__file__}", status=2)
    assert "error: OUT=" in output and "it is no folder that you can write to" in output

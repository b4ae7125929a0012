"""Memory of training any `torch.nn.Module`, without the device.

Its functions are reachable as lib.memory.estimate, lib.memory.fits and lib.memory.largest_batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lib.errors import ConfigError
from lib.memory.allocator import least_capacity
from lib.memory.live import CUDA_GRANULARITY, STEPS, LiveBytes, Trace, watch_gradients
from lib.memory.predict import training_step
from lib.memory.simulation import simulation
from lib.memory.twin import RealConstants, without_contents
from lib.plan.fitting import GAPS, StepSettings, largest_fitting, predicted
from lib.plan.gpus import parse_gpu
from lib.plan.types import OWN_MEMORY, Kind, Memory, Precision
from lib.units import bytes_text

AnyPrecision: TypeAlias = Literal["fp32", "bf16", "fp16", "bf16-true", "fp16-true"]
Model: TypeAlias = nn.Module | Callable[[], nn.Module]
MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_TRUE = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}
_INTEGERS = ("ids", "labels", "mask")  # ends of the names of such inputs of Hugging Face's models
_BEYOND = 1.1  # of the largest traced batch, to which the line through smaller ones is believed
_ALONE = "more than 1 value per channel"  # torch's error of batch normalisation over a single value
_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Predicted memory of a training step, in bytes.

    batch: samples; the size of the first dimension of the first input.
    parts: tensors at the peak, by category: parameters, gradients, optimizer, data, activations, temporaries.
    gaps_bytes: lost between tensors in the segments of the caching allocator of CUDA and ROCm.
    context_bytes: context and libraries of a GPU, and a margin of the prediction.
    expandable: gaps are those of expandable segments.
    phases: "forward", "backward" and "update" of the last step: bytes of tensors at its peak and at its end.
    trace: each allocation and release of two steps.
    marks: numbers of events before each phase of the last step (of its last micro-batch), and at its end.
    accumulation: micro-batches of a step, each of `batch` samples.
    flop, launches: of a step: FLOP of products, convolutions and attention; operators that launch a kernel.
    """

    device: Kind
    batch: int
    compiled: bool
    parts: Mapping[str, int]
    gaps_bytes: int
    expandable: bool
    phases: Mapping[str, tuple[int, int]]
    trace: Trace
    marks: tuple[int, ...]
    accumulation: int
    flop: int
    launches: int

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the peak, which torch.cuda.max_memory_allocated() reports."""
        return sum(self.parts.values())

    @property
    def context_bytes(self) -> int:
        """Bytes of the context, libraries and margin."""
        return self.on(0).reserve_bytes

    @property
    def need_bytes(self) -> int:
        """Bytes that the device must have free: tensors, gaps and context."""
        return self.on(0).need_bytes

    def between(self, other: Report, samples: int) -> Report | None:
        """Return the report for `samples` on the line through this one and `other`; None if steps differ."""
        steps, of = samples - self.batch, other.batch - self.batch
        trace = self.trace.affine(other.trace, steps, of)
        if trace is None or (self.marks, self.launches) != (other.marks, other.launches):
            return None
        flop = self.flop + (other.flop - self.flop) * steps // of
        return _filled(dataclasses.replace(self, batch=samples, trace=trace, flop=flop))

    def on(self, free_bytes: int) -> Memory:
        """Return this need on a device with `free_bytes`; `fits` of the result compares them."""
        step = StepSettings(
            device=self.device, several_devices=False, micro_batch=self.batch, norm_batch=0, precision="fp32",
            channels_last=False, compile=self.compiled,
        )  # fmt: skip
        return predicted(step, lambda _: {**self.parts, GAPS: self.gaps_bytes}, free_bytes=free_bytes)

    def __str__(self) -> str:
        sizes = {**self.parts, GAPS: self.gaps_bytes, "context, margin": self.context_bytes}
        rows = [f"{name:<16}{bytes_text(size):>10}" for name, size in sizes.items() if size]
        peaks = (f"{name} {bytes_text(peak)}" for name, (peak, _) in self.phases.items())
        return "\n".join(
            [*rows, f"{'need':<16}{bytes_text(self.need_bytes):>10}", f"peaks: {', '.join(peaks)}"]
        )


def estimate(
    model: Model,
    inputs: Any,
    *,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    precision: AnyPrecision = "fp32",
    loss: Callable[[Any], Tensor] | None = None,
    device: Kind = "cuda",
    expandable_segments: bool = False,
    accumulation: int = 1,
) -> Report:
    """Predict the memory of training `model` on one batch, from two steps on tensors without contents.

    model: a module, whose tensors may be real, on the meta device or simulated, and which is not changed; or
        a function that makes one, if it can be in the simulation, where weights take no memory. All of a
        module in evaluation mode is set to training mode; parts of one in training mode keep theirs.
    inputs: one batch. A tensor stands for its shape and type, a tuple of integers for a tensor of that shape
        in fp32, and (shape, dtype) for one of another type. A dict of these is passed by name, where a shape
        is of int64 if the name ends in ids, labels or mask; a list is passed by position.
    optimizer: makes the optimizer of the trained weights.
    precision: "bf16" and "fp16" run the forward pass under autocast; "bf16-true" and "fp16-true" cast weights
        and floating-point inputs instead; "fp32" changes nothing, nor does it end the module's own autocast.
    loss: a function of the model's output. None: the output's `loss`, or the sum of all that has gradients.
        The output is released after it, as in the loops of Lightning and Hugging Face.
    expandable_segments: of torch's allocator on CUDA, as by PYTORCH_ALLOC_CONF=expandable_segments:True.
    accumulation: such batches of a step. Between them gradients are kept; more than 2 need no more.

    Raises ConfigError for unsupported arguments, and where code depends on the values of tensors.
    """
    _check(precision, accumulation, {"model": model, "optimizer": optimizer, "loss": loss or _loss_of})
    specs, dtype = _specs_of(inputs), _TRUE.get(precision)
    live = LiveBytes(granularity=1 if device == "cpu" else CUDA_GRANULARITY)
    with _simulation(device):
        made = built(model)
        twin = _twin_of(made, dtype)
        # Weights, buffers, and tensors that are neither.
        held = tree_leaves([vars(module) for module in twin.modules()])
        live.add([each for each in held if isinstance(each, Tensor)], "parameters")
        with live:
            batch = tree_map_only(Tensor, lambda spec: _input_like(spec, dtype), specs)
            live.name_the_rest("data")
            watch_gradients(twin, live)
            updates = _optimizer_of(twin, optimizer, device=device)
            autocast_to: Precision = "fp32" if dtype else cast(Precision, precision)
            marks, value_of = list[int](), loss or _loss_of
            step = functools.partial(training_step, lambda: value_of(_called(twin, batch)), updates, live)
            for _ in range(STEPS):
                marks = step(autocast_to, accumulation)
    report = Report(
        device=device, batch=_samples(specs), parts={}, gaps_bytes=0, phases={}, trace=live.trace(),
        compiled=any(hasattr(module, "_orig_mod") for module in made.modules()),
        expandable=expandable_segments and device == "cuda", marks=tuple(marks),
        accumulation=accumulation, flop=live.flop // STEPS, launches=live.launches // STEPS,
    )  # fmt: skip
    return _filled(report)


def _check(precision: str, accumulation: int, functions: Mapping[str, Any]) -> None:
    if precision not in get_args(AnyPrecision):
        known = ", ".join(get_args(AnyPrecision))
        raise ConfigError(f"precision={precision!r} is not predicted for", todo=f"use one of {known}")
    if accumulation < 1:
        raise ConfigError(f"accumulation={accumulation} trains nothing", todo="use 1 or more")
    for name, value in functions.items():
        if not callable(value):
            todo = "optimizer=torch.optim.AdamW, and loss=lambda output: ..., are such"
            raise ConfigError(f"{name}={value!r} is not a function", todo=todo)


def _filled(report: Report) -> Report:
    """Return `report` with the sizes that follow from its trace."""
    trace, marks, gaps = report.trace, report.marks, 0
    totals = list(itertools.accumulate(byte_count for _, byte_count in trace.events))
    if report.device in OWN_MEMORY:
        gaps = max(0, least_capacity(trace.history(), expandable=report.expandable) - trace.peak_bytes)
    phases = {
        name: (max(totals[first - 1 : last]), totals[last - 1])
        for name, first, last in zip(("forward", "backward", "update"), marks, marks[1:], strict=False)
    }
    return dataclasses.replace(report, parts=trace.at_peak(), gaps_bytes=gaps, phases=phases)


def fits(model: Model, inputs: Any, *, gpu: str, **options: Any) -> bool:
    """Return True if training `model` on `inputs` is predicted to fit on `gpu`.

    gpu: a name as in GPU= of make plan: "rtx3090", "h100-80g:70G" (with 70 GB free), "cpu-24g".
    options: of `estimate`, but for `device`. Raises ConfigError as it does, and for an unknown name.
    """
    machine = parse_gpu(gpu)
    report = estimate(model, inputs, device=machine.kind, **options)
    return report.on(machine.devices[0].free_bytes).fits


def largest_batch(model: Model, inputs: Any, *, gpu: str, limit: int = 2**20, **options: Any) -> int:
    """Return the largest batch, in samples up to `limit`, that is predicted to fit on `gpu`; 0 if none does.

    inputs: as for `estimate`. First dimensions that are as large as that of the first input count samples.
    gpu, options: as for `fits`; `loss` takes any number of samples.
    """
    machine = parse_gpu(gpu)
    report_of, free_bytes = (
        reports(model, inputs, device=machine.kind, **options),
        machine.devices[0].free_bytes,
    )
    sizes = range(smallest(report_of).batch, limit + 1)
    return largest_fitting(lambda samples: report_of(samples).on(free_bytes), sizes)


def smallest(report_of: Callable[[int], Report]) -> Report:
    """Return the report of one sample, or of two where batch normalisation cannot be trained on one."""
    try:
        return report_of(1)
    except ValueError as error:
        if _ALONE not in str(error):
            raise
        return report_of(2)


def reports(model: Model, inputs: Any, *, device: Kind, **options: Any) -> Callable[[int], Report]:
    """Return the function from a number of samples to the report of `estimate`, which traces few of them.

    Storages grow along a line. Once that through two traced sizes has given a third trace exactly, sizes
    between them, and up to a tenth beyond, are calculated.
    """
    specs, traced, line = _specs_of(inputs), dict[int, Report](), [(0, -1)]
    if not isinstance(model, nn.Module):  # once, and not for each size
        with _simulation(device):
            model = built(model)

    def with_samples(spec: Tensor, samples: int) -> Tensor:
        is_batch = spec.shape[:1] == (_samples(specs),)
        return torch.empty(samples, *spec.shape[1:], dtype=spec.dtype, device="meta") if is_batch else spec

    @functools.cache
    def report_of(samples: int) -> Report:
        low, high = line[0]
        on_line = traced[low].between(traced[high], samples) if low <= samples <= high * _BEYOND else None
        if on_line is not None:
            return on_line
        batch = tree_map_only(Tensor, lambda spec: with_samples(spec, samples), specs)
        report = estimate(model, batch, device=device, **options)
        for one, other in itertools.combinations(sorted(traced), 2):
            if traced[one].between(traced[other], samples) == report:
                line[0] = min(one, samples), max(other, samples)
        traced[samples] = report
        return report

    return report_of


def _optimizer_of(model: nn.Module, make: MakeOptimizer, *, device: Kind) -> torch.optim.Optimizer:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not trained:
        raise ConfigError("no weight of the model is trained", todo="set requires_grad of some")
    optimizer = make(trained)
    for group in optimizer.param_groups if device in OWN_MEMORY else ():
        # torch's default on a GPU; here it sees tensors of the CPU.
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, list) else model(batch)


def _loss_of(output: Any) -> Tensor:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = tree_leaves(output) if own is None else [own]
    sums = [each.sum() for each in found if isinstance(each, Tensor) and each.requires_grad]
    if not sums:
        raise ConfigError("no output of the model has gradients", todo="pass loss=, a function of its output")
    return functools.reduce(torch.add, sums)


def _specs_of(inputs: Any) -> Any:
    """Return `inputs` with tensors, of the meta device where only a shape was given."""
    specs = _with_tensors(inputs)
    if not _samples(specs):
        todo = "write (32, 128), ((32, 128), torch.int64), or a dict or list of such"
        raise ConfigError(f"inputs={inputs!r} has no tensor and no shape with samples", todo=todo)
    return specs


def _with_tensors(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _with_tensors(each, str(key)) for key, each in value.items()}
    if isinstance(value, tuple) and value and all(type(each) is int for each in value):
        dtype = torch.int64 if name.endswith(_INTEGERS) else torch.float32
        return torch.empty(value, dtype=dtype, device="meta")
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype):
        return torch.empty(value[0], dtype=value[1], device="meta")
    return [_with_tensors(each) for each in value] if isinstance(value, list | tuple) else value


def _samples(specs: Any) -> int:
    shapes = [leaf.shape for leaf in tree_leaves(specs) if isinstance(leaf, Tensor)]
    return shapes[0][0] if shapes and shapes[0] else 0


def _input_like(spec: Tensor, floating: torch.dtype | None) -> Tensor:
    dtype = floating if floating is not None and spec.is_floating_point() else spec.dtype
    return torch.zeros(spec.shape, dtype=dtype)


@contextlib.contextmanager
def _simulation(device: Kind) -> Iterator[None]:
    # Compiled code runs as it was written.
    with simulation(device), torch.compiler.set_stance("force_eager"), RealConstants(), _explained():
        yield


def _twin_of(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    twin = without_contents(model)
    if not twin.training:
        twin.train()
    return twin if dtype is None else twin.to(dtype)


def built(model: Model) -> nn.Module:
    """Return the module that `model` is or makes. Call it in a simulation.

    A function that needs values of tensors makes it for real instead, with the memory of its weights.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # slow

    if isinstance(model, nn.Module):
        return model
    with contextlib.suppress(RuntimeError):  # of fake tensors; another one is raised again below
        return model()
    with unset_fake_temporarily():
        return model()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Name the module and the line of code that need the value of a tensor."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        theirs = [frame for frame in frames if not frame.f_code.co_filename.startswith(_NOT_THEIRS)]
        to_it = frames[: frames.index(theirs[-1]) + 1] if theirs else []
        where = f"{to_it[-1].f_code.co_filename}:{to_it[-1].f_lineno}" if to_it else "the backward pass"
        modules = [each for frame in to_it if isinstance(each := frame.f_locals.get("self"), nn.Module)]
        what = ""
        if modules:
            path = {id(module): path for path, module in modules[0].named_modules()}.get(id(modules[-1]))
            what = f"{path or 'the model'} ({type(modules[-1]).__name__}), "
        raise ConfigError(
            f"{what}{where} depends on the values of a tensor",
            why=f"{error.func} has no result without them",
            todo="let it take the same branch and size for all values",
        ) from error

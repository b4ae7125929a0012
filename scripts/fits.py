"""Print the largest batch with which a model of timm or transformers trains on a GPU, without that GPU.

`make fits MODEL=timm:NAME GPU=rtx3090`, or MODEL=hf: and a folder or a file like config.json. It needs no
weights and downloads nothing.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from lib import atomic
from lib.devices.host import allocator_text, expandable_segments
from lib.distributed.fsdp import weight_units
from lib.errors import ConfigError, meant, run_main
from lib.memory.any_module import AnyPrecision, Report, built, reports, smallest
from lib.memory.simulation import simulation
from lib.memory.twin import RealConstants
from lib.nn.four_bit import pack
from lib.nn.lora import adapt
from lib.nn.model_directory import faults_of_values, in_a_line, read_configuration, values_of
from lib.nn.packages import import_extra
from lib.nn.weights import head_of
from lib.optim.adam_8bit import Adam8bit
from lib.plan.cost import LIST, price_of
from lib.plan.fitting import GAPS, Split, largest_fitting, split_evenly, split_under
from lib.plan.gpus import Gpu, find_gpu, machine_names, parse_gpu
from lib.plan.roofline import StepTime, StepWork, estimate_step_time
from lib.plan.sharding import shares
from lib.plan.tables import BF16_CAPABILITY
from lib.plan.types import STATIC_SHAPES, Device, Hardware, Kind, Layout, Memory, Precision
from lib.units import aligned, bytes_text, columns, range_text, whole_number
from scripts.fits_picture import PHASES, drawn
from train.planning.changes import STATE, WEIGHTS, Change, Edit, attempts, together
from train.planning.memory_estimate import with_gaps

_EIGHT_BIT, _FOUR_BIT = "8-bit optimizer state", "4-bit weights"
_SETTINGS = {_EIGHT_BIT: "CONFIG_ADAM_8BIT=y", _FOUR_BIT: "CONFIG_ADAPT_QLORA=y"}
STEPS = 1000  # whose money is shown
MOST = 2**16  # samples at once
SHOWN = 0.01  # share of the need from which a part is shown
HEAD = (
    "GPU", "batch", "steps of", "need", "free", "of the need, in GB", "seconds", f"{STEPS} steps",
    "what would fit",
)  # fmt: skip
WORDS, NUMBERS = ("model", "gpu", "precision", "checkpoint", "price", "out"), ("seq", "lora", "target")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A model, and how it is trained.

    seq: tokens of a sample, if any. lora: the rank, 0 for all weights. four_bit: of the frozen layers.
    eight_bit: of the optimizer's state. accumulates: a step has several micro-batches.
    """

    model: str
    precision: str
    seq: int
    lora: int
    checkpoint: bool
    four_bit: bool = False
    eight_bit: bool = False
    accumulates: bool = False

    def build(self) -> nn.Module:
        """Make the model, within a simulation."""
        source, _, name = self.model.partition(":")
        with _values_of(self.model):
            model: Any = import_extra("timm").create_model(name) if source == "timm" else _made(name)
        if self.lora:
            classifies = source == "timm" or type(model).__name__.endswith("Classification")
            own: dict[str, Any] = {"head": head_of(model, None), "trains_head": classifies}
            adapt(model, rank=self.lora, alpha=self.lora, four_bit=self.four_bit, **own)
            pack(model, torch.device("cpu"))
        if self.checkpoint and source == "timm":
            model.set_grad_checkpointing()
        elif self.checkpoint:
            model.config.use_cache = False
            enable = getattr(model, "activation_checkpointing_enable", None)
            enable = enable or model.gradient_checkpointing_enable  # of transformers 4
            enable({"use_reentrant": False})
        return cast(nn.Module, model)

    @property
    def origin(self) -> str:
        """Source of the traced model and loss, in words."""
        package, symbol = (
            ("timm", "TIMM") if self.model.startswith("timm:") else ("transformers", "HUGGINGFACE")
        )
        adapters = ", with adapters as PEFT adds them" if self.lora else ""
        return (
            f"Model and loss are those of {package}{adapters}. Training here needs less for some: "
            f"make plan with CONFIG_MODEL_{symbol}=y predicts it."
        )

    def with_length(self) -> Request:
        """Return this request with the tokens that its samples have. Raises ConfigError for SEQ= without."""
        with _values_of(self.model):
            inputs = self.inputs()
        seq = inputs["input_ids"][1] if "input_ids" in inputs else 0
        if self.seq and not seq:
            raise ConfigError(f"SEQ={self.seq}: {self.model} takes no tokens", todo="leave SEQ= out")
        return dataclasses.replace(self, seq=seq)

    def to_reach(self, target: int, kind: Kind, free_bytes: int) -> Request:
        """Return this request, of several micro-batches if `target` samples (0: any) do not fit at once."""
        report_of = traced(self, kind)
        if target < 2 * smallest(report_of).batch or (
            target <= MOST and report_of(target).on(free_bytes).fits
        ):
            return self
        return dataclasses.replace(self, accumulates=True)

    def settings(self) -> str:
        """Format the size of a sample, and what else was asked for."""
        inputs = self.inputs()
        sizes = inputs if isinstance(inputs, tuple) else next(iter(inputs.values()))
        size = f"{sizes[1]:,} tokens" if len(sizes) == 2 else " x ".join(map(str, sizes[1:]))
        own = f"LORA={self.lora}" if self.lora else "all weights trained"
        return f"{own}, {'CHECKPOINT=y, ' * self.checkpoint}samples of {size}"

    def inputs(self) -> Any:
        """Return the shapes of one sample, with labels where the model takes them."""
        source, _, name = self.model.partition(":")
        if source == "timm":
            timm: Any = import_extra("timm")
            if not timm.is_model(name):
                todo = meant(name, timm.list_models(), listed="timm.list_models() has them all")
                raise ConfigError(f"MODEL={self.model} is no model of the installed timm", todo=todo)
            return (1, *timm.get_pretrained_cfg(name).input_size)
        make = _of_transformers(name)
        given, takes, kind = make.args[0], make.func.main_input_name, make.func.__name__  # type: ignore[attr-defined]
        text = (1, self.seq or min(2048, getattr(given, "max_position_embeddings", 2048)))
        if takes not in ("input_ids", "pixel_values"):
            todo = "lib.memory.estimate takes any (docs/memory-any-module.md)"
            raise ConfigError(f"make fits has no inputs for {kind}, which takes {takes}", todo=todo)
        inputs = {takes: text if takes == "input_ids" else (1, given.num_channels, *[given.image_size] * 2)}
        if kind.endswith(("LM", "LMHeadModel", "ForConditionalGeneration", "Classification")):
            of_sample = kind.endswith(("SequenceClassification", "ImageClassification"))
            inputs["labels"] = (1,) if of_sample else text
        return inputs


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.fits", description=__doc__)
    for name in WORDS:
        parser.add_argument(f"--{name}", default="")
    for name in NUMBERS:
        number = functools.partial(whole_number, variable=name.upper())
        parser.add_argument(f"--{name}", type=number, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # those of other packages are theirs
    missing = "MODEL" if not options.model else "" if options.gpu else "GPU"
    if missing or not options.model.startswith(("timm:", "hf:")):
        what = f"there is no {missing}=" if missing else f"MODEL={options.model} is of neither timm nor hf"
        raise ConfigError(what, todo="write MODEL=timm:NAME or MODEL=hf:FOLDER, and GPU=rtx3090 or GPU=all")
    if options.checkpoint not in ("", "y", "n"):
        raise ConfigError(f"CHECKPOINT={options.checkpoint} is neither y nor n")
    given = {name: getattr(options, name) for name in ("model", "seq", "lora")}
    precision = options.precision or "bf16"
    if precision not in get_args(AnyPrecision):
        todo = meant(precision, get_args(AnyPrecision))
        raise ConfigError(f"PRECISION={precision} is not predicted for", todo=todo)
    price_of(options.price, None)  # before what takes long
    if options.out:
        atomic.check_writable(Path(options.out), "OUT", log=print, suffixes=[".png"])
    named = [(name, parse_gpu(name)) for name in machine_names(options.gpu)]
    machines = [one for one in named if one[1].kind not in STATIC_SHAPES and len(one[1].devices) == 1]
    if not machines:
        raise ConfigError(f"GPU={options.gpu} is not one GPU", todo="name one; the table says how many")
    request = Request(**given, precision=precision, checkpoint=options.checkpoint == "y").with_length()
    rows = [(name, *cells(request, each.kind, each.devices[0], options)) for name, each in machines]
    print(f"{request.model}, {request.precision}, AdamW, {request.settings()}: predicted, not measured")
    print("\n".join(aligned(columns([HEAD, *rows]))))
    below, kind, device = list[str](), machines[0][1].kind, machines[0][1].devices[0]
    first = request.to_reach(options.target, kind, device.free_bytes)
    if len(rows) == 1 and rows[0][1] == "0":
        found = list(changes(first, kind, device.free_bytes))
        table = [
            (text, bytes_text(report.on(device.free_bytes).need_bytes), span(report, first, device))
            for text, report in found
            if report
        ]
        head = ("It would fit with", "need", "seconds")
        helpful = aligned(columns([head, *table])) if table else ()
        below = [*helpful, *(each for each, one in found if not one)]
        print("\n".join(below))
    print(
        f"{allocator_text()}. Seconds of a step by the roofline; money in US dollars unless PRICE= is yours."
    )
    text = "\n".join([*(row[-1] for row in rows), *below])
    print("\n".join([*notes(request, machines, text, target=bool(options.target)), request.origin]))
    if options.out:
        report = traced(first, kind)(int(rows[0][1]) or smallest(traced(first, kind)).batch)
        atomic.save(Path(options.out), drawn(report, request.model), action="write a picture")
    return 0 if any(row[1] != "0" for row in rows) else 2


def notes(
    request: Request, machines: Sequence[tuple[str, Hardware]], text: str, *, target: bool
) -> Iterator[str]:
    """Yield what else to know of the rows for `machines`. text: the changes that they name."""
    found = {name: each.devices[0].capability for name, each in machines if each.kind == "cuda"}
    old = [name for name, capability in found.items() if capability and capability < BF16_CAPABILITY]
    if old and request.precision.startswith("bf16"):
        yield f"NOTE: {', '.join(old)} cannot compute in bf16: make plan takes fp16 there (PRECISION=fp16)."
    if len(machines) > 1 and not target:
        yield f"NOTE: {STEPS} steps of different batches are different work: TARGET= gives all rows one."
    for name, setting in _SETTINGS.items():
        if name in text:
            yield f"{name}: {setting} in a configuration; make fits has no variable for it."
    if "FSDP" in text:
        yield "Seconds with FSDP are without communication between the GPUs; make plan GPU=NAMEx2 counts it."


def cells(request: Request, kind: Kind, device: Device, options: argparse.Namespace) -> tuple[str, ...]:
    """Return the cells of a row of the table."""
    free, gpu = device.free_bytes, find_gpu(device.name)
    request = request.to_reach(options.target, kind, free)
    report_of = traced(request, kind)
    least, most = smallest(report_of), (options.target or MOST) - request.accumulates
    if 0 < options.target < least.batch:
        raise ConfigError(f"TARGET={options.target}: {request.model} trains on {least.batch} samples or more")
    sizes = range(least.batch if request.accumulates or not options.target else most, most + 1)
    largest = largest_fitting(lambda size: report_of(size).on(free), sizes)
    report = report_of(largest) if largest else least
    memory = report.on(free)
    parts = {**memory.parts, GAPS: memory.gaps_bytes, "context, margin": memory.reserve_bytes}
    of = [(size, name) for name, size in parts.items() if size > SHOWN * memory.need_bytes]
    shown = ", ".join(f"{name} {size / 1e9:.1f}" for size, name in sorted(of)[::-1])
    need = bytes_text(memory.need_bytes), bytes_text(memory.usable_bytes), shown
    if not largest:
        return "0", "", *need, "", "", nearest(request, kind, device)
    split = split_under(options.target or largest, bound=largest)
    assert split is not None, "any number of samples can be split"
    if split.last_micro_batch < least.batch:
        split = split_evenly(split.samples, bound=largest)
    if split.last_micro_batch < least.batch:
        why = f"{request.model} trains on {least.batch} samples or more, and no more than {largest} fit"
        raise ConfigError(f"TARGET={options.target} cannot be split", why=why, todo="give an even number")
    steps = str(split) * bool(options.target)
    if gpu is None:
        return str(largest), steps, *need, "", "", ""
    time = step_time(report, request, gpu, split)
    seconds, price = (time.fastest_seconds, time.slowest_seconds), price_of(options.price or LIST, gpu)
    money = range_text(*(each * STEPS / 3600 * price.per_hour for each in seconds)) if price else ""
    return str(largest), steps, *need, range_text(*seconds), money, ""


def nearest(request: Request, kind: Kind, device: Device) -> str:
    """Format the nearest change with which one sample fits `device`, and what it needs then."""
    for text, report in changes(request, kind, device.free_bytes):
        if report:
            seconds = span(report, request, device)
            need = bytes_text(report.on(device.free_bytes).need_bytes)
            return f"{text}: {need}{seconds and f', {seconds} s'}"
    return "nothing that is known here"


def span(report: Report, request: Request, device: Device) -> str:
    """Format the estimated seconds of a step of one sample; "" for a device without known rates."""
    gpu = find_gpu(device.name)
    if gpu is None:
        return ""
    time = step_time(report, request, gpu, Split.of(report.batch, micro_batch=report.batch))
    return range_text(time.fastest_seconds, time.slowest_seconds)


def step_time(report: Report, request: Request, gpu: Gpu, split: Split) -> StepTime:
    """Return the estimated time of a step with `split`, by the samples and the micro-batches of `report`."""
    whole, times = split.samples / report.batch, split.accumulation
    held = (report.parts.get(name, 0) for name in ("parameters", "gradients", "optimizer", "activations"))
    weights, gradients, state, activations = held
    work = StepWork(
        flop=report.flop / report.accumulation * whole, accumulation=times, weight_bytes=weights,
        gradient_bytes=gradients, optimizer_bytes=state, activation_bytes=round(activations * whole),
        launches=report.launches * times // report.accumulation,
    )  # fmt: skip
    return estimate_step_time(work, gpu, precision=cast(Precision, request.precision.removesuffix("-true")))


@functools.cache
def traced(request: Request, kind: Kind) -> Callable[[int], Report]:
    """Return the function from a number of samples to the report. Raises ConfigError in one line."""
    options: dict[str, Any] = {
        "precision": request.precision,
        "expandable_segments": expandable_segments(),
        "accumulation": 1 + request.accumulates,
        "optimizer": Adam8bit if request.eight_bit else torch.optim.AdamW,
    }
    try:
        report_of = reports(request.build, request.inputs(), device=kind, **options)
        smallest(report_of)
    except faults_of_values() as error:
        source, _, name = request.model.partition(":")
        todo = f"check the values in {name}" if source == "hf" else ""
        raise ConfigError(
            f"MODEL={request.model} cannot be traced so", why=in_a_line(error), todo=todo
        ) from error
    return report_of


def changes(request: Request, kind: Kind, free_bytes: int) -> Iterator[tuple[str, Report | None]]:
    """Yield changes with which one sample fits, the nearest first, with reports; then lines on the others."""

    def edit(name: str, keeps: tuple[str, ...], *, is_exact: bool = False, **values: Any) -> Edit[Request]:
        return Edit(name, lambda own: dataclasses.replace(own, **values), keeps, is_exact)

    def attempt(change: Change[Request]) -> tuple[Memory, Report]:
        report = smallest(traced(change.subject, kind))
        if change.devices > 1:
            parts = with_gaps(report.trace, kind, sharded(change.subject, change.devices))
            report = dataclasses.replace(report, gaps_bytes=parts.pop(GAPS, 0), parts=parts)
        return report.on(free_bytes), report

    rank, again = request.lora or 16, edit("CHECKPOINT=y", STATE, is_exact=True, checkpoint=True)
    small, lora = edit(_EIGHT_BIT, WEIGHTS, eight_bit=True), edit(f"LORA={rank}", (), lora=rank)
    four_bit = edit(_FOUR_BIT, (), lora=rank, four_bit=True)
    adapted = [] if request.lora else [lora]
    found = together(
        request,
        [*([] if request.checkpoint else [again]), small, *adapted],
        None if request.checkpoint else again,
        [[small], *([adapted] if adapted else []), [*adapted, four_bit]],
        tokens=request.seq,
        shorter=lambda size: edit(f"SEQ={size}", STATE, seq=size),
        wider=lambda count: Edit(f"FSDP over {count}", lambda own: own, devices=count),
    )
    return attempts(found, smallest(traced(request, kind)).on(free_bytes), attempt, peak_of=_peak_of)


def _peak_of(report: Report) -> str:
    """Name the phase of a step whose peak is the largest."""
    names = dict(zip(report.phases, PHASES, strict=True))
    return names[max(report.phases, key=lambda phase: report.phases[phase][0])]


def sharded(request: Request, world: int) -> Mapping[str, float]:
    """Return the factors of memory on one of `world` GPUs with FSDP, what it gathers included."""
    with simulation("cuda"), RealConstants():
        return shares(weight_units(built(request.build)), Layout(strategy="fsdp", world=world, shard=world))


@functools.cache
def _of_transformers(path: str) -> functools.partial[nn.Module]:
    """Return what makes the model of the configuration in `path`, which is its argument."""
    transformers = import_extra("transformers")
    if not Path(path).exists():
        raise ConfigError(f"MODEL=hf:{path} is no folder and no file", todo="name one with a config.json")
    config = read_configuration(path)
    try:
        name = (config.architectures or [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__])[0]
        return functools.partial(getattr(transformers, name), config)
    except (AttributeError, LookupError, TypeError) as error:
        todo = 'write "architectures": ["..."] with a class of transformers there'
        raise ConfigError(f"MODEL=hf:{path} names no model", why=in_a_line(error), todo=todo) from error


def _made(path: str) -> nn.Module:
    make = _of_transformers(path)
    return make.func(*copy.deepcopy(make.args))  # CHECKPOINT=y changes the configuration of its model


def _values_of(model: str) -> AbstractContextManager[None]:
    """Return what turns errors about the values of a configuration of transformers into a ConfigError."""
    source, _, name = model.partition(":")
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    return nullcontext() if source == "timm" else values_of(file)


if __name__ == "__main__":
    raise SystemExit(run_main(main))

"""Print the largest batch with which a model of timm or transformers trains on a GPU, without that GPU.

`make fits MODEL=timm:NAME GPU=rtx3090`, or MODEL=hf: and a folder or a file like config.json. Weights are not
needed, and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from lib import atomic
from lib.devices.host import allocator_text, expandable_segments
from lib.distributed.fsdp import weight_units
from lib.errors import ConfigError, run_main
from lib.memory.any_module import Report, reports
from lib.memory.simulation import simulation
from lib.memory.twin import RealConstants
from lib.plan.cost import LIST, price_of
from lib.plan.fitting import GAPS, largest_fitting, split_under
from lib.plan.gpus import find_gpu, machine_names, parse_gpu
from lib.plan.roofline import StepWork, estimate_step_time
from lib.plan.sharding import shares
from lib.plan.types import Device, Kind, Layout, Memory, Precision
from lib.units import aligned, bytes_text, columns, range_text, whole_number
from train.planning.memory_estimate import with_gaps

STEPS = 1000  # whose money is shown
SHOWN = 0.01  # share of the need from which a part is shown
TOKENS = 2048  # of a sample, where SEQ= is left out and the model takes as many
# Share of Adam's fp32 state in 8 bits, with a scale per block of 256 values (bitsandbytes).
IN_8_BITS = (1 + 4 / 256) / 4
BYTES_IN_4_BITS = 0.5 + 4 / 64  # of a weight in NF4, with a scale per block of 64 (Dettmers et al. 2023)
HEAD = ("GPU", "batch", "steps of", "need", "of which", "a step", f"{STEPS} steps", "what would fit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A model and how it is trained. lora: the rank, 0 to train all weights. tokens: of a sample, 0: chosen."""

    model: str
    precision: str
    tokens: int = 0
    lora: int = 0
    checkpoint: bool = False

    def build(self) -> nn.Module:
        """Make the model, within a simulation."""
        source, _, name = self.model.partition(":")
        of_timm = source == "timm"
        model = _package("timm").create_model(name) if of_timm else _of_transformers(name)[1]()
        if self.lora:
            linear = [at for at, layer in model.named_modules() if isinstance(layer, nn.Linear)]
            target: Any = [at for at in linear if "head" not in at] if of_timm else "all-linear"
            peft = _package("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=self.lora, target_modules=target))
        if self.checkpoint and of_timm:
            model.set_grad_checkpointing()
        elif self.checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return cast(nn.Module, model)

    def inputs(self) -> Any:
        """Return the shapes of one sample, with labels where the model's loss is known."""
        source, _, name = self.model.partition(":")
        if source == "timm":
            if not _package("timm").is_model(name):
                raise ConfigError(f"MODEL={self.model} is no model of the installed timm")
            return (1, *_package("timm").get_pretrained_cfg(name).input_size)
        config, make = _of_transformers(name)
        kind, text = type(config).__name__, (1, self.tokens or min(TOKENS, getattr(config, _LONGEST, TOKENS)))
        match make.func.main_input_name:
            case "input_ids":
                inputs: dict[str, Any] = {"input_ids": text}
            case "pixel_values":
                inputs = {"pixel_values": (1, config.num_channels, config.image_size, config.image_size)}
            case other:
                todo = "lib.memory.estimate takes any inputs (docs/memory-any-module.md)"
                raise ConfigError(f"{kind} is of a model that takes {other}", todo=todo)
        name = make.func.__name__
        if name.endswith(("LM", "LMHeadModel", "ConditionalGeneration")):
            inputs["labels"] = text
        elif name.endswith("Classification"):
            inputs["labels"] = (1,)
        return inputs


_LONGEST = "max_position_embeddings"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.fits", description=__doc__)
    for name in ("model", "gpu", "seq", "lora", "precision", "checkpoint", "target", "price", "out"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    if options.model.partition(":")[0] not in ("timm", "hf") or not options.gpu:
        todo = "write MODEL=timm:NAME or MODEL=hf:FOLDER, and GPU=rtx3090 or GPU=all"
        raise ConfigError(f"MODEL={options.model} GPU={options.gpu} is not a model and a GPU", todo=todo)
    if options.checkpoint not in ("", "y", "n"):
        raise ConfigError(f"CHECKPOINT={options.checkpoint} is neither y nor n")
    seq, lora, target = (
        whole_number(getattr(options, name) or "0", name.upper(), least=0)
        for name in ("seq", "lora", "target")
    )
    request = Request(
        model=options.model,
        precision=options.precision or "bf16",
        tokens=seq,
        lora=lora,
        checkpoint=options.checkpoint == "y",
    )
    price_of(options.price, None)
    fits = Fits(target=target, price=options.price or LIST)
    return fits.show(request, options.gpu, picture=Path(options.out) if options.out else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fits:
    """Answers for one target (samples of a step, 0: of one micro-batch) and price of a GPU and hour."""

    target: int
    price: str

    def show(self, request: Request, gpu: str, *, picture: Path | None) -> int:
        """Print the table, and draw memory over the last step on the first GPU. Status 2 if nothing fits."""
        machines = {name: parse_gpu(name) for name in machine_names(gpu)}
        machines = {name: each for name, each in machines.items() if each.kind != "tpu" or gpu == name}
        if any(len(each.devices) > 1 or each.kind == "tpu" for each in machines.values()):
            raise ConfigError(
                f"GPU={gpu} is not one GPU", todo="name one; the table says where more are needed"
            )
        rows, drawn = [HEAD], None
        for name, machine in machines.items():
            device, report_of = machine.devices[0], traced(request, machine.kind)
            free = device.free_bytes
            largest = largest_fitting(lambda size: report_of(size).on(free), limit=self.target or 2**16)  # noqa: B023
            drawn = drawn or report_of(largest or 1)
            rows.append((name, *self._cells(request, machine.kind, device, largest)))
        inputs = request.inputs()
        print(f"{request.model}, {request.precision}, AdamW, inputs {inputs}: predicted, not measured")
        print("\n".join(aligned(columns(rows))))
        print(f"{allocator_text()}. Money: US dollars. Seconds: by the roofline.")
        if picture and drawn:
            atomic.save(picture, _drawn(drawn, request.model), action="write a picture")
        return 0 if any(row[1] != "0" for row in rows[1:]) else 2

    def _cells(self, request: Request, kind: Kind, device: Device, largest: int) -> Sequence[str]:
        report = traced(request, kind)(largest or 1)
        memory = report.on(device.free_bytes)
        need = {**memory.parts, GAPS: memory.gaps_bytes, "context, margin": memory.reserve_bytes}
        parts = sorted(need.items(), key=lambda part: -part[1])
        listed = ", ".join(
            f"{name} {size / 1e9:.1f}" for name, size in parts if size > SHOWN * memory.need_bytes
        )
        sizes = bytes_text(memory.need_bytes), listed
        if not largest:
            return (
                "0",
                "",
                *sizes,
                "",
                "",
                next(_changes(request, kind, device), "nothing that is known here"),
            )
        split = split_under(self.target or largest, bound=largest)
        assert split is not None, "any number of samples can be split"
        seconds = _seconds(report, device, request.precision, accumulation=split.accumulation)
        gpu = find_gpu(device.name)
        price = price_of(self.price, gpu)
        money = [each * STEPS / 3600 * price.per_hour for each in seconds] if price and seconds else []
        step = f"{split.accumulation} x {split.micro_batch}" if self.target else ""
        return (
            str(largest),
            step,
            *sizes,
            *(range_text(*each) if each else "" for each in (seconds, money)),
            "",
        )


@functools.cache
def traced(request: Request, kind: Kind) -> Callable[[int], Report]:
    """Return the function from a number of samples to the report. Raises ConfigError in one line."""
    options = {"precision": request.precision, "expandable_segments": expandable_segments()}
    try:
        report_of = reports(request.build, request.inputs(), device=kind, **options)
        report_of(1)
    except (
        AssertionError,
        AttributeError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"MODEL={request.model} cannot be traced so", why=first) from error
    return report_of


def _seconds(report: Report, device: Device, precision: str, *, accumulation: int) -> Sequence[float]:
    """Return the fastest and slowest seconds of a step; empty for a device without known rates."""
    gpu = find_gpu(device.name)
    if gpu is None:
        return ()
    work = StepWork(
        flop=report.flop * accumulation,
        accumulation=accumulation,
        weight_bytes=report.parts.get("parameters", 0),
        gradient_bytes=report.parts.get("gradients", 0),
        optimizer_bytes=report.parts.get("optimizer", 0),
        activation_bytes=report.parts.get("activations", 0) * accumulation,
        launches=report.launches * accumulation,
    )
    time = estimate_step_time(work, gpu, precision=cast(Precision, precision.removesuffix("-true")))
    return time.fastest_seconds, time.slowest_seconds


def _changes(request: Request, kind: Kind, device: Device) -> Iterator[str]:
    """Yield changes with which one sample fits, the nearest first."""
    recomputed = dataclasses.replace(request, checkpoint=True)
    small = dataclasses.replace(request, lora=request.lora or 16)
    both = dataclasses.replace(recomputed, lora=small.lora)
    checkpoint, lora = "CHECKPOINT=y", f"LORA={small.lora}"
    tries: list[tuple[str, Request, Callable[[], Mapping[str, float]]]] = [
        (checkpoint, recomputed, dict),
        ("8-bit optimizer state", request, lambda: {"optimizer": IN_8_BITS}),
        (lora, small, dict),
        (f"{lora} {checkpoint}", both, dict),
        (f"{lora} {checkpoint} and 4-bit weights", both, lambda: _in_4_bits(both)),
    ]
    for world in (2, 4, 8):
        layout = Layout(strategy="fsdp", world=world, shard=world)
        sharded = functools.partial(lambda layout: shares(weight_units(_on_meta(recomputed)), layout), layout)
        tries.append((f"{checkpoint} and FSDP over {world}", recomputed, sharded))
    for text, changed, factors in tries:
        try:
            if _scaled(traced(changed, kind)(1), factors()).on(device.free_bytes).fits:
                yield text
        except ConfigError:  # this model has no such change
            continue


def _scaled(report: Report, factors: Mapping[str, float]) -> Report:
    parts = with_gaps(report.trace, report.device, factors)
    gaps = parts.pop(GAPS, 0)
    return dataclasses.replace(report, parts=parts, gaps_bytes=gaps)


def _in_4_bits(request: Request) -> Mapping[str, float]:
    """Return the factor on the bytes of weights where those of frozen linear layers are in 4 bits."""
    model = _on_meta(request)
    layers = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    quantized = sum(weight.numel() for weight in layers if not weight.requires_grad)
    total = sum(weight.numel() for weight in model.parameters())
    width = 2 if request.precision.endswith("-true") else 4
    return {"parameters": 1 - quantized / total * (1 - BYTES_IN_4_BITS / width)}


def _on_meta(request: Request) -> nn.Module:
    with simulation("cuda"), RealConstants():
        return request.build()


def _of_transformers(path: str) -> tuple[Any, functools.partial[nn.Module]]:
    """Return the configuration in `path`, and what makes its model."""
    transformers = _package("transformers")
    if not Path(path).exists():
        raise ConfigError(f"MODEL=hf:{path} is no folder and no file", todo="name one with a config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"MODEL=hf:{path} is no configuration", why=str(error).splitlines()[0]) from error
    names = config.architectures or [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    return config, functools.partial(getattr(transformers, names[0]), config)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        todo = f"install it beside torch: pip install {name}"
        raise ConfigError(f"make fits needs {name} here", why=str(error), todo=todo) from error


def _drawn(report: Report, title: str) -> bytes:
    """Draw the memory of each category over the events of the last step, as PNG."""
    from lib.scaling.pictures import draw_page  # slow

    trace, first = report.trace, report.marks[0]
    names = sorted({trace.categories.get(event.storage, "temporaries") for event in trace.events})
    changes = np.zeros((len(names), len(trace.events)))
    for place, event in enumerate(trace.events):
        changes[names.index(trace.categories.get(event.storage, "temporaries")), place] = event.byte_count

    def draw(axes: Any) -> None:
        sizes = changes.cumsum(axis=1)[:, first:] / 1e9
        axes.stackplot(np.arange(sizes.shape[1]), sizes, labels=names)
        for (name, _), mark in zip(report.phases.items(), report.marks, strict=False):
            axes.axvline(mark - first, color="black", linewidth=0.8)
            axes.text(mark - first, axes.get_ylim()[1], f" {name}", va="top")
        axes.set(xlabel="allocations and releases of a step", ylabel="GB of tensors")

    return draw_page([draw], rows=1, inches=(9, 5), fontsize=9, title=f"{title}, batch {report.batch}")


if __name__ == "__main__":
    raise SystemExit(run_main(main))

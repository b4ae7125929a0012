"""Printed form of a plan, every value with its reason, and the reasons for its sizes."""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from lib.plan.fitting import NoRoomError, Split, StepSettings
from lib.plan.numerics import precision_problem
from lib.plan.placement import STEP_COMPILER, Placement
from lib.plan.types import OWN_MEMORY, STATIC_SHAPES, ConfigView, Memory, ModelFacts, Plan
from lib.plugins import MODELS
from lib.units import bytes_text, some_of, value_text

if TYPE_CHECKING:
    from lib.plan.probe_search import Probed

NARROW_COLUMNS = 72  # below this a reason goes under its value, not beside it

# Words with which a reason warns, or says that a request is met in another way.
WARNS = re.compile(r"\b(?:NOTE|MORE|MISSES|GROWS|EXPERIMENTAL)\b")


def show(plan: Plan, stream: TextIO, *, compact: bool = False) -> None:
    """Print `plan`: a table on a terminal, plain aligned text otherwise; or its compact text."""
    columns = shutil.get_terminal_size().columns
    if compact:
        print(compact_text(plan, columns=columns), file=stream)
    elif stream.isatty() and columns >= NARROW_COLUMNS:
        _show_table(plan, stream, columns=columns)
    else:
        print(plain_text(plan, columns=columns), file=stream)


def compact_text(plan: Plan, *, columns: int) -> str:
    """Format what a run is about to do in a few lines, and each reason that warns in full."""
    memory, why = plan.memory, plan.reasons
    ragged = plan.last_micro_batch < plan.micro_batch
    sizes = f"{plan.accumulation - ragged} x {plan.micro_batch}" + f" + {plan.last_micro_batch}" * ragged
    numerics = [plan.precision, "compiled" if plan.compile else "not compiled"]
    rows = [
        ("device", f"{plan.device}: {why['device']}"),
        ("batch", f"{plan.effective_batch} samples a step: {why['effective_batch']}; {sizes} at a time"),
        ("numerics", ", ".join(numerics + ["channels last"] * plan.channels_last)),
        ("memory", f"predicted: {format_need(memory)}" if memory is not None else why["memory"]),
    ]
    if plan.strategy != "single":
        more = f" in shards of {plan.shard}" if plan.shard > 1 else ""
        if plan.strategy == "pipeline":
            more = f" in {plan.shard} stages" + f" x {plan.layout.replicas}" * (plan.layout.replicas > 1)
        more += f" over {_text(plan.branch_devices)} devices" if plan.branch_devices else ""
        rows.insert(1, ("strategy", plan.strategy + more))
    shown = ("device", "effective batch")
    decisions = [(name, text) for name, _, text in named_decisions(plan) if name not in shown]
    rows += [(name, text) for name, text in decisions if WARNS.search(text)]
    width = max(9, *(len(name) for name, _ in rows)) + 1
    lines = ["Plan (make plan shows every value with its reason; V=1 does it here)"]
    for name, text in rows:
        lines += hanging(f"  {name:<{width}}", text, columns=columns, indent="    ")
    return "\n".join(lines)


def plain_text(plan: Plan, *, columns: int = 100) -> str:
    """Format the plan in lines of at most `columns` characters."""
    rows = list(named_decisions(plan))
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    lines: list[str] = []
    for name, value, reason in rows:
        head = f"{name:<{name_width}}  {value:<{value_width}}  "
        lines += hanging(head, reason, columns=columns, indent="  ")
    return "\n".join(lines)


def hanging(head: str, text: str, *, columns: int, indent: str) -> list[str]:
    """Wrap `text` beside `head`, or under it, with `indent`, where there are too few columns."""
    if columns >= NARROW_COLUMNS:
        return textwrap.wrap(head + text, columns, subsequent_indent=" " * len(head), break_long_words=False)
    return [head.rstrip(), *textwrap.wrap(text, columns, initial_indent=indent, subsequent_indent=indent)]


def _show_table(plan: Plan, stream: TextIO, *, columns: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("Plan", "", "Why", box=SIMPLE_HEAD)
    for row in named_decisions(plan):
        table.add_row(*row)
    Console(file=stream, width=columns, highlight=False, markup=False).print(table)


def named_decisions(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and reason of each decision, as text."""
    for field in dataclasses.fields(plan):
        if field.name == "reasons":
            continue
        value, reason = getattr(plan, field.name), plan.reasons[field.name]
        if value != () or WARNS.search(reason):
            yield field.name.replace("_", " "), _text(value), reason


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " + ".join(map(str, value)) or "none"
    return bytes_text(value.need_bytes) if isinstance(value, Memory) else value_text(value)


def format_need(memory: Memory) -> str:
    """Format the predicted need and the usable memory."""
    return f"{bytes_text(memory.need_bytes)} of {bytes_text(memory.usable_bytes)} usable"


def why_memory(memory: Memory | None, probed: Probed | None) -> str:
    """Explain the memory prediction by its parts, with the measurement if there is one."""
    if memory is None:
        return "not predicted"
    measured = f"measured: {bytes_text(probed.chosen.need_bytes)}" if probed is not None else "not measured"
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {bytes_text(byte_count)}" for name, byte_count in parts)
    if memory.gaps_bytes:
        listed += f", gaps between them {bytes_text(memory.gaps_bytes)}"
    more = "" if memory.fits else "MORE than there is: "
    reserve = f"in reserve {bytes_text(memory.reserve_bytes)}"
    return f"{more}{format_need(memory)}, of which {listed} and {reserve}; predicted, {measured}"


def offload_note(config: ConfigView, placement: Placement) -> str:
    """Note what a requested offload of activations does not do, or what of it is not known; else ""."""
    if not config.activation_offload:
        return ""
    if placement.device.value in OWN_MEMORY:
        return "; NOTE: the main memory that offloaded activations take is not predicted"
    compiled = placement.device.value in STATIC_SHAPES
    why = f"{STEP_COMPILER} places tensors itself" if compiled else "the device has no memory of its own"
    return f"; NOTE: CONFIG_ACTIVATION_OFFLOAD=y does nothing here: {why}"


def no_room(config: ConfigView, placement: Placement, memory: Memory, step: StepSettings) -> NoRoomError:
    """Return the error, with remedies, for `step`: the smallest micro-batch, which needs `memory`."""
    return NoRoomError(
        f"{config.model} does not fit on {placement.name}",
        why=f"a micro-batch of {step.micro_batch} is predicted to need {format_need(memory)}",
        todo=_remedies(config, placement, memory, step),
        step=step,
        memory=memory,
    )


def _remedies(config: ConfigView, placement: Placement, memory: Memory, step: StepSettings) -> str:
    remedies = ["free some memory"]
    if step.norm_batch > 1:
        remedies.append("set CONFIG_NORM_BATCH lower (on all machines alike)")
    largest = max(memory.parts, key=lambda part: memory.parts[part], default="")
    if largest in ("activations", "temporaries"):
        if config.grad_checkpoint == "none":
            remedies.append("recompute activations (CONFIG_GRAD_CHECKPOINT_BLOCKS=y)")
        if step.precision == "fp32" and not precision_problem("bf16", placement):
            remedies.append("use CONFIG_PRECISION_BF16=y")
    if largest == "optimizer":
        remedies.append("use CONFIG_OPTIMIZER_SGD=y")
    if "checkpoint" in memory.parts:
        remedies.append("set CONFIG_CHECKPOINT_ASYNC=n")
    return ", or ".join([*remedies, "choose a smaller model"])


def why_divisor(split: Split, *, bound: int, norm_batch: int) -> str:
    """Explain how the micro-batch follows from `bound`, the most that fits, and from a device's share."""
    per_device, micro_batch = split.samples, split.micro_batch
    if split.last_micro_batch < micro_batch:
        return f"; no divisor of {per_device} comes near, so the last micro-batch is smaller"
    if micro_batch == per_device < bound:
        return f"; the whole share of a device is {per_device}"
    if micro_batch < bound:
        multiple = f" and multiple of NORM_BATCH = {norm_batch}" if norm_batch else ""
        return f"; the largest divisor of {per_device}{multiple} that fits is {micro_batch}"
    return f"; divides {per_device}" if micro_batch < per_device else ""


def why_effective(config: ConfigView, shares: Sequence[int], *, rows: int, noun: str, target: int) -> str:
    """Explain each device's share, how long the others wait for the one with the most rows, and the target.

    rows: of the first device, padding included. noun: "devices", "pairs of devices" and the like.
    """
    world = len(shares)
    if world == 1:
        each = "" if noun == "devices" else f"all on one {noun.replace('s', '', 1)}, "
    elif sum(shares) == rows * world:
        each = f"{rows} on each of {world} {noun}, "
    else:
        sizes = sorted({*shares}, reverse=True)
        counts = ((shares.count(share), share) for share in sizes)
        have = " and ".join(f"{count} {'has' if count == 1 else 'have'} {share}" for count, share in counts)
        each = f"of {world} {noun} {have} ({1 - sum(shares) / (rows * world):.1%} idle), "
    if sum(shares) != target:
        return f"{each}MISSES the target of {target} by {sum(shares) - target:+d}"
    by_hand = config.target_effective_batch or config.hyper_param == "manual"
    return each + ("as requested" if by_hand else "as recommended")


def why_target(config: ConfigView) -> str:
    """Explain the source of the target effective batch."""
    if config.target_effective_batch:
        return f"CONFIG_TARGET_EFFECTIVE_BATCH={config.target_effective_batch}"
    if config.hyper_param == "manual" and config.gradient_accumulation:
        return "follows from CONFIG_BATCH_SIZE and CONFIG_GRADIENT_ACCUMULATION"
    return f"recommended for {config.model} (CONFIG_TARGET_EFFECTIVE_BATCH=0)"


def why_norm_batch(config: ConfigView, facts: ModelFacts) -> str:
    """Explain over which samples batch normalisation computes its statistics, and what else is not exact."""
    layers = f"; {facts.layers}" if facts.layers else ""
    if facts.inexact:
        shown = some_of(facts.inexact)
        layers += f"; NOTE: no trial showed these to be independent of the micro-batch: {shown}; torch's "
        layers += "generator is seeded by (seed, step, sample), so that runs can be repeated and resumed"
    return _why_norm_batch(config, facts) + layers


def _why_norm_batch(config: ConfigView, facts: ModelFacts) -> str:
    if not facts.has_batchnorm:
        return "the model has no batch normalisation"
    if config.norm_batch:
        return (
            f"every batch normalisation takes its statistics over groups of {config.norm_batch} samples, on "
            "every machine alike"
        )
    follow = (
        "NOTE: statistics follow the micro-batch: not portable to machines that split the batch differently"
    )
    if config.norm_batch is None:  # hidden
        follow += (
            f"; select MODEL_HAS_BATCHNORM in {MODELS.place(config.model)}/Kconfig to have CONFIG_NORM_BATCH"
        )
    return follow


def norm_batch_remedy(config: ConfigView) -> str:
    """Return the setting that gives normalisation over groups instead of over the micro-batch."""
    if config.norm_batch is None:
        return f"CONFIG_NORM_BATCH=32 (once {MODELS.place(config.model)}/Kconfig selects MODEL_HAS_BATCHNORM)"
    return "CONFIG_NORM_BATCH=32"

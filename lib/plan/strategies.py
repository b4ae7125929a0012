"""Choice of the parallelism strategy: the fastest that fits, the simplest among equals, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from lib.errors import PlanError
from lib.plan.fitting import WORK, NoRoomError, predicted
from lib.plan.gpus import MAX_DEVICES, find_gpu
from lib.plan.placement import NAMES, OWN_STATISTICS, Placement
from lib.plan.roofline import (
    FLOP_SHARES,
    SHORT_SECONDS,
    StepWork,
    peak_flop_per_second,
    step_seconds,
)
from lib.plan.sharding import (
    DEVICES_PER_NODE,
    ELEMENT_BYTES,
    Links,
    exposed_seconds,
    held,
    layouts,
    splits_over,
    traffic_seconds,
)
from lib.plan.show import format_need, norm_batch_remedy, why_memory
from lib.plan.sizing import Candidate, SizingContext, choose_sizes
from lib.plan.stages import (
    fewer_stages,
    idle_share,
    pipeline_seconds,
    pipelines,
    slowest_stage,
    stages_of,
)
from lib.plan.strategy_table import strategy_name
from lib.plan.types import COLLECTIVE_FORWARD, OWN_MEMORY, SHARDS_WEIGHTS, STATIC_SHAPES, Decision, Layout
from lib.units import GB, bytes_text, seconds_text

TIE = 1.02  # relative tolerance for a tie: the estimates are no more accurate


def choose_strategy(context: SizingContext) -> tuple[Candidate, tuple[Candidate, ...]]:
    """Choose the parallelism strategy on several devices; return it, and all candidates with their verdicts.

    `context` has the layout of the simplest strategy. The chosen candidate also has the reasons for the
    plan's `strategy` and `shard`. Raises PlanError where none, or not the requested one, is possible.
    """
    _check_running_statistics(context)
    requested = context.config.dist_strategy
    simplest = _candidate(context)
    # Where no other strategy can be faster, the others get its batch: a search for each takes long.
    like = simplest if _cannot_be_beaten(simplest) else None
    candidates = [simplest]
    for other in _other_layouts(context):
        # Each process of a split takes the samples of several devices, a stage those of all.
        own = other.layout.strategy in ("split", "pipeline", requested)
        candidates.append(_candidate(other, like=None if own else like))
    allowed = [each for each in candidates if requested in ("auto", each.layout.strategy)]
    possible = [each for each in allowed if each.split is not None]
    if not possible:
        raise _refusal(allowed, candidates, requested=requested, placement=context.placement)
    chosen = _best([each for each in possible if each.fits] or possible[:1])
    by_hand = f"CONFIG_DIST_STRATEGY_{requested.upper()}=y"
    strategy = _why(chosen, candidates) if requested == "auto" else by_hand
    verdicts = (replace(each, verdict=_verdict(each, chosen, requested=requested)) for each in candidates)
    reasons = {**chosen.reasons, "strategy": strategy, "shard": _why_shard(chosen)}
    return replace(chosen, reasons=reasons), tuple(verdicts)


def only_strategy(context: SizingContext) -> Candidate:
    """Return the candidate of the strategy that `context` has. Raises PlanError where it is impossible."""
    found, name = _candidate(context), context.layout.strategy
    if found.split is None:
        error = PlanError(f"{name} is not possible", why=found.why_not, todo=found.nearest)
        raise found.error or error
    reasons = {**found.reasons, "shard": _why_shard(found)}
    return replace(found, reasons=reasons, verdict="chosen")


def _why_shard(candidate: Candidate) -> str:
    layout, copies = candidate.layout, candidate.layout.world // candidate.layout.shard
    if layout.strategy == "pipeline":
        assert candidate.split is not None
        blocks = " + ".join(str(stage.blocks) for stage in stages_of(candidate.context.facts, layout))
        idle = idle_share(layout, accumulation=candidate.split.accumulation)
        share = f"; {copies} pipelines, whose equal stages sum their gradients" * (copies > 1)
        return f"stages of {blocks} blocks; each waits {idle:.1%} of a step for the others{share}"
    if layout.strategy == "sequential":
        need = bytes_text(_main_memory(candidate.context))
        unknown = candidate.context.placement.host_free_bytes is None
        checked = "NOTE: not checked on a named machine" if unknown else "which are free"
        return (
            "each process has all weights; of the frozen ones one model at a time is on its device, and all "
            f"take {need} of main memory of a node, {checked}"
        )
    if layout.shard == 1:
        return "each process has all weights" + " on its devices" * (layout.strategy == "split")
    return f"{layout.shard} processes hold one copy together" + (f", {copies} copies" if copies > 1 else "")


def _check_running_statistics(context: SizingContext) -> None:
    apart = context.step.device in OWN_STATISTICS and context.placement.world.value > 1
    if apart and context.facts.has_batchnorm and not context.config.norm_batch:
        raise PlanError(
            f"CONFIG_NORM_BATCH=0 is not possible on several {NAMES[context.step.device]}",
            why="each would keep running statistics of its own",
            todo=f"set {norm_batch_remedy(context.config)}, or CONFIG_NUM_DEVICES=1",
        )


def _other_layouts(context: SizingContext) -> Iterator[SizingContext]:
    """Yield `context` with each strategy but the simplest; sharded models are not compiled."""
    devices, step, branches = context.placement.world.value, context.step, context.facts.branches
    requested = context.config.dist_strategy
    _, *others = layouts(devices, per_node=context.placement.per_node)
    if devices > 1 and (branches is not None or requested == "split"):
        pair = Layout(strategy="split", world=1, shard=1, branch_devices=(1, 1))
        others += [*splits_over(devices, branches or ())] or [pair]
    if branches is not None or requested == "sequential":
        others.append(Layout(strategy="sequential", world=devices, shard=1))
    if devices > 1 and (context.facts.stages is not None or requested == "pipeline"):
        others += pipelines(context.config, context.facts, devices)
    for layout in others:
        compiled = step.compile and layout.strategy not in COLLECTIVE_FORWARD
        yield replace(context, step=replace(step, layout=layout, compile=compiled))


def _candidate(context: SizingContext, *, like: Candidate | None = None) -> Candidate:
    """Evaluate a strategy, with the sizes of `like` or the best of its own."""
    obstacle = _obstacle(context)
    if obstacle is not None:
        return Candidate(context=context, why_not=obstacle.value, nearest=obstacle.reason)
    try:
        found = choose_sizes(context) if like is None else _same_sizes(like, context)
    except NoRoomError as error:
        why_not = f"needs {format_need(error.memory)} at a micro-batch of {error.step.micro_batch}"
        frozen = error.memory.parts.get("frozen models", 0)
        if frozen and context.layout.strategy not in ("split", "sequential"):
            why_not += f", {bytes_text(frozen)} of it for frozen models, whole on each device"
        return Candidate(context=context, why_not=why_not, nearest=_nearest(error, context), error=error)
    except PlanError as error:
        why_not = "; ".join(filter(None, (error.why, error.todo)))
        return Candidate(context=context, why_not=why_not, error=error)
    return replace(found, seconds=seconds_of(found))


def _same_sizes(like: Candidate, context: SizingContext) -> Candidate:
    """Return the sizes of `like` with the memory that they need in `context`."""
    assert like.split is not None
    memory = context.memory(like.split.micro_batch, accumulates=like.split.accumulation > 1)
    reasons = {**like.reasons, "memory": why_memory(memory, context.probed)}
    return replace(like, context=context, memory=memory, reasons=reasons)


def _cannot_be_beaten(candidate: Candidate) -> bool:
    """True if it fits and takes no longer than its arithmetic, or if no time can be estimated."""
    if candidate.split is None or not candidate.fits:
        return False
    facts, gpu = candidate.context.facts, find_gpu(candidate.context.placement.name)
    if candidate.seconds is None or gpu is None or facts.flop_per_sample is None:
        return True
    frozen = sum(branch.flop_per_sample for branch in facts.branches or ()) * candidate.split.samples
    peak = peak_flop_per_second(gpu, precision=candidate.context.step.precision)
    return _as_fast(candidate.seconds[0], (_work(candidate)[0] + frozen) / (FLOP_SHARES[1] * peak))


def _obstacle(context: SizingContext) -> Decision[str] | None:
    """Return why a strategy is impossible regardless of memory, and the setting that allows it; else None."""
    strategy = context.layout.strategy
    if strategy in ("single", "ddp"):
        return None
    branches = strategy in ("split", "sequential")
    found = _obstacles_to_branches(context) if branches else _obstacles_to_sharding(context)
    return next((Decision(why, nearest) for stands, why, nearest in found if stands), None)


def _obstacles_to_sharding(context: SizingContext) -> Iterator[tuple[bool, str, str]]:
    """Yield what would be in the way of sharding: whether it is, why, and the setting that allows it."""
    config, facts, step = context.config, context.facts, context.step
    yield step.device in STATIC_SHAPES, f"{NAMES.get(step.device)} hold replicas only", "other devices"
    yield facts.units is None, "the shapes of the weights are not known", "plan with the model itself"
    other = "another optimizer (not the same mathematics)"
    pipeline = context.layout.strategy == "pipeline"
    of_whole = {"muon": "Muon works on whole matrices", "adam_atan2": "Adam-atan2 works on whole parameters"}
    yield not pipeline and config.optimizer in of_whole, of_whole.get(config.optimizer, ""), other
    yield config.adam_8bit and not pipeline, "its state is in 8 bits", "CONFIG_ADAM_8BIT=n"
    if context.layout.strategy == "zero1":
        return
    in_4_bits = config.weights is not None and config.weights.adapt == "qlora"
    yield in_4_bits, "weights in 4 bits are not sharded", "CONFIG_ADAPT_LORA=y"
    no_chain, blocks = pipeline and facts.stages is None, len(facts.units or ()) - 1
    yield no_chain, f"{config.model} is no chain of blocks that stages could divide", "another model"
    why = f"it would be {context.layout.shard} stages of {blocks} blocks"
    fewer = fewer_stages(config, context.placement, blocks=blocks)
    yield pipeline and not stages_of(facts, context.layout), why, fewer
    yield config.grad_checkpoint is None, f"{config.model} is not a sequence of blocks", "another model"
    yield config.activation_offload, "activations are offloaded", "CONFIG_ACTIVATION_OFFLOAD=n"
    by_precision = "CONFIG_PRECISION_BF16=y or _FP32=y"
    yield step.precision == "fp16", "no loss scaling for sharded gradients", by_precision
    shapes = [weight.shape for unit in facts.units or () for weight in unit]
    filters = step.channels_last and any(len(shape) == 4 for shape in shapes)
    yield filters, "filters in channels-last order cannot be sharded", "CONFIG_CHANNELS_LAST=n"
    whole = facts.has_batchnorm and not config.norm_batch
    yield whole, "plain batch normalisation needs whole replicas", norm_batch_remedy(config)
    yield () in shapes, "a weight without dimensions cannot be sharded", "a model whose weights have some"
    yield bool(config.compilation.by_hand), "compiled models are not sharded", "CONFIG_COMPILE_MODEL=n"


def _obstacles_to_branches(context: SizingContext) -> Iterator[tuple[bool, str, str]]:
    """As `_obstacles_to_sharding`, of placing each frozen model by itself."""
    config, layout, devices = context.config, context.layout, context.placement.world.value
    yield context.facts.branches is None, f"{config.model} has no two frozen models", "a model that has"
    device = context.placement.device.value
    yield device in STATIC_SHAPES, f"{NAMES.get(device)} hold replicas only", "GPUs"
    yield device not in OWN_MEMORY, "it is for devices with memory of their own", "GPUs"
    if layout.strategy == "sequential":
        by_precision = "CONFIG_PRECISION_BF16=y or _FP32=y"
        yield context.step.precision == "fp16", "no loss scaling within a frozen model", by_precision
        need_bytes, free_bytes = _main_memory(context), context.placement.host_free_bytes
        why = f"its frozen models need {bytes_text(need_bytes)} of main memory"
        if free_bytes is not None:
            lack = f"{why}, and {bytes_text(free_bytes)} are free"
            yield need_bytes > free_bytes, lack, f"{bytes_text(need_bytes - free_bytes)} more main memory"
        return
    several = config.dist_nnodes != "1"
    yield several, "several nodes need a process for each device", "CONFIG_DIST_NNODES=1"
    uneven = f"{devices} devices are no groups of 2 to {DEVICES_PER_NODE} of one size"
    yield layout.devices != devices, uneven, f"CONFIG_NUM_DEVICES={devices - 1}"


def _main_memory(context: SizingContext) -> int:
    """Return the bytes of main memory of a node for the frozen models of its processes."""
    world = context.layout.world
    branches = context.facts.branches or ()
    own = sum(branch.weight_bytes(context.step.precision) for branch in branches)
    return own * min(world, context.placement.per_node or world)


def _nearest(error: NoRoomError, context: SizingContext) -> str:
    """Return the smaller of two changes: more devices of the same kind, or more free memory on each."""
    strategy, world = context.layout.strategy, 2 * context.layout.world
    more = f"{(error.memory.need_bytes - error.memory.usable_bytes) / GB:.2f} GB more on each device"
    if context.predict is None or strategy not in {"zero1", *SHARDS_WEIGHTS}:
        return more
    while world <= MAX_DEVICES and context.config.target >= world * context.unit:
        wider = layouts(world, per_node=context.placement.per_node)
        larger = next((each for each in wider if each.strategy == strategy), None)
        step = replace(error.step, layout=larger)
        if larger and predicted(step, context.predict, free_bytes=context.placement.free_bytes).fits:
            return f"{world} devices, or {more}"
        world *= 2
    return more


def seconds_of(candidate: Candidate) -> tuple[float, float] | None:
    """Return the fastest and the slowest estimate of a step; None where it cannot be estimated."""
    context, layout, split = candidate.context, candidate.layout, candidate.split
    facts, memory = context.facts, candidate.memory
    gpu = find_gpu(context.placement.name) if context.step.device != "cpu" else None
    if gpu is None or facts.flop_per_sample is None or facts.units is None or memory is None:
        return None
    assert split is not None
    whole, (flop, launches, copied) = (
        held(facts.units, Layout(strategy="single", world=1, shard=1)),
        _work(candidate),
    )
    precision = context.step.precision
    if layout.strategy == "sequential":
        copied += split.accumulation * sum(each.weight_bytes(precision) for each in facts.branches or ())
    trained = StepWork(
        flop=flop,
        accumulation=split.accumulation,
        weight_bytes=ELEMENT_BYTES * whole.parameters,
        gradient_bytes=ELEMENT_BYTES * whole.gradients,
        optimizer_bytes=memory.parts.get("optimizer", 0),
        activation_bytes=memory.parts.get("activations", 0)
        * split.rows(padded=bool(context.why_one_shape))
        // split.micro_batch,
        launches=launches,
        copied_bytes=copied,
    )
    if layout.strategy == "pipeline":
        trained = slowest_stage(trained, facts, layout)
    branches = [*zip(facts.branches or (), layout.branch_devices or (1, 1), strict=False)]
    times = step_seconds(
        trained,
        [
            (branch.flop_per_sample * split.most_of(devices), branch.weight_bytes(precision))
            for branch, devices in branches
        ],
        concurrent=layout.strategy == "split",
        gpu=gpu,
        precision=precision,
        compiled=context.step.compile,
    )
    if layout.world == 1:
        return times
    links = Links.of(gpu, context.config, per_node=context.placement.per_node)
    if layout.strategy == "pipeline":
        sizes = {"samples": split.samples, "accumulation": split.accumulation}
        fastest, slowest = (pipeline_seconds(each, facts, layout, links, **sizes) for each in times)
        return fastest, slowest
    traffic = traffic_seconds(facts.units, layout, links, accumulation=split.accumulation)
    fastest, slowest = (seconds + exposed_seconds(traffic, compute=seconds) for seconds in times)
    return fastest, slowest


def _work(candidate: Candidate) -> tuple[float, int, int]:
    """Return FLOP, without frozen models, operators that launch a kernel, and bytes copied of one device.

    They are those of the trace, which recomputes attention as kernels do; copies are those of activations to
    main memory and back. Without one the FLOP are counted by sample, and neither operators nor copies are
    known.
    """
    context, split, facts = candidate.context, candidate.split, candidate.context.facts
    assert split is not None
    step = replace(context.step, micro_batch=split.micro_batch, accumulates=split.accumulation > 1)
    traced = context.predict(step) if context.predict else {}
    flop, each, update, copied = (traced.get(name, 0) for name in WORK)
    rows = split.rows(padded=bool(context.why_one_shape))
    launches, copies = split.accumulation * each + update, copied * rows // split.micro_batch
    if not flop or facts.branches is not None:  # traced with the frozen models
        return (facts.flop_per_sample or 0) * split.samples, launches, copies
    return flop * rows // split.micro_batch, launches, copies


def _best(possible: Sequence[Candidate]) -> Candidate:
    timed = [each.seconds[0] for each in possible if each.seconds is not None]
    if len(timed) < len(possible):
        return possible[0]
    return next(each for each, seconds in zip(possible, timed, strict=True) if _as_fast(seconds, min(timed)))


def _as_fast(seconds: float, fastest: float) -> bool:
    """True within the accuracy of the estimates."""
    return seconds <= max(TIE * fastest, SHORT_SECONDS)


def _why(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    simpler = candidates[: candidates.index(chosen)]
    reason = (
        "the simplest that fits" if chosen.seconds is None else "the simplest of the fastest, by estimate"
    )
    verdicts = (f"{strategy_name(each)} {_verdict(each, chosen, requested='auto')}" for each in simpler)
    return "; ".join([reason, *verdicts])


def _verdict(candidate: Candidate, chosen: Candidate, *, requested: str) -> str:
    if candidate is chosen:
        return "chosen"
    if candidate.split is None:
        return candidate.why_not + (f"; possible with {candidate.nearest}" if candidate.nearest else "")
    if not candidate.fits:
        assert candidate.memory is not None
        return f"needs {format_need(candidate.memory)} at that batch"
    if requested not in ("auto", candidate.layout.strategy):
        return f"not requested (CONFIG_DIST_STRATEGY_{requested.upper()}=y)"
    if candidate.seconds is None or chosen.seconds is None:
        return "fits, but is less simple"
    if _as_fast(candidate.seconds[0], chosen.seconds[0]):
        faster = f"at most {TIE - 1:.0%} or {seconds_text(SHORT_SECONDS)}"
        return f"{faster if candidate.seconds[0] < chosen.seconds[0] else 'not'} faster, and less simple"
    return f"estimated to take {candidate.seconds[0] / chosen.seconds[0]:.2f} times as long"


def _refusal(
    allowed: Sequence[Candidate], candidates: Sequence[Candidate], *, requested: str, placement: Placement
) -> PlanError:
    first = allowed[0] if allowed else None
    if first is not None and first.error is not None and not isinstance(first.error, NoRoomError):
        return first.error  # another strategy would fail alike
    if requested != "auto":
        world, per_node = placement.world.value, placement.per_node
        near = sorted(range(2, MAX_DEVICES), key=lambda count: (abs(count - world), -count))
        known = ((n, layout) for n in near for layout in layouts(n, per_node=per_node))
        counts = " or ".join(map(str, sorted(islice((n for n, at in known if at.strategy == requested), 2))))
        why, nearest = f"not on {world} devices", f"{counts or 'another number of'} devices"
        if first is not None:
            why, nearest = first.why_not, first.nearest
        return PlanError(
            f"CONFIG_DIST_STRATEGY_{requested.upper()}=y is not possible",
            why=why,
            todo=f"it is possible with {nearest}; or set CONFIG_DIST_STRATEGY_AUTO=y",
        )
    errors = [each.error for each in candidates if isinstance(each.error, NoRoomError)]
    error = min(errors, key=lambda each: each.memory.need_bytes)
    strategies = [f"{strategy_name(each)} with {each.nearest}" for each in candidates if each.nearest]
    todo = f"{error.todo}; possible: {', '.join(strategies)}"
    return NoRoomError(error.what, why=error.why, todo=todo, step=error.step, memory=error.memory)

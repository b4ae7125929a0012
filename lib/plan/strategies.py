"""Choice of the parallelism strategy: the fastest that fits, the simplest among equals, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lib.errors import PlanError
from lib.plan.asked import Asked, Decision
from lib.plan.assumed import MOST_DEVICES
from lib.plan.fitting import NoRoomError, predicted
from lib.plan.gpus import find_gpu
from lib.plan.placement import NAMES, Placement
from lib.plan.reasons import norm_batch_remedy, told, why_memory
from lib.plan.roofline import FLOP_SHARES, SHORT_SECONDS, StepWork, peak_flop_per_second, step_seconds
from lib.plan.sharding import held, layouts, split_over
from lib.plan.sizing import Situation, Sizes, Way, choose_sizes
from lib.plan.traffic import ELEMENT_BYTES, exposed_seconds, links_of, traffic_seconds
from lib.plan.types import ON_XLA, OWN_MEMORY, SHARDS_WEIGHTS, Layout, ModelFacts
from lib.units import GB, bytes_text

TIE = 1.02  # relative tolerance for a tie: the estimates are no more accurate


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One parallelism strategy at its best sizes.

    sizes:   None where it is not possible.
    seconds: fastest and slowest estimate of an optimizer step; None where it cannot be estimated.
    why_not: why it is not possible; nearest: the smallest change found that would make it so. "" otherwise.
    """

    way: Way
    sizes: Sizes | None = None
    seconds: tuple[float, float] | None = None
    why_not: str = ""
    nearest: str = ""
    error: PlanError | None = None

    @property
    def layout(self) -> Layout:
        """Layout over processes."""
        return self.way.layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen strategy, and every candidate with its verdict."""

    taken: Candidate
    sizes: Sizes
    reason: str
    verdicts: tuple[tuple[Candidate, str], ...]


def choose_strategy(config: Asked, facts: ModelFacts, placement: Placement, way: Way) -> Choice:
    """Choose the parallelism strategy. Raises PlanError where none, or not the requested one, is possible."""
    world = placement.world.value
    _check_running_statistics(config, facts, placement)
    first, *others = (_way_of(way, layout) for layout in _layouts(config, facts, world))
    simplest = _candidate(first, config, facts, placement)
    if world == 1:
        return _only(simplest, config)
    # Where no other strategy can be faster, the others get its batch: a search for each takes long.
    like = simplest if _cannot_be_beaten(simplest, facts, placement) else None
    candidates = [
        simplest,
        *(
            # Each process of a split takes the samples of two devices.
            _candidate(
                other, config, facts, placement, like=like if other.layout.strategy != "split" else None
            )
            for other in others
        ),
    ]
    wanted = config.dist_strategy
    if like is not None and wanted not in ("auto", "ddp"):
        candidates = [
            _candidate(each.way, config, facts, placement) if each.layout.strategy == wanted else each
            for each in candidates
        ]
    allowed = [each for each in candidates if wanted in ("auto", each.layout.strategy)]
    possible = [each for each in allowed if each.sizes is not None]
    if not possible:
        raise _refusal(allowed, candidates, wanted=wanted, world=world)
    taken = _best([each for each in possible if _fits(each)] or possible[:1])
    reason = f"CONFIG_DIST_STRATEGY_{wanted.upper()}=y" if wanted != "auto" else _why(taken, candidates)
    assert taken.sizes is not None
    verdicts = tuple((each, _verdict(each, taken, wanted=wanted)) for each in candidates)
    return Choice(taken=taken, sizes=taken.sizes, reason=reason, verdicts=verdicts)


def why_shard(layout: Layout) -> str:
    """Explain `Plan.shard` in one sentence."""
    if layout.shard == 1:
        return f"each process has all weights{' on its two devices' if layout.strategy == 'split' else ''}"
    copies = layout.world // layout.shard
    return f"{layout.shard} processes hold one copy together" + (f", {copies} copies" if copies > 1 else "")


def _check_running_statistics(config: Asked, facts: ModelFacts, placement: Placement) -> None:
    several = placement.device.value == "xla" and placement.world.value > 1
    if several and facts.has_batchnorm and not config.norm_batch:
        raise PlanError(
            "CONFIG_NORM_BATCH=0 cannot be honoured on several XLA devices",
            why="each would keep running statistics of its own",
            todo=f"set {norm_batch_remedy(config)}, or CONFIG_NUM_DEVICES=1",
        )


def _only(candidate: Candidate, config: Asked) -> Choice:
    if candidate.sizes is None:
        assert candidate.error is not None
        raise candidate.error
    reason = "one device"
    if config.dist_strategy not in ("auto", "single"):
        reason += f", so that CONFIG_DIST_STRATEGY_{config.dist_strategy.upper()}=y has nothing to spread"
    return Choice(taken=candidate, sizes=candidate.sizes, reason=reason, verdicts=((candidate, "taken"),))


def _layouts(config: Asked, facts: ModelFacts, devices: int) -> Iterator[Layout]:
    yield from layouts(devices)
    if devices > 1 and (facts.branches is not None or config.dist_strategy == "split"):
        yield split_over(devices)


def _way_of(way: Way, layout: Layout) -> Way:
    return replace(way, layout=layout, compile=way.compile and layout.strategy not in SHARDS_WEIGHTS)


def _candidate(
    way: Way, config: Asked, facts: ModelFacts, placement: Placement, *, like: Candidate | None = None
) -> Candidate:
    """Evaluate `way`, with the sizes of `like` or the best of its own."""
    obstacle = _obstacle(config, facts, placement, way)
    if obstacle is not None:
        return Candidate(way=way, why_not=obstacle.value, nearest=obstacle.reason)
    # The batch is shared by processes.
    placement = replace(placement, world=replace(placement.world, value=way.layout.world))
    try:
        if like is None or like.sizes is None:
            sizes = choose_sizes(config, facts, placement, way)
        else:
            sizes = _same_sizes(like.sizes, config, facts, placement, way)
    except NoRoomError as error:
        why_not = f"needs {told(error.memory)} at a micro-batch of {error.trial.micro_batch}"
        frozen = error.memory.parts.get("frozen models", 0)
        if frozen and way.layout.strategy != "split":
            why_not += f", {bytes_text(frozen)} of it for frozen models, whole on each device"
        nearest = _nearest(error, config, way, placement)
        return Candidate(way=way, why_not=why_not, nearest=nearest, error=error)
    except PlanError as error:
        return Candidate(way=way, why_not=error.why, nearest=error.todo, error=error)
    return Candidate(way=way, sizes=sizes, seconds=_seconds(sizes, facts, placement, way))


def _same_sizes(sizes: Sizes, config: Asked, facts: ModelFacts, placement: Placement, way: Way) -> Sizes:
    """Return `sizes` with the memory that they need in `way`."""
    situation = Situation(
        config=config, facts=facts, placement=placement, way=way, norm_batch=sizes.norm_batch
    )
    memory = situation.memory(sizes.split.micro_batch, accumulates=sizes.split.accumulation > 1)
    return replace(sizes, memory=memory, reasons={**sizes.reasons, "memory": why_memory(memory, way.probed)})


def _cannot_be_beaten(candidate: Candidate, facts: ModelFacts, placement: Placement) -> bool:
    """True if it fits and takes no longer than its arithmetic, or if no time can be estimated."""
    if candidate.sizes is None or not _fits(candidate):
        return False
    gpu = find_gpu(placement.name)
    if candidate.seconds is None or gpu is None or facts.flop_per_sample is None:
        return True
    per_sample = facts.flop_per_sample + sum(branch.flop_per_sample for branch in facts.branches or ())
    flop = per_sample * candidate.sizes.split.samples
    least = flop / (FLOP_SHARES[1] * peak_flop_per_second(gpu, precision=candidate.way.precision))
    return _as_fast(candidate.seconds[0], least)


def _obstacle(config: Asked, facts: ModelFacts, placement: Placement, way: Way) -> Decision[str] | None:
    """Return why `way` is impossible regardless of memory, and the setting that allows it; else None."""
    layout = way.layout
    if layout.strategy in ("single", "ddp"):
        return None
    if layout.strategy == "split":
        return _obstacle_to_split(config, facts, placement)
    if placement.device.value in ON_XLA:
        return Decision(f"{NAMES[placement.device.value]} hold copies", "other devices")
    if facts.units is None:
        return Decision("the shapes of the weights are not known", "plan with the model itself")
    if config.optimizer == "muon":
        return Decision("Muon works on whole matrices", "another optimizer (not the same mathematics)")
    if config.optimizer == "adam_atan2":
        return Decision("Adam-atan2 knows no parts", "another optimizer (not the same mathematics)")
    if layout.strategy == "zero1":
        return None
    if config.grad_checkpoint is None:
        return Decision(f"{config.model} is no chain of blocks", "another model")
    if config.activation_offload:
        return Decision("activations are offloaded", "CONFIG_ACTIVATION_OFFLOAD=n")
    shapes = [weight.shape for unit in facts.units for weight in unit]
    if way.precision == "fp16":
        return Decision("no loss scaling for gradients in parts", "CONFIG_PRECISION_BF16=y or _FP32=y")
    if way.channels_last and any(len(shape) == 4 for shape in shapes):
        return Decision("filters in channels-last order cannot be cut", "CONFIG_CHANNELS_LAST=n")
    if facts.has_batchnorm and not config.norm_batch:
        return Decision("plain batch normalisation needs whole copies", norm_batch_remedy(config))
    if () in shapes:
        return Decision("a weight without dimensions cannot be cut", "a model whose weights have some")
    if config.compile == "manual" and config.compile_model:
        return Decision("compiled models are not cut", "CONFIG_COMPILE_MODEL=n")
    return None


def _obstacle_to_split(config: Asked, facts: ModelFacts, placement: Placement) -> Decision[str] | None:
    devices = placement.world.value
    if facts.branches is None:
        return Decision(f"{config.model} has no two frozen models", "a model that has")
    if placement.device.value not in OWN_MEMORY:
        return Decision("no two devices are there to split for", "two GPUs")
    if devices % 2:
        return Decision(f"{devices} devices are not pairs", f"CONFIG_NUM_DEVICES={devices - 1}")
    if config.dist_nnodes != "1":
        return Decision("machines meet with a process for each device", "CONFIG_DIST_NNODES=1")
    return None


def _nearest(error: NoRoomError, config: Asked, way: Way, placement: Placement) -> str:
    """Return the smaller of two changes: more devices of the same kind, or more free memory on each."""
    more = f"{(error.memory.need_bytes - error.memory.usable_bytes) / GB:.2f} GB more on each device"
    if way.predict is None or way.layout.strategy not in {"zero1", *SHARDS_WEIGHTS}:
        return more
    world = 2 * way.layout.world
    # Only numbers of devices that divide the effective batch.
    while world <= MOST_DEVICES and config.target % world == 0:
        larger = next((each for each in layouts(world) if each.strategy == way.layout.strategy), None)
        trial = replace(error.trial, layout=larger)
        if larger and predicted(trial, way.predict, free_bytes=placement.free_bytes).fits:
            return f"{world} devices, or {more}"
        world *= 2
    return more


def _seconds(sizes: Sizes, facts: ModelFacts, placement: Placement, way: Way) -> tuple[float, float] | None:
    layout = way.layout
    gpu = find_gpu(placement.name) if placement.device.value != "cpu" else None
    if gpu is None or facts.flop_per_sample is None or facts.units is None or sizes.memory is None:
        return None
    whole = held(facts.units, Layout(strategy="single", world=1, shard=1))
    accumulation, samples = sizes.split.accumulation, sizes.split.samples
    trained = StepWork(
        flop=facts.flop_per_sample * samples,
        accumulation=accumulation,
        weight_bytes=ELEMENT_BYTES * whole.parameters,
        gradient_bytes=ELEMENT_BYTES * whole.gradients,
        optimizer_bytes=sizes.memory.parts.get("optimizer", 0),
        activation_bytes=sizes.memory.parts.get("activations", 0) * accumulation,
    )
    times = step_seconds(
        trained,
        [
            # Frozen weights are in the precision of products.
            (branch.flop_per_sample * samples, branch.parameters * (4 if way.precision == "fp32" else 2))
            for branch in facts.branches or ()
        ],
        at_once=layout.strategy == "split",
        gpu=gpu,
        precision=way.precision,
    )
    if layout.world == 1:
        return times
    traffic = traffic_seconds(facts.units, layout, links_of(gpu), accumulation=accumulation)
    fastest, slowest = (seconds + exposed_seconds(traffic, compute=seconds) for seconds in times)
    return fastest, slowest


def _fits(candidate: Candidate) -> bool:
    """True unless a batch set by hand, or by the table, needs more memory than there is."""
    memory = candidate.sizes.memory if candidate.sizes is not None else None
    return memory is None or memory.fits


def _best(possible: Sequence[Candidate]) -> Candidate:
    timed = [each.seconds[0] for each in possible if each.seconds is not None]
    if len(timed) < len(possible):
        return possible[0]
    return next(each for each, seconds in zip(possible, timed, strict=True) if _as_fast(seconds, min(timed)))


def _as_fast(seconds: float, fastest: float) -> bool:
    """True within the accuracy of the estimates, which do not count kernel launches."""
    return seconds <= max(TIE * fastest, SHORT_SECONDS)


def _why(taken: Candidate, candidates: Sequence[Candidate]) -> str:
    before = candidates[: candidates.index(taken)]
    reason = "the simplest that fits" if taken.seconds is None else "the simplest of the fastest, by estimate"
    return "; ".join(
        [reason, *(f"{each.layout.strategy} {_verdict(each, taken, wanted='auto')}" for each in before)]
    )


def _verdict(candidate: Candidate, taken: Candidate, *, wanted: str) -> str:
    if candidate is taken:
        return "taken"
    if candidate.sizes is None:
        would_do = f"; would do with {candidate.nearest}" if candidate.nearest else ""
        return candidate.why_not + would_do
    if not _fits(candidate):
        assert candidate.sizes.memory is not None
        return f"needs {told(candidate.sizes.memory)} at that batch"
    if wanted != "auto":
        return f"not asked for (CONFIG_DIST_STRATEGY_{wanted.upper()}=y)"
    if candidate.seconds is None or taken.seconds is None:
        return "fits, but is less simple"
    if _as_fast(candidate.seconds[0], taken.seconds[0]):
        return "no faster, and less simple"
    return f"estimated to take {candidate.seconds[0] / taken.seconds[0]:.2f} times as long"


def _refusal(
    allowed: Sequence[Candidate], candidates: Sequence[Candidate], *, wanted: str, world: int
) -> PlanError:
    first = allowed[0] if allowed else None
    if first is not None and first.error is not None and not isinstance(first.error, NoRoomError):
        return first.error  # another strategy would fail alike
    if wanted != "auto":
        why_not, nearest = (
            (first.why_not, first.nearest)
            if first is not None
            else (f"not on {world} devices", "another number")
        )
        return PlanError(
            f"CONFIG_DIST_STRATEGY_{wanted.upper()}=y cannot be honoured",
            why=why_not,
            todo=f"it would do with {nearest}; or set CONFIG_DIST_STRATEGY_AUTO=y",
        )
    assert first is not None and first.error is not None
    ways = [f"{each.layout.strategy} with {each.nearest}" for each in candidates if each.nearest]
    todo = f"{first.error.todo}; would do: {', '.join(ways)}"
    return PlanError(first.error.what, why=first.error.why, todo=todo)

"""Stages of a pipeline: the blocks, memory and time of each. Pure.

With m micro-batches and p stages a stage waits for p - 1 of m + p - 1 turns (Huang et al. 2019), and in the
order of 1F1B it holds the activations of at most as many micro-batches as there are stages from it to the
end (Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lib.config import Config
from lib.errors import PlanError
from lib.plan.fitting import divisors
from lib.plan.placement import Placement, grows_with_devices
from lib.plan.roofline import StepWork
from lib.plan.sharding import ELEMENT_BYTES, Exchange, Links
from lib.plan.types import (
    ConfigView,
    Layout,
    ModelFacts,
    StageFacts,
    least_effective_batch,
)

# torch's stage keeps, for each micro-batch of a step, what it receives in forward, the gradient of that,
# and what it receives in backward.
KEPT_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of a stage, elements of its weights and of those that are trained, and its share of the work."""

    blocks: int
    parameters: int
    trained: int
    work: float


def stage_blocks(blocks: int, *, block: int, last: int, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, so that the slowest is as fast as it can be.

    block, last: elements of the weights of a block, and of what comes after the blocks. The work is taken to
    grow with them; embeddings before the blocks are only looked up. Empty with more stages than blocks.
    """
    sizes = [0] * stages
    for _ in range(blocks if stages <= blocks else 0):
        work = [size * block for size in sizes[:-1]] + [sizes[-1] * block + last]
        sizes[work.index(min(work))] += 1
    return tuple(sizes) if any(sizes) else ()


def stages_of(facts: ModelFacts, layout: Layout) -> tuple[Stage, ...]:
    """Return the stages of a model; empty where it cannot have so many."""
    if facts.stages is None or facts.units is None or len(facts.units) < 2:
        return ()
    _, *blocks = facts.units
    block, last = (sum(each.elements for each in weights) for weights in (blocks[0], facts.stages.last))
    sizes, found = stage_blocks(len(blocks), block=block, last=last, stages=layout.shard), list[Stage]()
    for number, size in enumerate(sizes):
        own, blocks = [weight for unit in blocks[:size] for weight in unit], blocks[size:]
        is_last = number == len(sizes) - 1
        own += facts.stages.first * (number == 0) + facts.stages.last * is_last
        trained = sum(weight.elements for weight in own if weight.trainable)
        work = (size * block + last * is_last) / (sum(sizes) * block + last)
        found.append(Stage(size, sum(weight.elements for weight in own), trained, work))
    return tuple(found)


def pipelines(config: ConfigView, facts: ModelFacts, devices: int) -> list[Layout]:
    """Return the pipelines that `devices` can be, the longest first, or those of the requested length.

    The longest alone where the model has too few blocks for each. Raises PlanError where the devices are no
    pipelines of so many stages.
    """
    lengths = [length for length in divisors(devices)[::-1] if length > 1]
    requested = _requested(config)
    if requested and requested not in lengths:
        raise PlanError(
            f"CONFIG_DIST_STAGES={requested} is not possible",
            why=f"{devices} devices are no pipelines of {requested} stages each",
            todo=f"set it to 0 (the plan chooses) or {' or '.join(map(str, lengths))}",
        )
    lengths = [requested] if requested else lengths
    found = [Layout(strategy="pipeline", world=devices, shard=length) for length in lengths]
    return [layout for layout in found if stages_of(facts, layout)] or found[:1]


def fewer_stages(config: ConfigView, placement: Placement, *, blocks: int) -> str:
    """Return the setting for at most `blocks` stages, where no divisor of the devices is as small."""
    if _requested(config):
        return "CONFIG_DIST_STAGES=0"
    one_node = placement.per_node in (0, placement.world.value)
    return f"CONFIG_NUM_DEVICES={blocks}" if one_node else f"CONFIG_DIST_NNODES={blocks}"


def _requested(config: ConfigView) -> int:
    return (isinstance(config, Config) and config.launch.dist_stages) or 0


def most_samples(config: ConfigView, layout: Layout) -> int:
    """Return the samples of a step of the pipeline with most, or more where the batch grows with devices."""
    samples = least_effective_batch(config) or config.target
    return samples if grows_with_devices(config) else -(-samples // layout.replicas)


def stage_shares(facts: ModelFacts, layout: Layout) -> Mapping[str, float]:
    """Return the factor, at most, on each kind of memory of an undivided process, for the fullest stage."""
    assert facts.units is not None
    stages, weights = stages_of(facts, layout), [weight for unit in facts.units for weight in unit]
    parameters = max(stage.parameters for stage in stages) / sum(weight.elements for weight in weights)
    whole = max(1, sum(weight.elements for weight in weights if weight.trainable))
    trained = max(stage.trained for stage in stages) / whole
    # The last stage has one micro-batch at a time, and the only logits.
    blocks = len(facts.units) - 1
    in_flight = max((len(stages) - place) * stage.blocks / blocks for place, stage in enumerate(stages))
    kinds = dict.fromkeys(("averages", "gradients", "optimizer"), trained)
    return {"parameters": parameters, **kinds, "activations": max(1.0, in_flight)}


def buffer_bytes(stages: StageFacts, layout: Layout, *, samples: int, micro_batch: int) -> int:
    """Return the bytes that a stage keeps for its exchanges with others, in training and evaluation.

    samples: of a pipeline in an optimizer step. Evaluation goes forward with twice as many micro-batches as
    stages, and keeps what it receives and what it sends.
    """
    return stages.bytes_per_sample * (KEPT_BUFFERS * samples + 2 * 2 * layout.shard * micro_batch)


def slowest_stage(work: StepWork, facts: ModelFacts, layout: Layout) -> StepWork:
    """Return the work of the slowest stage of a model with `work`, without a change of optimizer_bytes."""
    share = max(stage.work for stage in stages_of(facts, layout))
    scaled = ("weight_bytes", "gradient_bytes", "activation_bytes", "launches")
    counts = {name: round(getattr(work, name) * share) for name in scaled}
    return replace(work, flop=work.flop * share, **counts)


def idle_share(layout: Layout, *, accumulation: int) -> float:
    """Return the share of a step in which a stage waits for the others to fill and empty the pipeline."""
    return (layout.shard - 1) / (accumulation + layout.shard - 1)


def pipeline_seconds(
    compute: float,
    facts: ModelFacts,
    layout: Layout,
    links: Links,
    *,
    samples: int,
    accumulation: int,
) -> float:
    """Return the seconds of a step in which the slowest stage computes for `compute` seconds.

    A stage waits for its exchanges with its neighbours, which go in both directions at once. Equal stages of
    pipelines sum their gradients afterwards. samples: of each pipeline.
    """
    stages = facts.stages
    assert stages is not None, "it can be a pipeline"
    within = layout.shard if links.per_node % layout.shard == 0 else layout.world
    pair = {"processes": 2, "among": within}
    # Activations in forward, and their gradients.
    sent = Exchange(kind="send", tensor_bytes=2 * samples * stages.bytes_per_sample, **pair)
    tied = Exchange(kind="all_reduce", tensor_bytes=ELEMENT_BYTES * stages.tied, **pair)
    most = ELEMENT_BYTES * max(stage.trained for stage in stages_of(facts, layout))
    summed = Exchange(kind="all_reduce", processes=layout.replicas, among=layout.world, tensor_bytes=most)
    seconds = compute + sent.seconds(links)
    busy = 1 - idle_share(layout, accumulation=accumulation)
    return seconds / busy + sum(each.seconds(links) for each in (tied, summed))

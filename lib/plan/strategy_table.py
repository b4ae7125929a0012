"""Table of the parallelism strategies, one line for all that are impossible for the same reason."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from lib.plan.gpus import find_gpu
from lib.plan.sharding import Links
from lib.plan.show import hanging
from lib.plan.sizing import Candidate, SizingContext
from lib.units import bytes_text, counted, seconds_text


def format_strategies(strategies: Sequence[Candidate], *, columns: int) -> Iterator[str]:
    """Format a line per strategy: batch, memory of the fullest device, seconds of a step, verdict."""
    yield "Parallelism strategies: samples at a time x micro-batches, memory of the fullest device, estimated"
    yield f"time of an optimizer step{_assumed_rates(strategies[0].context)}"
    widest = max(7, *(len(strategy_name(row)) for row in strategies))
    for _, alike in groupby(strategies, key=lambda row: (row.split and id(row), row.verdict)):
        row, *others = alike
        names = ", ".join(map(strategy_name, (row, *others)))
        sizes = "" if row.split is None else f"{row.split.micro_batch} x {row.split.accumulation}"
        need = "" if row.memory is None else bytes_text(row.memory.need_bytes)
        figures = f"{sizes:>10} {need:>10}  {'' if row.seconds is None else seconds_text(*row.seconds):<20} "
        head = f"  {names:<{widest}} {figures[max(0, len(names) - widest) :]}"
        yield from hanging(head, row.verdict, columns=columns, indent="    ")
    if re.search(r"[/(]", " ".join(map(strategy_name, strategies))):
        yield "(NAME/N: N devices hold one copy together; split(A,B): devices of each frozen model)"


def _assumed_rates(context: SizingContext) -> str:
    gpu, placement = find_gpu(context.placement.name), context.placement
    if gpu is None:
        return ""
    links = Links.of(gpu, context.config, per_node=placement.per_node)
    within = f", assuming {links.node_bytes_per_second / 1e9:g} GB/s each way of a link"
    if placement.world.value <= links.per_node:
        return within
    gbit = f"{8 * links.network_bytes_per_second / 1e9:g}"
    between = f"{gbit} Gbit/s of network for each device, {counted(links.per_node, 'device')} on a node"
    return f"{within} and {between} (CONFIG_DIST_NETWORK_GBIT)"


def strategy_name(row: Candidate) -> str:
    """Return the name of a strategy with the size of its groups."""
    layout = row.layout
    if layout.replica.strategy != "single":
        pair = ",".join(map(str, layout.branch_devices)) if layout.devices_per_process > 2 else ""
        return layout.strategy + (f"({pair})" if pair else "") + "+ddp" * (layout.world > 1)
    return layout.strategy + (f"/{layout.shard}" if 1 < layout.shard < layout.world else "")

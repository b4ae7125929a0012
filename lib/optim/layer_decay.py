"""Layer-wise learning-rate decay: the deeper a layer is below the head, the lower its learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lib.distributed.fsdp import blocks_of


def depths(model: nn.Module) -> dict[int, int]:
    """Return the depth of each weight by its id: 0 before the first block, the largest for the head.

    Blocks are the composed members of lists (`blocks_of`); without any, modules with weights of their own.
    Their order is that of registration, as is what is before the first and after the last one.
    """
    blocks = [list(block.parameters()) for block in blocks_of(model)]
    if not blocks:
        own = [list(module.parameters(recurse=False)) for module in model.modules()]
        _, *blocks = [weights for weights in own if weights] or [[]]
    of_block = {id(weight): number for number, weights in enumerate(blocks, start=1) for weight in weights}
    found: dict[int, int] = {}
    depth = 0
    for weight in model.parameters():
        if id(weight) in of_block:
            depth = of_block[id(weight)]
        elif depth == len(blocks):
            depth += 1
        found[id(weight)] = depth
    return found


def split_by_depth(
    groups: Iterable[dict[str, Any]], model: nn.Module, learning_rate: float, decay: float
) -> list[dict[str, Any]]:
    """Split optimizer groups by the depth of their weights, the largest depth first.

    The rate of a group ("lr", or `learning_rate`) is that of the largest depth; each depth below has `decay`
    times the rate of the one above.
    """
    depth_of = depths(model)
    last = max(depth_of.values())
    found = []
    for group in groups:
        for depth in range(last, -1, -1):
            weights = [weight for weight in group["params"] if depth_of[id(weight)] == depth]
            if weights or depth == last:  # the first group tells the rate of the model
                rate = group.get("lr", learning_rate) * decay ** (last - depth)
                found.append({**group, "params": weights, "lr": rate})
    return found

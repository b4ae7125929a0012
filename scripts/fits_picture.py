"""The picture of `make fits OUT=`: the memory of one step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from lib.memory.any_module import Report

PHASES = ("forward pass", "backward pass", "optimizer step")  # of Report.phases


def drawn(report: Report, title: str) -> bytes:
    """Draw the memory of each category over the events of the last step, as PNG."""
    from lib.scaling.pictures import draw_page  # slow

    of = [report.trace.categories.get(number, "temporaries") for number, _ in report.trace.events]
    names, first = sorted(set(of)), report.marks[0]
    changed = np.zeros((len(names), len(of)))
    changed[[names.index(name) for name in of], range(len(of))] = [size for _, size in report.trace.events]
    sizes = changed.cumsum(axis=1)[:, first:] / 1e9

    def draw(axes: Any) -> None:
        axes.stackplot(range(sizes.shape[1]), sizes, labels=names)
        edges = [mark - first for mark in report.marks]
        for edge in edges[1:-1]:
            axes.axvline(edge, color="black", linewidth=0.8)
        axes.set_xticks([sum(ends) / 2 for ends in pairwise(edges)], PHASES)
        axes.set(xlabel="phase of a step, as wide as it has allocations and releases", ylabel="GB of tensors")

    return draw_page([draw], rows=1, inches=(9, 5), fontsize=9, title=f"{title}, batch {report.batch}")

"""What a sweep cannot show whatever its losses will be: told of its plan, before anything is trained.

The rules are those of lib.scaling.judge and lib.scaling.isoflop, asked of models that have no loss yet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from lib.scaling.isoflop import NO_SEEDS, uncovered
from lib.scaling.judge import LAWS, lacks, points_for
from lib.scaling.laws import Point
from lib.scaling.noise import seed_noise
from lib.scaling.planning import Planned, budget_of, reductions, wall_seconds
from lib.scaling.report import TITLES


def outlook(
    plan: Sequence[Planned], whole: Sequence[Planned], *, workers: int, given: Sequence[str]
) -> Iterator[str]:
    """A line for each law that the plan is insufficient for, with the reason and what would help.

    whole: the grid that `plan` was cut out of. given: the variables that made it smaller than all there is.
    """
    for arch, missing in insufficient(plan).items():
        for title, reasons in missing.items():
            todo = _remedy(arch, title, whole, workers=workers)
            todo = todo or f"the whole grid has what it needs: leave out {' and '.join(given)}"
            yield f"{arch}: the plan is insufficient for {title}: {'; '.join(reasons)}; {todo}"


def insufficient(plan: Sequence[Planned]) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """By architecture and title of a law, what it needs and the plan does not have."""
    points: dict[str, list[Point]] = defaultdict(list)
    for each in plan:
        points[each.config.arch].append(
            Point(parameters=each.counts.nonembedding, tokens=each.tokens, loss=math.nan)
        )
    return {arch: _missing(own) for arch, own in points.items()}


def _missing(points: Sequence[Point]) -> dict[str, list[str]]:
    missing = {TITLES[name]: lacks(points_for(name, points), name) for name in LAWS}
    seeds = [NO_SEEDS] if seed_noise(points) is None else []
    missing["isoFLOP"] = [*([reason] if (reason := uncovered(points)) else []), *seeds]
    missing["telling whether the loss falls with size"] = seeds
    return {title: reasons for title, reasons in missing.items() if reasons}


def _remedy(arch: str, title: str, whole: Sequence[Planned], *, workers: int) -> str:
    """The time from which on every budget is enough; empty where the whole grid is not."""
    enough: Sequence[Planned] = ()
    for kept in reductions(whole):
        if title in insufficient(kept).get(arch, {}):
            break
        enough = kept
    return f"about {budget_of(wall_seconds(enough, workers=workers))} is enough" if enough else ""

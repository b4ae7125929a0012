"""Error rates of the judge of `make scaling`, measured on simulated sweeps with known laws and noise.

The grid and corpus are the defaults. Losses are E + A N^-0.34, for the data law plus B D^-0.28, with E and B
of Hoffmann et al. (2022) and normal noise. A sweep whose loss is constant in size, rises, or saturates at
some size must be refused; any other must be accepted.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, TypeAlias, get_args

import numpy as np

from lib.data.types import TextSpec
from lib.errors import ToolkitError, run_main
from lib.nn.model_code import build_model
from lib.scaling.costs import count
from lib.scaling.judge import fit_law, points_for, shortfalls
from lib.scaling.laws import LawName, Point
from lib.scaling.noise import seed_noise
from lib.scaling.planning import FULL, configs_of
from lib.scaling.results import ARCHITECTURES, BLOCK, ScalingConfig

Kind: TypeAlias = Literal["true", "flat", "rising", "saturating"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LAWS: tuple[LawName, ...] = ("floor", "chinchilla")
FACTORS, NOISES = (400.0, 100.0), (0.005, 0.01)
FLOOR, DATA_FACTOR, SIZE_POWER, DATA_POWER = 1.69, 410.7, 0.34, 0.28
KNEE = 8e5  # parameters at which a saturating loss stops falling
ONE_PASS = 3_999_872  # tokens of the synthetic corpus
MAX_TRUE, MIN_FALSE = 0.05, 0.95  # bounds of the share of refused sweeps
SWEEPS, STARTS, SAMPLES = 400, 8, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of sweep. factor: A. noise: standard deviation of the loss. knee: size at saturation."""

    law: LawName
    kind: Kind
    factor: float
    noise: float
    knee: float = KNEE

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss without noise."""
        size = min(parameters, self.knee) if self.kind == "saturating" else parameters
        size_term = 0.0 if self.kind == "flat" else self.factor * size**-SIZE_POWER
        if self.kind == "rising":  # offset, because E - A N^-0.34 alone is negative at the smallest size
            size_term = self.factor * min(cells())[0] ** -SIZE_POWER - size_term
        return FLOOR + size_term + (DATA_FACTOR * tokens**-DATA_POWER if self.law == "chinchilla" else 0.0)

    def refused(self, seed: int) -> bool:
        """Return whether a sweep with the noise of that seed is refused."""
        own = KINDS.index(self.kind), LAWS.index(self.law), int(self.factor), round(1e4 * self.noise)
        noise = self.noise * np.random.default_rng((seed, *own)).standard_normal(len(cells()))
        points = [
            Point(parameters=size, tokens=tokens, loss=self.loss(size, tokens) + float(by), seed=number)
            for (size, tokens, number), by in zip(cells(), noise, strict=True)
        ]
        # The cheap checks first: fits take most of the time.
        before = shortfalls(points_for(self.law, points), self.law, seed_noise(points))
        return bool(before) or bool(fit_law(points, self.law, starts=STARTS, samples=SAMPLES).reasons)

    def share_refused(self, sweeps: int) -> float:
        """Return the share of refused sweeps."""
        return sum(self.refused(seed) for seed in range(sweeps)) / sweeps

    def holds(self, share: float) -> bool:
        """Return whether that share of refusals is within the bounds."""
        return share <= MAX_TRUE if self.kind == "true" else share >= MIN_FALSE


@cache
def cells() -> Sequence[tuple[int, int, int]]:
    """Return (parameters without embeddings, tokens, seed) of every run of the default sweep."""
    spec = TextSpec(name="x", vocab_size=32, block_size=BLOCK, unit="char")
    base = ScalingConfig(*FULL.shapes[0], batch_size=FULL.batch_size)
    cells = []
    sizes: dict[tuple[int, int], int] = {}
    for config in configs_of(FULL.fitted(ONE_PASS), architectures=ARCHITECTURES[:1], base=base):
        shape = config.d_model, config.n_layers
        if shape not in sizes:
            sizes[shape] = count(partial(build_model, *config.model(), spec, seed=1)).nonembedding
        cells.append((sizes[shape], config.trained_tokens, config.seed))
    return tuple(cells)


def cases() -> list[Case]:
    """Return all cases with a bound. A flat loss has no A."""
    return [
        Case(law=law, kind=kind, factor=factor, noise=noise)
        for law, kind, factor, noise in itertools.product(LAWS, KINDS, FACTORS, NOISES)
        if kind != "flat" or factor == FACTORS[0]
    ]


def main() -> int:
    """Print how often the verdicts hold on sweeps with known laws."""
    parser = argparse.ArgumentParser(prog="scaling_power", description=__doc__)
    parser.add_argument("--sweeps", type=int, default=SWEEPS, help="of each kind")
    parser.add_argument("--knee", type=float, nargs="*", default=[], help="other sizes at which to saturate")
    options = parser.parse_args()
    if options.sweeps < 1 or min(options.knee, default=1.0) <= 0:
        parser.error("sweeps and sizes are above 0")
    others = [
        Case(law=law, kind="saturating", factor=factor, noise=noise, knee=knee)
        for knee, law, factor, noise in itertools.product(options.knee, LAWS, FACTORS, NOISES)
    ]
    failed = []
    print(f"{'law':10} {'kind':10} {'A':>4} {'noise':>6} {'knee':>8}  refused of {options.sweeps}")
    for case in cases() + others:
        started = time.process_time()
        share = case.share_refused(options.sweeps)
        row = f"{case.law:10} {case.kind:10} {case.factor:>4.0f} {case.noise:>6} "
        row += f"{case.knee if case.kind == 'saturating' else 0:>8.2g}"
        print(f"{row}  {share:>6.1%}  {time.process_time() - started:.0f} s", flush=True)
        if case not in others and not case.holds(share):
            failed.append(row)
    if failed:
        raise ToolkitError(f"{len(failed)} kinds of sweeps are judged wrongly too often", why=failed[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))

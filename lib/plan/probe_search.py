"""Search for the micro-batch with the best throughput by probe runs of a few sizes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEAR_BEST = 0.03  # throughput that a smaller micro-batch may cost, as a share
MAX_MEASURED = 4  # sizes whose throughput is compared
MAX_FAILED = 4  # sizes that may turn out not to fit
AFTER_FAILURE = 0.9  # the next size is at most this share of one that did not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Result of a probe run on the fullest and the slowest of its devices."""

    micro_batch: int
    need_bytes: int  # at most, of what was free before the model was created
    samples_per_second: float  # summed over all devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A size that did not fit into memory."""

    micro_batch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Results of the probe runs, in the order in which they ran."""

    measurements: tuple[Measurement, ...]
    failures: tuple[Failure, ...]

    @property
    def chosen(self) -> Measurement:
        """The smallest micro-batch within NEAR_BEST of the best throughput. Needs a measurement."""
        rates = {found.micro_batch: found.samples_per_second for found in self.measurements}
        size = smallest_near_best(rates)
        return next(found for found in self.measurements if found.micro_batch == size)

    @property
    def why(self) -> str:
        """Explain the choice."""
        rates = ", ".join(
            f"{found.samples_per_second:.4g} at {found.micro_batch}" for found in self.measurements
        )
        return f"measured: samples/s {rates}; the smallest within {NEAR_BEST:.0%} of the best"

    def to_json(self) -> dict[str, Any]:
        """Return the results as a dict that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Probed:
        """Make the results from `to_json` data. Raises KeyError or TypeError for anything else."""
        return cls(
            measurements=tuple(Measurement(**found) for found in data["measurements"]),
            failures=tuple(Failure(**failed) for failed in data["failures"]),
        )


def search(
    start: int,
    sizes: Sequence[int],
    probe: Callable[[int], Measurement | Failure],
    *,
    may_fit: Callable[[int, Measurement], bool],
) -> Probed:
    """Probe `start`, then a half, a quarter and an eighth of it while they are about as fast.

    Where a half is clearly slower, twice the size is probed instead, if it may fit. A size that does not fit
    is followed by the next one that is at least a tenth smaller. There is no measurement where none fits.

    sizes: valid micro-batches in ascending order, with `start`.
    may_fit: predicate, true if a larger size may fit given a measured one.
    """
    measurements, failures = list[Measurement](), list[Failure]()

    def results() -> Probed:
        return Probed(measurements=tuple(measurements), failures=tuple(failures))

    def is_best(size: int) -> bool:
        """Probe `size`; true if it is the one to choose by now."""
        outcome = probe(size)
        if isinstance(outcome, Failure):
            failures.append(outcome)
            return False
        measurements.append(outcome)
        return results().chosen == outcome

    def largest(limit: int) -> int:
        return max((size for size in sizes if size <= limit), default=0)

    while not is_best(start):  # the first that fits is the best
        start = largest(int(AFTER_FAILURE * start))
        if not start or len(failures) == MAX_FAILED:
            return results()
    for part in (2, 4, 8):
        size = largest(start // part)
        if not size or len(measurements) == MAX_MEASURED:
            break
        known = any(measured.micro_batch == size for measured in measurements)
        if not known and not is_best(size):
            break  # smaller sizes are expected to be slower still
    best = results().chosen
    while best.micro_batch >= start and len(measurements) < MAX_MEASURED and not failures:
        size = next((size for size in sizes if size >= 2 * best.micro_batch), 0)
        if not size or not may_fit(size, best) or not is_best(size):
            break
        best = results().chosen
    return results()


def smallest_near_best(rates: Mapping[int, float], *, share: float = NEAR_BEST) -> int:
    """Return the smallest micro-batch whose rate (samples per second) is within `share` of the best."""
    enough = (1 - share) * max(rates.values())
    return min(size for size, rate in rates.items() if rate >= enough)

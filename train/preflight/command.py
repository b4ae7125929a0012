"""`make preflight`: a minute of checks before days of training.

Twelve checks of the configured model, data and machine, each on a few samples. Arithmetic is checked in
double precision on the CPU, device behaviour on the device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from lib import kconf
from lib.config import config_from_values
from lib.devices.probe import probe
from lib.errors import DataError, ToolkitError
from lib.nn.model_code import place_in_code
from lib.plan.placement import refuse_static_shapes
from lib.tiers import with_tier
from train.build import check_run
from train.planning.run_plan import predicted_plan, refuse
from train.preflight import checks as checks
from train.preflight.checks import Candidate
from train.preflight.ranks import OF_RANKS, two_ranks
from train.record import log
from train.training_data import open_to_train

Outcome: TypeAlias = tuple[bool, str]  # passed, and the finding


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool
    finding: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold."""
        return {"name": self.name, "passed": self.passed, "told": self.finding, "seconds": self.seconds}


def preflight(requested: kconf.Resolved, *, root: Path, runs: Path, as_json: bool) -> int:
    """Run all checks and print a table, or JSON; return 1 if one has failed."""
    report = (lambda _: None) if as_json else log
    resolved = with_tier(requested, root=root, log=report)
    found = []
    for check in _checks(resolved, root=root, runs=runs, log=log):
        found.append(check)
        if not as_json:
            passed = "ok" if check.passed else "FAILED"
            log(f"{passed:<7}{check.name:<22}{check.seconds:5.1f} s  {check.finding}")
    if as_json:
        print(json.dumps([check.to_json() for check in found], indent=2))
    return int(not all(check.passed for check in found))


def _checks(resolved: kconf.Resolved, **options: Any) -> Iterator[Check]:
    """Run all checks, or only report the model that cannot even be measured."""
    started = time.perf_counter()
    try:
        candidate = candidate_of(resolved, **options)
    except Exception as error:
        if reason := _fault_of_model(error, root=options["root"]):
            yield Check("model", False, reason, time.perf_counter() - started)
            return
        raise
    yield from run_checks(candidate, resolved)


def _fault_of_model(error: Exception, *, root: Path) -> str:
    """Return `failure` of what a model's code raised, also as an error of the toolkit's; "" for others."""
    cause = error.__cause__ if isinstance(error, ToolkitError) else error
    is_own = cause is error or (isinstance(cause, Exception) and place_in_code(cause, root=root))
    return failure(error, root=root) if is_own and not isinstance(error, DataError) else ""


def candidate_of(
    resolved: kconf.Resolved, *, root: Path, runs: Path, log: Callable[[str], None]
) -> Candidate:
    """Return the configuration with its data and a plan. Raises ToolkitError if there is no plan."""
    config = config_from_values(resolved.values)
    hardware = probe(config.device)
    refuse_static_shapes(hardware.kind, what="make preflight")
    data = open_to_train(config, root=root, log=log, refuse=refuse)
    plan, _ = predicted_plan(config, data, hardware)
    check_run(config, plan, data)
    return Candidate(config=config, data=data, hardware=hardware, plan=plan, root=root, runs=runs)


def run_checks(candidate: Candidate, resolved: kconf.Resolved) -> Iterator[Check]:
    """Run all checks in order; a check that raises an error counts as failed."""
    alone: dict[str, Callable[[Candidate], Outcome]] = {
        "first loss": checks.first_loss,
        "loss falls": checks.loss_falls,
        "shards": checks.shards,
        "evaluation": checks.evaluation,
        "accumulation": checks.accumulation,
        "checkpoint": checks.round_trip,
        "static graph": checks.static_graph,
        "learning rate": checks.learning_rates,
        "storage": lambda of: checks.storage(of.runs, of.config),
        "memory": lambda of: checks.memory(of.plan),
    }
    for name, check in alone.items():
        yield from timed((name,), partial(_named, name, check, candidate), root=candidate.root)
    yield from timed(OF_RANKS, lambda: two_ranks(candidate, resolved), root=candidate.root)


def _named(name: str, check: Callable[[Candidate], Outcome], candidate: Candidate) -> dict[str, Outcome]:
    return {name: check(candidate)}


def timed(names: Sequence[str], check: Callable[[], Mapping[str, Outcome]], *, root: Path) -> Iterator[Check]:
    """Run the checks `names`, which are made together. Errors of the toolkit itself are raised."""
    started = time.perf_counter()
    found = _outcomes(names, check, root=root)
    seconds = (time.perf_counter() - started) / len(names)
    yield from (Check(name, *found[name], seconds) for name in names)


def _outcomes(
    names: Sequence[str], check: Callable[[], Mapping[str, Outcome]], *, root: Path
) -> Mapping[str, Outcome]:
    try:
        return check()
    except Exception as error:
        if reason := failure(error, root=root):
            return dict.fromkeys(names, (False, reason))
        raise


def failure(error: Exception, *, root: Path) -> str:
    """Format why a check could not be made; "" for an error of the toolkit itself.

    What is raised in a plug-in is its error, and so is what torch cannot do with a model's output.
    """
    if isinstance(error, ToolkitError):
        return str(error)
    place = place_in_code(error, root=root)
    if not place and not isinstance(error, RuntimeError | MemoryError):
        return ""
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
    return f"{place}: {reason}" if place else reason

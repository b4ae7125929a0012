"""`make preflight`: a minute of checks before days of training.

Eleven checks of the configured model, data and machine, each on a few samples. Arithmetic is checked in
double precision on the CPU, device behaviour on the device.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from lib import kconf
from lib.config import config_from_values
from lib.devices.probe import probe
from lib.errors import ToolkitError
from lib.hyperparams import apply_hyperparams
from lib.nn.model_code import place_in_models
from lib.plan.placement import refuse_on_xla
from lib.tiers import with_tier
from train.planning.memory_estimate import Footprints
from train.planning.run_plan import check_run
from train.preflight import checks as checks
from train.preflight.candidate import Candidate
from train.preflight.ranks import OF_RANKS, two_ranks
from train.stored_run import say
from train.training_data import open_to_train

Outcome: TypeAlias = tuple[bool, str]  # passed, and the finding


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool
    told: str
    seconds: float


def preflight(asked: kconf.Resolved, *, root: Path, runs: Path, as_json: bool) -> int:
    """Run all checks and print a table, or JSON; return 1 if one has failed."""
    tell = _say_nothing if as_json else say
    resolved = with_tier(asked, root=root, say=tell)
    found = []
    for check in _checks(resolved, root=root, runs=runs, tell=tell):
        found.append(check)
        if not as_json:
            say(
                f"{'ok' if check.passed else 'FAILED':<7}{check.name:<22}{check.seconds:5.1f} s  {check.told}"
            )
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    return int(not all(check.passed for check in found))


def _checks(
    resolved: kconf.Resolved, *, root: Path, runs: Path, tell: Callable[[str], None]
) -> Iterator[Check]:
    """Run all checks, or only report the model that cannot even be measured."""
    started = time.perf_counter()
    try:
        candidate = candidate_of(resolved, root=root, runs=runs, tell=tell)
    except Exception as error:
        if not isinstance(error, ToolkitError) and (told := failure(error, root=root)):
            yield Check("model", False, told, time.perf_counter() - started)
            return
        raise
    yield from run_checks(candidate, resolved)


def candidate_of(
    resolved: kconf.Resolved, *, root: Path, runs: Path, tell: Callable[[str], None]
) -> Candidate:
    """Return the configuration with its data and a plan. Raises ToolkitError if there is no plan."""
    config = config_from_values(resolved.values)
    subject = open_to_train(config, root=root, say=tell)
    hardware = probe(config.device)
    refuse_on_xla(hardware.kind, what="make preflight")
    plan = apply_hyperparams(
        # Predicted, because probing would take longer than all checks.
        dataclasses.replace(config, auto_method="predict") if config.auto_method == "probe" else config,
        False,
        hardware=hardware,
        facts=subject.facts,
        predict=Footprints(config, subject).predictor(hardware),
    )
    check_run(config, plan, subject)
    return Candidate(config=config, subject=subject, hardware=hardware, plan=plan, root=root, runs=runs)


def run_checks(candidate: Candidate, resolved: kconf.Resolved) -> Iterator[Check]:
    """Run all checks in order; a check that raises an error counts as failed."""
    named: list[tuple[str, Callable[[], Outcome]]] = [
        ("first loss", lambda: checks.first_loss(candidate)),
        ("loss falls", lambda: checks.loss_falls(candidate)),
        ("shards", lambda: checks.shards(candidate)),
        ("accumulation", lambda: checks.accumulation(candidate)),
        ("checkpoint", lambda: checks.round_trip(candidate)),
        ("static graph", lambda: checks.static_graph(candidate)),
        ("learning rate", lambda: checks.learning_rates(candidate)),
        ("storage", lambda: checks.storage(candidate.runs, candidate.config)),
        ("memory", lambda: checks.memory(candidate.plan)),
    ]
    for name, check in named:
        yield from timed((name,), partial(_alone, name, check), root=candidate.root)
    yield from timed(OF_RANKS, lambda: two_ranks(candidate, resolved), root=candidate.root)


def _alone(name: str, check: Callable[[], Outcome]) -> dict[str, Outcome]:
    return {name: check()}


def timed(names: Sequence[str], check: Callable[[], Mapping[str, Outcome]], *, root: Path) -> Iterator[Check]:
    """Run the checks `names`, which are made together."""
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
        if told := failure(error, root=root):
            return dict.fromkeys(names, (False, told))
        raise


def failure(error: Exception, *, root: Path) -> str:
    """Format why a check could not be made; "" for an error of the toolkit itself.

    What is raised below models/ is the model's error, and so is what torch cannot do with its output.
    """
    if isinstance(error, ToolkitError):
        return str(error)
    place = place_in_models(error, root=root)
    if not place and not isinstance(error, RuntimeError | MemoryError):
        return ""
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
    return f"{place}: {reason}" if place else reason


def _say_nothing(_: str) -> None:
    pass

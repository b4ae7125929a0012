"""`make preflight`: whether a run would do what it says, found out in a minute before days are spent on it.

Eleven checks of the configured model, data and machine, each on a few samples. What concerns the arithmetic
is checked in double precision on the CPU, what concerns the device on the device.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lib import kconf
from lib.config import config_from_values
from lib.errors import ToolkitError
from lib.hardware import probe
from lib.hyperparams import apply_hyperparams
from lib.plan.placement import refuse_on_xla
from lib.tiers import with_tier
from train import preflight_checks as checks
from train.candidate import Candidate
from train.forecast import Footprints
from train.preflight_ranks import two_ranks
from train.stored import say
from train.subject import open_subject


@dataclass(frozen=True, slots=True)
class Check:
    """What one check has found."""

    name: str
    passed: bool
    told: str
    seconds: float


def preflight(*, root: Path, runs: Path, as_json: bool) -> int:
    """Print a table of all checks, or JSON; 1 where one has failed."""
    tell = _say_nothing if as_json else say
    resolved = with_tier(kconf.from_environment(root), root=root, say=tell)
    config = config_from_values(resolved.values)
    subject = open_subject(config, root=root, say=tell)
    hardware = probe(config.device)
    refuse_on_xla(hardware.kind, what="make preflight")
    plan = apply_hyperparams(
        # What is measured would be measured first, which takes longer than all checks.
        dataclasses.replace(config, auto_method="predict") if config.auto_method == "probe" else config,
        False,
        hardware=hardware,
        facts=subject.facts,
        predict=Footprints(config, subject).predictor(hardware),
    )
    candidate = Candidate(config=config, subject=subject, hardware=hardware, plan=plan, root=root, runs=runs)
    found = []
    for check in run_checks(candidate, resolved):
        found.append(check)
        if not as_json:
            say(
                f"{'ok' if check.passed else 'FAILED':<7}{check.name:<22}{check.seconds:5.1f} s  {check.told}"
            )
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in found], indent=2))
    return int(not all(check.passed for check in found))


def run_checks(candidate: Candidate, resolved: kconf.Resolved) -> Iterator[Check]:
    """All of them, one after the other; what a check cannot do for an error counts as failed."""
    named: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
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
        yield _timed(name, check)
    started = time.perf_counter()
    try:
        ranks = two_ranks(candidate, resolved)
    except ToolkitError as error:
        ranks = {"gradients of 2 ranks": (False, str(error)), "averages of 2 ranks": (False, str(error))}
    seconds = (time.perf_counter() - started) / len(ranks)
    yield from (Check(name, passed, told, seconds) for name, (passed, told) in ranks.items())


def _timed(name: str, check: Callable[[], tuple[bool, str]]) -> Check:
    started = time.perf_counter()
    try:
        passed, told = check()
    except ToolkitError as error:
        passed, told = False, str(error)
    return Check(name, passed, told, time.perf_counter() - started)


def _say_nothing(_: str) -> None:
    pass

"""Several machines that train one model: how many, where they meet, and how torchrun is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lib.errors import ConfigError, PlanError

_NODES = re.compile(r"(?P<least>[1-9][0-9]{0,3})(?::(?P<most>[1-9][0-9]{0,3}))?")
_ENDPOINT = re.compile(r"[\w.-]+:[1-9][0-9]{0,4}")
# Seconds: how long those that are enough wait for more; how often a machine says that it is there.
LAST_CALL, KEEP_ALIVE, ATTEMPTS = 5, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """From `least` to `most` machines that meet at `endpoint`, which is one of them."""

    least: int
    most: int
    endpoint: str

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most


def gathering_of(*, nodes: str, endpoint: str | None) -> Gathering | None:
    """What CONFIG_DIST_NNODES and CONFIG_DIST_ENDPOINT ask for; None for one machine.

    Raises ConfigError where they make no sense.
    """
    found = _NODES.fullmatch(nodes)
    least = int(found["least"]) if found else 0
    most = int(found["most"] or least) if found else 0
    if not found or most < least:
        raise ConfigError(
            f"CONFIG_DIST_NNODES={nodes} is no number of machines",
            todo="write it as 4, or as 2:4 for two to four",
        )
    if most == 1:
        return None
    if endpoint is None or not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(
            f"CONFIG_DIST_ENDPOINT={endpoint or ''} is no place to meet",
            why=f"{nodes} machines are to train together",
            todo="write it as HOST:PORT, the host being one of them",
        )
    return Gathering(least=least, most=most, endpoint=endpoint)


def check_shares(gathering: Gathering, *, processes: int, target: int) -> None:
    """Raises PlanError where not every number of machines can share the effective batch evenly."""
    for nodes in range(gathering.least, gathering.most + 1):
        if target % (nodes * processes):
            raise PlanError(
                f"an effective batch of {target} cannot be shared by {nodes} x {processes} process(es)",
                why=f"CONFIG_DIST_NNODES allows {gathering.least} to {gathering.most}",
                todo="set CONFIG_TARGET_EFFECTIVE_BATCH to a multiple of each number of processes",
            )


def torchrun_options(
    gathering: Gathering | None, *, processes: int, restarts: int, name: str
) -> Sequence[str]:
    """Options of torchrun on each machine. name: what the machines of one job have in common."""
    each = f"--nproc-per-node={processes}"
    if gathering is None:
        return ("--standalone", each)
    nodes = f"{gathering.least}:{gathering.most}" if gathering.is_elastic else str(gathering.least)
    timing = (
        f"last_call_timeout={LAST_CALL},keep_alive_interval={KEEP_ALIVE},keep_alive_max_attempt={ATTEMPTS}"
    )
    return (
        f"--nnodes={nodes}",
        each,
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={gathering.endpoint}",
        f"--rdzv-id={name}",
        f"--rdzv-conf={timing}",
    )

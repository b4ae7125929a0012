"""Multi-node training: each node starts its processes; the plan is made after the rendezvous."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from lib import kconf
from lib.config import Config
from lib.devices.backend import open_backend
from lib.devices.base import Backend
from lib.devices.probe import probe
from lib.distributed.launcher import launch
from lib.distributed.rendezvous import Gathering, check_shares, environment_of, route_to, torchrun_options
from lib.errors import ConfigError, PlanError, ToolkitError, os_error
from lib.plan.asked import grows_with_devices
from lib.plan.placement import check_machines, place
from lib.plan.types import Hardware
from lib.runs.identity import identity


def launch_on_many(config: Config, resolved: kconf.Resolved, gathering: Gathering) -> NoReturn:
    """Become this node's launcher. Raises ConfigError or PlanError for what could not train."""
    if config.resume == "never":
        raise ConfigError(
            "CONFIG_RESUME_NEVER=y is not for several machines",
            why="they go on from a checkpoint whenever one comes or goes",
            todo="set CONFIG_RESUME_AUTO=y",
        )
    check_machines(config.device)
    hardware = probe(config.device)
    if hardware.kind == "xla" and gathering.is_elastic:
        raise ConfigError(
            f"CONFIG_DIST_NNODES={config.dist_nnodes} is not for XLA devices",
            why="a slice of TPUs has as many machines as it has",
            todo=f"set CONFIG_DIST_NNODES={gathering.most}",
        )
    if gathering.is_elastic and (option := grows_with_devices(config)):
        raise ConfigError(
            f"{option} is not for CONFIG_DIST_NNODES={config.dist_nnodes}",
            why="the effective batch would change whenever a machine comes or goes",
            todo="set CONFIG_TARGET_EFFECTIVE_BATCH instead, or a fixed number of machines",
        )
    processes = place(config, hardware).world.value
    check_shares(gathering, processes=processes, target=config.target)
    route = route_to(gathering.endpoint)
    port = gathering.endpoint.rpartition(":")[2]
    name = f"{config.model}-{identity(resolved.in_effect)}"
    options = torchrun_options(
        gathering,
        processes=processes,
        restarts=config.dist_max_restarts,
        name=name,
        route=route,
    )
    # Printed so that a node waiting in vain can be compared with what the others wait for.
    print(f"Meeting at {gathering.endpoint}: {config.dist_nnodes} machines that train {name}")
    # Each process probes its hardware again, except XLA devices, which are probed only here.
    told = hardware.to_json() if hardware.kind == "xla" else None
    payload = {"configuration": resolved.to_json(), "plan": None, "hardware": told, "run": None}
    launch(
        payload,
        world=processes,
        restarts=0,  # torchrun restarts them, as it knows the other nodes
        cpu_count=hardware.cpu_count,
        arguments=sys.argv[1:],
        torchrun=options,
        serve=f"{route.serves}:{port}" if route is not None and route.serves else None,
        variables=environment_of(route),
    )


def meet(config: Config, *, known: Mapping[str, Any] | None) -> tuple[Backend, Hardware]:
    """Join the process group; return the backend and the devices of all nodes as one machine's.

    known: the hardware of this node; None to probe it.

    Raises PlanError, on every process, if the nodes differ.
    """
    own = probe(config.device) if known is None else Hardware.from_json(known)
    backend = open_backend(own.kind, world=None)
    first: Hardware = Hardware.from_json(backend.broadcast(own.to_json()))
    names = [device.name for device in own.devices]
    alike = own.kind == first.kind and set(names) == {device.name for device in first.devices}
    free_bytes = min(device.free_bytes for device in own.devices)
    if own.kind == "cpu":
        free_bytes //= backend.local_world
    differ, less = backend.all_reduce_max((float(not alike), -float(free_bytes)))
    if differ:
        raise PlanError("the machines have different devices", why="different devices do not train alike")
    each = round(-less)
    if own.kind == "cpu":  # one memory, shared by all processes
        device = dataclasses.replace(first.devices[0], free_bytes=each * backend.world)
        return backend, dataclasses.replace(first, devices=(device,))
    devices = (dataclasses.replace(first.devices[0], free_bytes=each),) * backend.world
    return backend, dataclasses.replace(first, devices=devices)


def check_one_directory(backend: Backend, runs: Path) -> None:
    """Check that every process sees what rank 0 writes to `runs`. Raises ToolkitError on all of them.

    Each reads checkpoints there when a node joins or leaves, and any of them may be rank 0 after that.
    """
    with ExitStack() as removed:
        token = None
        if backend.is_main:
            try:
                runs.mkdir(parents=True, exist_ok=True)
                written = removed.enter_context(tempfile.NamedTemporaryFile(prefix=".meeting-", dir=runs))
            except OSError as error:
                raise os_error(f"write to {runs}", error) from error
            token = str(runs / Path(written.name).name)
        # A new name cannot be in a network file system's cache of missing files.
        told = Path(backend.broadcast(token))  # all read by rank 0's paths
        seen = told.exists() and (runs / told.name).exists()
        (missing,) = backend.all_reduce_max((float(not seen),))
    if missing:
        raise ToolkitError(
            "the machines do not see one directory of runs",
            why=f"what one of them writes to {runs} is not there on another",
            todo="put it by the same path on all, on a file system that they share (by a link or O=)",
        )

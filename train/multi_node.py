"""Multi-node training: each node starts its processes; the plan is made after the rendezvous."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lib import kconf
from lib.config import Config
from lib.devices.accelerators import probed_by_launcher
from lib.devices.backend import open_backend
from lib.devices.base import Backend
from lib.devices.probe import probe
from lib.distributed.launcher import launch
from lib.distributed.rendezvous import Rendezvous, check_shares, environment_of, route_to, torchrun_options
from lib.errors import ConfigError, PlanError, ToolkitError, os_errors
from lib.hyperparams import apply_hyperparams
from lib.plan.placement import NAMES, check_machines, grows_with_devices, of_all_nodes, place
from lib.plan.sharding import DEVICES_PER_NODE
from lib.plan.types import STATIC_SHAPES, Device, Hardware
from lib.runs.identity import identity

if TYPE_CHECKING:
    from lib.runs.directory import RunDir
    from train.training_data import TrainingData


_RESUMES = "they resume from a checkpoint whenever a node joins or leaves"


def check_node(config: Config, rendezvous: Rendezvous) -> tuple[Hardware, int]:
    """Return this node's hardware and its number of processes. Raises ConfigError or PlanError."""
    if config.resume == "never":
        raise ConfigError(
            "CONFIG_RESUME_NEVER=y is not for several nodes",
            why=_RESUMES,
            todo="set CONFIG_RESUME_AUTO=y",
        )
    if config.auto_method == "probe":
        raise ConfigError(
            "CONFIG_AUTO_METHOD_PROBE=y is not for several nodes",
            why="what is measured is on one of them",
            todo="set CONFIG_AUTO_METHOD_PREDICT=y",
        )
    check_machines(config.device)
    hardware = probe(config.device)
    if hardware.kind in STATIC_SHAPES and rendezvous.is_elastic:
        raise ConfigError(
            f"CONFIG_DIST_NNODES={config.dist_nnodes} is not for {NAMES[hardware.kind]}",
            why="the number of hosts in a slice is fixed",
            todo=f"set CONFIG_DIST_NNODES={rendezvous.max_nodes}",
        )
    if rendezvous.is_elastic and (option := grows_with_devices(config)):
        raise ConfigError(
            f"{option} is not for CONFIG_DIST_NNODES={config.dist_nnodes}",
            why="the effective batch would change whenever a node joins or leaves",
            todo="set CONFIG_TARGET_EFFECTIVE_BATCH instead, or a fixed number of nodes",
        )
    processes = place(config, hardware).world.value
    if not grows_with_devices(config):
        target, unit = config.elastic_base_batch or config.target, config.norm_batch or 1
        check_shares(rendezvous, processes=processes, target=target, unit=unit)
    return hardware, processes


def refusal_on_nodes(
    config: Config, rendezvous: Rendezvous, *, again: bool = False
) -> Callable[[Config, TrainingData | None], None]:
    """Check this node; return a function that raises what the plan refuses whatever the other nodes have.

    How many processes they start is known after the rendezvous only, but data and models that training starts
    from are made before. So it raises only where every number of processes is refused, with the reason of
    nodes like this one. again: of a run that shall not be resumed. Raises what `check_node` does.
    """
    if again:
        what = "make rerun is not for several nodes"
        raise ConfigError(what, why=_RESUMES, todo="train its configuration: make train")
    hardware, processes = check_node(config, rendezvous)
    least, most = rendezvous.min_nodes, rendezvous.max_nodes
    alike = [processes * nodes for nodes in range(least, most + 1)]
    every = range(processes + least - 1, processes + (most - 1) * max(processes, DEVICES_PER_NODE) + 1)

    def refuse(config: Config, data: TrainingData | None) -> None:
        from train.build import check_run
        from train.planning.memory_estimate import MemoryTraces

        if data is None:
            return None  # too little is known of the model
        traces, refused = MemoryTraces(config, data), list[ToolkitError]()
        for world in dict.fromkeys((*alike, *every)):
            machine = of_all_nodes(hardware, processes=processes, world=world)
            own, predict = config.replace(num_devices=world), traces.predictor(machine)
            try:
                plan = apply_hyperparams(own, False, hardware=machine, facts=data.facts, predict=predict)
                return check_run(own, plan, data)
            except (PlanError, ConfigError) as error:
                refused.append(error)
        raise refused[0]

    return refuse


def launch_multi_node(
    config: Config, resolved: kconf.Resolved, rendezvous: Rendezvous, *, run: RunDir | None = None
) -> NoReturn:
    """Become this node's launcher. run: to resume; None for an interrupted one. Raises as `check_node`."""
    hardware, processes = check_node(config, rendezvous)
    route = route_to(rendezvous.endpoint)
    port = rendezvous.endpoint.rpartition(":")[2]
    name, restarts = f"{config.model}-{identity(resolved.in_effect)}", config.launch.dist_max_restarts
    options = torchrun_options(rendezvous, processes=processes, restarts=restarts, name=name, route=route)
    # Printed so that a node waiting in vain can be compared with what the others wait for.
    print(f"Rendezvous at {rendezvous.endpoint}: {config.dist_nnodes} nodes train {name}")
    # Each process probes its hardware again, unless that is possible only before they start.
    known = hardware.to_json() if probed_by_launcher(hardware.kind) else None
    path = str(run.path.absolute()) if run else None
    payload = {"configuration": resolved.to_json(), "plan": None, "hardware": known, "run": path}
    launch(
        payload,
        world=processes,
        restarts=restarts,  # after a lost connection; torchrun restarts the workers
        cpu_count=hardware.cpu_count,
        arguments=sys.argv[1:],
        torchrun=options,
        serve=f"{route.serves}:{port}" if route is not None and route.serves else None,
        variables=environment_of(route),
    )


def join_rendezvous(config: Config, *, known: Mapping[str, Any] | None) -> tuple[Backend, Hardware]:
    """Join the process group; return the backend and the devices of all nodes as one machine's.

    known: the hardware of this node; None to probe it.

    Raises PlanError, on every process, if the nodes differ.
    """
    own = probe(config.device) if known is None else Hardware.from_json(known)
    backend = open_backend(own.kind, world=None)
    if own.kind != "cpu":  # a node may have more than CONFIG_NUM_DEVICES
        own = dataclasses.replace(own, devices=own.devices[: backend.local_world])
    first: Hardware = Hardware.from_json(backend.broadcast(own.to_json()))
    names = [device.name for device in own.devices]
    alike = own.kind == first.kind and set(names) == {device.name for device in first.devices}
    free_bytes = min(device.free_bytes for device in own.devices)
    if own.kind == "cpu":
        free_bytes //= backend.local_world
    # The least of all nodes: free memory of a device and of the host, and processes.
    leasts = (free_bytes, own.host_free_bytes or 0, backend.local_world)
    differ, less, host, count = backend.all_reduce_max(
        (float(not alike), *(-float(least) for least in leasts))
    )
    first = dataclasses.replace(first, of_all_nodes=True, per_node=round(-count))
    if first.host_free_bytes is not None:
        first = dataclasses.replace(first, host_free_bytes=round(-host))
    if differ:
        raise PlanError("the nodes have different devices", why="their numerics and memory differ")
    each, world = round(-less), backend.world
    # On the device: NCCL reduces nothing else, and some devices lack float64.
    cpus = torch.tensor(own.cpu_count / backend.local_world, dtype=torch.float32, device=backend.device)
    backend.all_reduce_sum(cpus)
    if own.kind == "cpu":  # one memory, shared by all processes
        devices: tuple[Device, ...] = (dataclasses.replace(first.devices[0], free_bytes=each * world),)
    else:
        devices = (dataclasses.replace(first.devices[0], free_bytes=each),) * world
    return backend, dataclasses.replace(first, devices=devices, cpu_count=round(cpus.item()))


def check_shared_directory(backend: Backend, runs: Path) -> None:
    """Check that every process sees what rank 0 writes to `runs`. Raises ToolkitError on all of them.

    Each reads checkpoints there when a node joins or leaves, and any of them may be rank 0 after that.
    """
    with ExitStack() as removed:
        token = None
        if backend.is_main:
            with os_errors(f"write to {runs}"):
                runs.mkdir(parents=True, exist_ok=True)
                written = removed.enter_context(tempfile.NamedTemporaryFile(prefix=".rendezvous-", dir=runs))
            token = str(runs / Path(written.name).name)
        # A new name cannot be in a network file system's cache of missing files.
        marker = Path(backend.broadcast(token))  # all read by rank 0's paths
        seen = marker.exists() and (runs / marker.name).exists()
        (missing,) = backend.all_reduce_max((float(not seen),))
    if missing:
        raise ToolkitError(
            "the nodes do not share one directory of runs",
            why=f"what one node writes to {runs} is not there on another",
            todo="put it at the same path on all nodes, on a shared file system (by a link or O=)",
        )

"""Print the launch command of a configuration, or write its job file for SLURM or another scheduler."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from lib import kconf
from lib.atomic import write_text
from lib.config import Config, config_from_values
from lib.devices.accelerators import launch_command
from lib.devices.probe import probe
from lib.distributed.job_specs import (
    CLUSTERS,
    ENVIRONMENT,
    FIRST,
    PORT,
    RUNS,
    Job,
    batch_script,
    job_file,
    missing,
    requested_slice,
)
from lib.distributed.rendezvous import Rendezvous, check_shares, rendezvous_of, torchrun_options
from lib.errors import ConfigError, ToolkitError, run_main
from lib.kconf.external import variables
from lib.kconf.project import given_overrides
from lib.plan.placement import check_machines, place
from lib.plan.types import STATIC_SHAPES, Kind
from lib.plugin_folders import external
from lib.plugins import DATASETS, MODELS, TASKS
from lib.runs.identity import identity

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run one action: print, sbatch, submit or emit."""
    parser = argparse.ArgumentParser(prog="python -m scripts.cluster", description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="directory of run directories")
    parser.add_argument("--config", type=Path, default=ROOT / ".config", help="the configuration")
    parser.add_argument("action", choices=("print", "sbatch", "submit", "emit"))
    emit = parser.add_argument_group("emit")
    emit.add_argument("--to", default="", help=f"the cluster: {', '.join(CLUSTERS)}")
    emit.add_argument("--image", default="", help="container image with the source tree")
    emit.add_argument("--storage", default="", help="storage for the directory of runs there")
    emit.add_argument("--accelerator", default="", help="the cluster's name of a GPU")
    options = parser.parse_args()
    resolved = kconf.from_environment(ROOT)
    config = config_from_values(resolved.values)
    name = f"{config.model}-{identity(resolved.in_effect)}"
    if options.action == "print":
        environment = environment_of(options.config)
        print(command_line(config, name=name, runs=options.runs, environment=environment))
        return 0
    folder, minimal = options.config.resolve().parent, resolved.minimal
    if options.action == "emit":
        given = {name: getattr(options, name) for name in ("image", "storage", "accelerator")}
        text = file_of(config, to=options.to, name=name, configuration=minimal, given=given)
        file = folder / f"run.{options.to}.yaml"
    else:
        text = script_of(config, configuration=minimal, folder=folder, runs=options.runs.resolve())
        file = folder / "run.sbatch"
    write_text(file, text)
    print(file)
    return submit(file) if options.action == "submit" else 0


def environment_of(config: Path) -> dict[str, str]:
    """Return the variables in which make has what it was given: the file `config`, EXTERNAL=, CONFIG_."""
    given = given_overrides()
    file = {} if config.absolute() == ROOT / ".config" else {"KCONFIG_CONFIG": str(config)}
    return file | variables() | ({"KCONFIG_MAKE_VARIABLES": " ".join(given), **given} if given else {})


def command_line(
    config: Config, *, name: str, runs: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the shell command of each node, equivalent to `make train`. environment: its variables."""
    rendezvous = _rendezvous(config)
    if rendezvous is not None:
        check_machines(config.device)
    kind: Kind
    if (
        config.device in (*STATIC_SHAPES, "cuda") and config.num_devices
    ):  # of a node that need not be this one
        processes, kind, device = _processes_on(config.num_devices, config), config.device, ""
    else:
        placement = place(config, probe(config.device))
        processes = _processes_on(placement.world.value, config)
        kind, device = placement.device.value, placement.name
    command = _command(config, rendezvous, processes=processes, name=name, runs=runs)
    if environment:
        command = f"env {shlex.join(f'{n}={value}' for n, value in environment.items())} {command}"
    return launch_command(command, kind, name=device, processes=processes)


def _rendezvous(config: Config, default: str = "") -> Rendezvous | None:
    return rendezvous_of(nodes=config.dist_nnodes, endpoint=config.launch.dist_endpoint, default=default)


def _command(config: Config, rendezvous: Rendezvous | None, *, processes: int, name: str, runs: Path) -> str:
    command = shlex.join(["python", "-m", "train", "--runs", str(runs), "train"])
    if rendezvous is None:
        return command if processes == 1 else f"{command} # starts {processes} processes"
    restarts = config.launch.dist_max_restarts
    options = torchrun_options(rendezvous, processes=processes, restarts=restarts, name=name)
    return f"{command} # starts torchrun {shlex.join(options)}"


def _processes_on(devices: int, config: Config) -> int:
    """Return the number of processes on so many devices, as far as that is known without a plan."""
    return devices // 2 if config.dist_strategy == "split" and devices % 2 == 0 else devices


def script_of(config: Config, *, configuration: str, folder: Path, runs: Path) -> str:
    """Return the batch script.

    Raises ConfigError for a malformed number of nodes, too short a time, or GPUs that contradict the device.
    """
    rendezvous = _rendezvous(config, f"localhost:{PORT}")  # the script finds the real one
    return batch_script(
        config.launch,
        model=config.model,
        nodes=rendezvous.min_nodes if rendezvous is not None else 1,
        gpus=_gpus_for_slurm(config),
        root=ROOT,
        python=sys.executable,
        configuration=configuration,
        folder=folder,
        runs=runs,
        environment=variables(),
    )


def file_of(config: Config, *, to: str, name: str, configuration: str, given: Mapping[str, str]) -> str:
    """Return the job file for the cluster `to`, from the configuration alone.

    configuration: in its minimal form. given: the image, storage and accelerator of a `Job`.
    Raises ConfigError for what is missing or not possible there, PlanError for a batch that cannot be
    split over the nodes.
    """
    if to and to not in CLUSTERS:
        raise ConfigError(
            f"TO={to} is not a supported cluster",
            todo=f"give TO={', TO='.join(CLUSTERS)}; make sbatch is for SLURM",
        )
    _check_in_tree(config)
    needs_gpus = _needs_gpus(config)
    uncounted = needs_gpus and not config.num_devices and config.device not in STATIC_SHAPES
    if unset := missing(to=to, gpus=needs_gpus, uncounted=uncounted, given=given):
        of = f" TO={to}" if to else ""
        raise ConfigError(f"make emit{of} needs {'; '.join(unset)}", why="only you can know that")
    rendezvous, whole = _rendezvous(config, f"{FIRST}:{PORT}"), None
    if config.device in STATIC_SHAPES:
        several = rendezvous is not None
        whole = requested_slice(
            given["accelerator"], to=to, devices=config.num_devices, several_nodes=several
        )
    processes = _processes_on(config.num_devices or (whole.devices if whole else 1), config)
    if rendezvous is not None:
        if rendezvous.is_elastic:
            raise ConfigError(
                f"CONFIG_DIST_NNODES={config.dist_nnodes} is not for make emit",
                why="a cluster gives a job a fixed number of nodes",
                todo=f"set CONFIG_DIST_NNODES={rendezvous.max_nodes}",
            )
        check_shares(rendezvous, processes=processes, target=config.target, unit=config.norm_batch or 1)
    job = Job(
        name=f"anneal-{name}".replace("_", "-"),
        nodes=rendezvous.min_nodes if rendezvous is not None else 1,
        gpus=whole.devices if whole else config.num_devices if needs_gpus else 0,
        configuration=configuration,
        finds_first=rendezvous is not None and not config.launch.dist_endpoint,
        slice=whole,
        environment=ENVIRONMENT.get(config.device, {}),
        **given,
    )
    command = _command(config, rendezvous, processes=processes, name=name, runs=Path(RUNS))
    return job_file(job, to=to, command=command)


def _check_in_tree(config: Config) -> None:
    base = external()
    for kind, name in ((MODELS, config.model), (TASKS, config.task), (DATASETS, config.dataset)):
        if base and kind.home(name).is_relative_to(base):
            raise ConfigError(
                f"make emit is not possible for the {kind.noun} {name} of EXTERNAL={base}",
                why="nodes have this source tree alone",
                todo=f"move {kind.home(name)} to {kind.package.replace('.', '/')}",
            )


def _needs_gpus(config: Config) -> bool:
    """Return True if a job file has to request accelerators."""
    if config.device == "mps":
        raise ConfigError(
            f"CONFIG_DEVICE_{config.device.upper()}=y is not for make emit",
            why="its files request GPUs, or CPUs only",
            todo="set CONFIG_DEVICE_CUDA=y or CONFIG_DEVICE_CPU=y",
        )
    return config.device != "cpu"


def _gpus_for_slurm(config: Config) -> int:
    """Return the GPUs to request per node; 0 for none.

    Raises ConfigError where CONFIG_SLURM_GPUS_PER_NODE contradicts the devices that training is to use, or
    neither gives a number.
    """
    wanted, used = config.launch.slurm_gpus_per_node, config.num_devices
    requested = f"CONFIG_SLURM_GPUS_PER_NODE={wanted}"
    if config.device not in ("auto", "cuda"):
        if not wanted:
            return 0
        raise ConfigError(
            f"{requested} is not for CONFIG_DEVICE_{config.device.upper()}=y",
            why="training would use none of them",
            todo="set CONFIG_SLURM_GPUS_PER_NODE=0 or CONFIG_DEVICE_CUDA=y",
        )
    if wanted and wanted < used:
        raise ConfigError(
            f"{requested} is fewer than CONFIG_NUM_DEVICES={used}",
            why="training would use more GPUs than each node is given",
            todo="leave CONFIG_SLURM_GPUS_PER_NODE=0, which requests as many as are used",
        )
    if config.device == "cuda" and not wanted and not used:
        raise ConfigError(
            "CONFIG_DEVICE_CUDA=y with CONFIG_NUM_DEVICES=0 does not say how many GPUs to request from SLURM",
            todo="set CONFIG_NUM_DEVICES, or CONFIG_SLURM_GPUS_PER_NODE to use all GPUs of a node",
        )
    return wanted or used


def submit(script: Path) -> int:
    """Submit `script` to SLURM. Raises ConfigError where there is none, ToolkitError where it refuses."""
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch here", why="SLURM is not installed", todo=f"submit {script}")
    done = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip() or f"status {done.returncode}"
        raise ToolkitError("sbatch refused the script", why=why)
    print(done.stdout.strip())
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

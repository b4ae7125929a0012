"""How a configuration is launched: printed, written for SLURM or for another scheduler, or submitted."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lib import kconf
from lib.atomic import write_text
from lib.config import Config, config_from_values
from lib.devices.probe import probe
from lib.distributed.job_specs import CLUSTERS, FIRST, RUNS, Job, emitted, missing
from lib.distributed.rendezvous import Gathering, check_shares, gathering_of, torchrun_options
from lib.distributed.slurm import PORT, Batch, batch_script
from lib.errors import ConfigError, ToolkitError, run_main
from lib.plan.placement import TPU, check_machines, place
from lib.plan.sharding import split_over
from lib.plan.types import ON_XLA
from lib.runs.identity import identity

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTAL = "# Experimental, never run on TPU hardware."
ON_TPU = f"{EXPERIMENTAL} On each host of the slice (gcloud: --worker=all):"
TPU_ENVIRONMENT = "env $(python -m lib.devices.tpu launch {})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.cluster", description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="directory of run directories")
    parser.add_argument("--config", type=Path, default=ROOT / ".config", help="the configuration")
    parser.add_argument("action", choices=("print", "sbatch", "submit", "emit"))
    of_emit = parser.add_argument_group("emit")
    of_emit.add_argument("--to", default="", help=f"the cluster: {', '.join(CLUSTERS)}")
    of_emit.add_argument("--image", default="", help="container image with the source tree")
    of_emit.add_argument("--storage", default="", help="what holds the directory of runs there")
    of_emit.add_argument("--accelerator", default="", help="what the cluster calls a GPU")
    options = parser.parse_args()
    resolved = kconf.from_environment(ROOT)
    config = config_from_values(resolved.values)
    name = f"{config.model}-{identity(resolved.in_effect)}"
    if options.action == "print":
        print(command_line(config, name=name, runs=options.runs))
        return 0
    if options.action == "emit":
        given = {name: getattr(options, name) for name in ("image", "storage", "accelerator")}
        text = file_of(config, to=options.to, name=name, configuration=resolved.minimal, given=given)
        file = options.config.resolve().with_name(f"run.{options.to}.yaml")
        write_text(file, text)
        print(file)
        return 0
    script = options.config.resolve().with_name("run.sbatch")
    text = script_of(
        config, configuration=resolved.minimal, folder=script.parent, runs=options.runs.resolve()
    )
    write_text(script, text)
    print(script)
    return submit(script) if options.action == "submit" else 0


def command_line(config: Config, *, name: str, runs: Path) -> str:
    """What runs on each machine, as a shell would be told it. `make train` does the same."""
    gathering = gathering_of(nodes=config.dist_nnodes, endpoint=config.dist_endpoint)
    if gathering is not None:
        check_machines(config.device)
    processes, on_tpu = _processes(config)
    command = _command(config, gathering, processes=processes, name=name, runs=runs)
    if config.device == "tpu":
        return f"{EXPERIMENTAL}\n{TPU_ENVIRONMENT.format(processes)} {command}"
    return f"{ON_TPU}\nPJRT_DEVICE=TPU {command}" if on_tpu else command


def _command(config: Config, gathering: Gathering | None, *, processes: int, name: str, runs: Path) -> str:
    program = ["-m", "train", "--runs", str(runs), "train"]
    if gathering is None:
        command = shlex.join(["python", *program])
        return command if processes == 1 else f"{command} # starts {processes} processes"
    restarts = config.dist_max_restarts
    options = torchrun_options(gathering, processes=processes, restarts=restarts, name=name)
    return shlex.join(["torchrun", *options, *program])


def _processes(config: Config) -> tuple[int, bool]:
    """How many each machine has, and whether torch_xla is to have the chips of a TPU."""
    if config.device in ON_XLA and config.num_devices:
        return config.num_devices, True  # of a machine that need not be this one
    placement = place(config, probe(config.device))
    on_tpu = placement.device.value == "xla" and placement.name == TPU
    return _processes_on(placement.world.value, config), on_tpu


def _processes_on(devices: int, config: Config) -> int:
    """How many have so many devices. What the plan decides by itself is not known here."""
    return split_over(devices).world if config.dist_strategy == "split" else devices


def script_of(config: Config, *, configuration: str, folder: Path, runs: Path) -> str:
    """The batch script.

    Raises ConfigError for a number of machines that is none, too short a time, or GPUs that do not fit
    the device.
    """
    local = f"localhost:{PORT}"  # the script finds the real one
    gathering = gathering_of(nodes=config.dist_nnodes, endpoint=config.dist_endpoint, default=local)
    batch = Batch(
        model=config.model,
        nodes=gathering.least if gathering is not None else 1,
        gpus_per_node=_gpus_for_slurm(config),
        cpus_per_node=config.slurm_cpus_per_node,
        time=config.slurm_time or "",
        partition=config.slurm_partition or "",
        grace_seconds=config.slurm_grace_seconds,
    )
    return batch_script(
        batch, root=ROOT, python=sys.executable, configuration=configuration, folder=folder, runs=runs
    )


def file_of(config: Config, *, to: str, name: str, configuration: str, given: Mapping[str, str]) -> str:
    """The file for the cluster `to`, from the configuration alone.

    configuration: in its minimal form. given: the image, storage and accelerator of a `Job`.
    Raises ConfigError for what is missing or cannot be honoured there, PlanError for a batch that the
    machines could not share.
    """
    if to and to not in CLUSTERS:
        raise ConfigError(
            f"TO={to} is no cluster that a file can be written for",
            todo=f"give TO={', TO='.join(CLUSTERS)}; make sbatch is for SLURM",
        )
    asks_for_gpus = _asks_for_gpus(config)
    lacking = missing(to=to, gpus=asks_for_gpus, given=given)
    if asks_for_gpus and not config.num_devices:
        lacking.append("CONFIG_NUM_DEVICES= (how many GPUs each machine has), or CONFIG_DEVICE_CPU=y")
    if lacking:
        of = f" TO={to}" if to else ""
        raise ConfigError(f"make emit{of} needs {'; '.join(lacking)}", why="only you can know that")
    processes = _processes_on(config.num_devices or 1, config)
    first = f"{FIRST}:{PORT}"
    gathering = gathering_of(nodes=config.dist_nnodes, endpoint=config.dist_endpoint, default=first)
    if gathering is not None:
        if gathering.is_elastic:
            raise ConfigError(
                f"CONFIG_DIST_NNODES={config.dist_nnodes} is not for make emit",
                why="a cluster gives a job as many machines as its file says",
                todo=f"set CONFIG_DIST_NNODES={gathering.most}",
            )
        check_shares(gathering, processes=processes, target=config.target)
    job = Job(
        name=f"anneal-{name}".replace("_", "-"),
        nodes=gathering.least if gathering is not None else 1,
        gpus=config.num_devices if asks_for_gpus else 0,
        configuration=configuration,
        finds_first=gathering is not None and not config.dist_endpoint,
        **given,
    )
    command = _command(config, gathering, processes=processes, name=name, runs=Path(RUNS))
    return emitted(job, to=to, command=command)


def _asks_for_gpus(config: Config) -> bool:
    """Whether a file of make emit has its machines have GPUs, by the configuration."""
    if config.device in ("mps", *ON_XLA):
        raise ConfigError(
            f"CONFIG_DEVICE_{config.device.upper()}=y is not for make emit",
            why="its files ask for GPUs, or for processors alone",
            todo="set CONFIG_DEVICE_CUDA=y or CONFIG_DEVICE_CPU=y",
        )
    return config.device != "cpu"


def _gpus_for_slurm(config: Config) -> int:
    """How many each machine is to have; 0 to ask for none.

    Raises ConfigError where CONFIG_SLURM_GPUS_PER_NODE contradicts the devices that training is to use, or
    neither tells how many.
    """
    wanted, used = config.slurm_gpus_per_node, config.num_devices
    asked = f"CONFIG_SLURM_GPUS_PER_NODE={wanted}"
    if config.device not in ("auto", "cuda"):
        if wanted:
            device = f"CONFIG_DEVICE_{config.device.upper()}=y"
            raise ConfigError(
                f"{asked} is not for {device}",
                why="training would use none of them",
                todo="set CONFIG_SLURM_GPUS_PER_NODE=0 or CONFIG_DEVICE_CUDA=y",
            )
        return 0
    if wanted and wanted < used:
        raise ConfigError(
            f"{asked} is fewer than CONFIG_NUM_DEVICES={used}",
            why="training would use more GPUs than each machine is given",
            todo="leave CONFIG_SLURM_GPUS_PER_NODE=0, which asks for as many as are used",
        )
    if config.device == "cuda" and not wanted and not used:
        raise ConfigError(
            "CONFIG_DEVICE_CUDA=y with CONFIG_NUM_DEVICES=0 leaves open how many GPUs to ask SLURM for",
            todo="set CONFIG_NUM_DEVICES, or CONFIG_SLURM_GPUS_PER_NODE to use all that a machine is given",
        )
    return wanted or used


def submit(script: Path) -> int:
    """Hand `script` to SLURM. Raises ConfigError where there is none, ToolkitError where it refuses."""
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

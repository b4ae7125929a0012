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
from lib.emit import CLUSTERS, FIRST, RUNS, Job, emitted
from lib.errors import ConfigError, ToolkitError, run_main
from lib.gathering import Gathering, check_shares, gathering_of, torchrun_options
from lib.hardware import probe
from lib.identity import identity
from lib.plan.placement import TPU, check_machines, place
from lib.plan.sharding import split_over
from lib.plan.types import ON_XLA
from lib.slurm import PORT, Batch, batch_script

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTAL = "# Experimental, never run on TPU hardware."
ON_TPU = f"{EXPERIMENTAL} On each host of the slice (gcloud: --worker=all):"
TPU_ENVIRONMENT = "env $(python -m lib.tpu launch {})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.cluster", description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="directory of run directories")
    parser.add_argument("--config", type=Path, default=ROOT / ".config", help="the configuration")
    parser.add_argument("action", choices=("print", "sbatch", "submit", "emit"))
    of_emit = parser.add_argument_group("emit")
    of_emit.add_argument("--to", default="", help=f"the cluster: {', '.join(CLUSTERS)}")
    of_emit.add_argument("--image", default="", help="container image with the source tree")
    of_emit.add_argument("--storage", default="", help="what holds the directory of runs there")
    of_emit.add_argument("--gpu", default="", help="what the cluster calls a GPU")
    options = parser.parse_args()
    resolved = kconf.from_environment(ROOT)
    config = config_from_values(resolved.values)
    name = f"{config.model}-{identity(resolved.in_effect)}"
    if options.action == "print":
        print(command_line(config, name=name, runs=options.runs))
        return 0
    if options.action == "emit":
        given = {"image": options.image, "storage": options.storage, "gpu": options.gpu}
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
    if gathering is None and processes == 1 and config.device not in ON_XLA:
        return shlex.join(["python", *program])
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
    """The batch script. Raises ConfigError for a number of machines that is none, or too short a time."""
    endpoint = config.dist_endpoint or f"localhost:{PORT}"  # the script finds the real one
    gathering = gathering_of(nodes=config.dist_nnodes, endpoint=endpoint)
    batch = Batch(
        model=config.model,
        nodes=gathering.least if gathering is not None else 1,
        gpus_per_node=config.slurm_gpus_per_node,
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

    configuration: in its minimal form. given: the image, storage and gpu of a `Job`.
    Raises ConfigError for what is missing or cannot be honoured there, PlanError for a batch that the
    machines could not share.
    """
    if to not in CLUSTERS:
        raise ConfigError(
            f"TO={to} is no cluster that a file can be written for",
            todo=f"give TO={', TO='.join(CLUSTERS)}; make sbatch is for SLURM",
        )
    gpus = _gpus_of(config)
    processes = _processes_on(config.num_devices or 1, config)
    endpoint = config.dist_endpoint or f"{FIRST}:{PORT}"
    gathering = gathering_of(nodes=config.dist_nnodes, endpoint=endpoint)
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
        gpus=gpus,
        configuration=configuration,
        finds_first=gathering is not None and not config.dist_endpoint,
        **given,
    )
    command = _command(config, gathering, processes=processes, name=name, runs=Path(RUNS))
    return emitted(job, to=to, command=command)


def _gpus_of(config: Config) -> int:
    """How many each machine is to have, by the configuration; 0 for processors alone."""
    if config.device == "cpu":
        return 0
    if config.device in ("mps", *ON_XLA):
        raise ConfigError(
            f"CONFIG_DEVICE_{config.device.upper()}=y is not for make emit",
            why="its files ask for GPUs, or for processors alone",
            todo="set CONFIG_DEVICE_CUDA=y or CONFIG_DEVICE_CPU=y",
        )
    if not config.num_devices:
        raise ConfigError(
            "CONFIG_NUM_DEVICES=0 leaves open how many GPUs each machine has",
            todo="set CONFIG_NUM_DEVICES to their number, or CONFIG_DEVICE_CPU=y",
        )
    return config.num_devices


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

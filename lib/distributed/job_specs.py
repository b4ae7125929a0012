"""Job files that train a configuration by SLURM, Kubernetes, SkyPilot or Ray. Pure.

On every node they start what make train does there; the configuration is part of the file. Those for other
schedulers than SLURM follow published schemas, and none was run on such a cluster. Their frames are files in
templates/: "@name" stands for a value.
"""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from lib.config import LaunchOptions
from lib.errors import ConfigError, Suspended
from lib.plan.tpus import Slice, slice_of

PORT = 29500
RUNS = "/runs"  # mount point of the storage on each node
FIRST = "FIRST"  # stands for the first node while its address is unknown
EARLY_SECONDS = 60  # SLURM may send the signal this much early (sbatch(1), --signal)

_TEMPLATES = Path(__file__).resolve().parent / "templates"
# Kinds of clusters: heading of the job file, expressions of its shell, patterns and meanings of variables.
CLUSTERS: Mapping[str, Any] = yaml.safe_load((_TEMPLATES / "clusters.yaml").read_text(encoding="utf-8"))
_TIMES = (  # as listed in sbatch(1) under --time
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
)
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
_SLURM_RENDEZVOUS = f"""
# The first node is the rendezvous endpoint; after a requeue it may be another one.
export CONFIG_DIST_ENDPOINT="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{PORT}"
export KCONFIG_MAKE_VARIABLES=CONFIG_DIST_ENDPOINT # as if given on make's command line
"""
# Each node gets its own address, and the first one uses it as the endpoint, so that it listens there alone:
# torch recognises neither an address that the node's own name does not resolve to nor, for a while, a name
# that was just assigned.
_RENDEZVOUS = """\
export PET_LOCAL_ADDR="{own}" # as torchrun --local-addr
export CONFIG_DIST_ENDPOINT="{first}:{port}"
[ "{number}" != 0 ] || CONFIG_DIST_ENDPOINT="$PET_LOCAL_ADDR:{port}"
export KCONFIG_MAKE_VARIABLES=CONFIG_DIST_ENDPOINT
"""
_IMAGE = r"\S{1,500}"
_IMAGE_MEANS = "a container image that has this source tree for working directory"
_OF_TPU = re.compile(r"tpu|google\.com/tpu")
_BUCKET = re.compile(r"[a-z0-9]+://\S+")


class _Template(string.Template):
    delimiter = "@"  # shell scripts are full of dollar signs


def _template(name: str, values: Mapping[str, object]) -> str:
    return _Template((_TEMPLATES / name).read_text(encoding="utf-8")).substitute(values)


def batch_script(
    launch: LaunchOptions,
    *,
    model: str,
    nodes: int,
    gpus: int,
    root: Path,
    python: str,
    configuration: str,
    folder: Path,
    runs: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return an sbatch script that trains `configuration` (a .config's text) in the source tree `root`.

    The job is requeued when preempted or out of time. gpus: per node, 0 for none. folder: directory for a
    job's output and configuration, shared by its nodes. environment: variables of training.
    Raises ConfigError where no time is left to train.
    """
    _check_time(launch)
    # sbatch expands percent signs in #SBATCH lines.
    output = shlex.quote(str(folder).replace("%", "%%"))
    requested = {  # what is empty is left to the site
        "job-name": f"anneal-{model}",
        "nodes": nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus,
        "cpus-per-task": launch.slurm_cpus_per_node,
        "time": launch.slurm_time,
        "partition": launch.slurm_partition,
        "open-mode": "append",
        "output": f"{output}/slurm-%j.log",
        "signal": f"B:USR1@{launch.slurm_grace_seconds}",
    }
    # Since SLURM 22.05 srun does not inherit --cpus-per-task from sbatch.
    cpus = [f"--cpus-per-task={launch.slurm_cpus_per_node}"] if launch.slurm_cpus_per_node else []
    train = [python, "-m", "train", "--runs", str(runs), "train"]
    values = {
        "options": "\n".join(f"#SBATCH --{name}={value}" for name, value in requested.items() if value),
        "root": shlex.quote(str(root)),
        "folder": shlex.quote(str(folder)),
        "configuration": configuration,
        "exports": _exports(environment),
        "many": _SLURM_RENDEZVOUS if nodes > 1 else "",
        "srun": shlex.join(["srun", "--kill-on-bad-exit=1", *cpus, *train]),
        "saved": Suspended.exit_code,
        "runs": shlex.quote(str(runs / model)),
    }
    return _template("slurm.sbatch", values)


def _exports(environment: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def _check_time(launch: LaunchOptions) -> None:
    seconds, grace_seconds = seconds_of(launch.slurm_time or ""), launch.slurm_grace_seconds
    needed = grace_seconds + EARLY_SECONDS
    if seconds is not None and seconds <= needed:
        raise ConfigError(
            f"CONFIG_SLURM_TIME={launch.slurm_time} leaves no time for training",
            why=f"SLURM signals {grace_seconds} s (CONFIG_SLURM_GRACE_SECONDS) before the end, "
            f"and may do so {EARLY_SECONDS} s earlier",
            todo=f"set CONFIG_SLURM_TIME to more than {needed} s",
        )


def seconds_of(time: str) -> int | None:
    """Return the seconds of a time limit as sbatch parses it; None for a word ("", UNLIMITED)."""
    for form in _TIMES:
        if match := re.fullmatch(form, time):
            return sum(_SECONDS[unit] * int(value) for unit, value in match.groupdict().items() if value)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job requested from a cluster.

    gpus:          per node, or devices of a TPU slice; 0 for CPUs only.
    configuration: in its minimal form.
    finds_first:   true if the nodes must still learn which one is the rendezvous endpoint.
    image:         container image whose working directory is this source tree, with its requirements.
    storage:       storage for the directory of runs, shared by all nodes, in the cluster's terms.
    accelerator:   the cluster's name of a GPU, or the name of a TPU slice; "" without either.
    slice:         where TPUs are requested.
    environment:   variables of the training process.
    """

    name: str
    nodes: int
    gpus: int
    configuration: str
    finds_first: bool
    image: str
    storage: str
    accelerator: str
    slice: Slice | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


# Variables that a job needs, by CONFIG_DEVICE.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {"xla": {"PJRT_DEVICE": "TPU"}}


def requested_slice(name: str, *, to: str, devices: int, several_nodes: bool) -> Slice:
    """Return the TPU slice `name` of a job; devices: of its node that train, 0 for all.

    Raises ConfigError for an unknown name, and for a job that cannot have a slice.
    """
    found = slice_of(name.lower())
    if to == "ray" or several_nodes or devices not in (0, 1, found.devices):
        raise ConfigError(
            f"make emit TO={to} is not possible for {found.devices} TPUs",
            why="TPU jobs are for Kubernetes or SkyPilot, on one host, with all of a slice or one device",
            todo=f"set TO=skypilot, CONFIG_DIST_NNODES=1 and CONFIG_NUM_DEVICES={found.devices}",
        )
    return found


def job_file(job: Job, *, to: str, command: str) -> str:
    """Return the job file for the cluster `to`, one of `CLUSTERS`; `command` is for its reader.

    Raises ConfigError where IMAGE, STORAGE or ACCELERATOR is malformed.
    """
    cluster = CLUSTERS[to]
    _check(job, to)
    template = yaml.safe_load((_TEMPLATES / f"{to}.yaml").read_text(encoding="utf-8"))
    document = _fill(template, _values(job, cluster))
    heading = (
        f"# Not run on {cluster['title']}: this follows its published schema, and nobody has tried it.\n"
        f"# Use it by: {cluster['usage']}\n"
        f"# On each node it runs: {command}\n"
    )
    heading += "# Experimental, never run on TPU hardware.\n" if job.slice else ""
    return heading + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110)


def missing(*, to: str, gpus: bool, uncounted: bool, given: Mapping[str, str]) -> list[str]:
    """Return the variables that the user must still set, as lines of `NAME= (meaning)`.

    to: the cluster, "" where it is missing, too. gpus: true if any are requested. uncounted: true if their
    number is not known. given: image, storage and accelerator of a `Job`.
    """
    cluster = CLUSTERS.get(to)
    means = {
        "to": f"the cluster: {', '.join(CLUSTERS)}",
        "image": _IMAGE_MEANS,
        "storage": cluster["storage"][1] if cluster else "storage for the directory of runs there",
    }
    if gpus:
        means["accelerator"] = cluster["accelerator"][1] if cluster else "the cluster's name of a GPU"
        means["accelerator"] += "; for TPUs a slice, such as tpu-v4-8" if to != "ray" else ""
    values = {"to": to, **given}
    unset = [f"{name.upper()}= ({meaning})" for name, meaning in means.items() if not values[name]]
    of_gpus = "CONFIG_NUM_DEVICES= (GPUs per node), or CONFIG_DEVICE_CPU=y"
    of_tpu = "CONFIG_DEVICE_TPU=y or CONFIG_DEVICE_XLA=y (for TPUs)"
    return unset + [of_tpu if _OF_TPU.match(given["accelerator"].lower()) else of_gpus] * uncounted


def _check(job: Job, to: str) -> None:
    cluster = CLUSTERS[to]
    expected = {"IMAGE": (job.image, _IMAGE, _IMAGE_MEANS), "STORAGE": (job.storage, *cluster["storage"])}
    if job.gpus and not job.slice:
        expected["ACCELERATOR"] = (job.accelerator, *cluster["accelerator"])
    elif job.accelerator and not job.slice:
        raise ConfigError(
            f"ACCELERATOR={job.accelerator} is not used by CONFIG_DEVICE_CPU=y",
            todo="leave it out, or set CONFIG_DEVICE_CUDA=y",
        )
    if not job.slice and _OF_TPU.match(job.accelerator.lower()):
        raise ConfigError(
            f"ACCELERATOR={job.accelerator} would not be used",
            why="only CONFIG_DEVICE_TPU=y and CONFIG_DEVICE_XLA=y train on TPUs",
            todo="set one of them, and name a slice, such as ACCELERATOR=tpu-v4-8",
        )
    wrong = [
        f"{name}={value} is not {meaning}"
        for name, (value, pattern, meaning) in expected.items()
        if not re.fullmatch(pattern, value)
    ]
    if to == "skypilot" and _BUCKET.fullmatch(job.storage) and job.nodes > 1:
        raise ConfigError(
            f"STORAGE={job.storage} is not for {job.nodes} nodes",
            why="in a bucket the others do not see at once what one of them writes",
            todo="name a volume of SkyPilot that all can mount",
        )
    if wrong:
        raise ConfigError("; ".join(wrong))


def _values(job: Job, cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return what "@name" stands for in the templates; None removes the field."""
    rendezvous = _RENDEZVOUS.format(**cluster, port=PORT) if job.finds_first else ""
    # SkyPilot counts slices, which have their size in their name.
    accelerators = f"{job.slice.accelerator}:1" if job.slice else f"{job.accelerator}:{job.gpus}"
    exported = rendezvous + _exports(job.environment)
    start = {"configuration": job.configuration.rstrip(), "rendezvous": exported, "runs": RUNS}
    script = _template("start.sh", start)
    bucket = _BUCKET.fullmatch(job.storage)
    pod_ip = {"name": "THIS_MACHINE", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    driver = ["python", "-m", "scripts.ray_machines", f"--machines={job.nodes}", f"--gpus={job.gpus}"]
    return {
        "name": job.name,
        "nodes": job.nodes,
        "image": job.image,
        "docker_image": f"docker:{job.image}",
        "script": script,
        "kubernetes_script": script.replace("$", "$$"),  # Kubernetes would expand $(NAME)
        "driver": shlex.join(driver),
        "address": [pod_ip] if job.finds_first else None,
        "limits": {"limits": {"google.com/tpu" if job.slice else job.accelerator: job.gpus}}
        if job.gpus
        else None,
        "node_labels": job.slice.node_labels if job.slice else None,
        "accelerators": accelerators if job.gpus else None,
        # The only mode that allows appending, which the files of a run need.
        "bucket": {RUNS: {"source": job.storage, "mode": "MOUNT_CACHED"}} if bucket else None,
        "volume": None if bucket else {RUNS: job.storage},
        "storage": job.storage,
        "runs": RUNS,
    }


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    """Replace each string "@name" in a document by its value."""
    if isinstance(node, dict):
        filled = {key: _fill(item, values) for key, item in node.items()}
        return {key: item for key, item in filled.items() if item is not None}
    if isinstance(node, list):
        return [_fill(item, values) for item in node]
    return values[node[1:]] if isinstance(node, str) and node.startswith("@") else node


class _Dumper(yaml.SafeDumper):
    """SafeDumper that writes scripts as literal blocks and uses no aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)

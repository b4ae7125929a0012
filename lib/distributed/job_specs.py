"""Job files that train a configuration with schedulers other than SLURM. Pure.

They follow published schemas, and none was run on such a cluster. On every node they start what make train
does there; the configuration is part of the file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from lib.distributed.slurm import PORT
from lib.errors import ConfigError

Document: TypeAlias = dict[str, Any]

RUNS = "/runs"  # mount point of the storage on each node
FIRST = "FIRST"  # stands for the first node while its address is unknown
_END = "END_OF_CONFIGURATION"
_IMAGE = re.compile(r"\S{1,500}")
_IMAGE_MEANS = "a container image that has this source tree for working directory"
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_BUCKET = re.compile(r"[a-z0-9]+://\S+")
_RESOURCE = re.compile(r"[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][\w.-]*")
_ACCELERATOR = re.compile(r"[A-Za-z][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job requested from a cluster.

    gpus:          per node; 0 for CPUs only.
    configuration: in its minimal form.
    finds_first:   true if the nodes must still learn which one is the rendezvous endpoint.
    image:         container image whose working directory is this source tree, with its requirements.
    storage:       storage for the directory of runs, shared by all nodes, in the cluster's terms.
    accelerator:   the cluster's name of a GPU; "" without GPUs.
    """

    name: str
    nodes: int
    gpus: int
    configuration: str
    finds_first: bool
    image: str
    storage: str
    accelerator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Shell expressions for the first node's address, this node's address, and its number."""

    first: str
    own: str
    number: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A kind of cluster: generator and heading of its file, and patterns of its variables."""

    called: str
    document: Callable[[Job], Document]
    storage: tuple[re.Pattern[str], str]
    accelerator: tuple[re.Pattern[str], str]
    used_by: str


def emitted(job: Job, *, to: str, command: str) -> str:
    """Return the text of the job file for the cluster `to`, one of `CLUSTERS`.

    command: the command that trains on each node, for the reader. Raises ConfigError where IMAGE, STORAGE or
    ACCELERATOR is malformed.
    """
    cluster = CLUSTERS[to]
    _check(job, cluster)
    heading = (
        f"# Not run on {cluster.called}: this follows its published schema, and nobody has tried it.\n"
        f"# Use it by: {cluster.used_by}\n"
        f"# What python -m train comes to on each machine: {command}\n"
    )
    return heading + yaml.dump(cluster.document(job), Dumper=_Dumper, sort_keys=False, width=110)


def missing(*, to: str, gpus: bool, given: Mapping[str, str]) -> list[str]:
    """Return the variables that the user must still set, as lines of `NAME= (meaning)`.

    to: the cluster, "" where it is missing, too. gpus: true if any are requested. given: image, storage and
    accelerator of a `Job`.
    """
    cluster = CLUSTERS.get(to)
    means = {
        "to": f"the cluster: {', '.join(CLUSTERS)}",
        "image": _IMAGE_MEANS,
        "storage": cluster.storage[1] if cluster else "what holds the directory of runs there",
    }
    if gpus:
        means["accelerator"] = cluster.accelerator[1] if cluster else "what the cluster calls a GPU"
    said = {"to": to, **given}
    return [f"{name.upper()}= ({meaning})" for name, meaning in means.items() if not said[name]]


def _check(job: Job, cluster: Cluster) -> None:
    wanted = {"IMAGE": (job.image, _IMAGE, _IMAGE_MEANS), "STORAGE": (job.storage, *cluster.storage)}
    if job.gpus:
        wanted["ACCELERATOR"] = (job.accelerator, *cluster.accelerator)
    elif job.accelerator:
        raise ConfigError(
            f"ACCELERATOR={job.accelerator} is not used by CONFIG_DEVICE_CPU=y",
            todo="leave it out, or set CONFIG_DEVICE_CUDA=y",
        )
    wrong = [
        f"{name}={value} is not {meaning}"
        for name, (value, pattern, meaning) in wanted.items()
        if not pattern.fullmatch(value)
    ]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _kubernetes(job: Job) -> Document:
    """Make a TrainJob of Kubeflow Trainer, whose runtime torch-distributed names the first node."""
    trainer: Document = {
        "image": job.image,
        "command": ["sh", "-c", _verbatim(_start(job, _IN_TRAINJOB))],
        "numNodes": job.nodes,
    }
    if job.finds_first:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        trainer["env"] = [{"name": "THIS_MACHINE", "valueFrom": address}]
    if job.gpus:
        trainer["resourcesPerNode"] = {"limits": {job.accelerator: job.gpus}}
    pod = {"volumes": _volumes(job), "containers": [{"name": "node", "volumeMounts": _mounts()}]}
    replicated = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": "anneal",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": replicated}}},
                }
            ],
        },
    }


def _skypilot(job: Job) -> Document:
    resources: Document = {"image_id": f"docker:{job.image}"}
    if job.gpus:
        resources["accelerators"] = f"{job.accelerator}:{job.gpus}"
    if _BUCKET.fullmatch(job.storage):
        if job.nodes > 1:
            raise ConfigError(
                f"STORAGE={job.storage} is not for {job.nodes} machines",
                why="a bucket does not show to the others at once what one of them writes",
                todo="name a volume of SkyPilot that all can mount",
            )
        # The only mode that allows appending, which the files of a run need.
        storage: Document = {"file_mounts": {RUNS: {"source": job.storage, "mode": "MOUNT_CACHED"}}}
    else:
        storage = {"volumes": {RUNS: job.storage}}
    return {
        "name": job.name,
        "workdir": ".",
        "num_nodes": job.nodes,
        "resources": resources,
        **storage,
        "run": _start(job, _ON_SKYPILOT),
    }


def _ray(job: Job) -> Document:
    """Make a RayJob of KubeRay, whose driver starts training on each worker; the head does not train."""
    head = {"name": "ray-head", "image": job.image}
    worker: Document = {
        "name": "ray-worker",
        "image": job.image,
        "env": [{"name": "ANNEAL_START", "value": _verbatim(_start(job, _ON_RAY))}],
        "volumeMounts": _mounts(),
    }
    if job.gpus:
        worker["resources"] = {"limits": {job.accelerator: job.gpus}}
    workers = {
        "groupName": "machines",
        "replicas": job.nodes,
        "minReplicas": job.nodes,
        "maxReplicas": job.nodes,
        "rayStartParams": {},
        "template": {"spec": {"containers": [worker], "volumes": _volumes(job)}},
    }
    driver = ["python", "-m", "scripts.ray_machines", f"--machines={job.nodes}", f"--gpus={job.gpus}"]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": shlex.join(driver),
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": {"spec": {"containers": [head]}},
                },
                "workerGroupSpecs": [workers],
            },
        },
    }


def _start(job: Job, words: _Words) -> str:
    """Return the shell script that runs on each node."""
    return f"""\
set -e
directory=$(mktemp -d)
cat > "$directory/.config" <<'{_END}'
{job.configuration.rstrip()}
{_END}
export KCONFIG_CONFIG="$directory/.config"
{_meet(words) if job.finds_first else ""}exec python -m train --runs {RUNS} train
"""


def _meet(words: _Words) -> str:
    """Return shell lines that set the rendezvous endpoint as if given on make's command line.

    Each node gets its own address, and the first one uses it as the endpoint, so that it listens there alone:
    torch recognises neither an address that the node's own name does not resolve to nor, for a while, a name
    that was just assigned.
    """
    return f"""\
export PET_LOCAL_ADDR="{words.own}" # as torchrun --local-addr
export CONFIG_DIST_ENDPOINT="{words.first}:{PORT}"
[ "{words.number}" != 0 ] || CONFIG_DIST_ENDPOINT="$PET_LOCAL_ADDR:{PORT}"
export KCONFIG_MAKE_VARIABLES=CONFIG_DIST_ENDPOINT
"""


def _verbatim(script: str) -> str:
    """Escape `script` for Kubernetes, which would expand $(NAME)."""
    return script.replace("$", "$$")


def _volumes(job: Job) -> list[Document]:
    # Processes of one node exchange data through shared memory, of which a container has only 64 MB.
    shared = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    return [{"name": "runs", "persistentVolumeClaim": {"claimName": job.storage}}, shared]


def _mounts() -> list[Document]:
    return [{"name": "runs", "mountPath": RUNS}, {"name": "shared-memory", "mountPath": "/dev/shm"}]


class _Dumper(yaml.SafeDumper):
    """SafeDumper that writes scripts as literal blocks and uses no aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)

_IN_TRAINJOB = _Words(first="$PET_MASTER_ADDR", own="$THIS_MACHINE", number="$PET_NODE_RANK")
_ON_SKYPILOT = _Words(
    first='$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
    own='$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")',
    number="$SKYPILOT_NODE_RANK",
)
_ON_RAY = _Words(first="$FIRST_MACHINE", own="$THIS_MACHINE", number="$MACHINE_NUMBER")
_OF_KUBERNETES = {
    "storage": (_CLAIM, "the name of a PersistentVolumeClaim that every machine can write to"),
    "accelerator": (_RESOURCE, "what the cluster calls a GPU, such as nvidia.com/gpu"),
}
CLUSTERS: Mapping[str, Cluster] = {
    "kubernetes": Cluster(
        called="Kubernetes with Kubeflow Trainer",
        document=_kubernetes,
        used_by="kubectl create -f run.kubernetes.yaml",
        **_OF_KUBERNETES,
    ),
    "skypilot": Cluster(
        called="SkyPilot",
        document=_skypilot,
        storage=(re.compile(f"{_BUCKET.pattern}|{_CLAIM.pattern}"), "a volume of SkyPilot, or a bucket"),
        accelerator=(_ACCELERATOR, "what SkyPilot calls a GPU, such as H100"),
        used_by="sky jobs launch run.skypilot.yaml, in the source tree",
    ),
    "ray": Cluster(
        called="Ray with KubeRay",
        document=_ray,
        used_by="kubectl create -f run.ray.yaml",
        **_OF_KUBERNETES,
    ),
}

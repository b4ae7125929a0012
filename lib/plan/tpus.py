"""TPU slices by Google's names, such as v4-8: devices, topology, and what schedulers call them.

The number counts TensorCores for v4 and v5p, two to a TPU, and TPUs for v5e and v6e. torch_tpu and
torch_xla show one device per TPU on all of them. Sources: the pages of these generations in Google's TPU
documentation, and its page on planning TPUs in GKE for labels and topologies. A plan is of one host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lib.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A TPU generation: topologies of the slices on one host by the number in their names."""

    cores: int  # TensorCores of a TPU, as the number counts them
    hosts: Mapping[int, str]
    gke: str  # value of GKE's label gke-tpu-accelerator
    sold_as: str = ""  # in names of slices, where Google's API has another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A TPU slice of one host."""

    generation: str
    number: int

    @property
    def devices(self) -> int:
        """Devices: one for each TPU."""
        return self.number // GENERATIONS[self.generation].cores

    @property
    def accelerator(self) -> str:
        """The name for SkyPilot, and after tpu- that for gcloud's --accelerator-type."""
        return f"tpu-{GENERATIONS[self.generation].sold_as or self.generation}-{self.number}"

    @property
    def node_labels(self) -> dict[str, str]:
        """Labels of the GKE nodes that are such a slice."""
        generation = GENERATIONS[self.generation]
        labels = {"accelerator": generation.gke, "topology": generation.hosts[self.number]}
        return {f"cloud.google.com/gke-tpu-{name}": value for name, value in labels.items()}


_SHAPES = {1: "1x1", 4: "2x2", 8: "2x4"}
GENERATIONS: Mapping[str, Generation] = {
    "v4": Generation(cores=2, hosts={8: "2x2x1"}, gke="tpu-v4-podslice"),
    "v5e": Generation(cores=1, hosts=_SHAPES, gke="tpu-v5-lite-podslice", sold_as="v5litepod"),
    "v5p": Generation(cores=2, hosts={8: "2x2x1"}, gke="tpu-v5p-slice"),
    "v6e": Generation(cores=1, hosts=_SHAPES, gke="tpu-v6e-slice"),
}
SEVERAL_HOSTS = "torch_tpu numbers the hosts of a slice by their place in it, torchrun as they come"
_NAME = re.compile(r"tpu-(?P<generation>v[0-9]+[a-z]*)-(?P<number>[0-9]{1,5})")


def slice_names() -> tuple[str, ...]:
    """Return the names of all slices of one host."""
    return tuple(f"tpu-{name}-{number}" for name, each in GENERATIONS.items() for number in each.hosts)


def largest_slices() -> tuple[str, ...]:
    """Return the name of each generation's largest slice of one host."""
    return tuple(f"tpu-{name}-{max(each.hosts)}" for name, each in GENERATIONS.items())


def slice_of(name: str) -> Slice:
    """Return the slice with that name, in lower case. Raises ConfigError, with suggestions, for others."""
    parts = _NAME.fullmatch(name)
    spelled = {each.sold_as: generation for generation, each in GENERATIONS.items() if each.sold_as}
    generation = spelled.get(parts["generation"], parts["generation"]) if parts else ""
    if parts is None or generation not in GENERATIONS:
        raise ConfigError(f"{name!r} is no TPU slice of one host", todo=f"name {', '.join(slice_names())}")
    number, known = int(parts["number"]), GENERATIONS[generation]
    near = " or ".join(f"tpu-{generation}-{each}" for each in known.hosts)
    most = max(known.hosts)
    if number > most and number % most == 0:
        what = f"{name} has {number // known.cores} TPUs, and a host at most {most // known.cores}"
        todo = f"name {near}; torch_xla takes CONFIG_DIST_NNODES of them"
        raise ConfigError(f"{what}; a plan is of one: {SEVERAL_HOSTS}", todo=todo)
    if number not in known.hosts:
        counts = "TensorCores, two to a TPU" if known.cores == 2 else "TPUs"
        raise ConfigError(f"there is no {name}: the number counts {counts}", todo=f"name {near}")
    return Slice(generation=generation, number=number)


def slice_sizes(device: str) -> tuple[int, ...]:
    """Return the numbers of devices, which have that name, of the slices of one host."""
    known = GENERATIONS[device.removeprefix("TPU ")]
    return tuple(number // known.cores for number in known.hosts)


def explain_count(device: str, count: int) -> str:
    """Explain how Google names a slice of `count` devices of that name; "" where it has no such slice."""
    generation = device.removeprefix("TPU ")
    known = GENERATIONS.get(generation)
    if known is None or count * known.cores not in known.hosts:
        return ""
    found = Slice(generation=generation, number=count * known.cores)
    counted = f"{found.number} TensorCores, two to a TPU" if known.cores == 2 else "TPUs"
    return f"{found.accelerator.removeprefix('tpu-')} by Google's name, which counts {counted}"

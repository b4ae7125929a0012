"""The part of the seam to devices that needs torch_tpu, written after the sources of its version 0.2.0.

EXPERIMENTAL, never run on TPU hardware. A TPU is a device of torch like a GPU: operations are carried out
as they come, autocast and process groups are torch's own. What is not like on a GPU:

- A process has one TPU, and it is told which by its environment, before it starts.
- torch_tpu must be loaded before the first backward pass of a process, which counts the devices, and must not
  be where memory is only predicted: that pass may take the TPUs. So torch does not load it
  (`lib/__init__.py`), and `TpuBackend` does.

`python -m lib.devices.tpu` prints the TPUs; `python -m lib.devices.tpu launch N` the environment of N
processes. Both are for a process that must neither take them nor wait for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from typing import Any

import torch

from lib.devices.base import Backend, DistributedBackend, host_copy
from lib.plan.types import Kind

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class TpuBackend(Backend):
    """A run of one process on one TPU."""

    def _device(self, kind: Kind, local_rank: int) -> torch.device:  # noqa: ARG002
        load()
        found = torch.accelerator.current_accelerator()
        assert found is not None and torch.accelerator.is_available(), "torch_tpu has found no TPU"
        return found

    def to_host(self, value: Any) -> Any:
        return host_copy(value)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def release_memory(self) -> None:
        torch.accelerator.empty_cache()

    def peak_memory_bytes(self) -> int | None:
        # 0 where the runtime does not count.
        return torch.accelerator.max_memory_allocated() or None


class DistributedTpuBackend(TpuBackend, DistributedBackend):
    """One of several processes with a TPU each, whose environment `launch_environment` has made."""


def load() -> None:
    """Have torch know the TPUs. Here and not where this module is imported, for it takes devices."""
    os.environ[_AUTOLOAD] = "1"  # the package looks for devices only if that is so
    import torch_tpu  # noqa: F401


def launch_environment(processes: int) -> dict[str, str]:
    """The variables that `processes` processes of this machine must agree on, before they start."""
    import torch_tpu  # noqa: F401 - without its devices

    before = dict(os.environ)
    torch.tpu.distributed.set_tpu_launch_env(nnodes=1, nproc_per_node=processes)  # type: ignore[attr-defined]
    made = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return {name: value for name, value in made.items() if name.startswith("TORCH_TPU_")}


def described() -> list[dict[str, Any]]:
    """The TPUs of this machine as name, total_bytes and free_bytes. A process sees the memory of one."""
    load()
    count = torch.accelerator.device_count()  # before it is opened: of the machine, not of this process
    free_bytes, total_bytes = torch.accelerator.get_memory_info()
    if not total_bytes:
        raise SystemExit("torch_tpu does not tell how much memory a TPU has")
    name = torch.tpu.get_device_name()  # type: ignore[attr-defined]
    return [{"name": name, "total_bytes": total_bytes, "free_bytes": free_bytes}] * count


def main(arguments: list[str]) -> int:
    """Print the TPUs as JSON, or variables as a shell takes them, and nothing that libraries say."""
    with contextlib.redirect_stdout(sys.stderr):
        if arguments[:1] == ["launch"]:
            variables = launch_environment(int(arguments[1]))
            answer = shlex.join(f"{name}={value}" for name, value in variables.items())
        else:
            answer = json.dumps(described())
    print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

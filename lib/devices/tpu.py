"""Backend for TPUs by torch_tpu, written from the sources of its version 0.2.0.

EXPERIMENTAL, never run on TPU hardware. A TPU is a torch device like a GPU: execution is eager, autocast and
process groups are torch's own. Differences from a GPU:

- A process has one TPU, assigned by environment variables before it starts.
- torch_tpu must be loaded before the first backward pass of a process, which counts the devices, and must not
    be loaded where memory is only predicted, since that pass may acquire the TPUs. So torch does not autoload
    it (`lib/__init__.py`), and `TpuBackend` does.

`python -m lib.devices.tpu` prints the TPUs; `python -m lib.devices.tpu launch N` prints the environment of N
processes. Both are for callers that must neither acquire the TPUs nor wait for them.
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
    """Backend of a run with one process on one TPU."""

    def _device(self, kind: Kind, local_rank: int) -> torch.device:  # noqa: ARG002
        load()
        found = torch.accelerator.current_accelerator()
        assert found is not None and torch.accelerator.is_available(), "torch_tpu has found no TPU"
        return found

    def to_host(self, value: Any) -> Any:
        """Copy the tensors of a state to the CPU."""
        return host_copy(value)

    def synchronize(self) -> None:
        """Wait for the TPU."""
        torch.accelerator.synchronize()

    def release_memory(self) -> None:
        """Release cached device memory."""
        torch.accelerator.empty_cache()

    def peak_memory_bytes(self) -> int | None:
        """Peak bytes allocated on the TPU; None where the runtime does not count."""
        # 0 where the runtime does not count.
        return torch.accelerator.max_memory_allocated() or None


class DistributedTpuBackend(TpuBackend, DistributedBackend):
    """Backend of one of several processes with a TPU each, started with `launch_environment`."""


def load() -> None:
    """Register TPUs with torch. Not done at import, because it acquires devices."""
    os.environ[_AUTOLOAD] = "1"  # torch_tpu looks for devices only if this is set
    import torch_tpu  # noqa: F401


def launch_environment(processes: int) -> dict[str, str]:
    """Return the variables that `processes` processes of this node must share before they start."""
    import torch_tpu  # noqa: F401 - without its devices

    before = dict(os.environ)
    torch.tpu.distributed.set_tpu_launch_env(nnodes=1, nproc_per_node=processes)  # type: ignore[attr-defined]
    made = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return {name: value for name, value in made.items() if name.startswith("TORCH_TPU_")}


def described() -> list[dict[str, Any]]:
    """Return the TPUs of this node as name, total_bytes and free_bytes. A process sees the memory of one."""
    load()
    count = torch.accelerator.device_count()  # of the node, as long as no device is opened
    free_bytes, total_bytes = torch.accelerator.get_memory_info()
    if not total_bytes:
        raise SystemExit("torch_tpu does not tell how much memory a TPU has")
    name = torch.tpu.get_device_name()  # type: ignore[attr-defined]
    return [{"name": name, "total_bytes": total_bytes, "free_bytes": free_bytes}] * count


def main(arguments: list[str]) -> int:
    """Print the TPUs as JSON, or variables in shell syntax; output of libraries goes to stderr."""
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

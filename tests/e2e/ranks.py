"""Several ranks out of one process that has loaded torch once: a test pays for one import, not for each."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from lib.devices.backend import open_backend
from lib.devices.base import Backend
from lib.distributed.local_ranks import environment
from lib.plan.types import Kind


def fork_ranks(world: int, work: Callable[[Backend], None], *, kind: Kind = "cpu") -> None:
    """Run `work` on `world` ranks at once. Exits with status 1 where one of them fails."""
    sys.exit(1 if any(endings(world, work, kind=kind)) else 0)


def endings(world: int, work: Callable[[Backend], None], *, kind: Kind = "cpu") -> list[int]:
    """How each of `world` ranks ended that ran `work` at once: an exit status, or less a signal."""
    for name in ("fsdp", "optim", "tensor"):  # once, before there are several
        importlib.import_module(f"torch.distributed.{name}")
    torch.set_num_threads(1)  # before any thread is started, which a fork would not take along
    with tempfile.TemporaryDirectory() as folder:
        environments = [environment(rank, world=world, store=Path(folder, "store")) for rank in range(world)]
        ranks = [pid for variables in environments if (pid := _rank(variables, world, work, kind))]
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


def _rank(variables: dict[str, str], world: int, work: Callable[[Backend], None], kind: Kind) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= variables
    status = 1
    try:
        backend = open_backend(kind, world=world)
        work(backend)
        backend.close()
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

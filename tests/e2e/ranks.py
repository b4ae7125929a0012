"""Several ranks out of one process that has loaded torch once: a test pays for one import, not for each."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from lib.backend import Backend, open_backend
from lib.plan.types import Kind

PATIENCE = timedelta(seconds=120)


def fork_ranks(world: int, work: Callable[[Backend], None], *, kind: Kind = "cpu") -> None:
    """Run `work` on `world` ranks at once. Exits with status 1 where one of them fails."""
    sys.exit(1 if any(endings(world, work, kind=kind)) else 0)


def endings(world: int, work: Callable[[Backend], None], *, kind: Kind = "cpu") -> list[int]:
    """How each of `world` ranks ended that ran `work` at once: an exit status, or less a signal."""
    for name in ("fsdp", "optim", "tensor"):  # once, before there are several
        importlib.import_module(f"torch.distributed.{name}")
    torch.set_num_threads(1)  # before any thread is started, which a fork would not take along
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = [pid for rank in range(world) if (pid := _rank(rank, world, work, kind))]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


def _rank(rank: int, world: int, work: Callable[[Backend], None], kind: Kind) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
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

"""Ranks of one node, none of which listens beyond the loopback interface.

torchrun is for several nodes: the stores of its agent listen on every interface, and unpickle whatever is put
there. On one node the rendezvous is a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STORE_VARIABLE = "ANNEAL_STORE"  # file of the FileStore that `rank_stores` opens
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SHUTDOWN_SECONDS = 5  # then workers that hang after another one failed are killed
_POLL_SECONDS = 0.05


def environment(rank: int, *, world: int, store: Path) -> dict[str, str]:
    """Return the variables of rank `rank` of `world` on this node; they override the user's.

    store: path of a file that does not exist yet, in a directory that only this user can write to.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        STORE_VARIABLE: str(store),
        "TORCHELASTIC_RUN_ID": "local",  # libraries recognise by it that ranks come from the environment
    } | on_interface(LOOPBACK)


def on_interface(name: str) -> dict[str, str]:
    """Return variables that make gloo, NCCL and RCCL listen on that network interface only."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # =: exact name, not a prefix


def run_ranks(command: Sequence[str], *, world: int, folder: Path) -> dict[int, int]:
    """Run `command` on `world` ranks until all have ended, or one has failed, which ends the others.

    folder: a new directory of this user's for the store, and RANK/stdout.log and RANK/stderr.log of all ranks
    but the first, which keeps the streams of this process. Returns the exit statuses other than 0 by rank
    (negative: signals).
    """
    folder.mkdir()  # without parents: the launch's directory is gone once the launch is to end
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            variables = environment(rank, world=world, store=folder / "store")
            processes.append(_start(command, variables, folder / str(rank) if rank else None))
        while None in (statuses := [process.poll() for process in processes]) and not any(statuses):
            time.sleep(_POLL_SECONDS)
    finally:
        _end(processes)
    return {rank: process.returncode for rank, process in enumerate(processes) if process.returncode}


def _start(command: Sequence[str], variables: dict[str, str], logs: Path | None) -> subprocess.Popen[bytes]:
    with contextlib.ExitStack() as opened:
        out = err = None
        if logs is not None:
            logs.mkdir()
            out, err = (opened.enter_context((logs / f"std{end}.log").open("wb")) for end in ("out", "err"))
        # In its own session, since Ctrl-C is for the supervisor, which signals the first rank.
        environment = ["env", *(f"{name}={value}" for name, value in variables.items())]
        return subprocess.Popen([*environment, *command], stdout=out, stderr=err, start_new_session=True)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End running process groups with SIGTERM, and with SIGKILL after SHUTDOWN_SECONDS."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for process in processes:
            # A process blocked in a driver survives even SIGKILL.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

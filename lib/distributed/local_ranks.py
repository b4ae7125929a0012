"""Processes that train one model on this node, of which nothing listens beyond the loopback device.

torchrun is for several nodes: the stores of its agent listen on every interface, and unpickle what anybody
puts there. On one node ranks find each other by a file.
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

STORE_VARIABLE = "ANNEAL_STORE"  # names the file by which `rank_stores` has ranks find each other
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
SHUTDOWN_SECONDS = 5  # until workers that hang after another one failed are killed
_POLL_SECONDS = 0.05


def environment(rank: int, *, world: int, store: Path) -> dict[str, str]:
    """Variables of rank `rank` of `world` on this node. They are not the user's choice.

    store: a file that is not there yet, in a directory that only this user can write to.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        STORE_VARIABLE: str(store),
        "TORCHELASTIC_RUN_ID": "local",  # by which libraries see that ranks are given by the environment
    } | on_interface(LOOPBACK)


def on_interface(name: str) -> dict[str, str]:
    """Variables that have gloo and NCCL, which RCCL follows, listen on that network interface alone."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # =: not all that begin so


def run_ranks(command: Sequence[str], *, world: int, folder: Path) -> dict[int, int]:
    """Run `command` on `world` ranks until all have ended, or one has failed, which ends the others.

    folder: a new one of this user's for the store, and RANK/stdout.log and RANK/stderr.log of all ranks
    but the first, which keeps the streams of this process.
    Returns the exit statuses of those that did not end well, by rank (negative: signals).
    """
    folder.mkdir(parents=True)
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
        # In a session of its own, for Ctrl-C is for the supervisor, who tells the first rank.
        told = ["env", *(f"{name}={value}" for name, value in variables.items())]
        return subprocess.Popen([*told, *command], stdout=out, stderr=err, start_new_session=True)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that go on by SIGTERM, and by SIGKILL those that go on after that, with what they started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for process in processes:
            # Even SIGKILL does not end one that a driver holds.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

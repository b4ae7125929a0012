"""Processes of one machine: what they are told, how they end, and where their stores listen."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lib.distributed.local_ranks import LOOPBACK, environment, run_ranks
from lib.distributed.rank_stores import open_rank_store, serve_at, serve_unless_served
from tests.e2e.listeners import open_addresses

PATIENCE = timedelta(seconds=30)
needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for sockets in /proc")


def test_what_the_user_has_for_other_networks_is_not_for_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RANK"):
        monkeypatch.setenv(name, "eth0")
    told = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'
    assert run_ranks(["sh", "-c", told], world=2, folder=tmp_path / "ranks") == {}
    assert (tmp_path / "ranks/1/stdout.log").read_text() == f"1 1 2 2 {LOOPBACK} ={LOOPBACK}\n"


def test_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = '[ "$RANK" = 1 ] || exec sleep 600; echo gone >&2; exit 3'
    failed = run_ranks(["sh", "-c", script], world=3, folder=tmp_path / "ranks")
    assert failed == {0: -signal.SIGTERM, 1: 3, 2: -signal.SIGTERM}
    assert (tmp_path / "ranks/1/stderr.log").read_text() == "gone\n"


def test_ranks_of_one_machine_meet_in_a_file(tmp_path: Path) -> None:
    variables = environment(0, world=1, store=tmp_path / "store")
    store = open_rank_store(variables, rank=0, world=1, timeout=PATIENCE)
    store.set("name", "value")
    assert isinstance(store, dist.FileStore) and store.get("name") == b"value"


@needs_proc
def test_a_store_listens_at_one_address_and_torchrun_would_take_it() -> None:
    before = open_addresses([os.getpid()])
    store = serve_at("127.0.0.1", 0, timeout=PATIENCE)
    assert open_addresses([os.getpid()]) == before
    client = dist.TCPStore("127.0.0.1", store.port, is_master=True, multi_tenant=True, timeout=PATIENCE)
    client.set("name", "value")
    assert store.get("name") == b"value" and open_addresses([os.getpid()]) == before
    assert serve_unless_served(f"127.0.0.1:{store.port}", timeout=PATIENCE) is None


@needs_proc
def test_what_is_only_a_name_is_served_everywhere() -> None:
    """For what a name leads to on its own machine need not be where it leads the others."""
    before = open_addresses([os.getpid()])
    store = serve_at("localhost", 0, timeout=PATIENCE)
    assert open_addresses([os.getpid()]) - before == {f"0.0.0.0:{store.port}"}

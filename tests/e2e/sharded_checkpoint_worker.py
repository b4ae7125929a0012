"""Ranks that save and load sharded checkpoints: `sharded_checkpoint_worker DIRECTORY [kill]`.

Four, two and three processes train one run, each from the checkpoint of the ones before, and leave what they
found in DIRECTORY/found.pt. With kill, saves of two processes are killed, one before each change of the file
system.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lib.devices.base import Backend
from lib.distributed.fsdp import Entries, Gatherer, Rows
from lib.plan.types import Layout
from lib.runs import checkpoint, dcp
from lib.runs.console import Console
from lib.runs.directory import RunDir
from tests.e2e.ranks import endings
from tests.e2e.sharded_worker import data, digest, saving_job, weights_and_states
from tests.lib.runs.test_checkpoint_kill import die_before_change
from train.job import Job, Progress
from train.loop import load_state_dict, state_dict, train
from train.record import AsyncCheckpointer, Record, RunRecord

FIRST = 3  # steps of the first four processes
# The processes that follow; the second save beside training.
CHAIN = (Layout(strategy="zero2", world=2, shard=2), Layout(strategy="zero1", world=3, shard=1))
SAVED_AS = {
    "fsdp": Layout(strategy="fsdp", world=4, shard=4),
    "hsdp": Layout(strategy="hsdp", world=4, shard=2),
    "zero1": Layout(strategy="zero1", world=4, shard=1),
    "ddp": Layout(strategy="ddp", world=4, shard=1),
}
FORMS = {name: ("full", "sharded", *(["async"] if name in ("fsdp", "zero1") else [])) for name in SAVED_AS}
BEFORE, KILLED = 1, 2  # the step of the checkpoint that is there, and of the save that is killed
ROWS = 5  # of a weight that two processes have


def run_of(directory: Path, name: str, backend: Backend) -> RunDir:
    path = directory / name
    if backend.is_main and not path.exists():
        made = RunDir.create(directory / "new", model="m", identity="0" * 8, files={"config": ""})
        made.release()
        made.path.rename(path)
    backend.broadcast(None)
    return RunDir(path)


def job_in(run: RunDir, layout: Layout, backend: Backend, *, sharded: bool, **changes: Any) -> Job:
    record: Any = Record()
    if backend.is_main:
        record = RunRecord(run, Console(run.log), started=0.0, keep_last=9)
        record.begin(0, None)
    job = saving_job(layout, backend, record=record, keep_best=False, **changes)
    job.shard_directory = run.checkpoints if sharded else None
    return job


def first_steps(name: str) -> int:
    """How many steps the first processes save: the others go on from those of FSDP."""
    return FIRST if name == "fsdp" else 1


def first(directory: Path, _: dict[str, Any], backend: Backend) -> None:
    """The same steps with every strategy, in both formats, and sharded beside training."""
    for name, layout in SAVED_AS.items():
        for form in FORMS[name]:
            run = run_of(directory, f"{name}-{form}", backend)
            every = {"checkpoint_interval_steps": 1, "checkpoint_async": form == "async"}
            every["max_steps"] = first_steps(name)
            job = job_in(run, layout, backend, sharded=form != "full", **every)
            train(job, Progress())
            if isinstance(job.record, RunRecord):
                job.record.close()
            backend.broadcast(None)


def resumed(run: RunDir, backend: Backend, layout: Layout, **changes: Any) -> tuple[Job, Progress]:
    job = job_in(run, layout, backend, sharded=True, **changes)
    loaded = checkpoint.load(run.checkpoints, log=job.record.log, ranks=backend)
    assert loaded is not None
    return job, load_state_dict(job, loaded[1])


def chain(name: str, *, aside: bool) -> Callable[[Path, dict[str, Any], Backend], None]:
    def work(directory: Path, found: dict[str, Any], backend: Backend) -> None:
        layout = next(each for each in CHAIN if each.world == backend.world)
        run, number = RunDir(directory / name), FIRST + CHAIN.index(layout)
        job, progress = resumed(run, backend, layout, max_steps=number + 1, checkpoint_async=aside)
        state = state_dict(job, progress)
        if backend.is_main:
            found[f"loaded by {backend.world}"] = digest(weights_and_states(state))
        train(job, progress)
        state = state_dict(job, progress)
        if backend.is_main:
            found[f"trained by {backend.world}"] = digest(weights_and_states(state))

    return work


def damaged(directory: Path, found: dict[str, Any], backend: Backend) -> None:
    """A file of the newest is damaged: which checkpoint is loaded, and what is logged."""
    run, said = RunDir(directory / "damaged"), list[str]()
    loaded = checkpoint.load(run.checkpoints, log=said.append, ranks=backend)
    assert loaded is not None
    steps = backend.all_reduce_max((loaded[0], -loaded[0]))
    if backend.is_main:
        found["damaged"] = (steps, said)


def ranked(world: int, directory: Path, work: Callable[[Path, dict[str, Any], Backend], None]) -> None:
    def of_rank(backend: Backend) -> None:
        found = torch.load(directory / "found.pt") if (directory / "found.pt").exists() else {}
        work(directory, found, backend)
        if backend.is_main:
            torch.save(found, directory / "found.pt")

    assert endings(world, of_rank) == [0] * world, work


class Kept(Record):
    """Rank 0's record without the rest of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: Mapping[str, Any], *, best: bool, write_shards: Any = None) -> None:
        checkpoint.save(
            self.folder, step=step, state=state, keep_last=1, best=best, write_shards=write_shards
        )


def parts_of(step: int, rank: int) -> dict[str, Any]:
    whole = torch.arange(ROWS * 2.0).view(ROWS, 2) + step
    own = whole[:3] if rank == 0 else whole[3:]
    entries = {rank: {"step": torch.tensor(float(step)), "moment": whole + rank}}
    optimizer = {"state": Entries(entries), "param_groups": [{"params": [0, 1]}]}
    return {
        "model": {"weight": Rows(own, (ROWS, 2)), "buffer": torch.full((2,), float(step))},
        "optimizer": optimizer,
        "ema": None,
        "progress": {"step": step},
    }


def keep(folder: Path, step: int, backend: Backend) -> None:
    saver = AsyncCheckpointer(Kept(folder), asynchronous=False, sharded=folder)
    gatherer = backend.gatherer(Layout(strategy="zero1", world=backend.world, shard=1))
    assert isinstance(gatherer, Gatherer)
    saver.save(step, parts_of(step, backend.rank), gatherer, best=False)


def kill(directory: Path) -> dict[tuple[int, int], tuple[int, list[int]]]:
    """Which step is found where rank R dies before its Nth change, and how both ended, by (R, N)."""
    os.fsync = lambda _: None
    found = {}
    assert endings(2, lambda backend: keep(directory / "kill", BEFORE, backend)) == [0, 0]
    for rank in (0, 1):
        for point in range(100):
            folder = directory / f"kill-{rank}-{point}"
            shutil.copytree(directory / "kill", folder)

            def save(backend: Backend, folder: Path = folder, rank: int = rank, point: int = point) -> None:
                if backend.rank == rank:
                    die_before_change(point)
                keep(folder, KILLED, backend)

            ended = endings(2, save)
            found[rank, point] = (valid_step(folder), ended)
            shutil.rmtree(folder)
            if ended == [0, 0]:
                break
    return found


def valid_step(folder: Path) -> int:
    """The step of the checkpoint that is loaded, which has every number of that step; nothing is logged."""
    said: list[str] = []
    loaded = checkpoint.load(folder, log=said.append)
    assert loaded is not None and said == [], said
    step, state = loaded

    def read(_: str, leaf: Any) -> Any:
        return leaf.read() if isinstance(leaf, dcp.StoredTensor) else leaf

    whole = torch.arange(ROWS * 2.0).view(ROWS, 2) + step
    expected = {
        "model": {"weight": whole, "buffer": torch.full((2,), float(step))},
        "optimizer": {
            "state": {r: {"step": torch.tensor(float(step)), "moment": whole + r} for r in (0, 1)},
            "param_groups": [{"params": [0, 1]}],
        },
        "ema": None,
        "progress": {"step": step},
    }
    assert digest(dcp.map_named(state, read, "state")) == digest(expected)
    return step


def main() -> None:
    directory = Path(sys.argv[1])
    if "kill" in sys.argv:
        torch.save(kill(directory), directory / "kills.pt")
        return
    data()  # once, before there are several
    ranked(4, directory, first)
    shutil.copytree(directory / "fsdp-sharded", directory / "damaged")
    shutil.copytree(directory / "fsdp-sharded", directory / "chain")
    for layout, aside in zip(CHAIN, (False, True), strict=True):
        ranked(layout.world, directory, chain("chain", aside=aside))
    newest = sorted((directory / "damaged" / "ckpt").glob("step-*"))[-1]
    part = bytearray((newest / "__2_0.distcp").read_bytes())
    part[len(part) // 2] ^= 1
    (newest / "__2_0.distcp").write_bytes(part)
    ranked(2, directory, damaged)


if __name__ == "__main__":
    main()

"""A save that is killed. The helpers run in a process of their own, which forks others."""

import errno
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.errors import CheckpointError
from lib.runs import checkpoint
from tests.e2e.forked import Forked
from tests.lib.runs.test_checkpoint import load, save, visible

pytestmark = pytest.mark.slow


def run_alone(function: str, directory: Path) -> str:
    single = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork copies one thread
    program = Forked(__name__, [function, str(directory)], environment=single, output=directory / "output")
    output, _ = program.communicate(timeout=120)
    assert program.returncode == 0, output
    return output


@pytest.mark.long
def test_killed_at_random_moments(tmp_path: Path) -> None:
    counts = json.loads(run_alone("kill_at_random", tmp_path))
    assert counts["kills"] == 40
    assert counts["saves"] >= 20, "the children hardly got to save; nothing was tried"
    assert counts["torn"] > 5, "no kill fell into a save; nothing was tried"


def test_killed_before_every_change_of_the_file_system(tmp_path: Path) -> None:
    counts = json.loads(run_alone("kill_at_every_change", tmp_path))
    assert set(counts) == set(SCENARIOS)
    assert min(counts.values()) >= 8


def kill_at_random(directory: Path) -> None:
    """Children save one checkpoint after the other and report each; after a kill none of those is lost."""
    torch.set_num_threads(1)
    os.fsync = ignore  # a killed process loses nothing that it wrote
    random.seed(1)
    began = time.perf_counter()
    for step in range(10):
        save(directory / "timing", step)
    save_seconds = (time.perf_counter() - began) / 10
    directory /= "ckpt"
    reported = saves = torn = 0
    for kill in range(40):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            for step in range(reported, 1_000_000):  # begins with the step that it resumed from
                save(directory, step, keep_last=1 + kill % 3, best=step % 5 == 0)
                os.write(writer, b"%d\n" % step)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            first = pipe.readline() if kill % 2 else ""
            time.sleep(random.uniform(0, 5 * save_seconds))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            done = [int(line) for line in (first + pipe.read()).split()]
        saves += len(done)
        torn += any(name.startswith(".") for name in (visible(directory) if directory.exists() else []))
        if done or reported:
            step, _, said = load(directory)
            assert said == []
            assert step in (done[-1], done[-1] + 1) if done else step == reported
            reported = step
    save(directory, reported + 1)
    assert not [name for name in visible(directory) if name.startswith(".")]
    print(json.dumps({"kills": 40, "saves": saves, "torn": torn}))


# What was saved before, the save that is killed, and the (step, version) that may be found afterwards.
SCENARIOS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], set[tuple[int, int]]]] = {
    "next": (
        [{"step": 1, "best": True}, {"step": 2}, {"step": 3}],
        {"step": 4, "keep_last": 2, "best": True},
        {(3, 0), (4, 9)},
    ),
    "only one kept": ([{"step": 1}], {"step": 2, "keep_last": 1}, {(1, 0), (2, 9)}),
    "same step": ([{"step": 1}], {"step": 1, "keep_last": 1}, {(1, 0), (1, 9)}),
    "went back": (
        [{"step": 1}, {"step": 2}, {"step": 3, "best": True}],
        {"step": 2, "keep_last": 3},
        {(3, 0), (2, 0), (2, 9)},
    ),
}


def kill_at_every_change(directory: Path) -> None:
    """Die before the 1st, 2nd, 3rd ... change that a save makes to the file system, until it ends."""
    torch.set_num_threads(1)
    os.fsync = ignore
    points = {}
    for name, (before, killed, allowed) in SCENARIOS.items():
        for point in range(1000):
            ckpt = directory / f"{name}-{point}"
            for options in before:
                save(ckpt, **options)
            child = os.fork()
            if child == 0:
                die_before_change(point)
                save(ckpt, version=9, **killed)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            step, version, said = load(ckpt)
            assert (step, version) in allowed and said == [], (name, point, step, version, said)
            best = checkpoint.load(ckpt, which="best", log=print)
            assert best is None or best[0] in {options["step"] for options in [*before, killed]}
            os.fsync = refuse  # the next save finds the disk full: cleaning up must not have cost anything
            with pytest.raises(CheckpointError):
                save(ckpt, 5)
            assert load(ckpt)[:2] == (step, version), (name, point)
            os.fsync = ignore
            save(ckpt, 5, version=2)
            assert load(ckpt) == (5, 2, []) and not [n for n in visible(ckpt) if n.startswith(".")], (
                name,
                point,
            )
            if status == 0:
                assert (step, version) == (killed["step"], 9)
                break
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        points[name] = point
    print(json.dumps(points))


def ignore(_: int) -> None:
    """A sync that does nothing."""


def refuse(_: int) -> None:
    """A sync that finds the disk full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die_before_change(point: int) -> None:
    changes = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        creates = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if creates or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            changes += 1
            if changes > point:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    {"kill_at_random": kill_at_random, "kill_at_every_change": kill_at_every_change}[sys.argv[1]](
        Path(sys.argv[2])
    )

"""How many runs train at a time: by processors, by memory, by what was asked, and by what a run has taken."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from lib import kconf
from lib.errors import ConfigError
from lib.sweeps.concurrency import Crew, Demand, decide, distinct
from lib.sweeps.runner import compose_text
from scripts.sweep import jobs_of
from tests.support.configs import load_hardware

ROOT = Path(__file__).resolve().parents[3]
GB = 10**9


def demand(
    run_gb: float | None,
    *,
    free_gb: float = 20.0,
    processors: int = 4,
    processes: int = 1,
    why: str = "predicted",
) -> Demand:
    machine = load_hardware("cpu-8g")
    memory = dataclasses.replace(machine.devices[0], free_bytes=round(free_gb * GB))
    hardware = dataclasses.replace(machine, devices=(memory,), cpu_count=processors)
    run_bytes = None if run_gb is None else run_gb * GB
    return Demand(hardware=hardware, run_bytes=run_bytes, processes=processes, why=why)


@pytest.mark.parametrize(
    ("found", "most", "workers"),
    [
        (demand(0.5), 9, 4),  # processors
        (demand(0.5), 3, 3),  # runs
        (demand(7.0), 9, 2),  # memory: 16 GB may be used
        (demand(8.1), 9, 1),
        (demand(30.0), 9, 1),
        (demand(0.5, processes=2), 9, 2),
        (demand(0.5, processes=8), 9, 1),
    ],
)
def test_as_many_as_there_is_room_for(found: Demand, most: int, workers: int) -> None:
    assert decide(found, jobs=None, most=most)[0] == workers


def test_the_reason_is_told_in_a_line() -> None:
    room = "16.00 GB of 20.00 GB free may be used"
    assert decide(demand(7.0), jobs=None, most=9)[1] == (
        f"2 workers: 4 processors; a run needs 7.00 GB (predicted), {room}"
    )
    assert decide(demand(30.0, processors=1), jobs=None, most=9)[1] == (
        f"1 worker: 1 processor; a run needs 30.00 GB (predicted), {room}; WARNING: 1 need 30.00 GB"
    )


@pytest.mark.parametrize(
    ("found", "jobs", "warned"),
    [
        (demand(4.0), 4, ""),
        (demand(4.1), 4, "; WARNING: 4 need 16.40 GB"),
        (demand(0.1), 5, "; WARNING: 5 processes wait for each other"),
        (demand(0.1, processes=2), 3, "; WARNING: 6 processes wait for each other"),
    ],
)
def test_what_is_asked_for_holds_and_warns_where_it_does_not_fit(
    found: Demand, jobs: int, warned: str
) -> None:
    workers, line = decide(found, jobs=jobs, most=9)
    assert workers == jobs and line.startswith(f"{jobs} workers: JOBS={jobs}; 4 processors; a run needs ")
    assert line.endswith(f"may be used{warned}")


def test_on_a_gpu_runs_train_one_at_a_time() -> None:
    found = dataclasses.replace(demand(None), hardware=load_hardware("h200"))
    workers, line = decide(found, jobs=None, most=9)
    assert workers == 1 and "train one at a time" in line
    workers, line = decide(found, jobs=2, most=9)
    assert workers == 2 and "WARNING: they share NVIDIA H200" in line


def crew_of(jobs: int | None, found: Demand, *, most: int) -> tuple[Crew, str]:
    crew = Crew(jobs, lambda _: found)
    return crew, crew.choose([], most=most)


def test_one_is_measured_where_nobody_can_predict() -> None:
    crew, line = crew_of(None, demand(None, why="it asks the device"), most=9)
    assert (crew.workers, crew.most) == (1, 4) and "(it asks the device)" in line
    assert crew.learn(3.0 * GB).startswith("4 workers: ") and crew.workers == 4
    assert crew.learn(2.0 * GB) == crew.learn(3.5 * GB) == "", "as much as was known, or enough still"
    assert crew.learn(7.0 * GB).startswith("2 workers: ") and crew.workers == 2


def test_what_was_asked_for_is_not_changed_by_what_a_run_took() -> None:
    crew, _ = crew_of(2, demand(0.5), most=9)
    assert crew.learn(9.0 * GB).endswith("WARNING: 2 need 18.00 GB") and crew.workers == 2
    assert crew.learn(9.5 * GB) == "", "told once"
    with pytest.raises(ConfigError, match="JOBS=two is no number of runs at a time; without it as many"):
        jobs_of("two")
    with pytest.raises(ConfigError, match="JOBS=0 is no number of runs"):
        Crew(0, lambda _: demand(1.0))


def test_no_more_train_at_a_time_than_there_are_workers() -> None:
    crew, _ = crew_of(None, demand(None), most=9)
    begun, done = list[int](), threading.Event()

    def train(number: int) -> None:
        with crew.place():
            begun.append(number)
            assert done.wait(30)
            crew.learn(7.0 * GB)

    def at_a_time() -> int:
        """Of four that want to."""
        done.clear()
        threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        found = len(begun)
        done.set()
        for thread in threads:
            thread.join(30)
        assert len(begun) == 4
        begun.clear()
        return found

    assert at_a_time() == 1, "nobody knows yet what one takes"
    assert crew.workers == at_a_time() == 2


def test_memory_is_predicted_once_for_runs_that_take_the_same() -> None:
    base = compose_text(ROOT, "lenet5")

    def resolved(**settings: str) -> kconf.Resolved:
        given = {f"CONFIG_{name}": value for name, value in ({"BUDGET_STEPS": "y"} | settings).items()}
        return kconf.load_written(base, root=ROOT, overrides=given)

    usual, long, without = resolved(), resolved(SEED="7", MAX_STEPS="9"), resolved(LABEL_SMOOTHING="0.1")
    wide, fast = resolved(TARGET_EFFECTIVE_BATCH="512"), resolved(LEARNING_RATE="0.3")
    assert len(distinct([usual, long, fast])) == 1
    assert len(distinct([usual, without, wide, long])) == 3, "0.1 and 0 are two kinds"

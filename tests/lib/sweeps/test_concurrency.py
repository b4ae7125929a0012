"""Number of concurrent runs: by CPUs, by memory, by JOBS=, and by the measured peak of a run."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest

from lib import kconf
from lib.errors import ConfigError
from lib.sweeps.concurrency import Concurrency, HostMemoryEstimate, choose_workers, distinct
from lib.sweeps.paired_comparison import whole_number
from lib.sweeps.runner import compose_text
from tests.support.configs import load_hardware

ROOT = Path(__file__).resolve().parents[3]
GB = 10**9


def host_memory(
    run_gb: float | None,
    *,
    free_gb: float = 20.0,
    processors: int = 4,
    processes: int = 1,
    why: str = "predicted",
) -> HostMemoryEstimate:
    machine = load_hardware("cpu-8g")
    memory = dataclasses.replace(machine.devices[0], free_bytes=round(free_gb * GB))
    hardware = dataclasses.replace(machine, devices=(memory,), cpu_count=processors)
    run_bytes = None if run_gb is None else run_gb * GB
    return HostMemoryEstimate(hardware=hardware, run_bytes=run_bytes, processes=processes, why=why)


@pytest.mark.parametrize(
    ("found", "runs", "workers"),
    [
        (host_memory(0.5), 9, 4),  # processors
        (host_memory(0.5), 3, 3),  # runs
        (host_memory(7.0), 9, 2),  # memory: 16 GB may be used
        (host_memory(8.1), 9, 1),
        (host_memory(30.0), 9, 1),
        (host_memory(0.5, processes=2), 9, 2),
        (host_memory(0.5, processes=8), 9, 1),
    ],
)
def test_workers_are_limited_by_cpus_runs_and_memory(
    found: HostMemoryEstimate, runs: int, workers: int
) -> None:
    assert choose_workers(found, jobs=None, runs=runs)[0] == workers


def test_the_reason_is_a_line() -> None:
    room = "16.00 GB of 20.00 GB free are usable"
    assert choose_workers(host_memory(7.0), jobs=None, runs=9)[1] == (
        f"2 workers: 4 CPUs; a run needs 7.00 GB (predicted); {room}"
    )
    assert choose_workers(host_memory(30.0, processors=1), jobs=None, runs=9)[1] == (
        f"1 worker: 1 CPU; a run needs 30.00 GB (predicted); {room}; WARNING: 1 need 30.00 GB"
    )


@pytest.mark.parametrize(
    ("found", "jobs", "warned"),
    [
        (host_memory(4.0), 4, ""),
        (host_memory(4.1), 4, "; WARNING: 4 need 16.40 GB"),
        (host_memory(0.1), 5, "; WARNING: 5 processes share them"),
        (host_memory(0.1, processes=2), 3, "; WARNING: 6 processes share them"),
    ],
)
def test_jobs_are_honoured_with_a_warning_where_they_do_not_fit(
    found: HostMemoryEstimate, jobs: int, warned: str
) -> None:
    workers, line = choose_workers(found, jobs=jobs, runs=9)
    assert workers == jobs and line.startswith(f"{jobs} workers: JOBS={jobs}; 4 CPUs; a run needs ")
    assert line.endswith(f"are usable{warned}")


def test_on_a_gpu_runs_train_one_at_a_time() -> None:
    found = dataclasses.replace(host_memory(None), hardware=load_hardware("h200"))
    workers, line = choose_workers(found, jobs=None, runs=9)
    assert workers == 1 and "train one at a time" in line
    workers, line = choose_workers(found, jobs=2, runs=9)
    assert workers == 2 and "WARNING: they share NVIDIA H200" in line


def limited(jobs: int | None, found: HostMemoryEstimate, *, runs: int) -> tuple[Concurrency, str]:
    concurrency = Concurrency(jobs, lambda _: found)
    return concurrency, concurrency.choose([], runs=runs)


def test_one_run_is_measured_where_memory_is_not_predicted() -> None:
    concurrency, line = limited(None, host_memory(None, why="it asks the device"), runs=9)
    assert (concurrency.workers, concurrency.max_workers) == (1, 4) and "(it asks the device)" in line
    assert concurrency.record_peak(3.0 * GB).startswith("4 workers: ") and concurrency.workers == 4
    assert concurrency.record_peak(2.0 * GB) == concurrency.record_peak(3.5 * GB) == "", (
        "as much as was known, or enough still"
    )
    assert concurrency.record_peak(7.0 * GB).startswith("2 workers: ") and concurrency.workers == 2


def test_jobs_are_not_changed_by_a_measured_peak() -> None:
    concurrency, _ = limited(2, host_memory(0.5), runs=9)
    assert concurrency.record_peak(9.0 * GB).endswith("WARNING: 2 need 18.00 GB") and concurrency.workers == 2
    assert concurrency.record_peak(9.5 * GB) == "", "reported once"
    for jobs in ("two", "0"):
        with pytest.raises(ConfigError, match=f"JOBS={jobs} is not a whole number from 1"):
            whole_number(jobs, "JOBS")


def test_no_more_train_at_a_time_than_there_are_workers() -> None:
    concurrency, _ = limited(None, host_memory(None), runs=9)
    begun, done = list[int](), threading.Event()

    def train(number: int) -> None:
        with concurrency.slot():
            begun.append(number)
            assert done.wait(30)
            concurrency.record_peak(7.0 * GB)

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

    assert at_a_time() == 1, "no run was measured yet"
    assert concurrency.workers == at_a_time() == 2


def test_memory_is_predicted_once_for_runs_of_equal_memory() -> None:
    base = compose_text(ROOT, "lenet5")

    def resolved(**settings: str) -> kconf.Resolved:
        given = {f"CONFIG_{name}": value for name, value in ({"BUDGET_STEPS": "y"} | settings).items()}
        return kconf.load_written(base, root=ROOT, overrides=given)

    usual, long, without = resolved(), resolved(SEED="7", MAX_STEPS="9"), resolved(LABEL_SMOOTHING="0.1")
    wide, fast = resolved(TARGET_EFFECTIVE_BATCH="512"), resolved(LEARNING_RATE="0.3")
    assert len(distinct([usual, long, fast])) == 1
    assert len(distinct([usual, without, wide, long])) == 3, "0.1 and 0 are two kinds"

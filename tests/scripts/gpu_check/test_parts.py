"""The checks on a real GPU, as far as they can be tried without one."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lib.errors import OutOfMemory, ToolkitError
from lib.memory.allocator import MIB
from lib.plan.probe_search import smallest_near_best
from scripts.gpu_check.cases import Setting
from scripts.gpu_check.parts import Bench, ladder, parse, part_1, part_2, part_3
from scripts.gpu_check.trials import HANDLERS, largest
from scripts.gpu_check.worker import Child, serve
from tests.support.configs import ROOT

# A worker without the toolkit: answers "double", dies of "die", sleeps at "sleep", chatters at "noise".
PLAYED = """
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    if request["what"] == "die":
        print('{"status": "o', end="", flush=True)
        sys.exit(7)
    if request["what"] == "sleep":
        time.sleep(60)
    status = "out_of_memory" if request["what"] == "fill" else "ok"
    answer = {"status": status, "double": 2 * request.get("number", 0), "pid": os.getpid()}
    print(json.dumps(answer), flush=True)
"""


def played() -> Child:
    return Child(log=subprocess.DEVNULL, command=(sys.executable, "-c", PLAYED))


@contextmanager
def bench(path: Path, child: Any = None, *, part: int = 1, seconds: float = 60) -> Iterator[Bench]:
    with path.open("a") as file:
        yield Bench(file, child, part=part, seconds=seconds)


# Rows


def test_rows_are_appended_and_on_the_disk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[str] = []
    path = tmp_path / "part1.jsonl"
    monkeypatch.setattr(os, "fsync", lambda _: synchronised.append(path.read_text()))
    for number in (1, 2):
        with bench(path) as one:
            one.add("context", number=number)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"part": 1, "kind": "context", "number": 1},
        {"part": 1, "kind": "context", "number": 2},
    ]
    assert [text.count("\n") for text in synchronised] == [1, 2], "flushed before it is synchronised"


# Search


@pytest.mark.parametrize("step", [1, 32])
@pytest.mark.parametrize("truth", [0, 1, 31, 32, 64, 75, 95, 96, 640, 4095, 65536])
@pytest.mark.parametrize("start", [1, 32, 74, 80, 5000, 10**6])
def test_the_largest_is_found_from_any_start(truth: int, step: int, start: int) -> None:
    tried: list[int] = []

    def works(size: int) -> bool:
        assert size % step == 0 and 0 < size <= 65536 and size not in tried
        tried.append(size)
        return size <= truth

    found = largest(works, start=start, step=step, most=65536)
    best = truth // step * step
    assert found % step == 0 and found <= best
    assert best - found <= max(step - 1, found // 50) and len(tried) <= 20
    if best <= 50:
        assert found == best


def test_a_good_start_needs_few_trials() -> None:
    tried: list[int] = []
    assert largest(lambda size: bool(tried.append(size)) or size <= 75, start=74, step=1, most=4096) == 75
    assert len(tried) <= 5


def test_the_smallest_that_is_nearly_the_fastest_is_used() -> None:
    assert smallest_near_best({8: 500.0, 16: 960.0, 32: 971.0, 64: 1000.0}) == 32
    assert smallest_near_best({8: 970.0, 64: 1000.0}) == 8
    assert smallest_near_best({8: 969.9, 64: 1000.0}) == 64
    assert smallest_near_best({64: 900.0, 128: 1000.0, 256: 800.0}) == 128


def test_the_ladder() -> None:
    assert ladder(64, step=1) == (8, 16, 32, 64)
    assert ladder(100, step=32) == (32, 96)
    assert ladder(1, step=1) == (1,)


def test_a_deadline_passes(tmp_path: Path) -> None:
    with bench(tmp_path / "rows", seconds=0) as none, bench(tmp_path / "rows") as some:
        assert none.left_seconds == 0 and 59 < some.left_seconds <= 60


# Child and worker


def test_a_child_answers_and_stays() -> None:
    with played() as child:
        one, two = (child.ask({"what": "double", "number": number}, seconds=30) for number in (1, 2))
    assert (one["double"], two["double"]) == (2, 4) and one["pid"] == two["pid"]


def test_a_child_that_ran_out_of_memory_is_replaced() -> None:
    with played() as child:
        one = child.ask({"what": "fill"}, seconds=30)
        two = child.ask({"what": "double"}, seconds=30)
    assert one["status"] == "out_of_memory" and two["status"] == "ok" and one["pid"] != two["pid"]


def test_a_child_that_dies_or_hangs_is_told_and_replaced() -> None:
    with played() as child:
        assert child.ask({"what": "die"}, seconds=30) == {"status": "died", "exit_status": 7}
        assert child.ask({"what": "sleep"}, seconds=0.2) == {"status": "timed_out", "seconds": 0.2}
        assert child.ask({"what": "double", "number": 3}, seconds=30)["double"] == 6


def test_a_command_that_does_not_run_at_all_is_told() -> None:
    with Child(log=subprocess.DEVNULL, command=(sys.executable, "-c", "raise SystemExit(3)")) as child:
        answer = child.ask({"what": "double"}, seconds=30)
    assert answer == {"status": "died", "exit_status": 3}


def test_a_worker_tells_memory_from_other_faults() -> None:
    def fail(error: Exception) -> Any:
        raise error

    faults = {
        "toolkit": OutOfMemory("out of memory at micro-batch 64", why="CUDA"),
        "cuda": RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nand more"),
        "other": RuntimeError("shapes differ"),
        "requested": ToolkitError("Lightning is not installed"),
    }
    requests = [json.dumps({"what": "fail", "name": name}) for name in faults]
    requests.append(json.dumps({"what": "add", "one": 1, "two": 2}))
    answers = io.StringIO()
    handlers = {"fail": lambda name: fail(faults[name]), "add": lambda one, two: {"sum": one + two}}
    serve(handlers, requests, answers)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    statuses = [answer["status"] for answer in found]
    assert statuses == ["out_of_memory", "out_of_memory", "failed", "failed", "ok"]
    assert found[1]["reason"] == "CUDA out of memory. Tried to allocate 2 GiB" and found[4]["sum"] == 3


@pytest.mark.slow
def test_the_real_worker_answers_and_keeps_chatter_out() -> None:
    """On the CPU a measurement cannot be made, and that is what it must say."""
    setting = {"case": "lenet5", "micro_batch": 4, "device": "cpu"}
    with Child(log=subprocess.DEVNULL) as child:
        answer = child.ask({"what": "measure", "setting": setting}, seconds=60)
    assert answer["status"] in ("failed", "died"), answer


# The parts


class PlayedChild:
    """Answers as a card would on which a sample takes 1 GiB, of whatever case."""

    def __init__(self) -> None:
        self.requested: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        assert 0 <= seconds < 300
        request = json.loads(json.dumps(request, default=dataclasses.asdict))  # as a worker reads it
        self.requested.append(request)
        answers: dict[str, dict[str, Any]] = {
            "context": {"outside_allocator_bytes": {"context": 400 * MIB, "backward": 512 * MIB}},
            "history": {"reserved_bytes": 1, "simulated_reserved_bytes": 1},
            "predict": {"peak_bytes": 1},
            "estimate": {"fastest_seconds": 0.1, "slowest_seconds": 0.3, "bound": "memory"},
            "choose": {"table": [8] * 5, "predicted": [7, 15, 23, 39, 79]},
            "lightning": {"batch": 8},
        }
        if request["what"] != "measure":
            return {"status": "ok", **answers[request["what"]]}
        micro_batch, limit = request["setting"]["micro_batch"], request.get("limit_bytes")
        if limit is not None and micro_batch * 2**30 > limit:
            return {"status": "out_of_memory"}
        compiled = request["setting"]["compile"]
        rate = {"samples_per_second": min(1000.0, 10.0 * micro_batch), "step_seconds": 0.4 - 0.2 * compiled}
        return {"status": "ok", **rate}

    def close(self) -> None:
        pass


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("part", [part_1, part_2, part_3])
def test_every_part_asks_only_what_a_worker_knows_and_writes_rows(part: Any, tmp_path: Path) -> None:
    child: Any = PlayedChild()
    with bench(tmp_path / "rows", child) as one:
        part(one)
    assert child.requested and {request["what"] for request in child.requested} <= set(HANDLERS)
    for request in child.requested:
        if "setting" in request:
            Setting(**request["setting"])
    assert all(
        "status" not in row or row["status"] in ("ok", "not_installed") for row in rows_of(tmp_path / "rows")
    )


def test_the_largest_under_an_emulated_card_leaves_room_for_the_context(tmp_path: Path) -> None:
    child: Any = PlayedChild()
    with bench(tmp_path / "rows", child, part=2) as one:
        part_2(one)
    largest_rows = [row for row in rows_of(tmp_path / "rows") if row["kind"] == "largest"]
    found = {(row["card_gib"], row["case"]): row["largest"] for row in largest_rows}
    # Half a GiB of each card is the context's; residual networks go by 32.
    assert [found[card, "gpt2"] for card in (8, 16, 24, 40, 80)] == [7, 15, 23, 39, 79]
    assert [found[card, "resnet50"] for card in (8, 16, 24, 40, 80)] == [0, 0, 0, 32, 64]


def test_measured_step_times_are_compared_with_the_estimated_range(tmp_path: Path) -> None:
    child: Any = PlayedChild()
    with bench(tmp_path / "rows", child, part=3) as one:
        part_3(one)
    found = [row for row in rows_of(tmp_path / "rows") if row["kind"] == "step_time"]
    assert {(row["setting"]["compile"], row["measured"]) for row in found} == {(False, 0.4), (True, 0.2)}
    with_graphs = [
        row for row in rows_of(tmp_path / "rows") if row["kind"] == "compile" and row["cuda_graphs"]
    ]
    assert len(with_graphs) == len(found) / 2, "their times are measured beside no estimate"
    assert all(row["estimated"]["fastest_seconds"] == 0.1 for row in found)


def test_when_time_is_up_what_is_left_out_is_told(tmp_path: Path) -> None:
    child: Any = PlayedChild()
    with bench(tmp_path / "rows", child, part=3, seconds=0) as one:
        part_3(one)
    rows_found = rows_of(tmp_path / "rows")
    assert rows_found[0]["kind"] == "out_of_time" and "gpt2" in rows_found[0]["left_out"]
    assert not any(row["kind"] == "throughput" for row in rows_found)


# The command


def test_arguments() -> None:
    options = parse(["2", "out"])
    assert (options.part, options.directory) == (2, Path("out"))
    for arguments in ([], ["5", "out"], ["one", "out"], ["1"], ["1", "out", "more"]):
        with pytest.raises(SystemExit) as stopped:
            parse(arguments)
        assert stopped.value.code == 2


@pytest.mark.slow
def test_without_a_gpu_it_ends_with_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/gpu_check.sh", "1", str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "VENV": "", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no CUDA or ROCm GPU") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()

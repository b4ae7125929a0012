"""What a run takes of main memory, predicted for a sweep that trains several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from lib import kconf
from lib.errors import PlanError
from lib.sweeps.concurrency import HostMemoryEstimate
from lib.sweeps.runner import compose_text
from tests.support.configs import load_hardware
from tests.support.training import CPU
from train.planning import host_memory

ROOT = Path(__file__).resolve().parents[3]


LIBRARIES_BYTES = 10**9

Ask: TypeAlias = Callable[..., HostMemoryEstimate]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setattr(host_memory, "probe", lambda _: CPU)
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: LIBRARIES_BYTES)

    def ask(*configurations: kconf.Resolved) -> HostMemoryEstimate:
        request, answer = tmp_path / "order.json", tmp_path / "answer.json"
        request.write_text(json.dumps([each.to_json() for each in configurations]))
        assert host_memory.estimate_host_memory(request, root=ROOT) == 0
        return HostMemoryEstimate(**{**json.loads(answer.read_text()), "hardware": CPU})

    return ask


def of_batch(size: int) -> kconf.Resolved:
    settings = {"HYPER_PARAM_MANUAL": "y", "BATCH_SIZE": str(size), "GRADIENT_ACCUMULATION": "1"}
    given = {f"CONFIG_{name}": value for name, value in settings.items()}
    return kconf.load_written(compose_text(ROOT, "lenet5"), root=ROOT, overrides=given)


@pytest.mark.slow
def test_it_is_that_of_the_hungriest_beside_the_libraries(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, found = host_memory._need, list[int]()

    def need(*arguments: Any, **named: Any) -> tuple[int, int]:
        bytes_and_world = whole(*arguments, **named)
        found.append(bytes_and_world[0])
        return bytes_and_world

    monkeypatch.setattr(host_memory, "_need", need)
    large = ask(of_batch(512), of_batch(8))
    assert found[0] > found[1] + 5e6 > 5e6 and large.processes == 1
    assert large.run_bytes == LIBRARIES_BYTES + found[0] and large.why == "predicted"


def test_what_has_no_plan_here_takes_nothing_and_what_cannot_be_predicted_is_told(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[tuple[int, int] | Exception] = []

    def need(*_: object, **__: object) -> tuple[int, int]:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    def found(*given: tuple[int, int] | Exception) -> tuple[float | None, int, str]:
        answers[:] = given
        told = ask(*[one] * len(given))
        return told.run_bytes, told.processes, told.why

    monkeypatch.setattr(host_memory, "_need", need)
    one, no_room = of_batch(8), PlanError("no room")
    assert found(no_room, (7, 1), no_room) == (LIBRARIES_BYTES + 7, 1, "predicted")
    assert found((7, 1), (5, 2)) == (2 * (LIBRARIES_BYTES + 5), 2, "predicted")
    assert found(no_room) == (None, 1, "no room")
    assert found((7, 1), RuntimeError("it asks\nthe device"), (7, 1)) == (None, 1, "it asks")


def test_on_another_device_nothing_is_predicted(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "probe", lambda _: load_hardware("h200"))
    assert ask(of_batch(8)).run_bytes is None

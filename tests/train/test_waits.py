"""Between two rows of metrics a GPU's host waits for it once: to read the sums of the first."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.contract.test_life_of_a_value import OTHERS, ROOT
from tests.contract.test_static_graph import DEFCONFIGS, SETTLING

ONCE = {"copy to the host": 1}
FIRST = ("lenet5", "gpt2-sst2+stream")  # resident images; streamed texts, with dropout
TIMEOUT_SECONDS = 300


def waits(*names: str) -> dict[str, dict[str, int]]:
    """What training of each waited for, in a process that has the simulated GPU."""
    command = [sys.executable, "-m", "tests.support.training_on_gpu", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: each["waits"] for name, each in zip(names, found, strict=True)}


@pytest.mark.slow
def test_the_host_waits_once_and_faults_are_found() -> None:
    looks, names = "lenet5+looks", "lenet5+names"
    found = waits(*FIRST, looks, names)
    assert {name: found[name] for name in FIRST} == dict.fromkeys(FIRST, ONCE)
    assert found[looks] == ONCE | {"_local_scalar_dense waits for values": 10}
    assert found[names] == ONCE | {"copy from pageable memory": 10}


@pytest.mark.long
@pytest.mark.parametrize("name", [*sorted({*DEFCONFIGS.values()} - {*FIRST}), *OTHERS])
def test_of_every_model_and_task(name: str) -> None:
    assert waits(name) == {name: ONCE}


@pytest.mark.long
@pytest.mark.parametrize("name", SETTLING.values())
def test_states_that_settle_are_waited_for(name: str) -> None:
    assert waits(name)[name].keys() == {*ONCE, "_local_scalar_dense waits for values"}

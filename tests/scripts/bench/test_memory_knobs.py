"""The table of what less memory costs: a row for each choice, from steps that are really made."""

from __future__ import annotations

import pytest

from lib.plan.probe_search import Measurement
from scripts.bench import memory_knobs
from scripts.bench.memory_knobs import compare


@pytest.mark.slow
def test_a_row_for_each_choice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requested: list[int] = []

    def trial(_bench: object, _plan: object, size: int) -> Measurement:
        requested.append(size)
        return Measurement(micro_batch=size, need_bytes=3_000_000, samples_per_second=1.0)

    monkeypatch.setattr(memory_knobs, "probe_run", trial)
    settings = {"CONFIG_TARGET_EFFECTIVE_BATCH": "8", "CONFIG_DEVICE_CPU": "y", "CONFIG_DATA_LIMIT": "64"}
    compare("lenet5", settings, micro_batch=4, rounds=1)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["lenet5, 4", choice] for choice in ("none", "blocks", "all")]
    assert requested == [4, 4, 4] and {row[3] for row in rows} == {"3 MB"}
    assert rows[0][4] == "" and rows[0][5].endswith(("s", " ms", " us"))
    # All but the last layer of each of three blocks, again: of three passes' worth a part of the first.
    assert 10 < int(rows[1][4].strip("+%")) <= int(rows[2][4].strip("+%")) < 67

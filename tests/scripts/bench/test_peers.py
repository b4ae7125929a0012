"""make bench PEERS=1: a row for each program, and nothing where they cannot be installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from docs.benchmarks.comparison.peer_models import peer_model
from docs.benchmarks.comparison.peers import Samples, case_of
from lib.data import ImageSpec
from lib.errors import ConfigError, ToolkitError
from scripts.bench import peers, throughput
from scripts.bench.throughput import normalised
from train.training_data import built


def answer(command: list[Any], *, installs: int = 0, measures: int = 0) -> SimpleNamespace:
    """The result of a process: of the script that installs, or of one that measures."""
    if str(command[0]).endswith("extra_environment.sh"):
        return SimpleNamespace(returncode=installs)
    if "docs.benchmarks.comparison.time_to_loss" in command:
        if not measures:
            Path(command[command.index("--out") + 1]).write_text('{"ours": [[[1.0, 2.0]]]}')
        return SimpleNamespace(returncode=measures)
    found: dict[str, Any] = {"unit": "2 threads", "seconds": {"ours": [1.0, 1.0], "Lightning": [2.0, 2.5]}}
    if "--only" in command:
        found = {"first_step_at": 1e12, "peak_bytes": 10**9, "lines": 17}
    return SimpleNamespace(returncode=measures, stdout=f"noise\n{json.dumps(found)}\n", stderr="no such case")


def test_every_case_has_a_table_and_the_file_has_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[list[Any]]()
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or answer(command))
    out = tmp_path / "peers.json"
    assert peers.compare_all([], out=out) == 0
    assert "docs.benchmarks.comparison.time_to_loss" in commands[1], "a missing text is reported at once"
    printed, figures = capsys.readouterr().out, json.loads(out.read_text())
    for case in peers.CASES:
        for precision in peers.PRECISIONS:
            assert f"{case}, {precision}, 2 threads" in printed
        assert [row["program"] for row in figures if row["case"] == case and "program" in row] == [
            "ours",
            "Lightning",
        ]
    assert "0.500" in printed and "17" in printed
    assert {"load", "seconds", "unit"} <= figures[0].keys()
    assert figures[-1] == {"case": "time to a loss", "curves": {"ours": [[[1.0, 2.0]]]}}


def test_only_a_json_file_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--peers", "--out=README.md"])
    with pytest.raises(ConfigError, match=r"OUT=README\.md does not end in \.json"):
        throughput.main()


def test_nothing_is_compared_where_nothing_can_be_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: answer(command, installs=1))
    assert peers.compare_all([], out=None) == 1
    assert capsys.readouterr().out == f"{peers.NOT_INSTALLED}\n"


def test_time_to_a_loss_is_left_out_where_it_cannot_be_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = list[list[Any]]()
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: commands.append(command) or answer(command, measures=1)
    )
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", "CONFIG_DATA_DIR")
    monkeypatch.setenv("CONFIG_DATA_DIR", "texts")
    assert peers.time_to_loss(Path("python")) is None
    assert "is not measured" in capsys.readouterr().out
    assert commands[0][-2:] == ["--data-dir", "texts"]


@pytest.mark.parametrize("case", peers.CASES)
def test_the_other_programs_networks_are_the_toolkits(case: str, tmp_path: Path) -> None:
    """With the same weights they have the same outputs: what is timed is the same work."""
    planned = case_of(case, "fp32", tmp_path)
    spec, config = planned.data.dataset.spec, planned.request.config
    ours, theirs = built(config, spec), peer_model(config.model, spec)
    with torch.no_grad():
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.uniform_(0.5, 1.5) if own.dim() == 1 else own.normal_(std=0.1)
            other.copy_(own)
        batch = torch.from_numpy(planned.data.dataset.train.take(np.arange(2))[0])
        batch = normalised(batch, spec) if isinstance(spec, ImageSpec) else batch
        torch.testing.assert_close(theirs(batch), ours(batch), rtol=1e-4, atol=1e-5)


def test_a_picture_of_the_other_programs_is_the_toolkits(tmp_path: Path) -> None:
    planned = case_of("resnet18", "fp32", tmp_path)
    part, spec = planned.data.dataset.train, planned.data.dataset.spec
    images = torch.from_numpy(part.take(np.arange(3))[0])
    assert isinstance(spec, ImageSpec)
    theirs = torch.stack([Samples(planned)[index]["inputs"] for index in range(3)])
    torch.testing.assert_close(theirs, normalised(images, spec))


def test_a_case_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: answer(command, measures=1))
    with pytest.raises(ToolkitError, match="--case lenet5 fp32 failed: no such case"):
        peers.compare_all([], out=None)

"""`make bench` of a recursive model: what is told of both ways to mix the cells is what they are and do."""

from __future__ import annotations

import sys

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lib.config import Config
from scripts.bench import throughput
from scripts.bench.tasks import recursive
from scripts.bench.tasks.recursive import MIXERS, Measured, table
from tests.models.trm.puzzles import puzzle_data, small_trm_config
from tests.support.training import CPU, small_job, small_plan
from train import loop
from train.job import Progress

ROWS = 6


def requested(mixer: str) -> Config:
    config = small_trm_config(target_effective_batch=ROWS, auto_method="table", eval_steps=1)
    options = {"mixer": mixer, "layers": 1, "l_cycles": 1}
    return config.replace(model_options={**config.model_options, **options})


def step_flop(config: Config) -> int:
    """Of a step, by torch's counter. The CPU's own attention, which it does not know, is replaced."""
    job = small_job(config, small_plan(ROWS), puzzle_data(config))
    loop.optimizer_step(job, Progress())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loop.optimizer_step(job, Progress(step=1))
    found: int = counter.get_total_flops()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_facts_count_the_operations_that_torch_counts(mixer: str) -> None:
    config = requested(mixer)
    assert puzzle_data(config).facts.flop_per_sample == step_flop(config) / ROWS


@pytest.mark.long
def test_bench_tells_of_both_mixers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, told = requested("attention"), dict[str, Measured]()
    monkeypatch.setattr(throughput, "configured", lambda: (None, config))
    monkeypatch.setattr(throughput, "open_training_data", lambda *_, **__: puzzle_data(config))
    monkeypatch.setattr(throughput, "probe", lambda _: CPU)
    monkeypatch.setattr(recursive, "table", lambda found: told.update(found) or table(found))
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "2", "--seconds", "0"])
    assert throughput.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trm on sudoku: 6 samples a step, 6 at a time, cpu, fp32, not compiled"
    assert [line.split()[0] for line in lines[2:5]] == ["mlp", "attention", "attention/mlp"]
    assert lines[5].startswith("2 interleaved rounds of 1 steps")
    for mixer, one in told.items():
        assert one.parameters == puzzle_data(requested(mixer)).facts.parameters
        assert len(one.step_seconds) == 2 and one.seconds == min(one.step_seconds) > 0
    # The CPU's attention computes its scores again backwards: so many, of 18 tokens and 8 channels.
    options = config.model_options
    again = 2 * ROWS * 18**2 * 8 * options["layers"] * (options["l_cycles"] + 1)
    assert told["mlp"].step_flop == step_flop(requested("mlp"))
    assert told["attention"].step_flop == step_flop(requested("attention")) + again


def test_the_table_is_of_minima() -> None:
    one = Measured(parameters=1000, step_flop=4 * 10**9, step_seconds=(0.5, 0.25, 2.0))
    other = Measured(parameters=1500, step_flop=10**10, step_seconds=(1.0, 0.5, 0.5))
    _, first, second, ratio = table({"mlp": one, "attention": other})
    assert first.split() == ["mlp", "1,000", "4", "0.25", "0.5", "16"]
    assert second.split() == ["attention", "1,500", "10", "0.5", "0.5", "20"]
    assert ratio.split() == ["attention/mlp", "1.500", "2.500", "2.000", "1.250"]

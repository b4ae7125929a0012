"""Speed of a run at its end: means by hand, beside the estimate, and what is missing is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.data.loader import Batch
from lib.devices.base import Backend
from lib.errors import ToolkitError
from lib.nn import IGNORED
from lib.plan.gpus import parse_gpu
from lib.plan.types import Hardware
from lib.runs import metrics
from lib.runs.console import Console
from lib.runs.directory import RunDir
from tests.support.chats import random_chats
from tests.support.labels import random_tags
from tests.support.tokens import BLOCK, VOCAB, small_lm_config
from tests.support.training import (
    Clock,
    MemoryRecord,
    Wrapped,
    random_data,
    small_config,
    small_job,
    small_plan,
)
from train.job import Progress
from train.loop import train
from train.record import RunRecord
from train.summary import log_speed
from train.tasks.base import Forward, Sums, Task

H100 = parse_gpu("h100-80g")
CPU = parse_gpu("cpu-24g")


def row(seconds: float, rate: float, wait: float, **more: float) -> dict[str, float]:
    return {"seconds": seconds, "samples_per_second": rate, "data_wait": wait, **more}


def test_the_speed_of_a_run_is_the_median_of_its_rows_but_the_first(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, model="lenet5", identity="01234567", files={"config": ""})
    record = RunRecord(run, Console(run.log), started=0.0, keep_last=1)
    record.begin(0, 4)
    assert record.speed() == {}, "nothing was trained"
    for step, rate in enumerate((1.0, 100.0, 20.0, 30.0)):
        record.row("train", step=step, epoch=0.0, loss=1.0, **row(step, rate, rate / 1000))
        if step == 0:
            assert record.speed()["samples_per_second"] == 1.0, "there is no other row"
    expected = {"samples_per_second": 30.0, "data_wait": 0.03, "first_step_seconds": 0.0}
    assert record.speed() == expected
    for step in (4, 5):
        compiled = {"compilations": step, "compile_seconds": 10.0 * step}  # since the process began
        record.row("train", step=step, epoch=0.0, loss=1.0, **row(step, 30.0, 0.03, **compiled))
    assert record.speed() == expected | {"compile_seconds": 50.0}
    resumed = row(6, 30.0, 0.03, gradient_wait=0.25, compile_seconds=50.0)  # on several devices
    record.row("train", step=6, epoch=0.0, loss=1.0, **resumed)
    assert record.speed() == expected | {"compile_seconds": 50.0, "gradient_wait": 0.25}
    record.close()


class Measured(MemoryRecord):
    """A record of a run that has trained at a known speed."""

    waited: Mapping[str, float] = {}

    def speed(self) -> Mapping[str, float]:
        return {"samples_per_second": 1000.0, "data_wait": 0.25, **self.waited, "first_step_seconds": 2.0}


def logged(hardware: Hardware) -> tuple[dict[str, Any], str]:
    config, record = small_config(), Measured()
    data = random_data(config, shape=(1, 28, 28), train_size=64)
    job = small_job(config, small_plan(16), data, record=record)
    log_speed(job, data, hardware, step=7)
    (found,), text = record.of_kind("speed"), record.said[-1]
    assert found["step"] == 7 and found["samples_per_second"] == 1000.0
    flop = data.facts.flop_per_sample
    assert flop is not None
    return {**found, "flop": flop}, text


class CountsTokens(Wrapped):
    """Counts what is not padding in the rows that it is given, however they are cut."""

    rows = tokens = 0

    def training(self, forward: Forward, batch: Batch) -> Sums:
        counted_BT = batch.targets != IGNORED
        self.rows += len(counted_BT)
        self.tokens += sum(int(each.nonzero().max()) + 1 for each in counted_BT)
        return super().training(forward, batch)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 8], ids=["part of an epoch", "two epochs"])
@pytest.mark.parametrize("bucketed", [False, True])
def test_tokens_per_second_are_those_without_padding(bucketed: bool, steps: int) -> None:
    config, record = small_lm_config(task="chat", max_steps=steps), Measured()
    data = random_chats(config, train=64, test=8, bucketed=bucketed)
    found = list[CountsTokens]()

    def counting(task: Task) -> Task:
        found.append(CountsTokens(task))
        return found[0]

    job = small_job(config, small_plan(8, 8), data, record=record, task=counting)
    train(job, Progress())
    log_speed(job, data, CPU, step=steps)
    (row,), (counted,) = record.of_kind("speed"), found
    assert counted.rows == 16 * steps
    assert row["tokens_per_second"] == pytest.approx(1000 * counted.tokens / counted.rows, rel=1e-12)
    assert row["tokens_per_second"] < 0.8 * 1000 * BLOCK


def test_padding_of_texts_with_tags_is_no_token() -> None:
    config, record = small_lm_config(task="tag"), Measured()
    data = random_tags(config, train=16, test=4)
    log_speed(small_job(config, small_plan(8, 8), data, record=record), data, CPU, step=1)
    (row,), (inputs_NT, _) = record.of_kind("speed"), data.dataset.train.take()
    count = sum(token != VOCAB - 1 for tokens in inputs_NT.tolist() for token in tokens)
    assert row["tokens_per_second"] == pytest.approx(1000 * count / 16) and count < 0.8 * inputs_NT.size


def test_on_a_cpu_there_is_no_estimate_and_nothing_to_say_about_it() -> None:
    found, text = logged(CPU)
    assert "model_flop_utilization" not in found
    assert text == "Speed: samples per second 1,000, data wait 25.0%, first step seconds 2"


def test_a_gpu_that_the_catalogue_lacks_is_named() -> None:
    device = dataclasses.replace(H100.devices[0], name="A New One")
    _, text = logged(dataclasses.replace(H100, devices=(device,)))
    assert text.endswith("; no estimate and no FLOP utilization: A New One is not in the catalogue")


def test_on_a_gpu_of_the_catalogue_it_is_beside_the_estimate() -> None:
    found, text = logged(H100)
    assert found["model_flop_utilization"] == pytest.approx(1000 * found["flop"] / 66.9e12), "fp32"
    least, most = found["least_samples_per_second"], found["most_samples_per_second"]
    assert 16 / 0.1 < least < most < 16 / 1e-6
    assert "least samples per second " in text and "model flop utilization 0.0%" in text and "; " not in text


def test_several_processes_have_the_wait_for_gradients_beside_its_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A strategy whose communication is not timed is named."""
    monkeypatch.setattr("train.planning.step_estimate.traffic_seconds", lambda *_, **__: 0.001)
    for strategy, waited in (("ddp", {"gradient_wait": 3.0}), ("fsdp", {})):
        config, record = small_config(), Measured()
        data = random_data(config, shape=(1, 28, 28), train_size=64)
        job = small_job(config, small_plan(16), data, record=record)
        job.plan = small_plan(16, world=2, strategy=strategy, shard=2 if strategy == "fsdp" else 1)
        job.backend.waited_seconds = lambda waited=waited: waited  # type: ignore[method-assign, misc]
        record.waited = dict.fromkeys(waited, 0.2)
        log_speed(job, data, H100, step=7)
        (found,), text = record.of_kind("speed"), record.said[-1]
        if waited:
            assert 0 <= found["least_gradient_wait"] <= found["most_gradient_wait"] < 1
            for end in ("most", "least"):  # half of the computation hides communication
                step = 32 / found[f"{end}_samples_per_second"]
                assert found[f"{end}_gradient_wait"] == pytest.approx(0.002 / step - 1)
            assert "gradient wait 20.0%" in text and "%, most gradient wait " in text and "; " not in text
        else:
            assert text.endswith("; communication is not measured with fsdp: make profile shows it")
            assert "gradient_wait" not in "".join(found)


@pytest.mark.slow
def test_what_the_compiler_took_is_counted() -> None:
    import torch._dynamo

    backend = Backend("cpu")
    before = backend.compilations(compiled=True)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    compiled(torch.ones(3)), compiled(torch.ones(3)), compiled(torch.ones(4))
    after = backend.compilations(compiled=True)
    assert after["compilations"] == before["compilations"] + 2
    assert after["compile_seconds"] > before["compile_seconds"]
    assert backend.compilations(compiled=False) == {}


def test_a_training_row_has_the_share_of_waiting_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr("lib.data.loader.time", clock)
    record, config = MemoryRecord(), small_config(max_steps=4, log_interval_steps=2, eval_interval_steps=100)
    data = random_data(config, shape=(1, 28, 28), train_size=40)
    job = small_job(config, small_plan(16), data, record=record)
    finish = job.train_loader._finish

    def slow(*arguments: Any) -> Any:
        clock.now += 1.0
        return finish(*arguments)

    monkeypatch.setattr(job.train_loader, "_finish", slow)
    training = job.task.training

    def task(*arguments: Any) -> Any:
        clock.now += 3.0
        return training(*arguments)

    monkeypatch.setattr(job.task, "training", task)
    train(job, Progress())
    assert [each["data_wait"] for each in record.of_kind("train")] == [pytest.approx(0.25)] * 2


def test_the_utilization_is_a_column_and_its_absence_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> float:
        raise ToolkitError("the driver reports no device utilization", why="no package")

    for utilization, column in ((lambda: 0.5, [0.5, 0.5]), (missing, [None, None])):
        run = RunDir.create(tmp_path, model="lenet5", identity="01234567", files={"config": ""})
        peaks: Any = {"utilization": utilization, "peak_memory": [None, 7].pop}
        record = RunRecord(run, Console(run.log), started=0.0, keep_last=1, **peaks)
        record.begin(0, 2)
        for step in (1, 2):
            record.row("train", step=step, epoch=0.0, loss=1.0, **row(step, 1.0, 0.0))
        record.close()
        assert [each.get("device_utilization") for each in metrics.read(run.metrics)] == column
        assert [each.get("peak_memory_bytes") for each in metrics.read(run.metrics)] == [7, None]
    assert capsys.readouterr().out.count("metrics.jsonl has no column device_utilization") == 1


def test_a_driver_without_its_package_is_an_error_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend("cpu")
    assert backend.utilization() is None
    backend.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 40)
    assert backend.utilization() == 0.4

    def missing(_: object) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    with pytest.raises(ToolkitError, match="no device utilization: nvidia-ml-py"):
        backend.utilization()

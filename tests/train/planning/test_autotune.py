"""Which sizes are tried and which is taken, what is kept of it, and what a trial may come to."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib import kconf
from lib.config import config_from_values
from lib.errors import PlanError, ToolkitError
from lib.plan import plan as make_plan
from lib.plan.fitting import GAPS, Parts, StepSettings
from lib.plan.probe_search import Failure, Measurement, Probed, search, smallest_near_best
from lib.plan.types import Plan
from tests.support.configs import ROOT, load_hardware, make_config, make_facts
from tests.support.training import CPU, random_data
from train.planning import autotune
from train.planning.autotune import CachedProbe, ProbeTarget

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def found(size: int, rate: float, need: int = 0) -> Measurement:
    return Measurement(micro_batch=size, need_bytes=need, samples_per_second=rate)


def searched(
    rate: Callable[[int], float], start: int = 64, *, fits: int = 512, may_fit: int = 512
) -> tuple[Probed, list[int]]:
    tried: list[int] = []

    def try_out(size: int) -> Measurement | Failure:
        tried.append(size)
        return found(size, rate(size)) if size <= fits else Failure(micro_batch=size, reason="full")

    return search(start, SIZES, try_out, may_fit=lambda size, _: size <= may_fit), tried


def test_smaller_ones_are_tried_while_they_are_as_fast() -> None:
    probed, tried = searched(lambda size: 100.0 if size >= 32 else 50.0)
    assert tried == [64, 32, 16] and probed.chosen.micro_batch == 32
    probed, tried = searched(lambda _: 100.0)
    assert tried == [64, 32, 16, 8] and probed.chosen.micro_batch == 8, "four are enough"
    probed, tried = searched(lambda size: 100.0 / size)
    assert tried == [64, 32, 16, 8] and probed.chosen.micro_batch == 8


def test_larger_ones_are_tried_while_they_are_faster_and_may_fit() -> None:
    probed, tried = searched(lambda size: float(size))
    assert tried == [64, 32, 128, 256] and probed.chosen.micro_batch == 256
    probed, tried = searched(lambda size: float(min(size, 130)))
    assert tried == [64, 32, 128, 256] and probed.chosen.micro_batch == 128
    probed, tried = searched(lambda size: float(size), may_fit=64)
    assert tried == [64, 32] and probed.chosen.micro_batch == 64
    probed, tried = searched(lambda size: float(size), fits=64)
    assert tried == [64, 32, 128] and probed.chosen.micro_batch == 64


def test_what_does_not_fit_is_followed_by_what_may() -> None:
    probed, tried = searched(lambda size: float(size), fits=16)
    assert tried == [64, 32, 16, 8] and probed.chosen.micro_batch == 16
    assert [failed.micro_batch for failed in probed.failures] == [64, 32]
    probed, tried = searched(lambda size: float(size), fits=0)
    assert tried == [64, 32, 16, 8] and not probed.measurements


@given(
    rates=st.lists(st.floats(1, 100), min_size=10, max_size=10),
    start=st.sampled_from(SIZES),
    fits=st.integers(0, 512),
    may_fit=st.integers(1, 512),
)
def test_whatever_is_found_few_are_tried_and_the_smallest_near_the_best_is_taken(
    rates: list[float], start: int, fits: int, may_fit: int
) -> None:
    probed, tried = searched(lambda size: rates[SIZES.index(size)], start, fits=fits, may_fit=may_fit)
    assert len(tried) == len(set(tried)) <= 8 and set(tried) <= set(SIZES)
    assert len(probed.measurements) <= 4
    if probed.measurements:
        rate = {each.micro_batch: each.samples_per_second for each in probed.measurements}
        assert rate[probed.chosen.micro_batch] >= 0.97 * max(rate.values())
        assert probed.chosen.micro_batch == smallest_near_best(rate)


def test_a_plan_takes_what_was_measured_and_says_so() -> None:
    def predict(trial: StepSettings) -> Parts:
        return {"activations": trial.micro_batch * 10**6}

    probed = Probed(measurements=(found(64, 100.0, 10**9), found(32, 98.0, 2 * 10**9)), failures=())
    requested = make_config("lenet5", auto_method="probe", target_effective_batch=512)
    machine, facts = load_hardware("rtx3090"), make_facts("lenet5")
    decided = make_plan(requested, machine, facts, predict=predict, probed=probed)
    assert (decided.micro_batch, decided.accumulation) == (32, 16)
    assert decided.reasons["micro_batch"] == (
        "measured: samples/s 100 at 64, 98 at 32; the smallest within 3% of the best"
    )
    assert decided.reasons["memory"].endswith("predicted, measured: 2.00 GB")
    unmeasured = make_plan(requested, machine, facts, predict=predict)
    assert unmeasured.reasons["micro_batch"].startswith(
        "nothing was measured here yet (make probe); 512 is predicted to need"
    )
    assert unmeasured.reasons["memory"].endswith("predicted, not measured")


def test_what_was_kept_comes_back_for_its_own_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "probe.json"
    kept = CachedProbe(
        Probed(measurements=(found(8, 1.5, 7),), failures=(Failure(micro_batch=16, reason="full"),)), "now"
    )
    assert autotune.load(file, "a") is None
    autotune.store(file, "a", kept, facts={"torch": "2"})
    autotune.store(file, "b", dataclasses.replace(kept, made="later"), facts={"sizes": (1, 2)})
    assert autotune.load(file, "a") == kept and autotune.load(file, "c") is None
    other = json.loads(file.read_text())
    other["a"]["probed"] = {"measurements": [{"micro_batch": 1}]}
    file.write_text(json.dumps(other))
    assert autotune.load(file, "a") is None, "of another version"
    file.write_text("{")
    with pytest.raises(ToolkitError, match=r"probe\.json is damaged.*remove it"):
        autotune.load(file, "a")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProbeTarget:
    monkeypatch.setenv("HOME", str(tmp_path))
    empty = tmp_path / "config"
    empty.write_text("")
    chosen = {"CONFIG_AUTO_METHOD_PROBE": "y", "CONFIG_TARGET_EFFECTIVE_BATCH": "64"}
    resolved = kconf.load(root=ROOT, config_file=empty, overrides=chosen)
    config = config_from_values(resolved.values)
    return ProbeTarget(
        resolved=resolved,
        config=config,
        data=random_data(config, shape=(1, 28, 28), train_size=64),
        hardware=CPU,
        predict=lambda trial: {"activations": 10**6 * trial.micro_batch},
        root=ROOT,
    )


@pytest.mark.slow
def test_a_key_is_all_that_a_measurement_depends_on(bench: ProbeTarget) -> None:
    def key(**changes: object) -> str:
        config = bench.config.replace(**changes)
        return autotune.key_of(autotune.cache_facts(dataclasses.replace(bench, config=config)))

    same, machine = key(), dataclasses.replace(CPU, cpu_count=7)
    assert key(seed=5, learning_rate=0.5, max_steps=9) == same
    assert key(log_seconds=9, sink_tensorboard=True, early_stop_evals=3, best_metric="loss") == same
    assert key(auto_method="predict") == same, "make probe serves a later CONFIG_AUTO_METHOD_PROBE=y"
    assert len({same, key(precision="bf16"), key(ema=True), key(target_effective_batch=32)}) == 4
    assert autotune.key_of(autotune.cache_facts(dataclasses.replace(bench, hardware=machine))) != same
    wider = random_data(bench.config, shape=(1, 32, 32), train_size=64)
    facts = dataclasses.replace(bench.data.facts, parameters=1)  # of another number of classes
    for data in (wider, dataclasses.replace(bench.data, facts=facts)):
        assert autotune.key_of(autotune.cache_facts(dataclasses.replace(bench, data=data))) != same


def test_other_sources_are_another_key(bench: ProbeTarget, tmp_path: Path) -> None:
    keys = []
    for name, text in (("lenet5", "x = 1"), ("lenet5", "x = 2"), ("lenet5", "x = 1"), ("another", "x = 3")):
        (tmp_path / "models" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name / "model.py").write_text(text)
        keys.append(autotune.key_of(autotune.cache_facts(dataclasses.replace(bench, root=tmp_path))))
    assert keys[0] == keys[2] == keys[3] != keys[1], "of lenet5, whatever other models there are"


def child(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have trials be made by `program`, which finds `request`, a path, and the `told` that is in it."""
    head = "import json, os, pathlib, sys; order = pathlib.Path(sys.argv[1]); "
    head += "told = json.loads(order.read_text()); answer = order.with_name('0.json'); "
    monkeypatch.setattr(autotune, "COMMAND", (sys.executable, "-c", head + program))


RESULT = (
    "size = told['plan']['micro_batch'];"
    "result = {'status': 'ok', 'need_bytes': size, 'step_seconds': told['plan']['effective_batch'] / size};"
    "answer.write_text(json.dumps(result))"
)


@pytest.mark.slow
def test_what_is_measured_is_kept_until_there_is_no_room_for_it(
    bench: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, RESULT)
    assert autotune.cached(bench) is None
    probed = autotune.cached_or_measured(bench)
    assert [each.micro_batch for each in probed.measurements] == [64, 32], "the larger, the faster"
    assert probed.chosen == found(64, 64.0, 64)
    monkeypatch.setattr(autotune, "COMMAND", ("false",))
    assert autotune.cached_or_measured(bench) == probed
    memory = dataclasses.replace(CPU.devices[0], free_bytes=79)  # of which 63 are for us
    full = dataclasses.replace(
        bench, hardware=dataclasses.replace(CPU, devices=(memory,)), predict=lambda _: {}
    )
    assert autotune.cached(full) is None


@pytest.mark.slow
@pytest.mark.parametrize(("gaps", "tried"), [(0, [64, 32, 128, 256]), (10**15, [64, 32])])
def test_a_larger_size_is_tried_where_there_is_room_for_its_gaps_too(
    gaps: int, tried: list[int], bench: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, RESULT)
    config = bench.config.replace(target_effective_batch=256)
    roomy = dataclasses.replace(
        bench,
        config=config,
        data=random_data(config, shape=(1, 28, 28), train_size=256),
        predict=lambda trial: {"activations": 1, GAPS: gaps * (trial.micro_batch > 64)},
    )
    assert [each.micro_batch for each in autotune.measure(roomy).measurements] == tried


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "its process was ended by signal 9 (Killed)"),
        (
            "answer.write_text(json.dumps({'status': 'out_of_memory', 'reason': 'no room'}))",
            "no room",
        ),
        (RESULT.replace("'need_bytes': size", "'need_bytes': 10**15"), "needs 1000000.00 GB of"),
    ],
)
def test_a_child_that_runs_out_of_memory_is_a_size_that_does_not_fit(
    program: str, reason: str, bench: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, program)
    outcome = autotune.probe_run(bench, bench.plan(), 64)
    assert isinstance(outcome, Failure) and outcome.reason.startswith(reason)
    with pytest.raises(
        PlanError, match=r"no micro-batch of lenet5 that was probed fits: 64: .*; 32: .*; 8: "
    ):
        autotune.measure(bench)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise KeyError('odd')", r"ended with status 1 and without a result: KeyError: 'odd'"),
        (
            "answer.write_text(json.dumps({'status': 'failed', 'reason': 'odd'}))",
            "a probe run failed, and not for lack of memory: odd",
        ),
    ],
)
def test_another_failure_is_no_matter_of_size(
    program: str, told: str, bench: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, program)
    with pytest.raises(ToolkitError, match=told):
        autotune.measure(bench)


@pytest.mark.parametrize("planned", [(64, 1), (16, 4)])
def test_a_size_that_accumulates_is_probed_without_cuda_graphs(
    planned: tuple[int, int], bench: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that does not with them, whatever was planned by prediction."""
    plans = list[Plan]()
    options = dataclasses.replace(bench.config.compilation, cuda_graphs=True)
    data = dataclasses.replace(bench.data, facts=dataclasses.replace(bench.data.facts, loss_apart=""))
    bench = dataclasses.replace(bench, config=bench.config.replace(compilation=options), data=data)
    answer = [{"status": "ok", "need_bytes": 5, "step_seconds": 1.0}]
    monkeypatch.setattr(autotune, "_run", lambda _, plan, **__: plans.append(plan) or answer)
    size, accumulation = planned
    sizes = {"micro_batch": size, "last_micro_batch": size, "accumulation": accumulation, "device": "cuda"}
    compiled = {"compile": True, "compile_parts": ("model", "loss"), "cuda_graphs": accumulation == 1}
    decided = dataclasses.replace(bench.plan(), **sizes, **compiled)
    for size in (64, 16):
        autotune.probe_run(bench, decided, size)
    assert [(plan.accumulation > 1, plan.cuda_graphs) for plan in plans] == [(False, True), (True, False)]


def test_a_size_below_the_share_keeps_gradients_as_in_training(
    bench: ProbeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 samples training makes 48 and 16."""
    plans = list[Plan]()
    answer = [{"status": "ok", "need_bytes": 5, "step_seconds": 1.0}]
    monkeypatch.setattr(autotune, "_run", lambda _, plan, **__: plans.append(plan) or answer)
    for size in (48, 64):
        autotune.probe_run(bench, bench.plan(), size)
    assert [plan.accumulation for plan in plans] == [2, 1]


def test_the_slowest_and_fullest_rank_counts(bench: ProbeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"status": "ok", "need_bytes": need, "step_seconds": s} for need, s in ((5, 2.0), (9, 1.0))]
    monkeypatch.setattr(autotune, "_run", lambda *_, **__: ranks)
    decided = dataclasses.replace(bench.plan(), world=2, strategy="ddp", effective_batch=128)
    outcome = autotune.probe_run(bench, decided, 32)
    assert outcome == found(32, 32 * 2 * 2 / 2.0, 9)
    bad = {"status": "out_of_memory", "reason": "full"}
    assert autotune._combined([ranks[0], bad], 2, status=1, output="") == "full"
    killed = "error: process 1 of 2 was ended by signal 9"
    assert autotune._combined([ranks[0]], 2, status=1, output=f"more\n{killed}\n") == killed

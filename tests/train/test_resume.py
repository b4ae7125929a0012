"""Which plan a run resumes with."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lib.errors import CheckpointError
from lib.plan.gpus import parse_gpu
from lib.runs import checkpoint
from lib.runs.directory import RunDir
from lib.runs.identity import changed, stored_digests
from tests.support.configs import load_hardware
from tests.support.tokens import small_lm_config
from tests.support.training import small_plan
from train import resume
from train.job import Progress
from train.record import Record
from train.resume import load_latest, note_code, same_machine, stored_plan


@pytest.mark.parametrize("strategy", ["split", "sequential"])
@pytest.mark.parametrize("requested", ["auto", "split", "sequential", "ddp"])
def test_a_strategy_for_frozen_models_is_kept_unless_another_is_requested(
    strategy: Any, requested: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One process has all devices of a split, and one device in turns."""
    machine, branches = parse_gpu("a100-40gx2"), (1, 1)
    if strategy == "sequential":
        machine, branches = parse_gpu("a100-40gx1"), ()  # type: ignore[assignment]
    known = {"hardware": machine, "plan": small_plan(4, strategy=strategy, branch_devices=branches)}
    monkeypatch.setattr(resume, "stored", lambda _, name, __: known[name])
    run = cast(RunDir, SimpleNamespace(path=tmp_path))
    found = stored_plan(run, small_lm_config().replace(dist_strategy=requested), machine)
    assert found == (known["plan"] if requested in ("auto", strategy) else None)


@pytest.mark.parametrize(
    ("requested", "is_kept"),
    [
        ({}, True),
        ({"dist_strategy": "pipeline", "dist_stages": 0}, True),
        ({"dist_strategy": "pipeline", "dist_stages": 4}, True),
        ({"dist_strategy": "pipeline", "dist_stages": 2}, False),
        ({"dist_strategy": "ddp"}, False),
    ],
)
def test_the_stored_plan_is_kept_unless_another_layout_is_requested(
    requested: dict[str, Any], is_kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = parse_gpu("a100-40gx4")
    stored = {
        "hardware": machine,
        "plan": small_plan(4, 4, world=4, strategy="pipeline", shard=4, effective_batch=8),
    }
    monkeypatch.setattr(resume, "stored", lambda _, name, __: stored[name])
    run = cast(RunDir, SimpleNamespace(path=tmp_path))
    found = stored_plan(run, small_lm_config().replace(**requested), machine)
    assert found == (stored["plan"] if is_kept else None)


def test_a_latest_checkpoint_that_was_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a damaged one: by the one before it, and an error without one."""
    logged: list[str] = []
    alone = SimpleNamespace(
        rank=0, world=1, is_main=True, broadcast=lambda value: value, all_reduce_max=lambda values: values
    )
    began = list[bool]()
    record = SimpleNamespace(log=logged.append, at_resume=began.append)
    job: Any = SimpleNamespace(record=record, backend=alone, carry=None)
    monkeypatch.setattr(resume.loop, "load_state_dict", lambda _, state: Progress(step=state["step"]))
    assert load_latest(job, tmp_path / "none").step == 0 and logged.pop() == "Starting after step 0"
    for step in (10, 20):
        checkpoint.save(tmp_path, step=step, state={"step": step}, keep_last=2, best=False)
    assert load_latest(job, tmp_path).step == 20 and logged.pop() == "Starting after step 20" and not logged
    shutil.rmtree(tmp_path / "step-00000020")
    assert load_latest(job, tmp_path).step == 10
    assert logged == ["warning: checkpoint step-00000020, the latest, is gone", "Starting after step 10"]
    shutil.rmtree(tmp_path / "step-00000010")
    with pytest.raises(CheckpointError, match=r"step-00000020, the latest, is gone; remove that"):
        load_latest(job, tmp_path)
    assert began == [False, True, True], "the files of a run that does not begin stay"


def test_only_rank_0_looks_for_the_latest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of another one before the broadcast would leave the others waiting in it."""
    monkeypatch.setattr(resume, "_lost", lambda _: pytest.fail("its result would not count"))
    monkeypatch.setattr(resume.checkpoint, "load", lambda *_, **__: None)
    backend = SimpleNamespace(rank=1, is_main=False, broadcast={None: ""}.get)
    job: Any = SimpleNamespace(record=Record(), backend=backend, carry=None)
    assert load_latest(job, tmp_path).step == 0


def test_a_machine_is_the_same_however_much_of_it_is_free() -> None:
    one, four = load_hardware("rtx3090"), load_hardware("h100-80g-70g-free-x4")
    devices = tuple(dataclasses.replace(device, free_bytes=10**9) for device in one.devices)
    assert same_machine(one, dataclasses.replace(one, devices=devices))
    assert not same_machine(one, four)
    assert not same_machine(four, dataclasses.replace(four, devices=four.devices[:2]))
    assert not same_machine(one, dataclasses.replace(one, cpu_name="another"))


def test_a_run_that_resumes_with_other_code_says_which_and_keeps_what_it_had(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def code(digest: str) -> dict[str, Any]:
        return {"model": {"folder": "models/own", "sha256": digest}, "task": {"folder": "t", "sha256": "x"}}

    kept = code("a")

    def resumed(known: dict[str, Any], facts: dict[str, Any], *, is_loaded: bool = True) -> dict[str, Any]:
        written = dict[str, Any]()
        run = SimpleNamespace(read_json=lambda _: known, write=written.__setitem__)
        note_code(cast(RunDir, run), facts, is_loaded)
        return cast(dict[str, Any], written["plugins"])

    for digest, former in (("a", []), ("b", ["a"]), ("b", ["a"]), ("a", ["a", "b"]), ("a", ["a", "b"])):
        kept = resumed(kept, code(digest))
        assert kept["model"].pop("former", []) == former and kept == code(digest)
        if former:
            kept["model"]["former"] = former
            note = "NOTE: the code of its model was changed after the run began: its further steps train by"
            assert capsys.readouterr().out.startswith(note)
            for single in "ab":
                assert changed(stored_digests(kept), stored_digests(code(single))) == "model"
        assert not capsys.readouterr().out
    assert resumed({}, code("b")) == code("b"), "of an older version"
    assert resumed(kept, code("c"), is_loaded=False) == code("c"), "no step was made before"
    assert not capsys.readouterr().out

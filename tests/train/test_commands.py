"""What a run leaves when it is ended, and what is told before it begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lib import kconf
from lib.errors import ConfigError
from lib.runs.directory import RunDir, resolve_run
from tests.support.configs import ROOT
from train import __main__ as start
from train import commands
from train.commands import _log_end
from train.preflight import command as preflight
from train.signals import Rescaled, Stopped, interrupted_text


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, model="lenet5", identity="0123abcd", files={"config": ""})
    run.set_status("running", step=5)
    return run


def test_a_run_says_what_ended_it(run: RunDir) -> None:
    expected = {
        Stopped(2, 7): ("preempted", 7, "stopped by SIGINT after step 7"),
        Rescaled(8): ("preempted", 8, "a node joins or leaves: stopping after step 8"),
        KeyboardInterrupt(): ("preempted", 5, "interrupted"),
        ValueError("bad"): ("failed", 5, "ValueError: bad"),
        SystemExit(0): ("failed", 5, "SystemExit: 0"),
        AssertionError(): ("failed", 5, "AssertionError"),
    }
    for error, (state, step, reason) in expected.items():
        run.set_status("running", step=5)
        _log_end(run, error)
        status = run.status()
        assert (status.state, status.step) == (state, step) and status.reason.startswith(reason)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "is_logged"), [(KeyError(3), True), (ConfigError("known"), False)])
def test_the_log_of_a_run_has_the_traceback_of_what_is_no_error_of_the_toolkit(
    error: Exception, is_logged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = dict.fromkeys(("CONFIG_DATA_LIMIT", "CONFIG_TARGET_EFFECTIVE_BATCH"), "64")
    requested = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5", overrides=overrides)
    monkeypatch.setattr(commands, "_train", mock.Mock(side_effect=error))
    with pytest.raises(type(error), match=r"^(3|known)$"):
        commands.train(requested, root=ROOT, runs=tmp_path, started=0.0)
    run = resolve_run(tmp_path, unfinished=True)
    assert run.status().state == "failed"
    assert ("Traceback" in run.log.read_text()) == is_logged


def test_an_interrupted_run_says_what_is_lost_and_how_it_resumes(run: RunDir) -> None:
    command = f"make resume RUN={run.path}"
    told = {("running", 0): f"before the first checkpoint; {command} begins again"}
    told |= {("running", 5): f"; {command} resumes after step 5", ("done", 9): ", but the run is done"}
    for (state, step), text in told.items():
        run.set_status(state, step=step)
        _log_end(run, KeyboardInterrupt())
        assert interrupted_text(run.status(), command).removeprefix("interrupted").strip() == text.strip()


def test_a_run_that_is_done_stays_done(run: RunDir) -> None:
    run.set_status("done", step=9)
    _log_end(run, KeyboardInterrupt())
    assert (run.status().state, run.status().step) == ("done", 9)


def test_of_a_run_that_is_gone_nothing_is_left(run: RunDir) -> None:
    for path in run.path.iterdir():
        path.unlink()
    _log_end(run, ValueError("bad"))
    assert not list(run.path.iterdir())


@pytest.mark.parametrize("command", ["train", "plan", "probe", "preflight"])
def test_a_mistake_in_the_configuration_is_told_before_torch_is_imported(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".config").write_text("CONFIG_SEED=many\n")
    monkeypatch.setenv("KCONFIG_CONFIG", str(tmp_path / ".config"))
    monkeypatch.setattr(sys, "argv", ["train", command])
    monkeypatch.setattr(start, "importing", mock.Mock(side_effect=AssertionError("too late")))
    with pytest.raises(ConfigError) as caught:
        start.main()
    assert "SEED=many" in "".join(caught.value.findings)


@pytest.mark.parametrize(("passed", "status"), [((True, True), 0), ((True, False), 1), ((False, False), 1)])
def test_one_failed_check_fails_all(
    passed: tuple[bool, ...], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [preflight.Check(f"check {n}", each, "told", 0.1) for n, each in enumerate(passed)]
    monkeypatch.setattr(preflight, "_checks", lambda *_, **__: iter(found))
    monkeypatch.setattr(preflight, "with_tier", lambda requested, **_: requested)
    nothing: Any = None
    assert preflight.preflight(nothing, root=tmp_path, runs=tmp_path, as_json=True) == status


def test_an_export_without_a_folder_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train", "export"])
    with pytest.raises(ConfigError, match="there is no DIRECTORY=; name it, as in make export "):
        start.main()


def test_a_seed_that_torch_does_not_take_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.sys, "argv", ["train", "sample", f"--seed={2**64}"])  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"SEED={2**64} is not a whole number from 0 below {2**64}"):
        start.main()

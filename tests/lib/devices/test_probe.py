"""What is read from the kernel's texts and from torch, on machines that are not at hand."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from lib.devices.probe import environment, git_state, probe
from lib.errors import PlanError
from lib.plan.types import Hardware
from tests.support.configs import ROOT, hardware_names, load_hardware


def test_probe_of_this_machine() -> None:
    found = probe("cpu")
    (memory,) = found.devices
    assert found.kind == "cpu" and found.cpu_name and found.cpu_count >= 1
    assert 0 < memory.free_bytes <= memory.total_bytes


def fake_gpus(monkeypatch: pytest.MonkeyPatch, *, hip: str | None, free: list[int]) -> None:
    def mem_get_info(index: int) -> tuple[int, int]:
        if free[index] < 0:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return free[index], 24_000_000_000

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU model {index // 2}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))


@pytest.mark.parametrize("hip", [None, "6.2"])
def test_probe_of_gpus(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    fake_gpus(monkeypatch, hip=hip, free=[20_000_000_000, 10_000_000_000, 5])
    found = probe("auto")
    assert found.kind == ("rocm" if hip else "cuda")
    assert [device.free_bytes for device in found.devices] == [20_000_000_000, 10_000_000_000, 5]
    assert found.devices[2].name == "GPU model 1"
    assert found.devices[0].capability == (None if hip else (8, 6))
    assert probe("cpu").kind == "cpu"


def test_a_gpu_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, hip=None, free=[1, -1])
    with pytest.raises(
        PlanError, match=r"GPU 1 does not tell its free memory: CUDA error: out of memory; end"
    ):
        probe("auto")


def test_probe_of_an_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 22_000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2_000)
    for device in ("auto", "mps"):
        found = probe(device)
        assert (found.kind, found.devices[0].free_bytes) == ("mps", 20_000)
    with pytest.raises(PlanError, match="CONFIG_DEVICE_CUDA"):
        probe("cuda")


def test_probe_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert probe("auto").kind == "cpu"
    with pytest.raises(PlanError, match="CONFIG_DEVICE_MPS"):
        probe("mps")


@pytest.mark.parametrize("name", hardware_names())
def test_recorded_machines_survive_json(name: str) -> None:
    machine = load_hardware(name)
    assert Hardware.from_json(json.loads(json.dumps(machine.to_json()))) == machine
    assert all(0 < device.free_bytes <= device.total_bytes for device in machine.devices)


def git(tree: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(tree), *identity, *arguments], check=True, capture_output=True)


def test_state_of_the_sources(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    git(tmp_path, "init")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    commit, dirty = git_state(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "untracked").write_text("b")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("b")
    assert git_state(tmp_path) == (commit, True)
    (tmp_path / "inside").mkdir()  # an unpacked tree in someone else's checkout is not that checkout
    assert git_state(tmp_path / "inside") == (None, None)


def test_environment_names_the_versions() -> None:
    found = environment()
    assert found["torch"] == torch.__version__
    assert set(found) == {"python", "platform", "torch", "numpy", "git_commit", "git_dirty"}
    assert (found["git_commit"] is None) == (not (ROOT / ".git").exists())

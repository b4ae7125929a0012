"""What is read from the kernel's texts and from torch, on machines that are not at hand."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from lib.devices import host
from lib.devices.host import linux_cpu_quota, linux_memory
from lib.devices.probe import environment, git_state, probe
from lib.errors import PlanError
from lib.plan.types import Hardware
from tests.support.configs import ROOT, hardware_names, load_hardware

MEMINFO = (
    "MemTotal:       16000000 kB\nMemFree:  1000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total:  0\n"
)
MIB = 2**20

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               100000.
Pages active:                             500000.
Pages inactive:                           400000.
Pages speculative:                          1000.
"Translation faults":                  123456789.
"""


def machine(root: Path, files: dict[str, str]) -> Path:
    """A directory that looks like / with these files."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_without_limits(tmp_path: Path) -> None:
    total, free = linux_memory(machine(tmp_path, {"proc/self/cgroup": "0::/\n"}))
    assert (total, free) == (16_000_000 * 1024, 8_000_000 * 1024)


def test_memory_under_a_version_2_group_counts_droppable_cache_as_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/job"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            "sys/fs/cgroup/user.slice/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{900 * MIB}\n",
            f"{group}/memory.max": f"{1000 * MIB}\n",
            f"{group}/memory.current": f"{700 * MIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {200 * MIB}\n",
        },
    )
    assert linux_memory(root) == (1000 * MIB, 500 * MIB)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": str(600 * MIB),
            "sys/fs/cgroup/outer/memory.current": str(550 * MIB),
            "sys/fs/cgroup/outer/inner/memory.max": str(500 * MIB),
            "sys/fs/cgroup/outer/inner/memory.current": str(100 * MIB),
        },
    )
    assert linux_memory(root) == (500 * MIB, 50 * MIB)


def test_memory_under_a_version_1_group_seen_from_inside_a_container(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/0123\n0::/\n",
            f"{mount}/memory.limit_in_bytes": f"{2000 * MIB}\n",
            f"{mount}/memory.usage_in_bytes": f"{2100 * MIB}\n",
            f"{mount}/memory.stat": "cache 5\ntotal_inactive_file 0\n",
        },
    )
    assert linux_memory(root) == (2000 * MIB, 0)


def test_version_1_without_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        },
    )
    assert linux_memory(root) == (16_000_000 * 1024, 8_000_000 * 1024)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/b\n",
                "sys/fs/cgroup/cpu/b/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/b/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4.0,
        ),
    ],
)
def test_processor_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert linux_cpu_quota(machine(tmp_path, files)) == quota


def test_processors_are_those_of_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, count in ((None, 8), (0.5, 1), (2.9, 2), (64.0, 8)):
        monkeypatch.setattr(host, "linux_cpu_quota", lambda quota=quota: quota)
        assert probe("cpu").cpu_count == count


@pytest.mark.parametrize(
    ("flags", "bf16"),
    [
        ("fpu amx_bf16 avx512_bf16", "amx"),
        ("fpu avx512_bf16", "avx512"),
        ("fpu avx512f amx_tile", "none"),
        ("", "none"),
    ],
)
def test_processor(flags: str, bf16: str) -> None:
    cpuinfo = f"processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
    assert host.parse_cpu_bf16(cpuinfo) == bf16
    assert host.parse_cpu_name(cpuinfo) == "Some CPU @ 2.0GHz"
    assert host.parse_cpu_name("processor\t: 0\nFeatures\t: fp asimd\n") == ""


def test_free_memory_of_macos() -> None:
    assert host.parse_vm_stat(VM_STAT) == 501_000 * 16384


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

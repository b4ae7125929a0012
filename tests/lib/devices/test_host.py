"""Memory and CPUs as the texts of kernels tell them, of machines that are not at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lib.devices import host
from lib.devices.host import linux_cpu_quota, linux_memory
from tests.support.configs import ROOT

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
        assert host.cpu_count() == count


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


OURS = "PYTORCH_ALLOC_CONF=expandable_segments:True"


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in host.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is gone after it
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(
    ("variables", "setting", "expandable"),
    [
        ({}, OURS, True),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            "PYTORCH_ALLOC_CONF=expandable_segments:False",
            False,
        ),
        ({"PYTORCH_ALLOC_CONF": ""}, "PYTORCH_ALLOC_CONF=", False),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments : True"},
            "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64, expandable_segments : True",
            True,
        ),
        # torch reads the older names first, and of a repeated option the last value.
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_HIP_ALLOC_CONF": "backend:native"},
            "PYTORCH_HIP_ALLOC_CONF=backend:native",
            False,
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,expandable_segments:False"},
            "PYTORCH_ALLOC_CONF=expandable_segments:True,expandable_segments:False",
            False,
        ),
    ],
)
def test_what_the_user_set_for_the_allocator_is_kept(
    variables: dict[str, str], setting: str, expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (host.allocator_setting(), host.expandable_segments()) == (setting, expandable)
    assert host.allocator_text().startswith(f"Allocator: {setting} (")
    assert host.allocator_text().endswith("(set in the environment)") == (setting != OURS)
    monkeypatch.setattr(host.platform, "system", lambda: "Linux")
    host.set_up_allocator()
    now = {name: os.environ[name] for name in host.ALLOCATOR_VARIABLES if name in os.environ}
    assert now == (variables or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize(("system", "torch"), [("Darwin", "2.13.0"), ("Linux", "2.13.0+rocm6.4")])
def test_elsewhere_torchs_own_default_stays(system: str, torch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.platform, "system", lambda: system)
    monkeypatch.setattr(metadata, "version", lambda _: torch)
    host.set_up_allocator()
    assert not [name for name in host.ALLOCATOR_VARIABLES if name in os.environ]


@pytest.mark.usefixtures("unset")
def test_every_training_process_sets_up_its_allocator_before_it_imports_torch() -> None:
    code = (
        "import os, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('PYTORCH_ALLOC_CONF'), flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.argv = ['train', 'resume']\n"
        "import runpy; runpy.run_module('train', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "expandable_segments:True\n", done.stderr


def test_without_torch_the_allocator_is_left_to_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise host.metadata.PackageNotFoundError(name)

    for name in host.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host.metadata, "version", missing)
    host.set_up_allocator()
    assert not {*host.ALLOCATOR_VARIABLES} & {*os.environ}

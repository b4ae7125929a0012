"""make doctor: checks of this machine and its Python environment, with advice. Never uses the network.

The checks judge facts. Collecting those needs only the standard library of Python 3.9 or later, because there
may be no environment yet; what has to be imported is imported in a process of the environment's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 120
GB = 1e9
EXTRAS = {  # of pyproject.toml -> its module, and what it is for
    "digits": ("sklearn", "handwritten digits"),
    "gcsfs": ("gcsfs", "gs:// storage"),
    "optuna": ("optuna", "searches in make sweep"),
    "s3fs": ("s3fs", "s3:// storage"),
    "safetensors": ("safetensors", "make export"),
    "tensorboard": ("tensorboard", "CONFIG_SINK_TENSORBOARD"),
    "trackio": ("trackio", "CONFIG_SINK_TRACKIO"),
    "transformers": ("transformers", "models of Hugging Face"),
    "wandb": ("wandb", "CONFIG_SINK_WANDB"),
}
_TEXTS = ("faults", "torch", "torchvision", "build", "kernels", "kind", "nvidia", "extras", "other_extras")
_SETTINGS = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_DUPLICATE_LIB_OK")
_NUMBERS: dict[str, Any] = {"cpus": 0, "gpus": 0, "busy": False, "open_files": 1024, "free": None}
UNKNOWN = _NUMBERS | dict.fromkeys((*_TEXTS, *_SETTINGS), "")  # where that Python fails before it tells
MARKS = (".created", ".creating")  # of scripts/bootstrap.sh
AGAIN = "make mrproper, then make train installs it again"


class Check(NamedTuple):
    """A bad state. text, advice: formats of facts."""

    name: str
    state: str
    applies: Callable[[Any], Any]
    text: str
    advice: str = ""


# fmt: off
CHECKS = (
    Check("system", "problem", lambda f: f.system == "Windows", "native Windows is not supported",
          "install WSL2 with wsl --install and work in it"),
    Check("system", "note", lambda f: f.system not in ("Windows", "Linux"), "{system} is not tested"),
    Check("system", "note", lambda f: "microsoft" in f.release.lower(), "WSL2 is not tested",
          "keep the tree below /home: files below /mnt are slow"),
    Check("system", "note", lambda f: not f.case_sensitive, "file names ignore case",
          "name models in lower case"),
    Check("make", "note", lambda f: release_of(f.make) < (4,), "GNU make {make} is not tested",
          "on macOS: brew install make, and type gmake instead of make"),
    Check("python", "problem", lambda f: release_of(f.python) < (3, 11), "Python {python} is too old",
          "name 3.11 to 3.13 with make PYTHON=..."),
    Check("python", "note", lambda f: release_of(f.python) >= (3, 14),
          "requirements.lock is not for {python}",
          "name 3.11 to 3.13 with make PYTHON=..., or use your own packages with make VENV="),
    Check("python", "problem", lambda f: not f.cpus, "{interpreter} fails: {failure}", "see whether it runs"),
    Check("packages", "problem", lambda f: f.environment == "broken", "{venv} is not a virtual environment",
          "remove it, or name another with make VENV=..."),
    Check("packages", "note", lambda f: f.environment == "unfinished", "{venv} is not complete yet",
          "make train installs what is missing"),
    Check("packages", "problem", lambda f: f.environment == "ready" and f.faults, "{venv}: {faults}",
          AGAIN),
    Check("packages", "problem", lambda f: f.environment == "own" and f.faults,
          "{interpreter}: {faults}", "install it yourself"),
    Check("torch", "problem", lambda f: f.torch and not f.build, "torch {torch} fails: {failure}", AGAIN),
    Check("torch", "note", lambda f: mixed(f.torch, f.torchvision),
          "torchvision {torchvision} beside {torch} may fail",
          "uninstall torchvision, or install it from the index that torch came from"),
    Check("devices", "problem", lambda f: f.build and not f.kind and not f.faults, "{failure}",
          "see whether nvidia-smi or rocm-smi lists the devices"),
    Check("devices", "problem", lambda f: f.kind == "cpu" and f.nvidia and not f.build.startswith("CUDA"),
          "there is an NVIDIA GPU, and torch is built for {build}",
          "install torch for CUDA: README.md, Use a GPU"),
    Check("devices", "problem", lambda f: f.kind == "cpu" and f.nvidia and f.build.startswith("CUDA"),
          "torch for {build} cannot use the NVIDIA GPU; its driver: {nvidia}",
          "see whether CUDA_VISIBLE_DEVICES is empty, or install a newer driver"),
    Check("devices", "note", lambda f: f.busy, "{devices}: others use it",
          "nvidia-smi shows which processes"),
    Check("cpu", "note", lambda f: f.kernels and not f.kernels.startswith("AVX512"),
          "{kernels} kernels, which in channels-last corrupt memory for some networks",
          "set CONFIG_CHANNELS_LAST=n where a run says so"),
    Check("cpu", "note", lambda f: f.OMP_NUM_THREADS.isdigit() and int(f.OMP_NUM_THREADS) > f.cpus,
          "OMP_NUM_THREADS={OMP_NUM_THREADS} on {cpus} CPUs", "unset OMP_NUM_THREADS"),
    Check("cpu", "note", lambda f: f.OMP_PROC_BIND or f.KMP_AFFINITY,
          "OMP_PROC_BIND or KMP_AFFINITY may bind several processes to the same CPUs",
          "unset OMP_PROC_BIND KMP_AFFINITY"),
    Check("cpu", "note", lambda f: f.KMP_DUPLICATE_LIB_OK,
          "KMP_DUPLICATE_LIB_OK hides that OpenMP is loaded twice",
          f"unset KMP_DUPLICATE_LIB_OK; if torch then fails: {AGAIN}"),
    Check("memory", "problem", lambda f: f.free is None, "the kernel does not say how much memory there is",
          "mount -t proc proc /proc"),
    Check("memory", "problem", lambda f: f.free is not None and f.free < 1, "{free:.2f} GB of {total:.1f} GB "
          "free{limit}", "end other programs, or raise the limit of the container"),
    Check("runs", "problem", lambda f: not f.runs_writable, "{runs} cannot be written",
          "name a place with make O=..."),
    Check("runs", "problem", lambda f: f.runs_free < 1, "{runs_free:.2f} GB free for {runs}",
          "remove old runs"),
    Check("runs", "note", lambda f: 1 <= f.runs_free < 10, "{runs_free:.1f} GB free for {runs}",
          "remove old runs"),
    Check("data", "problem", lambda f: not f.data_writable, "data cannot be written",
          "change its owner, or set CONFIG_DATA_DIR"),
    Check("data", "problem", lambda f: f.data_free < 1, "{data_free:.2f} GB free for data",
          "free some space"),
    Check("processes", "problem", lambda f: not f.loopback,
          "127.0.0.1 does not answer: several processes cannot train", "ip link set lo up"),
    Check("processes", "note", lambda f: f.open_files < 1024, "only {open_files} files may be open",
          "ulimit -n 4096"),
    Check("processes", "note", lambda f: f.gpus > 1 and f.shm is not None and f.shm < 1,
          "/dev/shm has {shm:.2f} GB: NCCL may fail", "docker run --shm-size=8g"),
)
# fmt: on
SUMMARIES = {  # name -> the fact that it needs, and its text where no check has that name
    "system": ("system", "{system} {release}"),
    "make": ("make", "GNU make {make}"),
    "python": ("python", "Python {python}"),
    "packages": ("python", "all of requirements.txt"),
    "torch": ("build", "torch {torch}, built for {build}, {kernels} kernels"),
    "devices": ("kind", "{devices}"),
    "cpu": ("cpus", "{cpus} of {all_cpus} CPUs may be used"),
    "memory": ("free", "{free:.1f} GB of {total:.1f} GB free{limit}"),
    "runs": ("runs", "{runs_free:.1f} GB free for {runs}"),
    "data": ("data", "found {data}; not there {missing}; embedded sets need no files"),
    "processes": ("loopback", "{open_files} files may be open; 127.0.0.1 answers"),
    "extras": ("extras", "installed: {extras}; not installed: {other_extras}"),
}


def judge(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the findings: name, state (ok, note or problem), text and advice, which may be empty."""
    bad = [check for check in CHECKS if check.applies(SimpleNamespace(**facts))]
    found = []
    for name, (needed, text) in SUMMARIES.items():
        own = [check for check in bad if check.name == name]
        if not own and facts[needed]:
            own = [Check(name, "ok", bool, text)]
        for check in own:
            texts = {"text": check.text.format_map(facts), "advice": check.advice.format_map(facts)}
            found.append({"name": name, "state": check.state, **texts})
    return found


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def mixed(torch: str, torchvision: str) -> bool:
    """Return True if both are installed, for different devices."""
    return bool(torch and torchvision) and torch.partition("+")[2] != torchvision.partition("+")[2]


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of this machine, and of the environment as far as its Python tells."""
    interpreter, environment = interpreter_of(Path(options.venv)) if options.venv else (sys.executable, "own")
    facts = {**UNKNOWN, "python": platform.python_version(), "make": options.make, "interpreter": interpreter}
    command = [interpreter, str(ROOT / "scripts" / "doctor.py"), "--probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=ROOT)
        lines, errors, status = done.stdout, done.stderr, f"status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        lines = printed if isinstance(printed, str) else printed.decode()
        errors, status = f"no answer within {TIMEOUT_SECONDS} s", ""
    for line in lines.splitlines():
        facts |= json.loads(line) if line.startswith("{") else {}
    names = re.findall(
        r'^config DATASET_(\w+)\n\tbool "(?!.*embedded)',
        "".join(
            file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("lib/data/datasets/*/Kconfig"))
        ),
        flags=re.M,
    )
    there = {re.sub(r"\W|_", "", path.name.lower()) for path in (ROOT / "data").glob("*")}
    found = [name.lower() for name in names if name.lower().replace("_", "") in there]
    runs, data = (nearest(path) for path in (Path(options.runs), ROOT / "data"))
    shm = Path("/dev/shm")
    return facts | {
        "failure": (errors.strip().splitlines() or [status])[-1],
        "environment": environment,
        "venv": options.venv,
        "system": platform.system(),
        "release": platform.release(),
        "case_sensitive": not (ROOT / "MAKEFILE").exists(),
        "all_cpus": os.cpu_count(),
        "runs": options.runs,
        "runs_free": shutil.disk_usage(runs).free / GB,
        "runs_writable": os.access(runs, os.W_OK),
        "data_free": shutil.disk_usage(data).free / GB,
        "data_writable": os.access(data, os.W_OK),
        "shm": shutil.disk_usage(shm).total / GB if shm.is_dir() else None,
        "loopback": loopback_works(),
        "data": ", ".join(found) or "none",
        "missing": ", ".join(sorted({name.lower() for name in names} - {*found})),
    }


def interpreter_of(venv: Path) -> tuple[str, str]:
    """Return the Python to probe, and the state of the environment `venv`: ready, unfinished or broken."""
    interpreter = venv / "bin" / "python"
    if (
        os.access(interpreter, os.X_OK)
        and subprocess.run([interpreter, "-c", ""], capture_output=True).returncode == 0
    ):
        return str(interpreter), "ready" if (venv / ".stamp").exists() else "unfinished"
    # scripts/bootstrap.sh makes it, also again where it was made by itself.
    makes = not venv.is_dir() or not any(venv.iterdir()) or any((venv / mark).exists() for mark in MARKS)
    return sys.executable, "unfinished" if makes else "broken"


def nearest(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def loopback_works() -> bool:
    """Return True if this process can connect to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
        return True
    except OSError:
        return False


def probe_environment() -> None:
    """Print facts of this interpreter as JSON, one line after each step that may fail or end the process."""
    import resource
    from importlib import metadata

    from lib.devices import host
    from lib.errors import PlanError
    from scripts import bootstrap_probe

    requirements = bootstrap_probe.requirements_of(ROOT / "requirements.txt")
    faults = [bootstrap_probe.fault_of(name, minimum=requirements[name]) for name in requirements]
    packages = {(one.metadata["Name"] or "").lower(): one.version for one in metadata.distributions()}
    settings, there = (
        host.speed_settings(),
        {name for name in EXTRAS if importlib.util.find_spec(EXTRAS[name][0])},
    )
    facts: dict[str, Any] = {
        **settings,
        "python": platform.python_version(),
        "faults": ", ".join(filter(None, faults)),
        "torch": packages.get("torch", ""),
        "torchvision": packages.get("torchvision", ""),
        "nvidia": settings["driver"] if settings["driver"].startswith("NVRM") else "",
        "cpus": host.cpu_count(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "extras": ", ".join(sorted(there)) or "none",
        "other_extras": ", ".join(f"{name} ({EXTRAS[name][1]})" for name in EXTRAS if name not in there)
        or "none",
    }
    print(json.dumps(facts), flush=True)
    with contextlib.suppress(PlanError):  # the kernel does not say: a finding of its own
        total, free = host.memory_bytes()
        kernel = host.read(host.ROOT / "proc/meminfo").partition("MemTotal:")[2].split()[:1]
        limited = kernel and total < int(kernel[0]) * 1024
        limit = " (limit of a control group)" if limited else ""
        print(json.dumps({"total": total / GB, "free": free / GB, "limit": limit}), flush=True)
    if not facts["torch"]:
        return
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    build = build if torch.version.cuda or torch.version.hip else "the CPU"
    print(json.dumps({"build": build, "kernels": torch.backends.cpu.get_cpu_capability()}), flush=True)
    if facts["faults"]:
        return
    from lib.devices.probe import probe

    hardware = probe("auto")
    texts = [
        f"{one.name}, {one.free_bytes / GB:.1f} of {one.total_bytes / GB:.1f} GB free"
        for one in hardware.devices
    ]
    is_cpu = hardware.kind == "cpu"
    busy = not is_cpu and any(one.free_bytes < one.total_bytes / 2 for one in hardware.devices)
    devices = "no GPU: runs use the CPU" if is_cpu else "; ".join(texts)
    print(
        json.dumps(
            {"kind": hardware.kind, "devices": devices, "busy": busy, "gpus": 0 if is_cpu else len(texts)}
        )
    )


def main() -> int:
    """Print the findings; return 1 if one is a problem."""
    parser = argparse.ArgumentParser(prog="doctor", description=__doc__)
    parser.add_argument("--venv", default="", help="the environment; default: none")
    parser.add_argument("--runs", default="runs", help="the folder of runs")
    parser.add_argument("--make", default="4", help="the version of make")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--probe", action="store_true", help="print facts of this interpreter")
    options = parser.parse_args()
    if options.probe:
        probe_environment()
        return 0
    found = judge(collect(options))
    problems = sum(one["state"] == "problem" for one in found)
    if options.json:
        print(json.dumps(found, indent=1))
        return int(problems > 0)
    for one in found:
        print(
            f"{one['state']:<8} {one['name']:<10} {one['text']}"
            + (f"\n{'':>19} -> {one['advice']}" * bool(one["advice"]))
        )
    print(f"Problems: {problems}" if problems else "No problem. Next: make defconfig-lenet5 && make train")
    return int(problems > 0)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # run as a file, Python would look for modules beside this one
    from lib.errors import run_main

    sys.exit(run_main(main, is_listing=True))

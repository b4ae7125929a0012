"""make doctor: checks of this machine and its Python environment, with advice. Never uses the network.

scripts/doctor.ini judges the facts collected here. That needs only the standard library of Python 3.9
or later, because there may be no environment yet; what must be imported is imported by the Python of that
environment.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 120
GB = 1e9
RULES = configparser.ConfigParser(interpolation=None, delimiters=("=",))
RULES.read(Path(__file__).with_suffix(".ini"), encoding="utf-8")
CHECKS = [title for title in RULES.sections() if ": " in title]
EXTRAS = {name: what.split(", ") for name, what in RULES["extras of pyproject.toml"].items()}
FACTS = RULES["facts of the environment"]["names"].split()


def judge(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the findings: name, state (ok, note or problem), text and advice, which may be empty."""
    found: list[dict[str, str]] = []
    for title in CHECKS:
        name, text = title.split(": ", 1)
        (state, when), *more = RULES[title].items()
        needed = state != "ok" or name not in {one["name"] for one in found}
        if needed and eval(when, {"release_of": release_of}, facts):
            advice = dict(more).get("advice", "").format_map(facts)
            found.append({"name": name, "state": state, "text": text.format_map(facts), "advice": advice})
    return found


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of this machine, and of the environment as far as its Python reports them."""
    interpreter, environment = interpreter_of(Path(options.venv)) if options.venv else (sys.executable, "own")
    command = [interpreter, str(ROOT / "scripts" / "doctor.py"), "--probe"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS, cwd=ROOT)
        output, errors = done.stdout, done.stderr.decode(errors="replace").strip().splitlines()
        failure = errors[-1] if errors else f"status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, failure = error.stdout or b"", f"no answer within {TIMEOUT_SECONDS} s"
    facts: dict[str, Any] = {**dict.fromkeys(FACTS, ""), "python": platform.python_version()}
    for line in output.splitlines():
        facts |= json.loads(line) if line.startswith(b"{") else {}
    for name, path in (("runs", Path(options.runs)), ("data", ROOT / "data")):
        there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
        disk = shutil.disk_usage(there)
        facts[f"{name}_free"] = disk.free / GB
        facts[f"{name}_writable"] = os.access(there, os.W_OK) and disk.total > 0  # /proc holds no files
    return {
        **facts,
        **vars(options),
        "failure": failure,
        "environment": environment,
        "interpreter": interpreter,
        "system": platform.system(),
        "release": platform.release(),
        "case_sensitive": not (ROOT / "MAKEFILE").exists(),
        "all_cpus": os.cpu_count(),
        "shm": shutil.disk_usage("/dev/shm").total / GB if Path("/dev/shm").is_dir() else "",
        "data": ", ".join(sorted(path.name for path in (ROOT / "data").glob("[!.]*"))) or "none",
    }


def interpreter_of(venv: Path) -> tuple[str, str]:
    """Return the Python to probe, and the state of the environment `venv`: ready, unfinished or broken."""
    python = venv / "bin" / "python"
    if os.access(python, os.X_OK) and not subprocess.run([python, "-c", ""], capture_output=True).returncode:
        return str(python), "ready" if (venv / ".stamp").exists() else "unfinished"
    # scripts/bootstrap.sh makes it, also again where it was made by itself.
    makes = not venv.is_dir() or not any(venv.iterdir()) or any(venv.glob(".creat*"))
    return sys.executable, "unfinished" if makes else "broken"


def emit(**facts: Any) -> None:
    """Print facts as a line of JSON, after each step of a probe that may fail or end the process."""
    print(json.dumps(facts), flush=True)


def probe_environment() -> None:
    """Print facts of this interpreter."""
    import resource
    from importlib import metadata

    from lib.devices import host
    from lib.errors import PlanError
    from scripts import bootstrap_probe

    requirements = bootstrap_probe.requirements_of(ROOT / "requirements.txt")
    faults = [bootstrap_probe.fault_of(name, minimum=requirements[name]) for name in requirements]
    packages = {(one.metadata["Name"] or "").lower(): one.version for one in metadata.distributions()}
    settings = host.speed_settings()
    there = {name for name, (module, _) in EXTRAS.items() if importlib.util.find_spec(module)}
    others = [f"{name} ({what})" for name, (_, what) in EXTRAS.items() if name not in there]
    emit(
        **settings,
        python=platform.python_version(),
        faults=", ".join(filter(None, faults)),
        torch=packages.get("torch", ""),
        torchvision=packages.get("torchvision", ""),
        nvidia=settings["driver"] if settings["driver"].startswith("NVRM") else "",
        cpus=host.cpu_count(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        extras=", ".join(sorted(there)) or "none",
        other_extras=", ".join(others) or "none",
    )
    with contextlib.suppress(PlanError):  # the kernel does not say: a finding of its own
        total, free = host.memory_bytes()
        emit(total=total / GB, free=free / GB)
    if "torch" in packages:
        probe_torch(is_complete=not any(faults))


def probe_torch(*, is_complete: bool) -> None:
    """Print facts of torch, and of the devices where all requirements are there."""
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    build = built if torch.version.cuda or torch.version.hip else "the CPU"
    emit(build=build, kernels=torch.backends.cpu.get_cpu_capability())
    if not is_complete:
        return
    from lib.devices.probe import probe

    hardware = probe("auto")
    if hardware.kind == "cpu":
        emit(kind="cpu", devices="no GPU: runs use the CPU")
        return
    devices = [(one.name, one.free_bytes / GB, one.total_bytes / GB) for one in hardware.devices]
    texts = [f"{name}, {free:.1f} of {total:.1f} GB free" for name, free, total in devices]
    busy = any(free < total / 2 for _, free, total in devices)
    emit(kind=hardware.kind, devices="; ".join(texts), busy=busy, gpus=len(texts))


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
    wrapped = textwrap.TextWrapper(
        100, subsequent_indent=" " * 20, break_long_words=False, break_on_hyphens=False
    )
    for one in found:
        print(wrapped.fill(f"{one['state']:<8} {one['name']:<10} {one['text']}"))
        print(f"{'':>19} -> {one['advice']}\n" * bool(one["advice"]), end="")
    print(f"Problems: {problems}" if problems else "No problem. Next: make defconfig-lenet5 && make train")
    return int(problems > 0)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # run as a file, Python would look for modules beside this one
    from lib.errors import run_main

    sys.exit(run_main(main, is_listing=True))

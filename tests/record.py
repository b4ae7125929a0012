"""What a change of structure must not change, written down and compared.

    python -m tests.record write      writes tests/fixtures/record from the tree as it stands
    python -m tests.record compare    every part; says what differs and ends with status 1
    python -m tests.record compare configurations plans      the parts that take seconds

Parts: `configurations` (the assignments of every shipped configuration, and of 200 random ones),
`plans` (by the table, of every shipped configuration on MACHINES), `predictions` (the same by prediction,
minutes), `weights` (SHA-256 of the final weights of small runs; they hold on the machine that wrote them),
`runs` (two run directories that are resumed), `hyperparams` (the public functions of lib.hyperparams).

Only what stays where it is gets imported: lib.kconf, lib.config, lib.plan, lib.hyperparams. The rest is
called as make calls it.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lib import hyperparams, kconf
from lib.config import config_from_values
from lib.errors import ConfigError
from lib.kconf.extremes import make_extreme
from lib.kconf.tree import load_own_tree
from lib.kconf.write import full_text
from lib.plan.gpus import parse_gpu
from lib.runs.identity import hashed_values

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "fixtures" / "record"
MACHINES = ("h100-80gx4", "a100-40g", "a10g", "rtx3090x2", "rtx2060-6g", "w7900", "mi300xx8", "cpu-64g")
SHIPPED = sorted(path.name for path in (ROOT / "defconfigs").iterdir() if path.is_file())
RANDOM = 200
TINY = {  # a few steps on the CPU, the same on any number of threads
    "DEVICE_CPU": "y",
    "PRECISION_FP32": "y",
    "DETERMINISTIC": "y",
    "BUDGET_STEPS": "y",
    "MAX_STEPS": "6",
    "CHECKPOINT_INTERVAL_STEPS": "3",
    "AUTO_METHOD_TABLE": "y",
}
SMALL_IMAGES = {"DATA_LIMIT": "512", "TARGET_EFFECTIVE_BATCH": "64"}
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "lenet5": ("lenet5", SMALL_IMAGES),
    "lenet5-two-processes": ("lenet5", SMALL_IMAGES | {"NUM_DEVICES": "2"}),
    "lenet5-resumed": ("lenet5", SMALL_IMAGES | {"MAX_STEPS": "40"}),
    "resnet18": ("resnet18", SMALL_IMAGES),
    "gpt2": ("gpt2-tiny", {"DATA_LIMIT": "512", "TARGET_EFFECTIVE_BATCH": "16"}),
    "trm": (
        "trm-sudoku4",
        {"SUDOKU_TRAIN_SIZE": "200", "SUDOKU_TEST_SIZE": "50", "TARGET_EFFECTIVE_BATCH": "32"},
    ),
    "looped": ("looped", {"DATA_LIMIT": "256", "TARGET_EFFECTIVE_BATCH": "32"}),
    "resnet_bk": ("resnet_bk", {"DATA_LIMIT": "512", "TARGET_EFFECTIVE_BATCH": "16"}),
    "latentwire": ("latentwire-tiny", {"FROZEN_STEPS": "5"}),
}
ASSIGNED = re.compile(r"^(?:# )?CONFIG_(\w+)(?:=| is not set$)", re.MULTILINE)
# Options that more models have since the record was written, with the value that changes nothing.
WIDENED = {'CONFIG_INITIAL_WEIGHTS=""'}
# Recipes that were replaced by faster ones since.
REPLACED = {"lenet5-mnist", "gpt2-shakespeare"}
KEPT_RUNS = ("lenet5-resumed", "trm")  # with their checkpoints; lenet5-resumed is kept where it was stopped


def main() -> int:
    action, *parts = sys.argv[1:] or [""]
    if action not in ("write", "compare") or set(parts) - set(PARTS):
        print(__doc__)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    differences = 0
    for part in parts or PARTS:
        if part == "runs" and action == "compare":
            found, known = resumed_runs(), json.loads((FOLDER / "resumed.json").read_text())
        else:
            found = PARTS[part]()
            known = found if action == "write" else read(part)
        if action == "write":
            _write(part, found)
            print(f"{part}: {len(found)} written")
            continue
        different = changed(found, known)
        differences += len(different)
        for name, what in different.items():
            print(f"{part}: {name} differs: {what}")
        equal, newer = len(known) - len(different), len(set(found) - set(known))
        print(f"{part}: {equal} of {len(known)} are equal, {newer} are newer than the record")
    return bool(differences)


def changed(found: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, str]:
    """Name -> the difference, of everything recorded. What is newer than the record is no difference."""
    kept = {name: value for name, value in known.items() if name.partition(" ")[0] not in REPLACED}
    names = sorted(name for name, value in kept.items() if found.get(name) != value)
    return {name: _first_difference(known[name], found.get(name)) for name in names}


def configurations(numbers: Sequence[int] = range(RANDOM)) -> dict[str, Any]:
    """Name -> sorted assignments. Random ones are read back from what was written, if that is there.

    numbers: of the random ones.

    Newer options are left out: that their defaults change nothing is tested by the identities of runs.
    """
    found = {name: _assignments(_shipped(name).text) for name in SHIPPED}
    written = read("configurations")
    kept = {name: lines for name, lines in written.items() if name.startswith("random-")}
    tree = load_own_tree(ROOT)
    for number in numbers:
        name = f"random-{number:03}"
        if name in kept:
            text = "\n".join(kept[name]) + "\n"
        else:
            percent = random.Random(number).choice((10, 50, 90))
            make_extreme(tree, "randconfig", {}, seed=number, percent=percent)
            text = full_text(tree)
        try:
            found[name] = _assignments(kconf.load_written(text, root=ROOT).text)
        except ConfigError as error:
            found[name] = [str(error), *error.findings]
    return {name: of_the_record(name, lines, written) for name, lines in found.items()} if written else found


def newer_in_identities(numbers: Sequence[int]) -> dict[str, set[str]]:
    """Return the options of an identity that a recorded configuration has not, by its name.

    numbers: of the random ones.
    """
    found = dict[str, set[str]]()
    names = {f"random-{number:03}" for number in numbers} | set(SHIPPED) - REPLACED
    for name, lines in read("configurations").items():
        if name not in names or not (own := set(ASSIGNED.findall("\n".join(lines)))):
            continue  # newer than the record, or refused
        counted = hashed_values(kconf.load_written("\n".join(lines) + "\n", root=ROOT).in_effect)
        if newer := counted.keys() - own:
            found[name] = newer
    return found


def of_the_record(name: str, lines: Sequence[str], written: Mapping[str, Sequence[str]]) -> list[str]:
    """Return `lines` without options that are in no recorded configuration, and WIDENED ones not in this."""
    recorded = {symbol for known in written.values() for line in known for symbol in ASSIGNED.findall(line)}
    lacks = WIDENED - set(written.get(name, ()))
    return [line for line in lines if recorded.issuperset(ASSIGNED.findall(line)) and line not in lacks]


def plans() -> dict[str, Any]:
    """NAME MACHINE -> the plan's values by the table, or the refusal."""
    return {f"{name} {machine}": _table_plan(name, machine) for name in SHIPPED for machine in MACHINES}


def _table_plan(name: str, machine: str) -> Any:
    config = config_from_values(_shipped(name).values)
    try:
        decided = hyperparams.auto_detect_hyperparams(config, gpu_info=_gpu_info(machine))
    except ConfigError:
        return "refused"
    return {key: value for key, value in decided.items() if key not in ("rationale", "plan")}


def _gpu_info(machine: str) -> dict[str, Any]:
    hardware = parse_gpu(machine)
    first = hardware.devices[0]
    return {
        "gpu_name": first.name,
        "gpu_count": 0 if hardware.kind == "cpu" else len(hardware.devices),
        "gpu_mem_gb": first.total_bytes / 1e9,
        "gpu_free_gb": first.free_bytes / 1e9,
        "has_gpu": hardware.kind != "cpu",
        "gpu_kind": hardware.kind,
        "gpu_capability": first.capability,
    }


def predictions() -> dict[str, Any]:
    """NAME MACHINE -> the values of `make plan GPU=MACHINE JSON=1`, without its sentences."""
    requested = [(name, machine) for name in SHIPPED for machine in MACHINES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda pair: _predicted(*pair), requested)
    return {f"{name} {machine}": values for (name, machine), values in zip(requested, found, strict=True)}


def _predicted(name: str, machine: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / ".config"
        config.write_text(_shipped(name).text)
        done = _train(config, "plan", "--gpu", machine, "--json")
    if done.returncode:
        return f"status {done.returncode}"
    told = json.loads(done.stdout)
    plan = {key: value for key, value in told["plan"].items() if key != "reasons"}
    return {
        "plan": plan,
        **{key: told[key] for key in ("steps_per_epoch", "step_flop", "step_seconds_estimate")},
    }


def weights() -> dict[str, Any]:
    """Name of a run -> SHA-256 of its final weights. Written with the machine, where alone they hold."""
    found = {"machine": f"{platform.processor() or platform.machine()} {_cpu_name()}"}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            place = Path(folder) / name
            _run(name, place, stop=name == "lenet5-resumed")
            if name == "lenet5-resumed":
                _checked(_train(place / ".config", "--runs", str(place / "runs"), "resume"))
            found[name] = _digest(place)
    return found


def kept_runs() -> dict[str, Any]:
    """Two run directories, kept in runs.tar.gz; and what they end as."""
    with tempfile.TemporaryDirectory() as folder:
        for name in KEPT_RUNS:
            _run(name, Path(folder) / name, stop=True)
        with tarfile.open(FOLDER / "runs.tar.gz", "w:gz") as archive:
            for name in KEPT_RUNS:
                archive.add(Path(folder) / name, arcname=name)
    ended = resumed_runs()
    (FOLDER / "resumed.json").write_text(json.dumps(ended, indent=1) + "\n")
    return ended


def resumed_runs() -> dict[str, Any]:
    """Name -> step and weights at the end of the kept runs, which `make train` finds and resumes."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(FOLDER / "runs.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        for name in KEPT_RUNS:
            place = Path(folder) / name
            said = _checked(_train(place / ".config", "--runs", str(place / "runs"), "train"))
            started = re.search(r"(?:after|from) step (\d+)", said)
            found[name] = {"resumed": started is not None and int(started[1]) > 0, "weights": _digest(place)}
            _checked(_train(place / ".config", "--runs", str(place / "runs"), "eval"))
    return found


def functions() -> dict[str, Any]:
    """Return the parameters, with kinds and defaults, of the public functions of lib.hyperparams."""
    return {
        name: [
            [parameter.name, str(parameter.kind), repr(parameter.default)]
            for parameter in inspect.signature(value).parameters.values()
        ]
        for name, value in vars(hyperparams).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == hyperparams.__name__
    }


PARTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "configurations": configurations,
    "plans": plans,
    "hyperparams": functions,
    "weights": weights,
    "runs": kept_runs,
    "predictions": predictions,
}


def _shipped(name: str, **changes: str) -> kconf.Resolved:
    overrides = {f"CONFIG_{symbol}": value for symbol, value in changes.items()}
    return kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides=overrides)


def _assignments(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if ASSIGNED.match(line))


def _run(name: str, place: Path, *, stop: bool) -> None:
    """Train one of RUNS below `place`; with `stop` it is told to end after its first checkpoint."""
    base, changes = RUNS[name]
    place.mkdir()
    (place / ".config").write_text(_shipped(base, **TINY | changes).text)
    command, environment = _command(place / ".config", "--runs", str(place / "runs"), "train")
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while stop and process.poll() is None:
        if list(place.glob("runs/*/*/ckpt/step-*")):
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.005)
    assert process.wait() in ((0, 75) if stop else (0,)), name


def _train(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, environment = _command(config, *arguments)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def _command(config: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "KCONFIG_CONFIG": str(config), "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-m", "train", *arguments], environment


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _digest(place: Path) -> str:
    """SHA-256 of the weights in the latest checkpoint, by name."""
    import torch

    (run,) = place.glob("runs/*/*/ckpt")
    latest = run / (run / "latest").read_text().strip() / "state.pt"
    model: dict[str, torch.Tensor] = torch.load(latest, weights_only=True)["model"]
    digest = hashlib.sha256()
    for name, tensor in sorted(model.items()):
        digest.update(
            name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def _cpu_name() -> str:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return str(names[0]) if names else ""


def read(part: str) -> dict[str, Any]:
    file = FOLDER / f"{part}.json.gz"
    return dict(json.loads(gzip.decompress(file.read_bytes()))) if file.exists() else {}


def _write(part: str, found: Mapping[str, Any]) -> None:
    data = json.dumps(found, indent=0, sort_keys=True).encode()
    (FOLDER / f"{part}.json.gz").write_bytes(gzip.compress(data, mtime=0))


def _first_difference(known: Any, found: Any) -> str:
    if isinstance(known, list) and isinstance(found, list):
        lost, new = sorted(set(known) - set(found)), sorted(set(found) - set(known))
        return f"without {lost[:3]}, with {new[:3]}"
    if isinstance(known, dict) and isinstance(found, dict):
        return next(
            (
                f"{key}: {known.get(key)} -> {found.get(key)}"
                for key in {*known, *found}
                if known.get(key) != found.get(key)
            ),
            "",
        )
    return f"{known} -> {found}"


if __name__ == "__main__":
    raise SystemExit(main())

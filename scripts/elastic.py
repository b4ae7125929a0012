"""LatentWire's elastic configuration: its answers for GPUs, and a demonstration."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lib import kconf
from lib.devices.probe import probe
from lib.errors import ConfigError, PlanError, ToolkitError, run_main
from lib.plan.gpus import parse_gpu
from lib.plan.latentwire import document_batch, latentwire
from lib.plan.types import Device
from lib.runs import metrics
from lib.runs.directory import resolve_run
from lib.units import GB

ROOT = Path(__file__).resolve().parents[1]
COUNTS = (1, 2, 3, 4, 8, 16)
DEMO = {
    "CONFIG_DATA_LIMIT": "2048",
    "CONFIG_ELASTIC_POLICY_LATENTWIRE": "y",
    "CONFIG_BUDGET_STEPS": "y",
    "CONFIG_MAX_STEPS": "40",
    "CONFIG_LOG_INTERVAL_STEPS": "1",
    "CONFIG_PRECISION_FP32": "y",
    "CONFIG_DEVICE_CPU": "y",
}
TRAIN = (sys.executable, "-m", "train")
# Training losses of the first steps agree to this share. Later, rounding in fp32 grows by itself.
FIRST_STEPS, CLOSE = 10, 1e-4


def main() -> int:
    """Run the command: check or demo."""
    parser = argparse.ArgumentParser(prog="python -m scripts.elastic", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="print the rules' answers, and check them")
    check.add_argument("gpu", nargs="?", default="", help="NAME[xN][:FREE]; default: of this machine")
    commands.add_parser("demo", help="train on one process and on two, and compare")
    options = parser.parse_args()
    return demonstrate() if options.command == "demo" else show(options.gpu)


def show(gpu: str) -> int:
    """Print a line for each number of GPUs. Raises ConfigError where there is no GPU and none is named."""
    hardware = parse_gpu(gpu) if gpu else probe("auto")
    if hardware.kind == "cpu":
        raise ConfigError("there is no GPU to ask the rules about", todo="name one: GPU=a100-40g")
    device = hardware.devices[0]
    print(f"{device.name}, {device.total_bytes / GB:.1f} GB; {len(hardware.devices)} of them")
    print("Two frozen models by LatentWire's rules, 64 samples an optimizer step (no run goes by them):")
    for count in sorted({*COUNTS, len(hardware.devices)}):
        print("\n".join(_lines(device, count)))
    return 0


def _lines(device: Device, count: int) -> Iterator[str]:
    memory = [device.total_bytes] * count
    written = document_batch(gpu_name=device.name, total_bytes=memory)
    try:
        found = latentwire(gpu_name=device.name, total_bytes=memory)
    except PlanError as error:
        yield f"{count:>3}  none: {error.why} (as written: {written} at once)"
        return
    every = [size for micro_batches in found.micro_batches for size in micro_batches]
    assert sum(every) == found.effective_batch and all(1 <= size <= found.capacity for size in every), found
    layout = ", ".join(f"{name} on {_listed(gpus)}" for name, gpus in found.layout.items())
    sizes = " + ".join(f"{times} x {size}" for size, times in Counter(found.micro_batches[0]).items())
    yield f"{count:>3}  {found.strategy:<12} {layout}"
    yield f"     {found.copies} x ({sizes}) = {found.effective_batch} samples (as written: {written} at once)"


def _listed(gpus: tuple[int, ...]) -> str:
    return f"{gpus[0]}-{gpus[-1]}" if len(gpus) > 2 else ",".join(map(str, gpus))


def demonstrate() -> int:
    """Train on one process and on two. Raises ToolkitError where the results differ."""
    found = {count: _trained(count) for count in (1, 2)}
    for count, (batch, losses) in found.items():
        print(f"{count} process(es): {batch} samples an optimizer step, last training loss {losses[-1]:.6f}")
    (one_batch, one), (two_batch, two) = found.values()
    apart = max(abs(a - b) / a for a, b in zip(one[:FIRST_STEPS], two[:FIRST_STEPS], strict=True))
    if one_batch != two_batch or len(one) != len(two) or apart > CLOSE:
        raise ToolkitError("one process and two did not train alike", why=f"{found}")
    print(f"The same training on both: the first {FIRST_STEPS} losses differ by {apart:.1e} at most.")
    return 0


def _trained(count: int) -> tuple[int, list[float]]:
    """Return the effective batch and the training loss of each step of LeNet-5 on the embedded digits."""
    settings = {**DEMO, "CONFIG_NUM_DEVICES": str(count)}
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5", overrides=settings)
    with tempfile.TemporaryDirectory(prefix="anneal-elastic-") as name:
        (Path(name) / ".config").write_text(resolved.text)
        command = ["env", f"KCONFIG_CONFIG={name}/.config", *TRAIN, "--runs", f"{name}/runs", "train"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ToolkitError(f"training on {count} process(es) failed", why=last[0])
        run = resolve_run(Path(name) / "runs")
        rows = [row for row in metrics.read(run.metrics) if row["kind"] == "train"]
        return run.read_json("plan")["effective_batch"], [row["loss"] for row in rows]


if __name__ == "__main__":
    sys.exit(run_main(main))

"""LatentWire's elastic configuration: its answers for GPUs, and a demonstration."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lib import kconf
from lib.config import Config, config_from_values
from lib.devices.probe import probe
from lib.errors import ConfigError, PlanError, ToolkitError, run_main
from lib.plan import plan
from lib.plan.gpus import machine_sizes, parse_gpu
from lib.plan.latentwire import document_batch, document_facts
from lib.plan.types import Hardware
from lib.units import GB, counted
from scripts.short_run import ROOT, rows_of, short_run

COUNTS = (1, 2, 3, 4, 8, 16)
CHECK = {"CONFIG_ELASTIC_POLICY_LATENTWIRE": "y", "CONFIG_TARGET_EFFECTIVE_BATCH": "0"}
DEMO = {
    "CONFIG_DATA_LIMIT": "2048",
    "CONFIG_ELASTIC_POLICY_LATENTWIRE": "y",
    "CONFIG_BUDGET_STEPS": "y",
    "CONFIG_MAX_STEPS": "40",
    "CONFIG_LOG_INTERVAL_STEPS": "1",
    "CONFIG_PRECISION_FP32": "y",
    "CONFIG_DEVICE_CPU": "y",
}
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
    print("Two frozen models of 14 and 13 GB (Llama-8B, Qwen-7B) with CONFIG_ELASTIC_POLICY_LATENTWIRE=y:")
    values = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5", overrides=CHECK).values
    config = config_from_values(values)
    for count in machine_sizes(hardware, COUNTS):
        print("\n".join(_lines(config, replace(hardware, devices=(device,) * count))))
    return 0


def _lines(config: Config, hardware: Hardware) -> Iterator[str]:
    """Yield what a plan by the policy says of the two models."""
    device, count = hardware.devices[0], len(hardware.devices)
    written = document_batch(gpu_name=device.name, total_bytes=[device.total_bytes] * count)
    try:
        found = plan(config, hardware, document_facts())
    except PlanError as error:
        yield f"{count:>3}  none: {error.why} (as written: {written} at once)"
        return
    name, reasons = found.reasons["strategy"].rpartition(" ")[2], found.reasons
    where = reasons["branch_devices"] if found.branch_devices else "all models on each device"
    yield f"{count:>3}  {name:<12} {found.strategy} in {counted(found.world, 'process')}: {where}"
    sizes = f"{found.effective_batch} samples a step: {reasons['accumulation']}"
    yield f"     {sizes} (as written: {written} at once)"


def demonstrate() -> int:
    """Train on one process and on two. Raises ToolkitError where the results differ."""
    found = {count: _trained(count) for count in (1, 2)}
    for count, (batch, losses) in found.items():
        text = f"{batch} samples an optimizer step, last training loss {losses[-1]:.6f}"
        print(f"{counted(count, 'process')}: {text}")
    (one_batch, one), (two_batch, two) = found.values()
    apart = max(abs(a - b) / a for a, b in zip(one[:FIRST_STEPS], two[:FIRST_STEPS], strict=True))
    if one_batch != two_batch or len(one) != len(two) or apart > CLOSE:
        raise ToolkitError("one process and two did not train alike", why=f"{found}")
    print(f"The same training on both: the first {FIRST_STEPS} losses differ by {apart:.1e} at most.")
    return 0


def _trained(count: int) -> tuple[int, list[float]]:
    """Return the effective batch and the training loss of each step of LeNet-5 on the embedded digits."""
    settings = {**DEMO, "CONFIG_NUM_DEVICES": str(count)}
    with tempfile.TemporaryDirectory(prefix="anneal-elastic-") as name:
        run = short_run("lenet5", settings, folder=Path(name))
        return run.read_json("plan")["effective_batch"], [row["loss"] for row in rows_of(run, "train")]


if __name__ == "__main__":
    sys.exit(run_main(main))

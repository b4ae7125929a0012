"""Run `python -m train` the way the make targets do, in a directory of its own."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib import kconf
from lib.distributed.fsdp import shard_of
from lib.runs import checkpoint
from lib.runs.directory import RunDir, resolve_run
from tests.e2e.forked import ROOT, Forked

TINY = {  # a run of a second on the embedded digits
    "CONFIG_DATA_LIMIT": "2048",
    "CONFIG_TARGET_EFFECTIVE_BATCH": "64",
    "CONFIG_BUDGET_STEPS": "y",
    "CONFIG_MAX_STEPS": "40",
    "CONFIG_LOG_INTERVAL_STEPS": "5",
    "CONFIG_PRECISION_FP32": "y",
}
BRIEF = TINY | {"CONFIG_HOLDOUT": "256"}  # evaluated on so many samples instead of the whole test part
# For what does not depend on the number of steps, nor on a plan by a trace, which is half of so short a run.
SHORT = BRIEF | {"CONFIG_MAX_STEPS": "10", "CONFIG_AUTO_METHOD_TABLE": "y"}

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Runner:
    """A configuration and a directory of runs.

    forks: ranks are forked off what launches them, which plans by the table, instead of started with their
    imports. That is for tests of what ranks do, and not of how they are started.
    """

    folder: Path
    forks: bool = False

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def configure(self, defconfig: str, overrides: Mapping[str, str]) -> None:
        if self.forks:
            overrides = {**overrides, "CONFIG_AUTO_METHOD_TABLE": "y"}
        resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / defconfig, overrides=overrides)
        (self.folder / ".config").write_text(resolved.text)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "KCONFIG_CONFIG": str(self.folder / ".config"), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str, **environment: str) -> Forked:
        return Forked(
            "train",
            ["--runs", str(self.runs), *arguments],
            environment=self.environment() | environment,
            output=self.folder / f"output-{next(_NUMBERS)}",
            ranks=self.forks,
        )

    def run(self, *arguments: str, status: int = 0, **environment: str) -> str:
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == status, output
        return output

    def newest(self) -> RunDir:
        return resolve_run(self.runs)

    def weights(self) -> dict[str, torch.Tensor]:
        found = checkpoint.load(self.newest().checkpoints, log=print)
        assert found is not None
        model: dict[str, Any] = found[1]["model"]
        return {name: shard_of(weight, None) for name, weight in model.items()}  # read where it is sharded


def assert_same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"differ: {different}"


def wait_for_checkpoint(runner: Runner, process: Forked, count: int = 1) -> None:
    deadline = time.monotonic() + 60
    while len(list(runner.runs.glob("*/*/ckpt/step-*"))) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_log(runner: Runner, process: Forked, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in (runner.newest().path / "log.txt").read_text():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)

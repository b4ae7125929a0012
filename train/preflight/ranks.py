"""Two-rank checks of `make preflight`: the state after two steps, compared with that of one process.

`python -m train.preflight.ranks FOLDER` is one of the ranks. Norms of gradients alone would not tell a sum
from a mean, nor would Adam, which ignores their scale; so the optimizer is SGD, and weights are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib import kconf
from lib.config import config_from_values
from lib.devices.backend import open_backend
from lib.distributed.local_ranks import environment
from lib.errors import ToolkitError, error_in, run_main
from lib.plan.types import Hardware, Plan
from train import loop
from train.job import Progress
from train.preflight.checks import NO_WARM_UP, Candidate, relative_difference
from train.training_data import open_training_data

STEPS = 2
TIMEOUT_SECONDS = 120
_POLL_SECONDS = 0.05
OF_RANKS = ("gradients of 2 ranks", "averages of 2 ranks")
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "nesterov": False, "learning_rate": 0.01}
RULE = SGD | NO_WARM_UP | {"weight_decay": 0.0, "schedule": "constant", "ema": True, "ema_decay": 0.5}
CLOSE = 1e-9

Results = dict[str, dict[str, Tensor]]  # "weights" and "averages", by name


def two_ranks(candidate: Candidate, resolved: kconf.Resolved) -> dict[str, tuple[bool, str]]:
    """Check gradients and averages on two ranks. Raises ToolkitError if a process fails."""
    with tempfile.TemporaryDirectory(prefix="anneal-preflight-") as name:
        folder = Path(name)
        request = {
            "configuration": resolved.to_json(),
            "plan": candidate.plan.to_json(),
            "hardware": candidate.hardware.to_json(),
            "root": str(candidate.root),
        }
        (folder / "request.json").write_text(json.dumps(request))
        _run(folder, root=candidate.root)
        ranks = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]
    before = {name: tensor.clone() for name, tensor in _job_of(candidate).model.state_dict().items()}
    return compare_ranks(ranks, outcome(candidate), before=before)


def compare_ranks(
    ranks: list[Results], alone: Results, *, before: Mapping[str, Tensor]
) -> dict[str, tuple[bool, str]]:
    """Check that ranks have the same to the bit, and the same as one process within tolerance."""
    one, other = ranks
    same = {
        kind: all(torch.equal(one[kind][name], other[kind][name]) for name in one[kind]) for kind in alone
    }
    moved = [[of["weights"][name] - before[name] for name in alone["weights"]] for of in (one, alone)]
    relative = relative_difference(*moved)
    words = {kind: "the same" if alike else "not the same" for kind, alike in same.items()}
    weights = f"weights of the two are {words['weights']}, {relative:.1e} from those of one"
    averages = f"averages of the two are {words['averages']}"
    passed = same["weights"] and relative < CLOSE, same["averages"]
    return dict(zip(OF_RANKS, zip(passed, (weights, averages), strict=True), strict=True))


def outcome(candidate: Candidate, *, world: int = 1, backend: Any = None) -> Results:
    """Return weights and averages after STEPS steps."""
    job = _job_of(candidate, world=world, backend=backend)
    for step in range(STEPS):
        loop.optimizer_step(job, Progress(step=step))
    assert job.ema is not None
    floats = {name: tensor for name, tensor in job.model.state_dict().items() if tensor.is_floating_point()}
    return {"weights": floats, "averages": job.ema.state_dict()}


def _job_of(candidate: Candidate, *, world: int = 1, backend: Any = None) -> Any:
    rows = sum(candidate.splits()[0]) // world
    return candidate.job(rows, world=world, backend=backend, **RULE)


def _run(folder: Path, *, root: Path) -> None:
    processes = []
    for rank in range(2):
        variables = environment(rank, world=2, store=folder / "store")
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), "OMP_NUM_THREADS=1"]
        command += [sys.executable, "-m", "train.preflight.ranks", str(folder)]
        with _log(folder, rank).open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=root, stdout=log, stderr=log))
    try:
        _wait(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for both. Raises ToolkitError for the first to fail: the other would wait for it."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while None in (statuses := [process.poll() for process in processes]) or any(statuses):
        if failed := [rank for rank, status in enumerate(statuses) if status]:
            # If both failed, the second did so because of the first.
            rank = min(failed, key=lambda rank: _log(folder, rank).stat().st_mtime_ns)
            message = error_in(_log(folder, rank).read_text(encoding="utf-8", errors="replace"))
            why = message or f"it ended with status {statuses[rank]} and no message"
            raise ToolkitError(f"process {rank} of two failed", why=why)
        if time.monotonic() > deadline:
            raise ToolkitError(f"two processes did not end within {TIMEOUT_SECONDS} s")
        time.sleep(_POLL_SECONDS)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def main() -> int:
    """Run one rank and save its results to the folder."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    config = config_from_values(kconf.Resolved.from_json(request["configuration"]).values)
    root = Path(request["root"])
    candidate = Candidate(
        config=config,
        data=open_training_data(config, root=root, log=lambda _: None),
        hardware=Hardware.from_json(request["hardware"]),
        plan=Plan.from_json(request["plan"]),
        root=root,
        runs=folder,
    )
    backend = open_backend("cpu", world=2)
    torch.save(outcome(candidate, world=2, backend=backend), folder / f"{backend.rank}.pt")
    backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

"""Host memory estimate of a run, for sweeps that train several runs concurrently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib import atomic, kconf
from lib.config import Config, config_from_values
from lib.devices.probe import probe
from lib.errors import PlanError, ToolkitError
from lib.memory.peak import resident_bytes
from lib.plan.fitting import predicted, step_settings
from lib.plan.types import Hardware
from lib.tiers import with_tier
from train.planning.run_plan import predicted_plan
from train.training_data import describe_training_data


def estimate_host_memory(request: Path, *, root: Path) -> int:
    """Write the peak host memory of the configurations in `request` beside it, as a HostMemoryEstimate."""
    requested = [kconf.Resolved.from_json(each) for each in json.loads(request.read_text(encoding="utf-8"))]
    hardware = probe(config_from_values(requested[0].values).device)
    answer: dict[str, Any] = {"run_bytes": None, "processes": 1, "why": f"on {hardware.kind}"}
    if hardware.kind == "cpu":
        answer = _peak_demand(requested, hardware, root=root)
    atomic.write_text(
        request.with_name("answer.json"), json.dumps({"hardware": hardware.to_json(), **answer})
    )
    return 0


def _peak_demand(requested: list[kconf.Resolved], hardware: Hardware, *, root: Path) -> dict[str, Any]:
    """Return the peak of all. One without a plan fails when it is trained, and counts nothing."""
    needs, problems = list[tuple[int, int]](), list[str]()
    for each in requested:
        config = config_from_values(with_tier(each, root=root, log=lambda _: None, hardware=hardware).values)
        try:
            need_bytes, world = _need(config, hardware, root=root)
        except PlanError as error:
            problems.append(str(error))
        except (ToolkitError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            return {"run_bytes": None, "processes": 1, "why": reason or type(error).__name__}
        else:
            # Besides tensors each process has what this one has by now: libraries, and what predicting took.
            needs.append((world * (resident_bytes() + need_bytes), world))
    if not needs:
        return {"run_bytes": None, "processes": 1, "why": problems[0]}
    run_bytes, processes = (max(numbers) for numbers in zip(*needs, strict=True))
    return {"run_bytes": run_bytes, "processes": processes, "why": "predicted"}


def _need(config: Config, hardware: Hardware, *, root: Path) -> tuple[int, int]:
    """Bytes that each process needs besides libraries, and the number of processes."""
    data = describe_training_data(config, root=root, log=lambda _: None)
    plan, predict = predicted_plan(config, data, hardware)
    memory = predicted(step_settings(plan), predict, free_bytes=hardware.devices[0].free_bytes)
    return memory.need_bytes, plan.world

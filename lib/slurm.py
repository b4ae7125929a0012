"""The batch script with which SLURM trains a configuration, requeued when preempted or out of time. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

PORT = 29500
_BODY = """
# The first machine is where all meet; on another one after a requeue.
export CONFIG_DIST_ENDPOINT="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{port}"
export KCONFIG_MAKE_VARIABLES=CONFIG_DIST_ENDPOINT # as if it stood on make's command line
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What SLURM is asked for. "" and 0 leave it to the site.

    grace_seconds: before the time is up, when training is told to save and stop.
    """

    model: str
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    time: str
    partition: str
    grace_seconds: int


def batch_script(batch: Batch, *, root: Path, python: str, config: Path, runs: Path) -> str:
    """A script for sbatch that trains `config` in the source tree `root`."""
    asked = {
        "job-name": f"anneal-{batch.model}",
        "nodes": str(batch.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(batch.gpus_per_node or ""),
        "cpus-per-task": str(batch.cpus_per_node or ""),
        "time": batch.time,
        "partition": batch.partition,
        "open-mode": "append",
        "output": "slurm-%j.log",
        "signal": f"B:USR1@{batch.grace_seconds}",
    }
    head = "\n".join(f"#SBATCH --{name}={value}" for name, value in asked.items() if value)
    many = _BODY.format(port=PORT) if batch.nodes > 1 else ""
    newest = f'"$(ls -td {shlex.quote(str(runs / batch.model))}/*/status.json | head -n 1)"'
    command = shlex.join([python, "-m", "train", "--runs", str(runs), "train"])
    return f"""#!/bin/bash
{head}
#SBATCH --requeue

cd {shlex.quote(str(root))} || exit 2
export KCONFIG_CONFIG={shlex.quote(str(config))}
{many}
# Out of time soon (USR1), or to be preempted (TERM): training saves and stops.
step= stop=
trap 'stop=1; [ -z "$step" ] || kill -TERM "$step" 2>/dev/null' USR1 TERM
srun --kill-on-bad-exit=1 {command} &
step=$!
[ -z "$stop" ] || kill -TERM "$step"
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends wait, and not the step
    wait "$step"
    status=$?
done
# What ended srun depends on the site; what training has left in its run does not.
if [ "$status" -ne 0 ] && grep -q '"state": "preempted"' {newest} 2>/dev/null; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # until SLURM ends this script
fi
exit "$status"
"""

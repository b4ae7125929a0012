"""The sbatch script that trains a configuration, requeued when preempted or out of time. Pure."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from lib.errors import ConfigError, Suspended

PORT = 29500
EARLY_SECONDS = 60  # SLURM may send the signal this much early (sbatch(1), --signal)
_TIMES = (  # as listed in sbatch(1) under --time
    r"(?P<minutes>\d+)(:(?P<seconds>\d+))?",
    r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)",
    r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?",
)
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
_MANY = """
# The first machine is where all meet; on another one after a requeue.
export CONFIG_DIST_ENDPOINT="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{port}"
export KCONFIG_MAKE_VARIABLES=CONFIG_DIST_ENDPOINT # as if it stood on make's command line
"""
_BODY = """
cd {root} || exit 2
# What is trained is what was asked when this was written, whatever .config says by now.
config={folder}/slurm-$SLURM_JOB_ID.config
cat > "$config" <<'END_OF_CONFIGURATION' || exit 2
{configuration}END_OF_CONFIGURATION
unset "${{!CONFIG_@}}" KCONFIG_MAKE_VARIABLES # those of the make that submitted
export KCONFIG_CONFIG="$config"
{many}
job() {{ scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o " $1=[^ ]*" | head -n 1 | cut -d = -f 2; }}

# Out of time soon (USR1): training saves and stops. A signal to srun would kill it.
stop= told=
trap 'stop=1 told=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap told=1 TERM # preempted or cancelled: SLURM tells training, too
{srun} &
step=$!
status=127 seen=
until [ -n "$seen" ] && [ -z "$told" ]; do # a signal ends wait, and not the step, which may end meanwhile
    told=
    wait "$step"
    seen=$?
    [ "$seen" -eq 127 ] || status=$seen # 127: its status is known already
done
[ "$status" -ne 0 ] || exit 0

# A job that SLURM is ending is not asked for again: it would come back when it was cancelled.
[ "$(job JobState)" = RUNNING ] || exit "$status"
saved() {{ # training says so by status {saved}; if srun gives another one, by what it has left in its run
    [ "$status" -eq {saved} ] ||
        find {runs} -name status.json -newer "$config" -exec cat {{}} + | grep -q '"state": "preempted"'
}}
taken() {{ # ended by a signal before it could save
    [ "$status" -gt 128 ] && {{ [ -n "$stop" ] || [[ "$(job PreemptTime)" = *[0-9]* ]]; }}
}}
if saved || taken; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # until SLURM ends this script
fi
exit "$status"
"""
_SAVED_STATUS = Suspended.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Resources requested from SLURM. "" and 0 leave a setting to the site.

    grace_seconds: time before the limit at which training is signalled to save and stop.
    """

    model: str
    nodes: int
    gpus_per_node: int
    cpus_per_node: int
    time: str
    partition: str
    grace_seconds: int


def batch_script(
    batch: Batch, *, root: Path, python: str, configuration: str, folder: Path, runs: Path
) -> str:
    """Return an sbatch script that trains `configuration` (a .config's text) in the source tree `root`.

    folder: directory for a job's output and configuration, shared by all its nodes. Raises ConfigError where
    no time would be left for training.
    """
    _check_time(batch)
    asked = {
        "job-name": f"anneal-{batch.model}",
        "nodes": str(batch.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(batch.gpus_per_node or ""),
        "cpus-per-task": str(batch.cpus_per_node or ""),
        "time": batch.time,
        "partition": batch.partition,
        "open-mode": "append",
        "output": f"{_quoted(folder)}/slurm-%j.log",
        "signal": f"B:USR1@{batch.grace_seconds}",
    }
    head = "\n".join(f"#SBATCH --{name}={value}" for name, value in asked.items() if value)
    body = _BODY.format(
        root=shlex.quote(str(root)),
        folder=shlex.quote(str(folder)),
        configuration=configuration,
        many=_MANY.format(port=PORT) if batch.nodes > 1 else "",
        srun=_srun(batch, [python, "-m", "train", "--runs", str(runs), "train"]),
        saved=_SAVED_STATUS,
        runs=shlex.quote(str(runs / batch.model)),
    )
    return f"#!/bin/bash\n{head}\n#SBATCH --requeue\n{body}"


def _srun(batch: Batch, command: list[str]) -> str:
    # Since SLURM 22.05 srun does not inherit --cpus-per-task from sbatch.
    cpus = [f"--cpus-per-task={batch.cpus_per_node}"] if batch.cpus_per_node else []
    return shlex.join(["srun", "--kill-on-bad-exit=1", *cpus, *command])


def _quoted(path: Path) -> str:
    """Quote `path` for an #SBATCH line, in which sbatch expands percent signs."""
    return shlex.quote(str(path).replace("%", "%%"))


def _check_time(batch: Batch) -> None:
    seconds = seconds_of(batch.time)
    needed = batch.grace_seconds + EARLY_SECONDS
    if seconds is not None and seconds <= needed:
        raise ConfigError(
            f"CONFIG_SLURM_TIME={batch.time} leaves no time for training",
            why=f"it is told to stop {batch.grace_seconds} s (CONFIG_SLURM_GRACE_SECONDS) before the end, "
            f"and SLURM may do so {EARLY_SECONDS} s earlier",
            todo=f"set CONFIG_SLURM_TIME to more than {needed} s",
        )


def seconds_of(time: str) -> int | None:
    """Return the seconds of a time limit as sbatch parses it; None for a word ("", UNLIMITED)."""
    for form in _TIMES:
        if match := re.fullmatch(form, time):
            return sum(_SECONDS[unit] * int(value) for unit, value in match.groupdict().items() if value)
    return None

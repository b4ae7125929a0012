"""A SLURM of one machine, started in a temporary directory and stopped in any case."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 240.0
_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # daemons are there
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
# A job that is requeued waits for cred_expire, and one that is cancelled has KillWait to end by itself.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
PartitionName=low Nodes=one Default=YES PriorityTier=1 GraceTime=240 MaxTime=INFINITE State=UP
PartitionName=sudden Nodes=one PriorityTier=1 GraceTime=0 MaxTime=INFINITE State=UP
PartitionName=high Nodes=one PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why SLURM cannot be started here; empty where it can."""
    absent = [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]
    return f"SLURM is not installed here: there is no {', no '.join(absent)}" if absent else ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Programs of SLURM that talk to the daemons in `folder`."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": _PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def fields(self, job: str) -> dict[str, str]:
        """What SLURM tells of a job."""
        words = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, job: str) -> dict[str, str]:
        """Its fields once it has ended, and is not requeued."""
        wait_until(lambda: self.fields(job)["JobState"] in _ENDED, lambda: str(self.fields(job)))
        return self.fields(job)

    def take_the_machine(self) -> None:
        """Have a job of a higher partition want all of it."""
        self.call("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true")


def wait_until(true: Callable[[], object], told: Callable[[], str]) -> None:
    """Raises AssertionError with what `told` gives where it does not become true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


@contextlib.contextmanager
def slurm() -> Iterator[Cluster]:
    """Daemons of SLURM with one node of two processors, while entered."""
    # Not pytest's directory: the name of a socket is at most 107 characters long.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster, daemons = Cluster(folder), list[subprocess.Popen[bytes]]()
    # A pytest that is told to end tears down, too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _configure(folder)
        key, socket_file = f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"
        own = (f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed")
        daemons.append(_start(cluster, ["munged", "--foreground", "--force", key, socket_file, *own]))
        wait_until((folder / "munge.socket").exists, lambda: _logs(folder))
        daemons.append(_start(cluster, ["slurmctld", "-D", "-c"]))
        daemons.append(_start(cluster, ["slurmd", "-D", "-c", "-N", "one"]))
        wait_until(lambda: _is_idle(cluster), lambda: _logs(folder))
        yield cluster
    finally:
        _stop(cluster, daemons)
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    host, user = socket.gethostname().split(".")[0], pwd.getpwuid(os.getuid()).pw_name
    text = _CONFIGURATION.format(host=host, user=user, folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(text)


def _start(cluster: Cluster, command: Sequence[str]) -> subprocess.Popen[bytes]:
    with (cluster.folder / f"{command[0]}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _is_idle(cluster: Cluster) -> bool:
    """Whether a job could start. False while nobody answers."""
    command = ["sinfo", "--noheader", "--format=%t", "--partition=high"]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() == "idle"


def _logs(folder: Path) -> str:
    return "\n".join(f"{log}:\n{log.read_text(errors='replace')}" for log in sorted(folder.glob("*.log")))


def _stop(cluster: Cluster, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the jobs, then the daemons, the last one first."""
    if len(daemons) == 3 and all(daemon.poll() is None for daemon in daemons):
        jobs = cluster.call("squeue", "--noheader", "--format=%A").split()
        if jobs:
            cluster.call("scancel", "--full", "--signal=KILL", *jobs)
            cluster.call("scancel", *jobs)
            wait_until(lambda: not cluster.call("squeue", "--noheader"), lambda: _logs(cluster.folder))
    for daemon in reversed(daemons):
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

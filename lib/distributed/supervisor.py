"""Supervisor that `launcher.launch` becomes: workers, signals and the exit status."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.atomic import naming
from lib.distributed.launcher import KEPT, LAUNCH, STOP
from lib.distributed.local_ranks import run_ranks
from lib.errors import Suspended, outlast_readers, signal_name
from lib.runs.directory import RunDir

_TAIL_LINES = 30
_MAX_LOG_BYTES = 1_000_000  # per stream and attempt: only the tail is kept
_OMITTED = b"... what was before is left out ...\n"
_STORE_TIMEOUT = datetime.timedelta(seconds=60)  # for torchrun's agents


class Supervisor:
    """Parent of the workers: forwards signals to them and exits with rank 0's status."""

    def __init__(self, notes: Path, *, world: int) -> None:
        self._notes, self._world = notes, world
        self._launched = json.loads((notes / LAUNCH).read_text())
        self._hostname = socket.gethostname() if self._launched["torchrun"] is not None else ""
        self._lost = ""  # why the other nodes are unreachable
        self._disconnected = False  # because of the connection, which may be made again
        self._signal = 0  # last signal received, 0 = none
        self._keeping = threading.Lock()
        self._ending = threading.Lock()  # never released: the thread that gets it ends this process
        self._has_kept = False  # this attempt's rank logs were kept

    def run(self, arguments: Sequence[str]) -> int:
        """Run the workers to their end. Returns the exit status of the launch."""
        _handle_signals((signal.SIGINT, signal.SIGTERM), self._forward)
        try:
            failed = self._attempts(arguments)
        finally:
            # A thread that ends this process has removed the files that are missing here.
            self._ending.acquire()
        return self._exit_status(failed)

    def _attempts(self, arguments: Sequence[str]) -> dict[int, int]:
        """Run the workers, again after a killed one or a lost connection to the other nodes.

        Returns the last failures, as `_attempt` does.
        """
        restarts = self._launched["restarts"]
        failed = self._attempt(arguments)
        for restart in range(1, restarts + 1):
            if self._signal or not (reason := self._restart_reason(failed)):
                break
            self._lost, self._disconnected = "", False
            print(f"{reason} ({restart} of {restarts})", file=sys.stderr, flush=True)
            for path in self._notes.iterdir():  # files of the previous workers, except for kept.json
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.suffix in (".pid", ".status", ".crash"):
                    path.unlink()
            failed = self._attempt(arguments)
        return failed

    def _restart_reason(self, failed: Mapping[int, int]) -> str:
        """Return why another attempt may succeed; "" where it would not."""
        if self._launched["torchrun"] is not None:  # which has restarted killed workers
            # Without workers the endpoint was never reached, and the other nodes may have ended.
            again = self._disconnected and self._pid(0) and not (self._notes / "0.status").exists()
            return f"lost the other nodes: {self._lost}: joining them again" if again else ""
        rank = self._first_failed(failed)
        if failed.get(rank, 0) >= 0:  # not killed by a signal from elsewhere
            return ""
        return f"process {rank} of {self._world} was ended by {signal_name(failed[rank])}: starting all again"

    def _attempt(self, arguments: Sequence[str]) -> dict[int, int]:
        """Run the workers once; returns exit statuses (negative: signals) of failed ones by local rank."""
        self._has_kept = False
        program = ["-m", "train", *arguments]
        try:
            if self._launched["torchrun"] is not None:
                return self._torchrun(program)
            folder = self._notes / "local" / "attempt_0"  # torchrun's naming
            folder.parent.mkdir()
            return run_ranks([sys.executable, "-u", *program], world=self._world, folder=folder)
        finally:
            self._keep_outputs()

    def _torchrun(self, program: Sequence[str]) -> dict[int, int]:
        log = (self._notes / "torchrun.log").open("a")
        # File descriptor 2 is not redirected: rank 0 inherits it.
        with contextlib.redirect_stderr(log):
            # Imported here, because its loggers keep the stderr that they find.
            from torch.distributed import run
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
            from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

            from lib.distributed.rank_stores import serve_unless_served

            # torchrun's agent, in this process, becomes a client of it.
            serve = self._launched["serve"]
            store = serve_unless_served(serve, timeout=_STORE_TIMEOUT) if serve else None  # noqa: F841
            options = [
                *self._launched["torchrun"],
                f"--log-dir={self._notes}",
                f"--redirects={','.join(['0:0', *(f'{rank}:3' for rank in range(1, self._world))])}",
                "--signals-to-handle=SIGQUIT",  # the others are for `_forward`
            ]
            try:
                run.main([*options, *program])
            except ChildFailedError as error:
                return {failure.local_rank: failure.exitcode for failure in error.failures.values()}
            except RendezvousError as error:
                # The RendezvousError only points to its cause, whose message ends in C++ frames.
                cause = str(error.__cause__ or error).partition("\n")[0]
                self._lost = cause or type(error).__name__
                self._disconnected = isinstance(error, RendezvousConnectionError)
        return {}

    def _keep_outputs(self) -> None:
        """Keep rank logs once per attempt, although `_leave` may call this from its thread, too."""
        with self._keeping:
            if not self._has_kept and (kept := self._kept()):
                keep_rank_logs(self._notes, RunDir(Path(kept["run"])), hostname=self._hostname)
                self._has_kept = True

    def _kept(self) -> dict[str, Any]:
        kept = self._notes / KEPT
        return dict(json.loads(kept.read_text())) if kept.exists() else {}

    def _forward(self, number: int) -> None:
        """Forward the first signal to rank 0, which informs the others; kill everything at a later SIGINT.

        SLURM sends SIGTERM to workers, too, and to some processes twice, so a repeated SIGTERM is ignored.
        """
        again = self._signal != 0
        if again and number == signal.SIGTERM:
            return
        self._signal = number
        rank_0 = self._pid(0)
        if rank_0 is not None and not again:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
                (self._notes / STOP).touch()
                os.kill(rank_0, number)
            if self._hostname:
                threading.Thread(target=self._leave, daemon=True).start()
            return
        self._ending.acquire()
        self._kill_workers()
        print("interrupted", file=sys.__stderr__, flush=True)
        os._exit(128 + number)

    def _leave(self) -> None:
        """End this node's part once its workers have saved; torchrun would restart them."""
        status_file = self._notes / "0.status"
        while not status_file.exists():
            time.sleep(0.05)
        self._ending.acquire()
        status = int(status_file.read_text())
        self._keep_outputs()
        self._kill_workers()
        os._exit(status)

    def _kill_workers(self) -> None:
        # A worker that has not written its pid yet will notice that its parent is gone.
        for pid in filter(None, map(self._pid, range(self._world))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._notes, ignore_errors=True)

    def _pid(self, rank: int) -> int | None:
        note = self._notes / f"{rank}.pid"
        return int(note.read_text()) if note.exists() else None

    def _exit_status(self, failed: Mapping[int, int]) -> int:
        """Return the exit status of the launch; reports the failure unless rank 0 has done so."""
        status_file = self._notes / "0.status"
        if self._lost:
            lost = f"error: the other nodes are unreachable, or too few: {self._lost}"
            print(f"{lost}; make train on all of them resumes", file=sys.stderr)
        if status_file.exists():
            status = int(status_file.read_text())
            if status == Suspended.exit_code and self._hostname and not (self._signal or self._lost):
                none = f"CONFIG_DIST_MAX_RESTARTS={self._launched['restarts']} leaves no restart"
                print(f"error: another node has left, and {none}; make train resumes", file=sys.stderr)
            return status
        if self._lost:
            return 1
        if not failed:
            return 0
        if self._signal:
            if failed.get(0) != 128 + signal.SIGINT:  # it has not said so
                print("interrupted", file=sys.stderr)
            return 128 + self._signal
        rank = self._first_failed(failed)
        status = failed.get(rank, 1)
        if rank != 0 or status < 0 or self._crash_of(rank).exists():
            how = f"was ended by {signal_name(status)}" if status < 0 else f"ended with status {status}"
            reason = f"process {rank} of {self._world} {how}"
            kept = self._kept()
            run = RunDir(Path(kept["run"])) if kept.get("own") else None
            # Unless rank 0 has set the final status: it may have been killed, or aborted by gloo.
            if run is not None and run.status().state == "running":
                run.set_status("failed", step=run.status().step, reason=reason)
            print(self._last_output(rank), file=sys.stderr)
            print(f"error: {reason}", file=sys.stderr)
        return max(status, 1)

    def _first_failed(self, failed: Mapping[int, int]) -> int:
        """Return the rank that failed first: one killed without a report, or the earliest report."""
        notes = [*self._notes.glob("*.crash"), *self._notes.glob("*.status")]
        notes.sort(key=lambda note: note.stat().st_mtime_ns)
        reported = [int(note.stem) for note in notes]
        silent = sorted(failed.keys() - reported)
        # The others get SIGTERM, possibly before their status is read.
        died = [rank for rank in silent if failed[rank] != -signal.SIGTERM]
        return next(iter([*died, *reported, *silent]), 0)

    def _crash_of(self, rank: int) -> Path:
        return self._notes / f"{rank}.crash"

    def _last_output(self, rank: int) -> str:
        if self._crash_of(rank).exists():
            return self._crash_of(rank).read_text().rstrip()
        logs = self._notes.glob(f"*/attempt_*/{rank}/stderr.log")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return "\n".join(lines[-_TAIL_LINES:])


def _handle_signals(numbers: Sequence[int], handler: Callable[[int], None]) -> None:
    """Call `handler` with the number of each of these signals, on a thread of its own.

    Python's handlers wait until the main thread is back in Python, which may never happen in the constructor
    of torch's store, which connects to the other nodes.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in numbers:
        signal.signal(number, lambda *_: None)  # with SIG_IGN the wakeup fd would get nothing

    def wait() -> None:
        while received := reader.recv(1):
            if received[0] in numbers:
                handler(received[0])

    threading.Thread(target=wait, daemon=True).start()


def keep_rank_logs(notes: Path, run: RunDir, *, hostname: str) -> None:
    """Append the non-empty output of ranks, as torchrun names it in `notes`, to RUN/ranks/RANK.txt.

    hostname: of this node where there are several, put before the local rank because global ranks may change;
    else "". The first rank of each node writes to the terminal, and rank 0 has a log of its own.
    """
    try:
        for log in sorted(notes.glob("*/attempt_*/*/std*.log")):
            if not (size := log.stat().st_size):
                continue
            with log.open("rb") as stream:
                stream.seek(max(0, size - _MAX_LOG_BYTES))
                text = stream.read()
            name = f"{hostname}-{log.parent.name}" if hostname else log.parent.name
            kept = run.path / "ranks" / f"{name}.txt"
            kept.parent.mkdir(exist_ok=True)
            with naming(kept), kept.open("ab") as file:
                file.write(text if size <= _MAX_LOG_BYTES else _OMITTED + text)
    except OSError as error:  # only printed, so that it does not hide how the run itself ended
        print(f"the output of other ranks is not kept: {error}", file=sys.__stderr__, flush=True)


if __name__ == "__main__":
    outlast_readers()
    _notes, _world, *_arguments = sys.argv[1:]
    try:
        sys.exit(Supervisor(Path(_notes), world=int(_world)).run(_arguments))
    finally:
        shutil.rmtree(_notes, ignore_errors=True)

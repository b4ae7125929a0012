"""Several processes that look like one: the user sees rank 0 and gets its exit status.

`launch` turns this process into the supervisor, which starts the workers through torchrun and
stays their parent. Notes in a directory of the launch go between them: launch.json (to all
workers), and by the rank on this machine RANK.pid (it can take signals now), RANK.status (it has
told how it ended, and ends), RANK.crash (the traceback of what nothing caught); kept.json (what a
worker that takes its place after a restart is to know). No worker outlives the supervisor, however
that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lib.gathering import torchrun_options
from lib.rank_logs import keep_outputs
from lib.rundir import RunDir

_NOTES_VARIABLE = "ANNEAL_LAUNCH"  # names the directory of notes to the workers
_PARENT_CHECK_SECONDS = 1.0
_PATIENCE_SECONDS = 2.0  # of a failing worker with rank 0, which may be about to tell the same failure
_SHUTDOWN_SECONDS = 5  # until torchrun kills workers that hang after another one failed
_TAIL_LINES = 30
_LAUNCH, _KEPT = "launch.json", "kept.json"


def launch(
    plan: Mapping[str, Any],
    *,
    world: int,
    restarts: int,
    cpu_count: int,
    arguments: Sequence[str],
    torchrun: Sequence[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> NoReturn:
    """Replace this process by a supervisor of `world` workers that run `python -m train ARGUMENTS`.

    restarts: how many times all are started again after one was killed.
    torchrun: its options, where there are other machines; they then have workers, too.
    variables: of the environment of torchrun and the workers, but for those that the user has set.
    Replacing it frees the device memory that probing took. Does not return; the exit status is
    the one that rank 0 gives to `end_process`.
    """
    notes = tempfile.mkdtemp(prefix="anneal-")
    # The supervisor will have the number of this process.
    options = torchrun or torchrun_options(None, processes=world, restarts=0, name="")
    launched = {"plan": plan, "supervisor": os.getpid(), "restarts": restarts, "torchrun": list(options)}
    (Path(notes) / _LAUNCH).write_text(json.dumps(launched))
    environment = os.environ | {_NOTES_VARIABLE: notes}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count // world)))
    environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_SECONDS))
    for variable, value in (variables or {}).items():
        environment.setdefault(variable, value)
    command = [sys.executable, "-m", "lib.launcher", notes, str(world), *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)


def is_worker() -> bool:
    """Whether this process was started by a launch."""
    return _notes() is not None


def become_worker() -> dict[str, Any] | None:
    """Take up the duties of a worker; None in a process of its own.

    Returns what `launch` was given, and after a restart what a worker has kept (`keep`).
    """
    notes = _notes()
    if notes is None:
        return None
    try:
        launched = json.loads((notes / _LAUNCH).read_text())
    except FileNotFoundError:
        os._exit(1)  # the supervisor has ended and taken the notes along
    threading.Thread(target=_end_with, args=(launched["supervisor"], notes), daemon=True).start()
    sys.excepthook = _crash
    for kind in ("status", "crash"):  # of one whose place this one takes
        (notes / f"{os.environ['LOCAL_RANK']}.{kind}").unlink(missing_ok=True)
    _note("pid", str(os.getpid()))
    plan: dict[str, Any] = launched["plan"]
    kept = notes / _KEPT
    return plan | json.loads(kept.read_text()) if kept.exists() else plan


def keep(values: Mapping[str, Any]) -> None:
    """Have `become_worker` return these, too, after a restart. Nothing happens outside of a launch."""
    notes = _notes()
    if notes is not None:
        part = notes / f"{_KEPT}-part"
        part.write_text(json.dumps(values))
        part.rename(notes / _KEPT)


def end_process(status: int) -> NoReturn:
    """End a worker that has told how it went, without the interpreter's clean-up.

    During that clean-up gloo's threads can abort.
    """
    _end(status, "status", str(status))


def _crash(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> NoReturn:
    """Leave the traceback to the supervisor: it knows whose crash was the first and made the others."""
    _end(1, "crash", "".join(traceback.format_exception(kind, error, trace)))


def _end(status: int, kind: str, text: str) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    rank_0 = _note(kind, text)
    if rank_0 is not None and status != 0:
        # torchrun ends all workers with the first that fails, and rank 0 has the files to put in order.
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not any(rank_0.with_suffix(end).exists() for end in (".status", ".crash")):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    os._exit(status)


def _note(kind: str, text: str) -> Path | None:
    """Leave a note of this worker; returns where rank 0 leaves its own, None outside of a launch."""
    notes = _notes()
    if notes is None:
        return None
    note = notes / f"{os.environ['LOCAL_RANK']}.{kind}"
    try:
        note.with_suffix(f".{kind}-part").write_text(text)
        note.with_suffix(f".{kind}-part").rename(note)
    except FileNotFoundError:
        os._exit(1)  # as above
    return notes / "0"


def _notes() -> Path | None:
    directory = os.environ.get(_NOTES_VARIABLE)
    return None if directory is None else Path(directory)


def _end_with(supervisor: int, notes: Path) -> None:
    """End this process when its parent is no longer the supervisor. Linux could do that by itself."""
    while os.getppid() == supervisor:
        time.sleep(_PARENT_CHECK_SECONDS)
    shutil.rmtree(notes, ignore_errors=True)  # nobody is left to read them
    os._exit(1)


def _listen(numbers: Sequence[int], heard: Callable[[int], None]) -> None:
    """Call `heard` with the number of each of these signals, on a thread of its own.

    Python's handlers wait until the main thread is back in Python; in the constructor of torch's store,
    which connects to the other machines, it may be for ever.
    """
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    signal.set_wakeup_fd(mouth.detach())
    for number in numbers:
        signal.signal(number, lambda *_: None)  # SIG_IGN would not be told

    def attend() -> None:
        while told := ear.recv(1):
            if told[0] in numbers:
                heard(told[0])

    threading.Thread(target=attend, daemon=True).start()


class _Supervisor:
    def __init__(self, notes: Path, *, world: int) -> None:
        self._notes, self._world = notes, world
        self._launched = json.loads((notes / _LAUNCH).read_text())
        self._lost = ""  # why the other machines cannot be reached any more
        self._signal = 0  # number of the signal that came, 0 = none

    def run(self, arguments: Sequence[str]) -> int:
        """Run the workers to their end. Returns the exit status of the whole."""
        _listen((signal.SIGINT, signal.SIGTERM), self._pass_on)
        restarts = self._launched["restarts"]
        failed = self._torchrun(arguments)
        for restart in range(1, restarts + 1):
            if not self._was_killed(failed):
                break
            rank = self._culprit(failed)
            killed = f"process {rank} of {self._world} was ended by signal {-failed[rank]}"
            print(f"{killed}: starting all again ({restart} of {restarts})", file=sys.stderr, flush=True)
            self._forget()
            failed = self._torchrun(arguments)
        return self._verdict(failed)

    def _was_killed(self, failed: Mapping[int, int]) -> bool:
        """Whether somebody else ended a worker, and nobody asked for an end."""
        return bool(failed) and not self._signal and failed.get(self._culprit(failed), 0) < 0

    def _forget(self) -> None:
        """Remove what the workers of before have left, but for what they kept for those who come."""
        for path in self._notes.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix in (".pid", ".status", ".crash"):
                path.unlink()

    def _torchrun(self, arguments: Sequence[str]) -> dict[int, int]:
        """Exit statuses (negative: signals) of the workers that failed first, by rank."""
        log = (self._notes / "torchrun.log").open("a")
        # File descriptor 2 stays what it is: rank 0 inherits it.
        with contextlib.redirect_stderr(log):
            # Here, because its loggers keep the stderr that they find.
            from torch.distributed import run
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
            from torch.distributed.elastic.rendezvous.api import RendezvousError

            options = [
                *self._launched["torchrun"],
                f"--log-dir={self._notes}",
                f"--redirects={','.join(['0:0', *(f'{rank}:3' for rank in range(1, self._world))])}",
                "--signals-to-handle=SIGQUIT",  # the others are for `_pass_on`
            ]
            try:
                run.main([*options, "-m", "train", *arguments])
            except ChildFailedError as error:
                return {failure.local_rank: failure.exitcode for failure in error.failures.values()}
            except RendezvousError as error:
                # torch says in the first that the second is to be seen, which ends in frames of C++.
                cause = str(error.__cause__ or error).partition("\n")[0]
                self._lost = cause or type(error).__name__
            finally:
                keep_outputs(self._notes, self._run())
        return {}

    def _run(self) -> RunDir | None:
        kept = self._notes / _KEPT
        return RunDir(Path(json.loads(kept.read_text())["run"])) if kept.exists() else None

    def _pass_on(self, number: int) -> None:
        """Tell rank 0 the first signal, which the others learn from it; end everything at a SIGINT after it.

        SLURM sends SIGTERM to workers, too, and to some processes twice: those that follow change nothing.
        """
        again = self._signal != 0
        if again and number == signal.SIGTERM:
            return
        self._signal = number
        rank_0 = self._pid(0)
        if rank_0 is not None and not again:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(rank_0, number)
            if "--standalone" not in self._launched["torchrun"]:
                threading.Thread(target=self._leave, daemon=True).start()
            return
        self._kill_workers()
        print("interrupted", file=sys.__stderr__, flush=True)
        os._exit(128 + number)

    def _leave(self) -> None:
        """End this machine's part once its workers have saved; torchrun would start them again."""
        told = self._notes / "0.status"
        while not told.exists():
            time.sleep(0.05)
        status = int(told.read_text())
        self._kill_workers()
        os._exit(status)

    def _kill_workers(self) -> None:
        # Who is not there yet will find its parent gone.
        for pid in filter(None, map(self._pid, range(self._world))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._notes, ignore_errors=True)

    def _pid(self, rank: int) -> int | None:
        note = self._notes / f"{rank}.pid"
        return int(note.read_text()) if note.exists() else None

    def _verdict(self, failed: Mapping[int, int]) -> int:
        """The exit status of the whole; tells why, unless rank 0 has done so."""
        told = self._notes / "0.status"
        if self._lost:
            gone = f"error: the other machines are gone, or too few: {self._lost}"
            print(f"{gone}; make train on all of them goes on", file=sys.stderr)
            return int(told.read_text()) if told.exists() else 1
        if told.exists():
            return int(told.read_text())
        if not failed:
            return 0
        if self._signal:
            print("interrupted", file=sys.stderr)
            return 128 + self._signal
        rank = self._culprit(failed)
        status = failed.get(rank, 1)
        if rank != 0 or status < 0 or self._crash_of(rank).exists():
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            reason = f"process {rank} of {self._world} {how}"
            self._end_run(reason)
            print(self._last_words(rank), file=sys.stderr)
            print(f"error: {reason}", file=sys.stderr)
        return max(status, 1)

    def _end_run(self, reason: str) -> None:
        """Say in the run how it ended, unless rank 0 has: it may be what died, or gloo aborted it."""
        run = self._run()
        if run is not None and run.status().state == "running":
            run.set_status("failed", step=run.status().step, reason=reason)

    def _culprit(self, failed: Mapping[int, int]) -> int:
        """The rank that made the others fail: one that died without a word, or the first that spoke."""
        notes = [*self._notes.glob("*.crash"), *self._notes.glob("*.status")]
        notes.sort(key=lambda note: note.stat().st_mtime_ns)
        spoke = [int(note.stem) for note in notes]
        silent = sorted(failed.keys() - spoke)
        # torchrun ends the others by SIGTERM, and may do so before they are asked how they fare.
        died = [rank for rank in silent if failed[rank] != -signal.SIGTERM]
        return next(iter([*died, *spoke, *silent]), 0)

    def _crash_of(self, rank: int) -> Path:
        return self._notes / f"{rank}.crash"

    def _last_words(self, rank: int) -> str:
        if self._crash_of(rank).exists():
            return self._crash_of(rank).read_text().rstrip()
        logs = self._notes.glob(f"*/attempt_*/{rank}/stderr.log")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return "\n".join(lines[-_TAIL_LINES:])


def _main(notes: str, world: str, *arguments: str) -> int:
    try:
        return _Supervisor(Path(notes), world=int(world)).run(arguments)
    finally:
        shutil.rmtree(notes, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))

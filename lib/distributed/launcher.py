"""Launch of several processes that look like one: the user sees rank 0 and gets its exit status.

`launch` turns this process into the supervisor, which starts the workers, through torchrun where there are
other nodes, and stays their parent. They communicate by files in a directory of the launch: launch.json (to
all workers), and by local rank RANK.pid (it can take signals now), RANK.status (it has reported how it ended,
and ends), RANK.crash (traceback of an uncaught exception); kept.json (state for a worker that replaces
another after a restart), stop (this node got a signal). No worker outlives the supervisor.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lib.runs.directory import RunDir

_NOTES_VARIABLE = "ANNEAL_LAUNCH"  # holds the directory of the launch's files
_PARENT_CHECK_SECONDS = 1.0
_GRACE_SECONDS = 2.0  # a failing worker waits for rank 0, which may be about to report the same failure
LAUNCH, KEPT, STOP = "launch.json", "kept.json", "stop"


def launch(
    plan: Mapping[str, Any],
    *,
    world: int,
    restarts: int,
    cpu_count: int,
    arguments: Sequence[str],
    torchrun: Sequence[str] | None = None,
    serve: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> NoReturn:
    """Replace this process by a supervisor of `world` workers that run `python -m train ARGUMENTS`.

    restarts: how many times all workers are restarted after one was killed or, under torchrun, after this
    node has lost its connection to the others.
    torchrun: its options, where there are other nodes, which then have workers, too.
    serve: HOST:PORT of the rendezvous endpoint, where it is an address of this node.
    variables: environment variables of the workers; those that the user has set take precedence.

    Replacing the process frees the device memory that probing took. Does not return; the exit status is the
    one that rank 0 passes to `end_process`.
    """
    notes = tempfile.mkdtemp(prefix="anneal-")
    # exec keeps the process id, so this is the supervisor's.
    launched = {"plan": plan, "supervisor": os.getpid(), "restarts": restarts}
    launched |= {"serve": serve, "torchrun": torchrun}
    (Path(notes) / LAUNCH).write_text(json.dumps(launched))
    environment = os.environ | {_NOTES_VARIABLE: notes}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count // world)))
    if torchrun is not None:
        from lib.distributed.local_ranks import SHUTDOWN_SECONDS

        environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        # A node that joins later never finds the store that torch would share, which also listens on every
        # interface.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for variable, value in (variables or {}).items():
        environment.setdefault(variable, value)
    command = [sys.executable, "-m", "lib.distributed.supervisor", notes, str(world), *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, environment)


def is_worker() -> bool:
    """True if this process was started by `launch`."""
    return _notes() is not None


def restarts_by_itself() -> bool:
    """True in a worker that torchrun stops because a node joins or leaves, and not by a signal."""
    if (notes := _notes()) is None or not notes.is_dir() or (notes / STOP).exists():
        return False
    from lib.distributed.local_ranks import STORE_VARIABLE

    return STORE_VARIABLE not in os.environ  # that of nodes without others


def become_worker() -> dict[str, Any] | None:
    """Set this process up as a worker; None in a process that was not launched.

    Returns the plan given to `launch`, merged after a restart with what `keep` has saved.
    """
    notes = _notes()
    if notes is None:
        return None
    try:
        launched = json.loads((notes / LAUNCH).read_text())
    except FileNotFoundError:
        os._exit(1)  # the supervisor has ended and removed the files
    threading.Thread(target=_end_with_supervisor, args=(launched["supervisor"], notes), daemon=True).start()
    sys.excepthook = _crash
    for kind in ("status", "crash"):  # left by the worker that this one replaces
        (notes / f"{os.environ['LOCAL_RANK']}.{kind}").unlink(missing_ok=True)
    _note("pid", str(os.getpid()))
    plan: dict[str, Any] = launched["plan"]
    kept = notes / KEPT
    return plan | json.loads(kept.read_text()) if kept.exists() else plan


def keep(run: RunDir, *, own: bool) -> None:
    """Save the run for the supervisor and for `become_worker` after a restart; only local rank 0 does.

    own: true if rank 0 is on this node, so that the supervisor must set the run's final status.
    """
    notes = _notes()
    if notes is not None and os.environ["LOCAL_RANK"] == "0":
        part = notes / f"{KEPT}-part"
        part.write_text(json.dumps({"run": str(run.path), "own": own}))
        part.rename(notes / KEPT)


def end_process(status: int) -> NoReturn:
    """End a worker that has reported, without clean-up, during which gloo's threads can abort."""
    _end(status, "status", str(status))


def _crash(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> NoReturn:
    """Save the traceback for the supervisor, which knows the order of the crashes."""
    _end(1, "crash", "".join(traceback.format_exception(kind, error, trace)))


def _end(status: int, kind: str, text: str) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    rank_0 = _note(kind, text)
    if rank_0 is not None and status != 0:
        # The first failure ends all workers, and rank 0 must finish its files before.
        deadline = time.monotonic() + _GRACE_SECONDS
        ends = rank_0.with_suffix(".status"), rank_0.with_suffix(".crash")
        while not any(end.exists() for end in ends) and time.monotonic() <= deadline:
            time.sleep(0.02)
    os._exit(status)


def _note(kind: str, text: str) -> Path | None:
    """Write a file of this worker; returns the base path of rank 0's, None outside of a launch."""
    notes = _notes()
    if notes is None:
        return None
    note = notes / f"{os.environ['LOCAL_RANK']}.{kind}"
    try:
        note.with_suffix(f".{kind}-part").write_text(text)
        note.with_suffix(f".{kind}-part").rename(note)
    except FileNotFoundError:
        os._exit(1)  # as in become_worker
    return notes / "0"


def _notes() -> Path | None:
    directory = os.environ.get(_NOTES_VARIABLE)
    return None if directory is None else Path(directory)


def _end_with_supervisor(supervisor: int, notes: Path) -> None:
    """End this process once the supervisor is not its parent; portable, unlike PR_SET_PDEATHSIG."""
    while os.getppid() == supervisor:
        time.sleep(_PARENT_CHECK_SECONDS)
    shutil.rmtree(notes, ignore_errors=True)  # nobody is left to read them
    os._exit(1)

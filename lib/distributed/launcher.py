"""Several processes that look like one: the user sees rank 0 and gets its exit status.

`launch` turns this process into the supervisor, which starts the workers, through torchrun where there
are other nodes, and stays their parent. Notes in a directory of the launch go between them: launch.json
(to all workers), and by the rank on this machine RANK.pid (it can take signals now), RANK.status (it has
told how it ended, and ends), RANK.crash (the traceback of what nothing caught); kept.json (what a
worker that takes its place after a restart is to know). No worker outlives the supervisor, however
that ends.
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

from lib.distributed.local_ranks import SHUTDOWN_SECONDS
from lib.runs.directory import RunDir

_NOTES_VARIABLE = "ANNEAL_LAUNCH"  # names the directory of notes to the workers
_PARENT_CHECK_SECONDS = 1.0
_PATIENCE_SECONDS = 2.0  # of a failing worker with rank 0, which may be about to tell the same failure
LAUNCH, KEPT = "launch.json", "kept.json"


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

    restarts: how many times all are started again after one was killed.
    torchrun: its options, where there are other machines; they then have workers, too.
    serve: HOST:PORT, where all meet at an address of this machine.
    variables: of the environment of the workers, but for those that the user has set.
    Replacing it frees the device memory that probing took. Does not return; the exit status is
    the one that rank 0 gives to `end_process`.
    """
    notes = tempfile.mkdtemp(prefix="anneal-")
    # The supervisor will have the number of this process.
    launched = {"plan": plan, "supervisor": os.getpid(), "restarts": restarts, "serve": serve}
    launched["torchrun"] = None if torchrun is None else list(torchrun)
    (Path(notes) / LAUNCH).write_text(json.dumps(launched))
    environment = os.environ | {_NOTES_VARIABLE: notes}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count // world)))
    if torchrun is not None:
        environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        # The store that torch would share is one that a machine which joins later never finds, and one
        # that listens on every interface.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for variable, value in (variables or {}).items():
        environment.setdefault(variable, value)
    command = [sys.executable, "-m", "lib.distributed.supervisor", notes, str(world), *arguments]
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
        launched = json.loads((notes / LAUNCH).read_text())
    except FileNotFoundError:
        os._exit(1)  # the supervisor has ended and taken the notes along
    threading.Thread(target=_end_with, args=(launched["supervisor"], notes), daemon=True).start()
    sys.excepthook = _crash
    for kind in ("status", "crash"):  # of one whose place this one takes
        (notes / f"{os.environ['LOCAL_RANK']}.{kind}").unlink(missing_ok=True)
    _note("pid", str(os.getpid()))
    plan: dict[str, Any] = launched["plan"]
    kept = notes / KEPT
    return plan | json.loads(kept.read_text()) if kept.exists() else plan


def keep(run: RunDir, *, own: bool) -> None:
    """Tell the supervisor, and `become_worker` after a restart, of the run; by the first of this machine's.

    own: whether rank 0 is on this machine, which is to say then how the run ended.
    """
    notes = _notes()
    if notes is not None and os.environ["LOCAL_RANK"] == "0":
        part = notes / f"{KEPT}-part"
        part.write_text(json.dumps({"run": str(run.path), "own": own}))
        part.rename(notes / KEPT)


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
        # All workers are ended with the first that fails, and rank 0 has the files to put in order.
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

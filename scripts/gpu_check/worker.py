"""A worker process that answers requests, one JSON line each, and the client that starts it.

{"what": "measure", ...} -> {"status": "ok", ...} | {"status": "out_of_memory" | "failed", "reason": ...}

`python -m scripts.gpu_check.worker` is the worker.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from lib.devices.backend import is_out_of_memory
from lib.errors import OutOfMemory, ToolkitError, run_main

ROOT = Path(__file__).resolve().parents[2]
WORKER = (sys.executable, "-m", "scripts.gpu_check.worker")

Answer = dict[str, Any]
Handler = Callable[..., dict[str, Any]]


class Child:
    """Client of a worker, which it starts at the first request and again after each answer that is not "ok".

    After running out of memory a process may still hold some through leaked references; a new one does not.
    """

    def __init__(self, *, log: TextIO | int, command: Sequence[str] = WORKER) -> None:
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], *, seconds: float) -> Answer:
        """Return the answer to `request`: its "status" is ok, out_of_memory, failed, died or timed_out."""
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=self._log
            )
        answer = _answer_of(self._process, request, seconds=seconds)
        if answer["status"] != "ok":
            self.close()
        return answer

    def close(self) -> None:
        """End the worker, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answer_of(process: subprocess.Popen[bytes], request: dict[str, Any], *, seconds: float) -> Answer:
    assert process.stdin is not None and process.stdout is not None
    try:
        line = json.dumps(request, default=dataclasses.asdict)
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return {"status": "died", "exit_status": process.wait()}
    if not select.select([process.stdout], [], [], seconds)[0]:
        return {"status": "timed_out", "seconds": seconds}
    answer = process.stdout.readline()
    if not answer.endswith(b"\n"):
        return {"status": "died", "exit_status": process.wait()}
    return json.loads(answer)  # type: ignore[no-any-return]


def serve(handlers: Mapping[str, Handler], requests: Iterable[str], answers: TextIO) -> None:
    """Answer each of `requests` by the handler named in "what", with the other values as arguments."""
    for line in requests:
        request = json.loads(line)
        answer = _answer(handlers[request.pop("what")], request)
        print(json.dumps(answer), file=answers, flush=True)


def _answer(handler: Handler, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"status": "ok", **handler(**arguments)}
    except (RuntimeError, MemoryError, ToolkitError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        memory = isinstance(error, OutOfMemory) or is_out_of_memory(error)
        return {"status": "out_of_memory" if memory else "failed", "reason": reason}


def main() -> int:
    """Answer requests from stdin until it ends."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from scripts.gpu_check.trials import HANDLERS

    serve(HANDLERS, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

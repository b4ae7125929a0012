"""A process that answers requests, one JSON line each: what breaks in it breaks nothing else."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
WORKER = (sys.executable, "-m", "scripts.gpu_check.worker")

Answer = dict[str, Any]


class Child:
    """Starts `command` when it is first asked, and again after an answer that was not "ok".

    A process that ran out of memory may have lost some of it to references nobody knows: a new one has not.
    """

    def __init__(self, *, log: TextIO | int, command: Sequence[str] = WORKER) -> None:
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], *, seconds: float) -> Answer:
        """The answer to `request`: its "status" is ok, out_of_memory, failed, died or timed_out."""
        process = self._process or self._start()
        answer = _ask(process, request, seconds=seconds)
        if answer["status"] != "ok":
            self.close()
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        return self._process

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ask(process: subprocess.Popen[bytes], request: dict[str, Any], *, seconds: float) -> Answer:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return {"status": "died", "exit_status": process.wait()}
    if not select.select([process.stdout], [], [], seconds)[0]:
        return {"status": "timed_out", "seconds": seconds}
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        return {"status": "died", "exit_status": process.wait()}
    answer: Answer = json.loads(line)
    return answer

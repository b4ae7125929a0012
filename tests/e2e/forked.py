"""A program without its imports, half of a tiny run: it is forked off a server that has them."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SERVER = multiprocessing.get_context("forkserver")
# The last two are what torch imports when it makes the first optimizer and the first fake tensor.
_SERVER.set_forkserver_preload(
    ["train.commands", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", __name__]
)


class Forked:
    """A process with the part of `subprocess.Popen` that tests use; its output goes to a file."""

    def __init__(
        self, program: str, arguments: Sequence[str], *, environment: Mapping[str, str], output: Path
    ) -> None:
        """program: the name of a module, as of `python -m`."""
        self._output = output
        self._process = _SERVER.Process(target=_run, args=(program, arguments, dict(environment), output))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has written to standard output and standard error, once it has ended."""
        self.wait(timeout)
        return self._output.read_text(), None

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(program: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(opened, number)
    os.close(opened)
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding, write_through=True)
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)

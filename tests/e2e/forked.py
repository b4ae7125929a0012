"""A program without its imports, half of a tiny run: it is forked off a server that has them."""

from __future__ import annotations

import ctypes
import inspect
import io
import itertools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"anneal", "lib", "models", "scripts", "tests", "train"}
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "train.commands",
        "torch._dynamo",  # this and the next: for the first optimizer and the first fake tensor
        "torch.fx.experimental.symbolic_shapes",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        __name__,
    ]
)
_PR_SET_NAME = 15  # linux/prctl.h


class Forked:
    """A process with the part of `subprocess.Popen` that tests use; its output goes to a file."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: Path,
        ranks: bool = False,
    ) -> None:
        """program: the name of a module, as of `python -m`; or a file that finds nothing of the tree.

        ranks: those that it launches are forked off it, too. It must not have made a backward pass before,
        after which torch refuses: it is to plan by the table.
        """
        self._output = output
        run = _run_with_ranks if ranks else _run_file if program.endswith(".py") else _run
        self._process = _SERVER.Process(target=run, args=(program, arguments, dict(environment), output))
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
    sys.path[:0] = [folder for folder in _python_path(environment) if folder not in sys.path]
    _write_to(output, environment)
    _main(program, arguments)


def _run_file(program: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """As `python program` in its folder, with torch loaded and nothing of this tree.

    Programs of the tree that it starts are forked off it.
    """
    subprocess.Popen._execute_child = _fork  # type: ignore[attr-defined]
    folder = str(Path(program).parent)
    os.chdir(folder)
    others = [each for each in sys.path if each not in ("", str(ROOT))]
    sys.path[:] = [folder, *_python_path(environment), *others]
    for name in [*sys.modules]:
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]
    _write_to(output, environment)
    _at_start(environment)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def _python_path(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _at_start(environment: Mapping[str, str]) -> None:
    """What Python runs in every process when it starts."""
    for folder in _python_path(environment):
        if (at_start := Path(folder, "sitecustomize.py")).exists():
            runpy.run_path(str(at_start))


def _write_to(output: Path, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(opened, number)
    os.close(opened)
    _open_streams(environment)


def _open_streams(environment: Mapping[str, str]) -> None:
    """To what is standard output and standard error now: a pipe cannot be sought as a file is."""
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding, write_through=True)


def _main(program: str, arguments: Sequence[str]) -> None:
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _run_with_ranks(
    program: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path
) -> None:
    """Here Python programs that this one becomes, or starts, go without their imports, too."""
    subprocess.Popen._execute_child = _fork  # type: ignore[attr-defined]
    os.execve = lambda _, words, variables: _become(words, variables)  # type: ignore[assignment]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name_of(environment).encode(), 0, 0, 0)
    _run(program, arguments, environment, output)


def name_of(environment: Mapping[str, str]) -> str:
    """What the processes of a run are called that are forked off each other, and cannot be told otherwise."""
    return f"run-{zlib.crc32(environment['KCONFIG_CONFIG'].encode()):08x}"


_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork(self: subprocess.Popen[bytes], *given: Any) -> None:
    """In place of `Popen._execute_child`: for `env -u C A=B python -u -m PROGRAM WORDS`."""
    told = inspect.signature(_execute_child).bind(self, *given).arguments
    words = list(told["args"])
    if words[0] != "env":
        return _execute_child(self, *given)
    first = words.index(sys.executable)
    variables = dict(word.split("=", 1) for word in words[1:first] if "=" in word)
    removed = {name for option, name in itertools.pairwise(words[1:first]) if option == "-u"}
    self.pid = os.fork()
    if self.pid == 0:
        for number, end in ((1, told["c2pwrite"]), (2, told["errwrite"])):
            if end != -1:
                os.dup2(end, number)
        os.setsid()
        if told["cwd"] is not None:
            os.chdir(told["cwd"])
            sys.path.insert(0, str(told["cwd"]))
        kept = {name: value for name, value in os.environ.items() if name not in removed}
        _become(words[first:], kept | variables)
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(told[name] for name in pipes))  # type: ignore[attr-defined]
    self._child_created = True  # type: ignore[attr-defined]
    return None


def _become(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run `python -u -m PROGRAM WORDS` as this process, after what Python runs in every process."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        _open_streams(environment)
        sys.orig_argv = [*words]
        _at_start(environment)
        _, program, *arguments = words[words.index("-m") :]
        _main(program, arguments)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(status)

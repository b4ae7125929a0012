"""Work counted in place of time: a count is the same on every machine and under every load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Runs a script as the interpreter would and writes the number of calls that it made to the file argv[1].
_COUNTING = """
import runpy, sys
file, sys.argv, count, status = sys.argv[1], sys.argv[2:], 0, 0
sys.path[0] = sys.argv[0].rpartition("/")[0]
def note(frame, event, argument):
    global count
    count += event in ("call", "c_call")
sys.setprofile(note)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    status = end.code
finally:
    sys.setprofile(None)
    open(file, "w").write(str(count))
sys.exit(status)
"""


def calls(work: Callable[[], object]) -> int:
    """Return how many functions `work` calls on this thread, those written in C included."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_of_program(
    script: str, *arguments: str, cwd: Path, notes: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Return how many functions a Python script calls, imports included, and its exit status.

    notes: an empty folder for the count.
    """
    file = notes / "calls"
    command = [sys.executable, "-c", _COUNTING, str(file), script, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, stdin=subprocess.DEVNULL)
    return int(file.read_text()), done.returncode


class ElementsComputed(TorchDispatchMode):
    """Counts the elements of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            self.count += leaf.numel() if isinstance(leaf, torch.Tensor) else 0
        return result

"""`python -m scripts.gpu_check.worker`: reads requests, a JSON line each, and answers them.

{"what": "measure", ...} -> {"status": "ok", ...} | {"status": "out_of_memory" | "failed", "reason": ...}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from lib.devices.backend import is_out_of_memory
from lib.errors import OutOfMemory, ToolkitError

Handler = Callable[..., dict[str, Any]]


def serve(handlers: Mapping[str, Handler], requests: Iterable[str], answers: TextIO) -> None:
    """Answer each of `requests` by the handler that it names, with the rest of it as arguments."""
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
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from scripts.gpu_check.trials import HANDLERS

    serve(HANDLERS, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())

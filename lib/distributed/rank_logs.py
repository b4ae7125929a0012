"""Rank logs: output of the ranks other than rank 0, kept in the run directory."""

from __future__ import annotations

import sys
from pathlib import Path

from lib.atomic import naming
from lib.runs.directory import RunDir

MOST_BYTES = 1_000_000  # per stream and attempt: only the tail is kept
_CUT = b"... what was before is left out ...\n"


def keep_outputs(notes: Path, run: RunDir, *, machine: str) -> None:
    """Append non-empty rank logs of torchrun to RUN/ranks/RANK.txt.

    notes: torchrun's --log-dir. machine: hostname of this node where there are several, put before the local
    rank because global ranks may change; else "". The first rank of each node writes to the terminal, and
    rank 0 has a log of its own.
    """
    try:
        for log in sorted(notes.glob("*/attempt_*/*/std*.log")):
            name = f"{machine}-{log.parent.name}" if machine else log.parent.name
            _append(log, run.path / "ranks" / f"{name}.txt")
    except OSError as error:  # only printed, so that it does not hide how the run itself ended
        print(f"what other ranks wrote is not kept: {error}", file=sys.__stderr__, flush=True)


def _append(log: Path, kept: Path) -> None:
    size = log.stat().st_size
    if not size:
        return
    with log.open("rb") as stream:
        stream.seek(max(0, size - MOST_BYTES))
        text = stream.read()
    kept.parent.mkdir(exist_ok=True)
    with naming(kept), kept.open("ab") as file:
        file.write(text if size <= MOST_BYTES else _CUT + text)

"""Two processes on XLA devices that a stand-in plays: `xla_worker DIRECTORY` leaves DIRECTORY/RANK.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from lib.devices.base import Backend
from tests.e2e.ddp_worker import CASES, outcome
from tests.e2e.ranks import fork_ranks
from tests.support.examples import told_of
from tests.support.stubbed import XLA_STUB

NAMES = ("ghost", "counted", *(name for names in told_of("STATIC_SHAPES") for name in names))


def main() -> None:
    directory = Path(sys.argv[1])
    sys.path.insert(0, str(XLA_STUB))

    def work(backend: Backend) -> None:
        torch.manual_seed(backend.rank)
        model = backend.wrap(nn.Linear(3, 2), share_buffers=False)
        found = {"cases": {name: outcome(CASES[name], backend) for name in NAMES}, "first": model.weight.data}
        torch.save(found | {"calls": sys.modules["torch_xla"].CALLS}, directory / f"{backend.rank}.pt")

    fork_ranks(2, work, kind="xla")


if __name__ == "__main__":
    main()

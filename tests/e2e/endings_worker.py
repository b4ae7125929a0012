"""Runs on two ranks, one after the other, each to its end as `make train` ends it, and how they ended.

`endings_worker DIRECTORY RUNS` leaves in DIRECTORY/endings a list of exit statuses for each run, and for one
more whose second rank aborts.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path

from lib.devices.base import Backend
from lib.distributed.launcher import end_process
from lib.plan.sharding import layouts
from lib.plan.types import Layout
from tests.e2e.ranks import endings
from tests.support.training import random_data, small_config, small_job, small_plan
from train.job import Progress
from train.loop import train

CONFIG = small_config(max_steps=2)
SUBJECT = random_data(CONFIG, shape=(1, 28, 28), train_size=16, test_size=4)


def run(backend: Backend, layout: Layout, *, aborts: bool = False) -> None:
    plan = small_plan(2, world=layout.world, strategy=layout.strategy, shard=layout.shard)
    train(small_job(CONFIG, plan, SUBJECT, backend=backend), Progress())
    backend.close()
    if aborts and not backend.is_main:
        os.kill(os.getpid(), signal.SIGABRT)
    end_process(0)


def main() -> None:
    ways = list(layouts(2))
    found = [
        endings(2, functools.partial(run, layout=ways[number % len(ways)]))
        for number in range(int(sys.argv[2]))
    ]
    found.append(endings(2, functools.partial(run, layout=ways[0], aborts=True)))
    (Path(sys.argv[1]) / "endings").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

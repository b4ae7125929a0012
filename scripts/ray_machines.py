"""Driver of run.ray.yaml (make emit TO=ray): starts training on each node of a Ray cluster.

Tested on a local Ray cluster of two nodes (tests/e2e/test_ray.py).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lib.errors import run_main

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Start Ray and train on each node."""
    parser = argparse.ArgumentParser(prog="python -m scripts.ray_machines", description=__doc__)
    parser.add_argument("--machines", type=int, required=True, help="number of nodes")
    parser.add_argument("--gpus", type=int, required=True, help="per node; 0 for CPUs only")
    options = parser.parse_args()
    ray.init()
    return run_on_each(machines=options.machines, gpus=options.gpus)


def run_on_each(*, machines: int, gpus: int) -> int:
    """Run the script in ANNEAL_START on each node; return the first exit status other than 0, or 0."""
    group = placement_group([{"CPU": 1, "GPU": gpus}] * machines, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    same = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0}  # the launcher restarts workers
    strategies = [PlacementGroupSchedulingStrategy(group, place) for place in range(machines)]
    places = [{**same, "scheduling_strategy": strategy} for strategy in strategies]
    first = ray.get(ray.remote(_address).options(**places[0]).remote())
    train = ray.remote(_train)
    pending = [train.options(**place).remote(number, first) for number, place in enumerate(places)]
    while pending:
        done, pending = ray.wait(pending)
        for status in ray.get(done):
            if status:
                return int(status)  # the other tasks end with this process
    return 0


def _address() -> str:
    return str(ray.util.get_node_ip_address())


def _train(number: int, first: str) -> int:
    variables = (f"FIRST_MACHINE={first}", f"THIS_MACHINE={_address()}", f"MACHINE_NUMBER={number}")
    command = ["env", *variables, "sh", "-c", 'exec sh -c "$ANNEAL_START"']
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(run_main(main))

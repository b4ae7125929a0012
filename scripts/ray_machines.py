"""Start training on each of several machines of a Ray cluster, which are told the first one's address.

The driver of run.ray.yaml (make emit TO=ray). Tried on two nodes that Ray plays on one machine only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.ray_machines", description=__doc__)
    parser.add_argument("--machines", type=int, required=True, help="how many")
    parser.add_argument("--gpus", type=int, required=True, help="of each of them; 0 for processors alone")
    options = parser.parse_args()
    ray.init()
    return run_on_each(machines=options.machines, gpus=options.gpus)


def run_on_each(*, machines: int, gpus: int) -> int:
    """Run what ANNEAL_START says on as many different machines; the first exit status that is not 0, or 0."""
    group = placement_group([{"CPU": 1, "GPU": gpus}] * machines, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    places = [
        {
            "num_cpus": 1,
            "num_gpus": gpus,
            "max_retries": 0,  # the launcher starts again what is worth it
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, place),
        }
        for place in range(machines)
    ]
    first = ray.get(ray.remote(_address).options(**places[0]).remote())
    train = ray.remote(_train)
    pending = [train.options(**place).remote(number, first) for number, place in enumerate(places)]
    while pending:
        done, pending = ray.wait(pending)
        for status in ray.get(done):
            if status:
                return int(status)  # with this process end the others
    return 0


def _address() -> str:
    return str(ray.util.get_node_ip_address())


def _train(number: int, first: str) -> int:
    told = (f"FIRST_MACHINE={first}", f"THIS_MACHINE={_address()}", f"MACHINE_NUMBER={number}")
    command = ["env", *told, "sh", "-c", 'exec sh -c "$ANNEAL_START"']
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

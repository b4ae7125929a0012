"""Start a Ray cluster of two nodes on this machine and run a command there; arguments: the command."""

from __future__ import annotations

import os
import subprocess
import sys

from ray.cluster_utils import Cluster


def main() -> int:
    """Return the command's exit status."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
        shutdown_at_exit=True,
    )
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    done = subprocess.run(sys.argv[1:], env=os.environ | {"RAY_ADDRESS": cluster.address}, check=False)
    cluster.shutdown()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

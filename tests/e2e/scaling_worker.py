"""Trains the models of a sweep: `scaling_worker OUT TEXT CHANGES CONFIG...`.

CHANGES are made to what is known of the corpus; they and every CONFIG are JSON objects.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from lib.scaling.experiments import ScalingExperiments
from lib.scaling.results import ScalingConfig


def main() -> None:
    out, text, changes, *configs = sys.argv[1:]
    experiments = ScalingExperiments(out, corpus=f"file:{text}", workers=1)
    experiments.corpus = dataclasses.replace(experiments.corpus, **json.loads(changes))
    experiments.run([ScalingConfig(**json.loads(config)) for config in configs])


if __name__ == "__main__":
    main()

"""Behaviour of Hydra, for docs/comparison.md: python try_hydra.py, in an environment with hydra-core."""

import subprocess
import sys
import tempfile
from pathlib import Path

APP = """
import hydra
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
@dataclass
class Schema:
    lr: float = 0.1
    steps: int = 10
ConfigStore.instance().store(name="schema", node=Schema)
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    print(dict(config))
main()
"""
FILES = {
    "app.py": APP,
    "conf/config.yaml": "defaults: [schema, {model: small}, _self_]\nlr: 0.2\n",
    "conf/model/small.yaml": "# @package _global_\nsteps: 5\n",
    "conf/model/large.yaml": "# @package _global_\nsteps: 50\n",
}

with tempfile.TemporaryDirectory() as folder:
    for name, text in FILES.items():
        (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(text)
    for given in (
        "",
        "lrr=3",
        "lr=abc",
        "lr=-5",
        "model=large",
        "model=larg",
        "-m lr=0.1,0.2 model=small,large",
    ):
        command = [sys.executable, "app.py", *given.split()]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        print(f"== {given or 'nothing'}: status {done.returncode}")
        print(done.stdout + done.stderr)

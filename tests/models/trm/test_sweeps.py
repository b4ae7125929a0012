"""The studies of the Tiny Recursive Model that are shipped."""

from __future__ import annotations

from pathlib import Path

from lib.kconf import load
from lib.runs.identity import identity
from lib.sweeps.experiment import read_experiment
from lib.sweeps.runner import resolved_runs

ROOT = Path(__file__).resolve().parents[3]
SWEEPS = ROOT / "defconfigs" / "sweeps"


def test_the_control_is_trained_beside_the_model_as_both_ship() -> None:
    runs = resolved_runs(read_experiment(SWEEPS / "trm-control.yaml"), root=ROOT)
    shipped = [
        identity(
            load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides={"CONFIG_SEED": "2"}).in_effect
        )
        for name in ("trm-sudoku", "trm-sudoku-flat")
    ]
    assert [run.identity for run in runs if run.settings["SEED"] == "2"] == shipped


def test_the_studies_of_the_document_are_shipped() -> None:
    studies = {file.stem: read_experiment(file) for file in SWEEPS.glob("trm-*.yaml")}
    assert studies["trm-ema"].points == ({"EMA": "y"}, {"EMA": "n"})
    schedules = [tuple(point.values()) for point in studies["trm-cycles"].points]
    assert schedules == [("2", "2"), ("2", "6"), ("3", "4"), ("3", "6"), ("4", "6")]

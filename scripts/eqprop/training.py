"""Experiment 2: accuracy of equilibrium propagation and other estimators over seeds; and the ablation."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lib.config import Config
from lib.devices.base import Backend
from lib.devices.probe import environment, probe
from lib.errors import Diverged
from lib.hyperparams import apply_hyperparams
from models.looped.model import LoopedTransformer
from scripts.eqprop.report import Report, Trained, spread
from scripts.eqprop.setting import (
    REFERENCE,
    ROOT,
    Setting,
    agreement,
    batch_of,
    convergence,
    core_gradient,
    spectral_radius,
    with_options,
)
from train.build import make_job
from train.job import Job, Progress
from train.loop import train
from train.planning.autotune import digest_of_sources
from train.record import Record
from train.training_data import TrainingData

LOOK_EVERY = 50  # steps
LOOK_ROWS = 64
SEEDS = 3
FROZEN = "frozen core"
METHODS: dict[str, dict[str, str]] = {
    "ep": {"LOOPED_GRADIENT_EP": "y"},
    "implicit": {"LOOPED_GRADIENT_IMPLICIT": "y"},
    "bptt": {"LOOPED_GRADIENT_BPTT": "y"},
    "frozen blocks": {"LOOPED_GRADIENT_IMPLICIT": "y"},
    FROZEN: {"LOOPED_GRADIENT_ONE_STEP": "y"},
}
# Parameters that are trained, by prefix, where not all are.
TRAINED = {"frozen blocks": ("embedding", "head"), FROZEN: ("head",)}
ABLATION: dict[str, dict[str, str]] = {
    "as it is": {},
    "beta 0.1": {"LOOPED_BETA": "0.1"},
    "beta 0.001": {"LOOPED_BETA": "0.001"},
    "one-sided": {"LOOPED_NUDGE_ONE_SIDED": "y"},
    "four-point": {"LOOPED_NUDGE_FOUR_POINT": "y"},
    "step 0.5": {"LOOPED_STEP_SIZE": "0.5"},
    "step 0.7": {"LOOPED_STEP_SIZE": "0.7"},
    "step 1.0": {"LOOPED_STEP_SIZE": "1.0"},
    "anderson": {"LOOPED_SOLVER_ANDERSON": "y"},
    "keys from input": {"LOOPED_BLOCK_ENERGY_CROSS": "y", "LOOPED_STEP_SIZE": "1.0"},
    "keys from states": {"LOOPED_BLOCK_ENERGY_SELF": "y", "LOOPED_STEP_SIZE": "0.9"},
    "layernorm": {"LOOPED_ACTIVATION_LAYERNORM": "y"},
    "tanh activation": {"LOOPED_ACTIVATION_TANH": "y"},
    "tanh units": {"LOOPED_MLP_TANH": "y"},
    "2 blocks": {"LOOPED_LAYERS": "2"},
    "3 blocks": {"LOOPED_LAYERS": "3"},
    "4 blocks": {"LOOPED_LAYERS": "4"},
    "10 iterations": {"LOOPED_MAX_ITERATIONS": "10"},
    "no bound": {"LOOPED_SPECTRAL_CAP": "1000"},
}
COLUMNS = (
    "way", "seed", "accuracy", "test_loss", "seconds", "iterations", "residual", "unsettled", "rho",
    "lowest_cosine",
)  # fmt: skip


def run(setting: Setting) -> Report:
    """Train every method over seeds and compare accuracies."""
    report = Report("2", "Does it train?", setting, COLUMNS)
    seeds = range(1, 2 if setting.quick else SEEDS + 1)
    found = {way: [_one(way, symbols, seed, report) for seed in seeds] for way, symbols in METHODS.items()}
    for way, accuracies in found.items():
        report.note(f"{way}: {spread(accuracies, factor=100)} %")
    _verdicts(report, found)
    return report


def _verdicts(report: Report, found: Mapping[str, Sequence[float]]) -> None:
    """Judge means over seeds, and differences seed by seed. A diverged training (nan) fails every bar."""
    ep = [100 * accuracy for accuracy in found["ep"]]
    behind = [100 * other - own for own, other in zip(ep, found["implicit"], strict=True)]
    above = [own - 100 * other for own, other in zip(ep, found[FROZEN], strict=True)]
    remark = "" if len(ep) > 1 else ": a look, no result"
    reached = f"equilibrium propagation reaches {spread(ep)} %, bar 95 %"
    report.verdict(statistics.fmean(ep) >= 95, reached + remark)
    near = f"it is {spread(behind)} points behind implicit differentiation, bar 1 point"
    report.verdict(abs(statistics.fmean(behind)) <= 1, near + remark)
    far = f"it is {spread(above)} points above a frozen core, bar 10 points"
    report.verdict(statistics.fmean(above) >= 10, far + remark)


def ablate(setting: Setting) -> Report:
    """Change one option at a time, with one seed each; differences below two points are not significant."""
    report = Report("ablation", "What does it need?", setting, COLUMNS)
    for way, symbols in ABLATION.items():
        if symbols and setting.config(**symbols) == report.config:
            report.note(f"{way}: as it is")
        else:
            _one(way, symbols, 1, report)
    report.note("One seed each: differences below two points are none.")
    return report


def _one(way: str, symbols: Mapping[str, str], seed: int, report: Report) -> float:
    """Train once, or reuse an earlier training, and add a row.

    Returns the accuracy on the evaluation part, nan if training diverged.
    """
    key = _key(way, config_of(report.setting, seed, symbols))
    trained = report.unfinished.get(key)
    if trained is not None:
        report.note(f"{way}, seed {seed}: trained before the experiment was started again")
    else:
        try:
            trained = train_once(report.setting, seed=seed, symbols=symbols, way=way, watched=True)
        except Diverged as error:  # the other methods still run
            report.note(f"{way}, seed {seed}: no figure, for {error}")
            report.row({"way": way, "seed": seed})
            return math.nan
        report.unfinished.put(key, trained)
    report.series += [{"way": way, "seed": seed, **row} for row in trained.looks]
    report.row({"way": way, "seed": seed, "accuracy": trained.accuracy, **trained.last})
    return trained.accuracy


def _key(way: str, config: Config) -> str:
    """Return a hash of everything that a training depends on."""
    facts = way, config, environment(), digest_of_sources(ROOT, config.model)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def config_of(setting: Setting, seed: int, symbols: Mapping[str, str]) -> Config:
    """Return the configuration with `symbols` changed and a single evaluation, at the end."""
    return setting.config(SEED=str(seed), EVAL_INTERVAL_STEPS="100000000", **symbols)


def train_once(
    setting: Setting, *, seed: int, symbols: Mapping[str, str], way: str = "", watched: bool = False
) -> Trained:
    """Train a model with `symbols` changed.

    watched: measure it every LOOK_EVERY steps, not only at the end.
    """
    config = config_of(setting, seed, symbols)
    data = setting.data(config)
    look = Look(config, data, every=LOOK_EVERY if watched else 0, compare=way not in TRAINED)
    job = job_of(config, data, look)
    assert isinstance(job.model, LoopedTransformer)
    look.model = job.model
    for name, parameter in job.model.named_parameters():
        parameter.requires_grad_(name.startswith(TRAINED.get(way, "")))
    progress = Progress()
    with job.train_loader, job.eval_loader:
        result = train(job, progress)
    look.now(progress.step)
    last = look.rows[-1] | {"test_loss": result["loss"], "seconds": progress.seconds}
    if cosines := [row["cosine"] for row in look.rows if "cosine" in row]:
        last["lowest_cosine"] = min(cosines)
    return Trained(result["accuracy"], last, look.rows)


def trained_model(
    setting: Setting, *, seed: int, symbols: Mapping[str, str]
) -> tuple[Config, LoopedTransformer]:
    """Return the configuration with `symbols` changed, and its model after training."""
    config = config_of(setting, seed, symbols)
    job = job_of(config, setting.data(config), Record())
    with job.train_loader, job.eval_loader:
        train(job, Progress())
    assert isinstance(job.model, LoopedTransformer)
    return config, job.model


def job_of(config: Config, data: TrainingData, record: Record) -> Job:
    """Make a job on the CPU with the micro-batch of the table, without memory prediction."""
    config = config.replace(auto_method="table")
    hardware = probe("cpu")
    plan = apply_hyperparams(config, False, hardware=hardware, facts=data.facts)
    return make_job(
        config, plan, data, hardware=hardware, backend=Backend("cpu"), record=record, whole_run=True
    )


class Look(Record):
    """Record that measures convergence and the gradient's error every so many steps (0: only on `now`).

    It uses samples of the evaluation part and does not influence training.
    """

    def __init__(self, config: Config, data: TrainingData, *, every: int, compare: bool) -> None:
        self.config, self.data, self.every, self.compare = config, data, every, compare
        self.inputs, self.targets = batch_of(data, rows=LOOK_ROWS)
        self.model: LoopedTransformer | None = None
        self.rows: list[dict[str, float]] = []

    def row(self, kind: str, **values: Any) -> None:
        """Keep step and loss of a training row."""
        if kind == "train":
            self.rows.append({"step": values["step"], "loss": values["loss"]})

    def progress(self, step: int, fraction: float) -> None:  # noqa: ARG002
        """Measure if it is time to."""
        if self.every and step % self.every == 0:
            self.now(step)

    def now(self, step: int) -> None:
        """Measure the model as it is."""
        assert self.model is not None
        model, row = self.model, {"step": float(step)}
        with torch.no_grad():
            model(self.inputs)
        row |= convergence(model)
        row["rho"] = spectral_radius(model, self.inputs)
        if self.compare:
            own = with_options(model, self.config, self.data)
            exact = with_options(model, self.config, self.data, **REFERENCE).double()
            found = core_gradient(own, self.inputs, self.targets)
            row["cosine"] = agreement(found, core_gradient(exact, self.inputs, self.targets))["cosine"]
        self.rows.append(row)

"""The experiments on equilibrium propagation: that they tell a wrong gradient from a right one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lib import kconf
from lib.config import config_from_values
from lib.data.types import Dataset
from lib.errors import ConfigError, DataError, Diverged, Suspended, ToolkitError
from lib.tiers import with_changes
from scripts.eqprop import __main__ as command
from scripts.eqprop import adaptive, gradients, scale, training
from scripts.eqprop.adaptive import ranks_of, spearman
from scripts.eqprop.report import Report, Trained, Unfinished, spread
from scripts.eqprop.scale import information_criteria
from scripts.eqprop.setting import Setting
from tests.support.training import random_data
from train.job import Job, Progress
from train.loop import train
from train.training_data import TrainingData

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    "LOOPED_PATCH": "3",
    "LOOPED_WIDTH": "8",
    "LOOPED_HIDDEN": "16",
    "BUDGET_STEPS": "y",
    "MAX_STEPS": "3",
    "TARGET_EFFECTIVE_BATCH": "8",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def resolved(**changes: str) -> kconf.Resolved:
    """With a value of "" the symbol is left as it is in defconfigs/looped."""
    found = kconf.load(root=ROOT, config_file=ROOT / "defconfigs/looped")
    return with_changes(found, {f"CONFIG_{k}": v for k, v in (SMALL | changes).items() if v}, root=ROOT)


DATA: dict[str, TrainingData] = {}


class Small(Setting):
    """On random images of 7x6 pixels."""

    def data(self, config: Any) -> TrainingData:
        options = sorted(config.model_options.items())
        key = repr((config.model, options, config.grad_checkpoint, config.seed))
        if key not in DATA:  # to simulate a model takes longer than all else
            DATA[key] = random_data(config, shape=(1, 6, 7), train_size=64)
        assert isinstance(DATA[key].dataset, Dataset)
        return DATA[key]


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Small(resolved=resolved(), quick=True, out=tmp_path, log=lambda _: None)


def test_the_gradients_are_told_apart(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BETAS", (0.1, 0.03, 0.01))
    monkeypatch.setattr(gradients, "ROWS", 3)
    monkeypatch.setattr(gradients, "LOSS_BETA", 0.05)  # a bar that is for more than eight channels
    report = gradients.run(setting)
    assert all(passed for passed, _ in report.passed), report.lines
    files = {path.name for path in report.write()}
    assert files == {"report.txt", "results.json", "picture.png"}
    found = json.loads((report.folder / "results.json").read_text())
    assert found["rows"] == report.rows and "holds" in (report.folder / "report.txt").read_text()


def test_a_wrong_sign_does_not_hold(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.looped import equilibrium

    right = equilibrium.contrast

    def wrong(*arguments: Any, gradient_BTD: Any, **others: Any) -> Any:
        return right(*arguments, gradient_BTD=-gradient_BTD, **others)

    monkeypatch.setattr(gradients, "BETAS", (0.1, 0.03, 0.01))
    monkeypatch.setattr(gradients, "ROWS", 3)
    for module in (equilibrium, gradients):
        monkeypatch.setattr(module, "contrast", wrong)
    report = gradients.run(setting)
    assert [passed for passed, _ in report.passed][:6] == [False] * 6


@pytest.mark.long
def test_training_and_ablation_are_told(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LOOK_EVERY", 2)
    changes = {"as it is": {}, "1 block": {"LOOPED_LAYERS": "1"}, "2 blocks": {"LOOPED_LAYERS": "2"}}
    monkeypatch.setattr(training, "ABLATION", changes)
    report = training.run(setting)
    assert [row["way"] for row in report.rows] == ["ep", "implicit", "bptt", "frozen blocks", "frozen core"]
    assert not report.passed[0][0], "three steps on noise reach nothing"
    assert report.rows[1]["lowest_cosine"] > 0.999 and "lowest_cosine" not in report.rows[3] | report.rows[4]
    assert "(one seed) %, bar 95 %: a look, no result" in report.passed[0][1]
    assert "Configuration: MODEL_LOOPED=y" in report.lines[2] and report.lines[3].startswith("Machine: ")
    ablation = training.ablate(setting)
    assert [row["way"] for row in ablation.rows] == ["as it is", "2 blocks"]
    assert "1 block: as it is" in ablation.lines
    report.picture()


def test_an_interrupted_experiment_goes_on(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a training that diverges takes no other one with it."""
    trained: list[str] = []

    def once(_: Setting, *, way: str, **__: Any) -> Trained:
        trained.append(way)
        if way == "bptt" and len(trained) == 3:
            raise KeyboardInterrupt
        if way == "frozen blocks":
            raise Diverged("the loss is nan at step 3")
        return Trained(0.97, {"rho": 0.5}, [{"step": 1.0, "loss": 2.0}])

    monkeypatch.setattr(training, "train_once", once)
    with pytest.raises(KeyboardInterrupt):
        training.run(setting)
    report = training.run(setting)
    assert trained == ["ep", "implicit", "bptt", "bptt", "frozen blocks", "frozen core"]
    assert "ep, seed 1: trained before the experiment was started again" in report.lines
    assert "frozen blocks, seed 1: no figure, for the loss is nan at step 3" in report.lines
    ways = ["ep", "implicit", "bptt", "frozen blocks", "frozen core"]
    assert [row["way"] for row in report.rows] == ways and [passed for passed, _ in report.passed][:2] == [
        True,
        True,
    ]
    assert [row["way"] for row in report.series] == ["ep", "implicit", "bptt", "frozen core"]
    report.write()
    training.run(setting)
    assert trained[6:] == ways, "what has come to its end is trained anew"


def test_a_stopped_experiment_names_no_run_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: Setting) -> Report:
        raise Suspended("stopped by SIGINT after step 3", todo="make resume continues from there")

    (tmp_path / "config").write_text("CONFIG_MODEL_LOOPED=y\n")
    monkeypatch.setenv("KCONFIG_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("sys.argv", ["experiment", "--experiment", "2", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(command, "experiments", lambda: {"2": stopped})
    with pytest.raises(Suspended, match=r"EXP=2 was stopped.*the same command resumes"):
        command.main()


def test_what_is_kept_of_an_interrupted_experiment_is_of_the_same_configuration(
    setting: Setting, tmp_path: Path
) -> None:
    one, other = (training.config_of(setting, seed, {}) for seed in (1, 2))
    keys = {training._key(way, config) for way in ("ep", "frozen core") for config in (one, other)}
    assert len(keys) == 4 and training._key("ep", one) in keys
    (tmp_path / "unfinished.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        Unfinished(tmp_path / "unfinished.json").get("a key")


@pytest.mark.parametrize(
    ("way", "trained"), [("frozen blocks", {"embedding", "head"}), ("frozen core", {"head"}), ("ep", None)]
)
def test_what_is_frozen_stays_as_it_is(
    way: str, trained: set[str] | None, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}

    def watched(job: Job, progress: Progress) -> dict[str, float]:
        before.update({name: tensor.clone() for name, tensor in job.model.state_dict().items()})
        after.update(job.model.state_dict())  # the tensors that training changes
        return train(job, progress)

    monkeypatch.setattr(training, "train", watched)
    training.train_once(setting, seed=1, symbols=training.METHODS[way], way=way)
    # Bounded weights are brought back to their bound after every step, which rounds.
    changed = {
        name.split(".")[0] for name, tensor in after.items() if not tensor.allclose(before[name], rtol=1e-5)
    }
    assert changed == (trained or {"blocks", "embedding", "head"})


@pytest.mark.long
def test_cost_and_laws_are_told(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "WIDTHS", (8, 16))
    monkeypatch.setattr(scale, "LAW_WIDTHS", (8, 16))
    monkeypatch.setattr(scale, "ROWS", 4)
    monkeypatch.setattr(scale, "BETAS", (0.1, 0.001))
    report = scale.run(setting)
    assert {row["gradient"] for row in report.rows} == {"bptt", "ep", "implicit", "one_step"}
    assert "accuracy" in report.rows[-1]
    laws = scale.laws(setting)
    told = {text.split(",")[0]: passed for passed, text in laws.passed}
    assert told["memory of equilibrium propagation does not depend on iterations"]
    assert any("too few for a law" in line for line in laws.lines)
    for each in (report, laws):
        each.picture()


@pytest.mark.long
def test_iterations_of_samples_are_told(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    original, blocks = adaptive.trained_model, []

    def trained(*arguments: Any, **named: Any) -> Any:
        config, model = original(*arguments, **named)
        blocks.append((config.model_options["block"], config.model_options["gradient"]))
        return config, model

    correlations = iter([(-0.5, 0.01), (-0.5, 0.2), (0.5, 0.01)])
    monkeypatch.setattr(adaptive, "trained_model", trained)
    monkeypatch.setattr(adaptive, "spearman", lambda *_: next(correlations))
    setting = replace(setting, resolved=resolved(LOOPED_BLOCK_ENERGY_SELF="y", LOOPED_GRADIENT_BPTT="y"))
    report = adaptive.run(setting)
    expected = [("energy_cross", "ep"), ("energy_self", "ep"), ("plain", "implicit")]
    assert blocks == expected, "whatever is configured"
    assert len(report.rows) == 3 and [passed for passed, _ in report.passed] == [True, False, False]
    report.picture()


def test_a_way_that_diverges_is_told_and_the_others_are_kept(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = adaptive.trained_model

    def trained(setting: Setting, *, seed: int, symbols: dict[str, str]) -> Any:
        if "LOOPED_BLOCK_PLAIN" in symbols:
            raise Diverged("the loss is nan at step 3")
        return original(setting, seed=seed, symbols=symbols)

    monkeypatch.setattr(adaptive, "trained_model", trained)
    report = adaptive.run(setting)
    assert [row["way"] for row in report.rows] == ["ep, keys from input", "ep, keys from states"]
    assert "plain, implicit: not measured, for the loss is nan at step 3" in report.lines
    report.picture()


def test_rank_correlation() -> None:
    assert ranks_of(np.array([3.0, 1.0, 3.0])).tolist() == [2.5, 1.0, 2.5]
    rising = np.arange(100.0)
    assert spearman(rising, rising**3) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-12))
    assert spearman(np.ones(5), np.arange(5.0)) == (0.0, 1.0)
    random = np.random.default_rng(0)
    chances = [spearman(random.random(50), random.random(50))[1] < 0.05 for _ in range(400)]
    assert 0.02 < np.mean(chances) < 0.09


def test_which_law_describes_it() -> None:
    sizes = [32, 48, 64, 96, 128, 192, 256]
    random = np.random.default_rng(1).normal(scale=0.2, size=7)

    def best(values: Any) -> str:
        found = information_criteria(sizes, list(values + random))
        return min(found, key=lambda name: found[name])

    assert best(np.full(7, 20.0)) == "constant"
    assert best(5 * np.log(sizes)) == "logarithm"
    assert best(np.sqrt(sizes)) == "power"


def test_a_spread_says_how_many() -> None:
    assert spread([0.95, 0.97], factor=100) == "96.00 +- 1.41 (2 seeds)"
    assert spread([0.95]) == "0.95 (one seed)"


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("5", {}, "EXP=5 is not an experiment"),
        ("2", {"TIER_0": "y"}, "EXP=2 is not enabled at CPU_ONLY: that tier is for 1"),
        ("ablation", {"TIER_0": "y"}, "not enabled"),
        ("2", {"LOOPED_BLOCK_PLAIN": "y"}, "has no energy to propagate; .* EXP=1 and EXP=4"),
        ("1", {"MODEL_LENET5": "y"}, "on the looped transformer"),
        ("1", {"LOOPED_INPUT_TEXT": "y", "LOOPED_PATCH": ""}, "what has labels: images and SST-2"),
    ],
)
def test_what_is_not_enabled_is_refused(name: str, changes: dict[str, str], told: str) -> None:
    config = config_from_values(resolved(**changes).values) if "MODEL_LENET5" not in changes else None
    if config is None:
        config = config_from_values(kconf.load(root=ROOT, config_file=ROOT / "defconfigs/lenet5").values)
    with pytest.raises(ConfigError, match=told):
        command.check(name, config)


def test_a_folder_that_cannot_be_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ToolkitError, match=r"cannot write a report .*OUT= names another folder"):
        command.prepare(tmp_path / "file" / "reports")
    command.prepare(tmp_path / "reports" / "of today")
    assert list((tmp_path / "reports" / "of today").iterdir()) == []


def test_what_a_tier_enables_is_done() -> None:
    for name, tier in (("1", "0"), ("2", "1"), ("ablation", "1"), ("3", "2")):
        command.check(name, config_from_values(resolved(**{f"TIER_{tier}": "y"}).values))
    command.check("scaling_laws", config_from_values(resolved().values))
    command.check("4", config_from_values(resolved(LOOPED_BLOCK_PLAIN="y").values))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"TIER_0": "y"}, ["1"]),
        ({"TIER_1": "y"}, ["1", "2", "ablation"]),
        ({"TIER_2": "y"}, ["1", "2", "3", "ablation"]),
        ({"TIER_2": "y", "LOOPED_BLOCK_PLAIN": "y"}, ["1"]),
        ({}, list(command.NAMES)),
    ],
)
def test_without_a_name_all_that_the_configuration_allows_is_run(
    changes: dict[str, str],
    names: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def report_of(name: str) -> Any:
        return lambda _: SimpleNamespace(write=lambda: [f"report of {name}"])

    monkeypatch.setattr(command.kconf, "from_environment", lambda _: resolved(**changes))
    monkeypatch.setattr(command, "experiments", lambda: {name: report_of(name) for name in command.NAMES})
    monkeypatch.setattr("sys.argv", ["experiment", f"--out={tmp_path}"])
    assert command.main() == 0
    told = [line for name in names for line in (f"EXP={name}", f"report of {name}")]
    assert capsys.readouterr().out.splitlines() == told


def test_without_a_name_another_model_is_refused() -> None:
    config = config_from_values(kconf.load(root=ROOT, config_file=ROOT / "defconfigs/lenet5").values)
    with pytest.raises(ConfigError, match="on the looped transformer"):
        command.allowed(config)

"""Nested experiment files of the design document for the Tiny Recursive Model, read by make sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.config import config_from_values
from lib.errors import ConfigError
from lib.kconf.tree import load_own_tree
from lib.sweeps.experiment import read_experiment
from lib.sweeps.nested_keys import tables
from lib.sweeps.runner import resolved_runs

ROOT = Path(__file__).resolve().parents[3]
BASE = """
tpu: {project: "your-gcp-project", zone: "us-central2-b", tpu_name: "tpu-v4-32", accelerator_type: "v4-32", num_workers: 8}
data:
  dataset_path: "gs://your-bucket/data/sudoku-extreme-1k-aug-1000"
  local_cache_dir: "/tmp/sudoku_data"
  num_workers: 8
  prefetch_factor: 4
model:
  name: "TinyRecursiveReasoningModel_ACTV1"
  H_cycles: 3
  L_cycles: 6
  L_layers: 2
  hidden_size: 512
  num_heads: 8
  expansion: 4
  mlp_t: true
  puzzle_emb_ndim: 512
  halt_max_steps: 16
  forward_dtype: "bfloat16"
training:
  global_batch_size: 1024
  per_worker_batch_size: 128  # 1024 / 8
  gradient_accumulation_steps: 1
  epochs: 50000
  eval_interval: 5000
  checkpoint_interval: 2500
  optimizer: "AdamATan2"
  lr: 4e-4  # Scaled from 1e-4 for batch 1024
  lr_min_ratio: 1.0
  lr_warmup_steps: 5000
  weight_decay: 1.0
  beta1: 0.9
  beta2: 0.95
  ema: true
  ema_rate: 0.999
  seed: 42
checkpoint: {bucket: "your-bucket", save_dir: "checkpoints/sudoku_baseline", keep_last_n: 5}
logging: {use_tensorboard: true, log_interval: 100, tensorboard_dir: "gs://your-bucket/logs/sudoku_baseline"}
"""  # noqa: E501
ABLATION = """
defaults:
  - base_sudoku_tpu

training:
  ema: false  # Override base config

checkpoint:
  save_dir: "checkpoints/sudoku_no_ema"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base_sudoku_tpu.yaml").write_text(BASE)
    (tmp_path / "experiments").mkdir()
    return tmp_path


def study(folder: Path, text: str) -> Path:
    """A file below that of its defaults, as in the document."""
    file = folder / "experiments" / "study.yaml"
    file.write_text(text)
    return file


def test_the_base_file_is_the_recipe(folder: Path) -> None:
    experiment = read_experiment(folder / "base_sudoku_tpu.yaml")
    (run,) = resolved_runs(experiment, root=ROOT)
    config = config_from_values(run.resolved.values)
    values = run.resolved.values
    assert (config.model, config.seed, config.target_effective_batch) == ("trm", 42, 1024)
    assert (values["TRM_H_CYCLES"], values["TRM_L_CYCLES"], values["TRM_WIDTH"]) == (3, 6, 512)
    assert (values["LEARNING_RATE"], values["WARMUP_STEPS"], values["NUM_EPOCHS"]) == (4e-4, 5000, 50000)
    assert (values["OPTIMIZER"], values["SCHEDULE"], values["PRECISION"]) == (
        "adam_atan2",
        "constant",
        "bf16",
    )
    assert (values["EMA"], values["EMA_DECAY"], values["SINK_TENSORBOARD"]) == (True, 0.999, True)


def test_a_key_that_sets_nothing_is_named_with_its_line_and_the_reason(folder: Path) -> None:
    notices = read_experiment(folder / "base_sudoku_tpu.yaml").notices
    named = {notice.split(": ")[1].split()[0] for notice in notices}
    assert named == {
        *(f"tpu.{key}" for key in ("project", "zone", "tpu_name", "accelerator_type", "num_workers")),
        *("data.local_cache_dir", "model.num_heads", "model.puzzle_emb_ndim"),
        *("training.per_worker_batch_size", "training.gradient_accumulation_steps"),
        *("checkpoint.bucket", "checkpoint.save_dir", "logging.tensorboard_dir"),
    }
    (heads,) = (notice for notice in notices if "num_heads" in notice)
    assert heads == f"{folder}/base_sudoku_tpu.yaml:14: model.num_heads sets nothing: model.mlp_t is true"


def test_an_experiment_file_overrides_its_base_in_the_folder_above(folder: Path) -> None:
    experiment = read_experiment(study(folder, ABLATION))
    (run,) = resolved_runs(experiment, root=ROOT)
    assert run.resolved.values["EMA"] is False
    assert "EMA_DECAY" not in experiment.settings, "it would have no effect, which is an error"
    (given,) = (notice for notice in experiment.notices if "ema_rate" in notice)
    assert given.endswith("training.ema_rate sets nothing: training.ema is false")


def test_sections_and_keys_of_experiment_files_mix(folder: Path) -> None:
    more = "config: trm-sudoku4\nset: {TRM_H_CYCLES: 4}\naxes: {TRM_L_CYCLES: [2, 6]}\nseeds: 2\n"
    small = "model: {H_cycles: 2, mlp_t: false, num_heads: 4}\ntraining: {lr_min_ratio: 0.1, seed: 3}\n"
    experiment = read_experiment(study(folder, more + small))
    assert (experiment.config, experiment.seeds, len(experiment.points)) == ("trm-sudoku4", (1, 2), 2)
    assert experiment.settings == {
        "TRM_H_CYCLES": "4",  # of `set`
        "TRM_MIXER_ATTENTION": "y",
        "TRM_HEADS": "4",
        "SCHEDULE_COSINE": "y",
        "LR_MIN_RATIO": "0.1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  H_cycle: 3\n",
            r"study\.yaml:2: model\.H_cycle: 3 is not known here; did you mean H_cycles\?",
        ),
        ("training: {optimizer: Adam}\n", r"study\.yaml:1: .* it takes AdamATan2, AdamW"),
        ("training: {ema_rate: null}\n", r"study\.yaml:1: training\.ema_rate is null"),
        ("model: 3\n", r"study\.yaml:1: model is not a mapping of keys to values"),
        ("modle: {H_cycles: 3}\n", r"study\.yaml:1: there is no key modle"),
    ],
)
def test_what_is_not_known_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_experiment(study(folder, text))


def test_a_value_out_of_range_has_the_line_of_its_key(folder: Path) -> None:
    experiment = read_experiment(study(folder, "model:\n  mlp_t: true\n  H_cycles: 1000\n"))
    with pytest.raises(ConfigError) as error:
        resolved_runs(experiment, root=ROOT)
    assert any("study.yaml:3" in finding and "TRM_H_CYCLES" in finding for finding in error.value.findings)


def test_every_symbol_of_the_table_exists() -> None:
    tree = load_own_tree(ROOT)
    rules = [rule for name, part in tables().items() if name != "_file" for rule in part.values()]
    texts = [text for rule in rules for text in (rule.values() if isinstance(rule, dict) else [rule])]
    given = [text for text in texts if not text.startswith("none: ")]
    symbols = {assignment.partition("=")[0] for text in given for assignment in text.split()}
    assert len(symbols) > 30 and {name for name in symbols if name not in tree.syms} == set()

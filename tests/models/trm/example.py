"""What core tests need of the Tiny Recursive Model, how it learns, and its puzzles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.datasets.sudoku.spec import PuzzleSpec as SPEC
from models.trm.model import Thought as OUTPUT
from tests.models.trm.puzzles import puzzle_data as data
from tests.models.trm.puzzles import small_trm_config as config

__all__ = ["OUTPUT", "SPEC", "config", "data"]

# In tests/e2e/ddp_worker.py. Samples stay for several steps, on whichever process their row is.
DISTRIBUTED: dict[str, dict[str, Any]] = {
    "recursive": {
        "model": "trm",
        "micro_batch": 5,
        "settings": {"halt_max_steps": 2, "halt_exploration": 0.5, "learning_rate": 0.1, "max_steps": 4},
    }
}
WITH_A_CARRY = STATIC_SHAPES = ("recursive",)  # of them; with a stand-in for XLA, too
DATASETS = ("sudoku", "sudoku_csv")  # that the model takes, and no other does
# In tests/contract/test_life_of_a_value.py. There is no epsilon to spare in an arctangent of two numbers near
# zero.
NARROW = {
    "TRM_SIZE_CUSTOM": "y",
    "AUGMENT_NONE": "y",
    "TRM_WIDTH": "8",
    "TRM_MULTIPLE": "8",
    "TRM_PUZZLE_TOKENS": "2",
    "OPTIMIZER_ADAMW": "y",
    "TRM_H_CYCLES": "2",
    "TRM_L_CYCLES": "1",
}
# In tests/contract/test_static_graph.py: what has code of its own in a step, and the optimizer for it.
STATIC_GRAPH = {"trm": "trm-sudoku", "trm with an embedding": "trm-sudoku-extreme"}
OWN_OPTIMIZER = {"optimizer": "adam_atan2", "sign_learning_rate": 0.1}
# In tests/lib/kconf/test_overruled.py.
DECIDED = (
    ("MODEL_TRM TRM_HEADS=4", "TRM_HEADS"),
    ("MODEL_TRM TRM_SIZE_SMALL SIGN_LEARNING_RATE=0.5", "SIGN_LEARNING_RATE"),
    ("MODEL_TRM HALT_MAX_STEPS=1 HALT_EXPLORATION=0.5", "HALT_EXPLORATION"),
)
# In tests/e2e/test_readme_commands.py: command, flags, what it says; what is not run is understood.
_PUZZLES = (
    "CONFIG_TRM_SIZE_CUSTOM=y CONFIG_TRM_WIDTH=8 CONFIG_MAX_STEPS=2"
    " CONFIG_TARGET_EFFECTIVE_BATCH=16 CONFIG_SUDOKU_TEST_SIZE=20"
)
README_END_TO_END = (
    ("make defconfig-trm-sudoku && make train", f"{_PUZZLES} CONFIG_SUDOKU_TRAIN_SIZE=64", "exact accuracy"),
    (
        "make defconfig-trm-sudoku4 && make train",
        f"{_PUZZLES} CONFIG_SUDOKU_TRAIN_SIZE=100",
        "exact accuracy",
    ),
)
README_DRY = ("make sweep SWEEP=trm-ema",)
# In tests/contract/test_every_option_counts.py.
SMALL = {
    "SUDOKU_TRAIN_SIZE": "24",
    "SUDOKU_TEST_SIZE": "8",
    "SUDOKU_CLUES": "70",
    "HALT_MAX_STEPS": "3",
    "HALT_EXPLORATION": "0.5",
    "EVAL_STEPS": "2",
    "TRM_SIZE_CUSTOM": "y",
    "TRM_LAYERS": "1",
    "TRM_HEADS": "2",
    "TRM_WIDTH": "8",
    "TRM_MULTIPLE": "4",
    "TRM_PUZZLE_TOKENS": "2",
    "TRM_H_CYCLES": "2",
    "TRM_L_CYCLES": "1",
}
SHOWN = ("TRM TRM_MIXER_ATTENTION EMA", "TRM SUDOKU_LEVEL_4X4")
MIXED = (
    "TRM TRM_SIZE_SMALL AUGMENT_AHEAD EMA HALT_MAX_STEPS=1",
    "TRM DATASET_SUDOKU SUDOKU_LEVEL_4X4 OPTIMIZER_SGD",
)
OF_ALL = {"TRM_HEADS", "SIGN_LEARNING_RATE", "HALT_EXPLORATION", "HALT_MAX_STEPS", "EVAL_STEPS"}
# In tests/contract/test_random_configurations.py.
SMALLEST = {
    "TRM_LAYERS": "1",
    "TRM_HEADS": "1",
    "TRM_WIDTH": "8",
    "TRM_H_CYCLES": "1",
    "TRM_L_CYCLES": "1",
    "EVAL_STEPS": "1",
    "SUDOKU_LEVEL_4X4": "y",
    "SUDOKU_TRAIN_SIZE": "64",
    "SUDOKU_TEST_SIZE": "16",
}
EMBEDDED = ("sudoku",)


def few_generated() -> Iterator[Any]:
    """Puzzles are taken for solved as soon as may be."""
    yield mock.patch("models.trm.model.HALT_BIAS", 5)


def spec_of_case(case: dict[str, Any]) -> SPEC | None:
    """The puzzles of a golden case; None where it has others."""
    return SPEC(name="noise", side=case["side"], synthetic=True) if "side" in case else None


def spec_of_config(_: Config) -> SPEC:
    """What only the files would tell."""
    return SPEC(name="sudoku", side=9, synthetic=False)


def targets_of(spec: SPEC, inputs: Tensor) -> Tensor:
    return 2 + inputs % spec.side


def output_shape(spec: SPEC, rows: int) -> tuple[int, ...]:
    return rows, *spec.input_shape, spec.vocab_size


def logits_of(output: OUTPUT) -> Tensor:
    return output.logits


def further_loss(output: OUTPUT, _: Tensor, *, reduction: str) -> Tensor:
    """That of the halting logits."""
    return F.binary_cross_entropy_with_logits(
        output.halt, output.halt.new_ones(output.halt.shape), reduction=reduction
    )

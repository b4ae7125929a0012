"""What core tests need of the looped transformer."""

from __future__ import annotations

from typing import Any

DISTRIBUTED: dict[str, dict[str, Any]] = {
    "looped": {
        "model": "looped",
        "micro_batch": 5,
        "scalars": True,
        "settings": {"ema": True, "ema_decay": 0.5, "grad_clip": 0.5},
    }
}
NARROW = {
    "LOOPED_WIDTH": "8",
    "LOOPED_HIDDEN": "16",
    "LOOPED_MAX_ITERATIONS": "5",
    "LOOPED_NUDGED_ITERATIONS": "3",
}
# How many iterations it makes is for its states to say: no graph could hold a step.
NO_STATIC_GRAPH = {"looped": "looped"}
README_END_TO_END = (
    (
        "make defconfig-looped && make train",
        "{short} CONFIG_LOOPED_MAX_ITERATIONS=8 CONFIG_LOOPED_WIDTH=8",
        "Done: ",
    ),
    ("make experiment EXP=1", "QUICK=1 CONFIG_LOOPED_WIDTH=8", "holds: "),
)
README_RUN = ("make defconfig-looped+tier1",)
SMALL = {
    "LOOPED_LAYERS": "1",
    "LOOPED_HEADS": "2",
    "LOOPED_WIDTH": "8",
    "LOOPED_HIDDEN": "8",
    "LOOPED_MAX_ITERATIONS": "6",
    "LOOPED_NUDGED_ITERATIONS": "4",
}
SHOWN = (
    "LOOPED",
    "LOOPED LOOPED_MLP_TANH LOOPED_NUDGE_HOLOMORPHIC",
    "LOOPED LOOPED_BLOCK_PLAIN LOOPED_GRADIENT_EP_VF LOOPED_NUDGE_FOUR_POINT",
    "LOOPED LOOPED_INPUT_TEXT DATASET_SST2",
    "LOOPED LOOPED_INPUT_TEXT DATASET_MARKOV",
)
DECIDED = (("MODEL_LOOPED LOOPED_NUDGE_ONE_SIDED LOOPED_TOGETHER", "LOOPED_TOGETHER"),)
OF_ALL = {"LOOPED_TOGETHER", "LOOPED_TOLERANCE", "LOOPED_SPECTRAL_CAP"}
SMALLEST = {
    "LOOPED_LAYERS": "1",
    "LOOPED_HEADS": "1",
    "LOOPED_WIDTH": "8",
    "LOOPED_MAX_ITERATIONS": "4",
    "LOOPED_NUDGED_ITERATIONS": "4",
}

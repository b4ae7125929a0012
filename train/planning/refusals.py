"""Refusals of a plan before the data of a run are made."""

from __future__ import annotations

from lib.config import Config
from lib.devices.probe import probe
from lib.hyperparams import apply_hyperparams
from lib.plan.placement import place
from train.build import check_run
from train.job import warm_up_text
from train.planning.memory_estimate import predicted_plan
from train.training_data import TrainingData


def refuse(config: Config, data: TrainingData | None) -> None:
    """Raise, before data are made, what a plan refuses by their metadata, or by the options alone (None).

    How several devices share a batch depends on the model, and of several nodes on all of them.
    """
    if config.dist_nnodes != "1" or config.launch.dist_endpoint:
        return  # check_node
    hardware = probe(config.device)
    if data is not None:
        check_run(config, predicted_plan(config, data, hardware)[0], data)
    elif place(config, hardware).world.value == 1:
        requested = config.replace(auto_method="predict") if config.auto_method == "probe" else config
        plan = apply_hyperparams(requested, False, hardware=hardware, predict=lambda _: {})  # whatever fits
        if config.budget != "epochs":
            warm_up_text(config, train_size=1, effective_batch=plan.effective_batch)

"""make experiment EXP=1|2|3|4|ablation|scaling_laws: experiments on the configured looped transformer.

Without EXP= all that its compute tier and its block allow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lib import atomic, kconf
from lib.config import Config, config_from_values
from lib.errors import ConfigError, Suspended, run_main
from lib.plan.tables import TIER_CONFIGS
from lib.tiers import TIERS, with_tier

if TYPE_CHECKING:
    from scripts.eqprop.report import Report
    from scripts.eqprop.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("1", "2", "3", "4", "ablation", "scaling_laws")
ANY_BLOCK = ("1", "4")  # experiments that choose their blocks themselves


def main() -> int:
    """Run the experiment that the command line names, or all that the configuration allows."""
    options = parse()
    resolved = with_tier(kconf.from_environment(ROOT), root=ROOT, log=print)
    config = config_from_values(resolved.values)
    names = [options.experiment] if options.experiment else allowed(config)
    check(names[0], config)

    from scripts.eqprop.setting import Setting  # torch takes a second

    setting = Setting(
        resolved=resolved, quick=options.quick, out=options.out, log=lambda text: print(text, flush=True)
    )
    prepare(options.out)
    for name in names:
        print(f"EXP={name}", flush=True)
        try:
            report = experiments()[name](setting)
        except Suspended as error:  # replaces the hint to resume a run, which an experiment has not
            raise Suspended(
                f"EXP={name} was stopped",
                todo="the same command resumes; finished trainings of EXP=2 and ablation are reused",
            ) from error
        for path in report.write():
            print(path)
    return 0


def allowed(config: Config) -> list[str]:
    """Return the experiments that `config` allows. Raises ConfigError where it allows none."""
    refused = {name: _refusal(name, config) for name in NAMES}
    if error := refused[NAMES[0]]:  # for every tier and every block
        raise error
    return [name for name, error in refused.items() if error is None]


def prepare(out: Path) -> None:
    """Create the folder of reports before the work. Raises ToolkitError if it is not writable."""
    atomic.save(out / ".writable", b"", action="write a report", todo="OUT= names another folder")
    (out / ".writable").unlink()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="experiment", description=__doc__)
    parser.add_argument("--experiment", default="", help=", ".join(NAMES))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, for a look")
    parser.add_argument("--out", type=Path, default=Path("benchmark_results/eqprop"), help="where to")
    return parser.parse_args(arguments)


def check(name: str, config: Config) -> None:
    """Raise ConfigError for an experiment that is unknown, unsuitable, or not enabled at the compute tier."""
    if error := _refusal(name, config):
        raise error


def _refusal(name: str, config: Config) -> ConfigError | None:
    if name not in NAMES:
        return ConfigError(f"EXP={name} is not an experiment", todo=f"one of {', '.join(NAMES)}")
    if config.model != "looped" or config.model_options["causal"]:
        return ConfigError(
            "the experiments are on the looped transformer and what has labels: images and SST-2",
            todo="make defconfig-looped; where a tier chooses texts without labels CONFIG_DATASET_SST2=y, or "
            "CONFIG_LOOPED_INPUT_IMAGES=y",
        )
    if name not in ANY_BLOCK and config.model_options["block"] == "plain":
        return ConfigError(
            f"EXP={name} is on the configured block, and a plain one has no energy to propagate",
            todo="CONFIG_LOOPED_BLOCK_ENERGY_CROSS=y, or EXP=1 and EXP=4, which try the plain block, too",
        )
    if config.tier == "none":
        return None
    tier = TIERS[int(config.tier)]
    enabled = [str(number) for number in TIER_CONFIGS[tier]["experiments"]]
    if {"ablation": "2"}.get(name, name) in enabled:  # the ablation is enabled with experiment 2
        return None
    return ConfigError(
        f"EXP={name} is not enabled at {tier}",
        why=f"that tier is for {', '.join(enabled)}",
        todo="choose a larger tier (CONFIG_TIER_*), or none with sizes of your own",
    )


def experiments() -> dict[str, Callable[[Setting], Report]]:
    """Return the experiments by name."""
    from scripts.eqprop import adaptive, gradients, scale, training

    runs = (gradients.run, training.run, scale.run, adaptive.run, training.ablate, scale.laws)
    return dict(zip(NAMES, runs, strict=True))


if __name__ == "__main__":
    raise SystemExit(run_main(main))

"""Compute tier of a machine (0 to 4), and configurations whose tier follows the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from lib.config import config_from_values
from lib.devices.probe import probe
from lib.errors import ConfigError
from lib.kconf import Resolved, load_written
from lib.plan.tables import ADVERTISED_SHARE, TIER_1_GB, TIER_2_GB, TIER_3_GB, TIER_4_DEVICES, TIER_CONFIGS
from lib.plan.types import Decision, Hardware
from lib.units import GB, counted

TIERS = tuple(TIER_CONFIGS)  # CONFIG_TIER_0 .. CONFIG_TIER_4


def detect_compute_tier() -> str:
    """Return the key of TIER_CONFIGS for this machine. Raises PlanError where a GPU does not respond."""
    return tier_of(probe("auto")).value


def tier_of(hardware: Hardware) -> Decision[str]:
    """Return the tier of a machine, with the reason: by its smallest GPU's memory, then the number of GPUs.

    Names are not used: a MIG slice is named like the whole GPU, and new GPUs have new names.
    """
    if hardware.kind == "cpu":
        return Decision(TIERS[0], "there is no GPU")
    count = len(hardware.devices)
    smallest_gb = min(device.total_bytes for device in hardware.devices) / GB
    gpus = f"{counted(count, 'GPU')}, the smallest with {smallest_gb:.1f} GB"

    def at_least(advertised_gb: int) -> bool:
        return smallest_gb >= ADVERTISED_SHARE * advertised_gb

    if at_least(TIER_3_GB) and count >= TIER_4_DEVICES:
        return Decision(TIERS[4], f"{gpus}: {TIER_4_DEVICES} or more of {TIER_3_GB} GB")
    for tier, advertised_gb in ((3, TIER_3_GB), (2, TIER_2_GB), (1, TIER_1_GB)):
        if at_least(advertised_gb):
            return Decision(TIERS[tier], f"{gpus}: from {advertised_gb} GB on")
    return Decision(TIERS[0], f"{gpus}: below {TIER_1_GB} GB")


def with_tier(
    resolved: Resolved, *, root: Path, log: Callable[[str], None], hardware: Hardware | None = None
) -> Resolved:
    """Return `resolved`, with CONFIG_TIER_AUTO replaced by the machine's tier and the defaults that follow.

    hardware: the machine; None for this one. Nothing is written back, and values set by a user are kept.
    Raises ConfigError where such a value contradicts those defaults, and for a model that has none.
    """
    config = config_from_values(resolved.values)
    if config.tier != "none" and not resolved.values["MODEL_BY_TIER"]:
        raise ConfigError(
            f"CONFIG_TIER_{config.tier.upper()}=y is not possible",
            why=f"{config.model} has no sizes by tier",
            todo="set CONFIG_TIER_NONE=y",
        )
    if config.tier != "auto":
        return resolved
    tier = tier_of(hardware or probe(config.device))
    log(f"Compute tier: {tier.value} ({tier.reason})")
    given = {f"CONFIG_{name}": value for name, value in resolved.given.items() if name != "TIER_AUTO"}
    # Values set by a user are passed on even if they equal the default without a tier.
    chosen = {f"CONFIG_TIER_{TIERS.index(tier.value)}": "y"}
    places = {name: resolved.origins.get(name.removeprefix("CONFIG_"), "the configuration") for name in given}
    decided = load_written(resolved.text, root=root, overrides=given | chosen, places=places)
    reason = f"default of {tier.value}: {tier.reason}"
    origins = {
        name: resolved.origins[name] if decided.values[name] == resolved.values[name] else reason
        for name in decided.origins
    }
    return dataclasses.replace(decided, origins=MappingProxyType(origins), notices=resolved.notices)


def with_changes(resolved: Resolved, changes: Mapping[str, str], *, root: Path) -> Resolved:
    """Apply `changes`, CONFIG_NAME -> raw value, with the defaults that follow. Raises ConfigError."""
    return load_written(resolved.text, root=root, overrides=changes)

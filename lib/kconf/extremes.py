"""Whole configurations by rule: all defaults, all off, all on, random.

As in the C tools, numbers and strings keep their defaults, and KCONFIG_ALLCONFIG names a file of fixed
values.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.errors import ConfigError
from lib.kconf import write
from lib.kconf.defconfig import find_fragment, read_shipped
from lib.kconf.resolve import accept, load_text
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import has_prompt, is_logical

# Command -> file name (without .config) for KCONFIG_ALLCONFIG=1.
KINDS = {
    "alldefconfig": "alldef",
    "allnoconfig": "allno",
    "allyesconfig": "allyes",
    "allmodconfig": "allmod",
    "randconfig": "allrandom",
    "tinyconfig": "alltiny",
}
_DEFAULT_PERCENT = 50


def make_extreme(
    tree: Any, command: str, environ: Mapping[str, str], *, seed: int = 0, percent: int = _DEFAULT_PERCENT
) -> tuple[StrictLoad, list[str]]:
    """Make the configuration for one of KINDS in our own `tree`; also returns its notices.

    seed, percent: of randconfig; percentage of the free bool options that are on.
    Raises ConfigError where the file of KCONFIG_ALLCONFIG is not valid.
    """
    root = Path(tree.srctree)
    tiny = [find_fragment(root, "tiny")] if command == "tinyconfig" else []
    paths = [*tiny, *_preset_files(root, KINDS[command], environ)]
    configuration = StrictLoad(tree, *(read_shipped(root, path) for path in paths))
    free = [
        symbol  # bools with a prompt that are in no choice and not set by a file
        for symbol in tree.unique_defined_syms
        if is_logical(symbol) and has_prompt(symbol) and not symbol.choice
        if configuration.assigned(symbol.name) is None
    ]
    notices = []
    if command == "randconfig":
        _set_randomly(tree, free, source=random.Random(seed), percent=percent)
    elif command != "alldefconfig":
        value = "n" if command in ("allnoconfig", "tinyconfig") else "y"
        for symbol in free:
            symbol.set_value(value)
    if command == "allmodconfig":
        notices.append("there are no modules here: allmodconfig is allyesconfig")
    notices += accept(configuration, "no configuration was written").notices
    text = write.full_text(tree, sources=configuration.sources)
    fresh = load_text(tree, text)  # drops assignments without effect
    assert write.full_text(tree, sources=fresh.sources) == text, "it does not survive its own file"
    return fresh, notices


def seed_of(environ: Mapping[str, str]) -> int:
    """Return KCONFIG_SEED, decimal or with 0x, or a fresh seed. Raises ConfigError."""
    text = environ.get("KCONFIG_SEED")
    if not text:
        return int.from_bytes(os.urandom(4), "big")
    if not re.fullmatch(r"0[xX][0-9a-fA-F]{1,8}|0|[1-9][0-9]{,9}", text) or int(text, 0) >= 2**32:
        what = f"KCONFIG_SEED={text} is not a number of 0..{2**32 - 1:#x}"
        raise ConfigError(what, todo="give one such as 42 or 0x2A")
    return int(text, 0)


def probability_of(environ: Mapping[str, str]) -> int:
    """Return KCONFIG_PROBABILITY as the percentage of options that are on. Raises ConfigError.

    The C tools take one to three numbers: `bool`, `yes:module` (both count as on), `bool:yes:module`.
    """
    text = environ.get("KCONFIG_PROBABILITY")
    if not text:
        return _DEFAULT_PERCENT
    words = text.split(":")
    if len(words) > 3 or not all(re.fullmatch(r"[0-9]{1,3}", word) for word in words):
        raise ConfigError(f"KCONFIG_PROBABILITY={text} is not 1 to 3 percentages with colons between them")
    numbers = [int(word) for word in words]
    percent = sum(numbers) if len(numbers) == 2 else numbers[0]
    if percent > 100 or sum(numbers[1:]) > 100:
        raise ConfigError(f"KCONFIG_PROBABILITY={text} is more than 100 percent")
    return percent


def _preset_files(root: Path, kind: str, environ: Mapping[str, str]) -> list[Path]:
    """Return the file of KCONFIG_ALLCONFIG: a path, or (empty or 1) that of the kind, else all.config."""
    text = environ.get("KCONFIG_ALLCONFIG")
    if text is None:
        return []
    if text not in ("", "1"):
        return [Path(text)]
    for name in (f"{kind}.config", "all.config"):
        if (root / name).is_file():
            return [root / name]
    what = f"KCONFIG_ALLCONFIG={text}, but there is neither {kind}.config nor all.config"
    raise ConfigError(what, todo="make one, or name a file")


def _set_randomly(tree: Any, free: list[Any], *, source: random.Random, percent: int) -> None:
    for symbol in free:
        symbol.set_value("y" if source.randrange(100) < percent else "n")
    # Choices made by a file are kept. Repeated, since visible members depend on other choices.
    orders = [
        (choice, source.sample(choice.syms, len(choice.syms)))
        for choice in tree.unique_choices
        if has_prompt(choice) and choice.user_selection is None
    ]
    for _ in orders:
        before = [choice.selection for choice, _ in orders]
        for _, order in orders:
            member = next((one for one in order if one.visibility), None)
            if member is not None:
                member.set_value("y")
        if before == [choice.selection for choice, _ in orders]:
            break

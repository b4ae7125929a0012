"""The first line of a shipped configuration, shown by make list-defconfigs, tells the size of its network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lib import kconf
from lib.config import Config, config_from_values
from lib.data import describe_dataset
from lib.data.types import Spec, TextClassSpec, TextSpec
from lib.kconf.defconfig import available, summary
from tests.contract.cases import needs_extra
from tests.support.examples import examples
from train.training_data import built, place_of

ROOT = Path(__file__).resolve().parents[2]
DEFCONFIGS = [path for path in available(ROOT)[0] if not needs_extra(path)]
# What only the files of a data set can tell of its vocabulary: Tiny Shakespeare has 65 characters.
VOCABULARY = {"byte": 256, "char": 65, "gpt2": 50257}
TOLD = re.compile(r"([\d,]+|[\d.]+ million) parameters")


def parameters_of(config: Config) -> int:
    """Counted without memory for them. Frozen models are not the network that is trained."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in built(config, spec_of(config)).parameters())


def spec_of(config: Config) -> Spec:
    known = describe_dataset(place_of(config, root=ROOT, data_dir=None, log=print), config.data_options)
    if known is not None:
        return known.spec
    if config.model in examples():
        spec: Spec = examples()[config.model].spec_of_config(config)
        return spec
    assert config.tokenizer is not None and config.block_size is not None
    vocab_size = VOCABULARY[config.tokenizer]
    if config.dataset == "sst2":  # one more token fills short sentences
        return TextClassSpec(
            name="text", vocab_size=vocab_size + 1, block_size=config.block_size, classes=2, pad=vocab_size
        )
    return TextSpec(
        name="text",
        vocab_size=vocab_size,
        block_size=config.block_size,
        unit="token",
        validation_tokens=1,
        validation_bytes=None,
    )


def told_like(count: int, told: str) -> str:
    """`count` in the form of `told`: exact, or millions with as many digits."""
    if not told.endswith(" million"):
        return f"{count:,}"
    decimals = len(told.removesuffix(" million").partition(".")[2])
    return f"{count / 1e6:.{decimals}f} million"


@pytest.mark.slow
@pytest.mark.parametrize("path", DEFCONFIGS, ids=lambda path: path.name)
def test_the_first_line_tells_the_number_of_parameters(path: Path) -> None:
    config = config_from_values(kconf.load(root=ROOT, config_file=path).values)
    told = TOLD.search(summary(path))
    count = parameters_of(config)
    assert told, f"{path.name} has {count:,} parameters: {summary(path)}"
    assert told[1] == told_like(count, told[1])

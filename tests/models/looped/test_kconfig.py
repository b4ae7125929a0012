"""What of the looped transformer does not go together is refused by Kconfig, with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib import kconf
from lib.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_a_force_that_rounding_swallows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("CONFIG_MODEL_LOOPED=y\n")
    with pytest.raises(ConfigError) as caught:
        kconf.load(root=ROOT, config_file=tmp_path / "config", overrides={"CONFIG_LOOPED_BETA": "1e-7"})
    assert 'CONFIG_LOOPED_BETA="1e-7" is out of range' in caught.value.findings[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            "LOOPED_BLOCK_PLAIN LOOPED_GRADIENT_EP",
            "needs CONFIG_LOOPED_BLOCK_ENERGY_CROSS=y or CONFIG_LOOPED_BLOCK_ENERGY_SELF=y",
        ),
        ("LOOPED_GRADIENT_EP_VF", "give CONFIG_LOOPED_BLOCK_PLAIN=y CONFIG_LOOPED_GRADIENT_EP_VF=y"),
        (
            "LOOPED_GRADIENT_EP_ADJOINT",
            "give CONFIG_LOOPED_BLOCK_PLAIN=y CONFIG_LOOPED_GRADIENT_EP_ADJOINT=y",
        ),
        ("LOOPED_NUDGE_HOLOMORPHIC", "give CONFIG_LOOPED_MLP_TANH=y CONFIG_LOOPED_NUDGE_HOLOMORPHIC=y"),
        ("LOOPED_GRADIENT_BPTT LOOPED_NUDGE_FOUR_POINT", "give CONFIG_LOOPED_GRADIENT_EP=y"),
        (
            "LOOPED_BLOCK_PLAIN LOOPED_ACTIVATION_TANH",
            "needs CONFIG_LOOPED_BLOCK_ENERGY_CROSS=y or CONFIG_LOOPED_BLOCK_ENERGY_SELF=y",
        ),
        (
            "LOOPED_BLOCK_PLAIN LOOPED_MLP_RELU",
            "needs CONFIG_LOOPED_BLOCK_ENERGY_CROSS=y or CONFIG_LOOPED_BLOCK_ENERGY_SELF=y",
        ),
        (
            "LOOPED_INPUT_TEXT LOOPED_BLOCK_ENERGY_SELF",
            "CONFIG_LOOPED_CAUSAL=n (now y; it follows from CONFIG_LOOPED_INPUT_TEXT, CONFIG_DATASET_LABELS_",
        ),
        ("LOOPED_INPUT_TEXT LOOPED_READOUT_TOKENS", "needs CONFIG_LOOPED_INPUT_IMAGES=y"),
        ("DATASET_WIKITEXT103", "give CONFIG_LOOPED_INPUT_TEXT=y CONFIG_DATASET_WIKITEXT103=y"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(lines: str, told: str, tmp_path: Path) -> None:
    *before, last = lines.split()
    file = tmp_path / "config"
    file.write_text("".join(f"CONFIG_{name}=y\n" for name in ("MODEL_LOOPED", *before)))
    with pytest.raises(ConfigError) as caught:
        kconf.load(root=ROOT, config_file=file, overrides={f"CONFIG_{last}": "y"})
    [finding] = caught.value.findings
    assert finding.startswith(f"command line: CONFIG_{last}=y has no effect: it needs ") and told in finding

"""What one option decides, no other one can be set to: the strict loader says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lib import kconf
from lib.errors import ConfigError
from tests.support.examples import told_of

ROOT = Path(__file__).resolve().parents[3]
DECIDED = (
    ("ELASTIC_POLICY_LATENTWIRE DIST_STRATEGY_FSDP", "DIST_STRATEGY_FSDP"),
    ("ELASTIC_POLICY_LATENTWIRE AUTO_METHOD_TABLE", "AUTO_METHOD_TABLE"),
    ("ELASTIC_POLICY_LATENTWIRE ELASTIC_SCALE_BATCH TARGET_EFFECTIVE_BATCH=64", "TARGET_EFFECTIVE_BATCH"),
    ("DEVICE_XLA CHANNELS_LAST=n", "CHANNELS_LAST"),
    ("DEVICE_CPU ACTIVATION_OFFLOAD", "ACTIVATION_OFFLOAD"),
    ("MODEL_GPT2 DATASET_SST2 CHUNKED_CROSS_ENTROPY=n", "CHUNKED_CROSS_ENTROPY"),
    ("MODEL_RESNET_BK DATASET_SST2 RESNET_BK_FORM_UPSTREAM RESNET_BK_ALLOW_LEAK", "RESNET_BK_ALLOW_LEAK"),
    *(decided for example in told_of("DECIDED") for decided in example),
)


def given(words: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in words.split())
    return {f"CONFIG_{name}": value or "y" for name, _, value in pairs}


@pytest.mark.slow
@pytest.mark.parametrize(("words", "name"), DECIDED)
def test_what_is_decided_by_another_option_is_refused(words: str, name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        kconf.load(root=ROOT, config_file=ROOT / "defconfigs/lenet5", overrides=given(words))
    (finding,) = raised.value.findings
    assert f"CONFIG_{name}=" in finding and "has no effect: it needs" in finding


def test_a_file_of_before_that_agrees_is_read(tmp_path: Path) -> None:
    """Full configurations of stored runs name the member that a choice had when it could still be made."""
    file = tmp_path / "config"
    policy = {"CONFIG_ELASTIC_POLICY_LATENTWIRE": "y"}
    now = kconf.load(root=ROOT, config_file=ROOT / "defconfigs/lenet5", overrides=policy)
    hidden = ("DIST_STRATEGY_AUTO", "AUTO_METHOD_PREDICT")
    file.write_text(now.text + "".join(f"CONFIG_{name}=y\n" for name in hidden))
    assert kconf.load(root=ROOT, config_file=file).values == now.values


@pytest.mark.slow
@pytest.mark.parametrize(("words", "name"), DECIDED)
def test_in_a_full_file_of_before_it_is_a_notice(words: str, name: str, tmp_path: Path) -> None:
    """Tools wrote it where it had no effect; stored runs have such files."""
    *others, own = words.split()
    now = kconf.load(root=ROOT, config_file=ROOT / "defconfigs/lenet5", overrides=given(" ".join(others)))
    value = own.partition("=")[2] or "y"
    line = f'CONFIG_{name}="{value}"' if "." in value else f"CONFIG_{name}={value}"
    line = f"# CONFIG_{name} is not set" if value == "n" else line
    kept = [each for each in now.text.splitlines() if not re.match(rf"(# )?CONFIG_{name}[ =]", each)]
    file = tmp_path / "config"
    file.write_text("\n".join([*kept, line]) + "\n")
    found = kconf.load(root=ROOT, config_file=file)
    assert found.values == now.values
    assert any(f"CONFIG_{name}" in notice and "has no effect" in notice for notice in found.notices)


def test_what_was_never_shown_is_a_fault_in_a_full_file_too(tmp_path: Path) -> None:
    file = tmp_path / "config"
    text = kconf.load(root=ROOT, config_file=ROOT / "defconfigs/lenet5").text
    file.write_text(text + "CONFIG_RESNET50_WIDTH=16\n")
    with pytest.raises(ConfigError, match="1 fault"):
        kconf.load(root=ROOT, config_file=file)

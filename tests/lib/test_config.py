"""The typed view of a configuration: what Kconfig lets through and a run cannot take."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from lib.config import config_from_values
from lib.errors import ConfigError
from lib.kconf import load
from lib.plugins import MODELS

ROOT = Path(__file__).resolve().parents[2]


def values_of(folder: Path, text: str, *, root: Path = ROOT):  # type: ignore[no-untyped-def]
    (folder / ".config").write_text(text)
    return load(root=root, config_file=folder / ".config").values


@pytest.mark.slow
def test_nesterov_needs_momentum(tmp_path: Path) -> None:
    without = 'CONFIG_OPTIMIZER_SGD=y\nCONFIG_MOMENTUM="0"\n'
    with pytest.raises(ConfigError, match=r"CONFIG_NESTEROV=y needs a momentum above 0.*CONFIG_NESTEROV=n"):
        config_from_values(values_of(tmp_path, without))
    plain = config_from_values(values_of(tmp_path, f"{without}# CONFIG_NESTEROV is not set\n"))
    assert (plain.optim.momentum, plain.optim.nesterov) == (0.0, False)


def test_a_data_set_whose_kconfig_gives_it_no_name_is_told() -> None:
    values = load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5").values
    with pytest.raises(ConfigError, match="has no name; give CONFIG_DATASET the name in its Kconfig"):
        config_from_values({**values, "DATASET": None})


def test_a_model_of_something_else_is_no_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        name: load(root=ROOT, config_file=ROOT / "defconfigs" / name).values for name in ("lenet5", "gpt2")
    }
    monkeypatch.setattr("lib.config.task_of", lambda _: "lm")
    assert config_from_values(values["gpt2"]).task == "lm"
    with pytest.raises(
        ConfigError, match=r'^models/lenet5/model\.py: TASK = "lm" is for models of texts: its K'
    ):
        config_from_values(values["lenet5"])


def test_a_model_may_select_texts_in_a_file_that_its_kconfig_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5").values
    monkeypatch.setattr("lib.config.task_of", lambda _: "lm")
    (tmp_path / "options").mkdir()
    text = "config MODEL_LENET5_TEXT\n\tbool\n\tselect MODEL_DATA_TEXT\n"
    (tmp_path / "options" / "Kconfig.data").write_text(text)
    (tmp_path / ".Kconfig.swp").write_bytes(b"\xff")  # of an editor
    with mock.patch.object(type(MODELS), "home", return_value=tmp_path):
        assert config_from_values(values).task == "classify"


def test_a_model_may_leave_the_table_and_the_target_open(tmp_path: Path, tree: Path) -> None:
    kconfig = tree / "models/lenet5/Kconfig"
    lines = kconfig.read_text().splitlines(keepends=True)
    kept = "".join(line for line in lines if not line.startswith(("config TABLE_S", "config RECOMM")))
    kconfig.write_text(
        kept.replace('\tstring\n\tdefault "4.0" if MODEL_LENET5\n', "").replace(
            "\tint\n\tdefault 512 if MODEL_LENET5\n", ""
        )
    )
    config = config_from_values(values_of(tmp_path, "CONFIG_MODEL_LENET5=y\n", root=tree))
    assert (config.table_scale, config.target) == (None, 0)

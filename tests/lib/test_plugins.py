"""Plug-ins are found by their folders, and own the symbols that their own Kconfig defines."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib import plugin_folders, plugins
from lib.errors import ConfigError, meant
from lib.plugin_folders import symbols_of
from lib.plugins import DATASETS, MODELS, Kind

TABLE = """\
choice MODEL_CHOICE

config MODEL_TABLE
\tbool "Table"
\thelp
\t  A plain one.

endchoice

config MODEL
\tstring
\tdefault "table" if MODEL_TABLE

config TABLE_SCALE
\tstring
\tdefault "1.0" if MODEL_TABLE

menu "Table"
\tdepends on MODEL_TABLE

config TABLE_LEGS
\tint "Legs"
\trange 1 8
\tdefault 4
\thelp
\t  Those that it stands on.

config CLOTH
\tstring
\tdefault "red"
\thelp
\t  Value: text
\t  What lies on it.

menuconfig TABLE_DRAWERS
\tbool "Drawers"

endmenu
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "models" / "table"
    home.mkdir(parents=True)
    (home / "Kconfig").write_text(TABLE)
    (home / "model.py").write_text('TASK: str = "classify"\n')
    monkeypatch.setattr(plugin_folders, "ROOT", tmp_path)
    return home


def test_a_symbol_belongs_to_the_folder_whose_kconfig_defines_it(table: Path) -> None:
    """TABLE_SCALE is every model's, and a model called table is not handed it."""
    values = {"MODEL": "table", "TABLE_SCALE": 1.0, "TABLE_LEGS": 3, "CLOTH": "red", "TABLE_DRAWERS": True}
    assert MODELS.own("table", values) == {"legs": 3, "cloth": "red", "drawers": True}
    assert MODELS.own("table", {"TABLE_SCALE": 1.0, "TABLE_TOP": 2}) == {}
    assert "TABLE_SCALE" not in symbols_of(table)
    task = table.parents[1] / "train" / "tasks" / "classify" / "task.py"
    task.parent.mkdir(parents=True)
    task.touch()
    assert plugins.task_of("table") == "classify"
    (table / "model.py").write_text('TASK = "regres"\n')
    with pytest.raises(ConfigError, match=r"^models/table/model.py: .*'regres'; there are classify$"):
        plugins.task_of("table")


def test_names_are_those_that_the_kconfig_gives_to_the_symbol_of_the_kind(table: Path) -> None:
    kind = Kind("model", "models", "model", (), symbol="MODEL")
    (table.parent / "two").mkdir()
    (table.parent / "two" / "Kconfig").write_text(
        'config MODEL\n\tstring\n\tdefault "one" if MODEL_ONE\n\tdefault "other" if MODEL_OTHER\n'
    )
    (table.parent / "two" / "model.py").write_text("")
    (table.parent / "no_plug_in").mkdir()
    assert kind.names() == ("one", "other", "table")
    assert kind.home("other").name == "two"
    assert MODELS.names() == ("table", "two")


@pytest.mark.usefixtures("table")
def test_unknown_names_are_told() -> None:
    with pytest.raises(ConfigError, match=r"no model 'tabel' under models/.*did you mean table\?"):
        MODELS.home("tabel")
    with pytest.raises(ConfigError, match=r"no model '\.\.'.*there are table"):
        MODELS.home("..")


def test_a_data_set_owns_its_symbols_by_its_file_too(table: Path) -> None:
    home = table.parents[1] / "lib" / "data" / "datasets" / "table"
    home.mkdir(parents=True)
    (home / "data.py").write_text("")
    kconfig = TABLE.replace("MODEL", "DATASET").replace('"table"', '"round_table"')
    (home / "Kconfig").write_text(kconfig)
    assert DATASETS.names() == ("round_table",)
    values = {"DATASET": "round_table", "TABLE_SCALE": 1.0, "TABLE_LEGS": 3}
    assert DATASETS.own("round_table", values) == {"legs": 3}


def test_two_folders_of_one_name_are_refused(table: Path) -> None:
    """The later one would be opened in the place of the other, and nobody would know."""
    for folder in ("one", "two"):
        home = table.parents[1] / "lib" / "data" / "datasets" / folder
        home.mkdir(parents=True)
        (home / "data.py").write_text("")
        (home / "Kconfig").write_text('config DATASET\n\tstring\n\tdefault "same" if DATASET_SAME\n')
    refusal = r"datasets/one and lib/data/datasets/two both have a data set 'same'; rename one of them"
    for ask in (DATASETS.names, lambda: DATASETS.home("same")):
        with pytest.raises(ConfigError, match=refusal):
            ask()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("acuracy", "did you mean accuracy? there"),
        ("acc", "did you mean accuracy? there"),
        ("xyz", "there"),
    ],
)
def test_a_word_is_completed_or_corrected(name: str, advice: str) -> None:
    assert meant(name, ["accuracy", "loss", "lr"], listed="there") == advice
    assert meant(name, ["accuracy"]).startswith(advice.removesuffix(" there"))

"""EXTERNAL=: what a folder adds to the tree, and what it may not do."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lib import kconf, plugin_folders
from lib.config import config_from_values
from lib.errors import ConfigError
from lib.kconf.cli import main
from lib.kconf.defconfig import available, compose, path_of
from lib.kconf.tree import find, load_own_tree
from lib.plugin_folders import ROOT
from lib.plugins import DATASETS, MODELS, TASKS
from lib.runs.identity import identity
from tests.support.external import write_external, write_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of EXTERNAL=, which is given."""
    path = write_external(tmp_path / "of me")
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(path))
    return path


def kconfig(folder: Path) -> Path:
    return folder / "models" / "tiny_net" / "Kconfig"


def refusal() -> str:
    gc.disable()  # so that all that is made here is young below
    try:
        with pytest.raises(ConfigError) as caught:
            load_own_tree(ROOT)
        text = str(caught.value)
        assert "\n" not in text and caught.value.exit_code == 2
        del caught
        gc.collect(0)  # files that kconfiglib has left open are told in the test that ignores them
    finally:
        gc.enable()
    return text


def command(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(arguments, root=ROOT)
    return status, *capsys.readouterr()


def test_its_models_options_and_configurations_are_those_of_the_tree(folder: Path) -> None:
    configuration, _ = compose(load_own_tree(ROOT), "tiny_net")
    symbol = find(configuration.tree, "TINY_NET_WIDTH")
    assert symbol is not None and symbol.nodes[0].filename == str(kconfig(folder))
    resolved = kconf.load(root=ROOT, config_file=folder / "defconfigs" / "tiny_net")
    config = config_from_values(resolved.values)
    assert (config.model, config.model_options) == ("tiny_net", {"width": 16})
    assert str(folder) not in str(dict(resolved.in_effect)), "the identity has no path"


def test_its_file_is_imported_with_what_that_imports(folder: Path) -> None:
    assert MODELS.load("tiny_net").__file__ == str(folder / "models" / "tiny_net" / "model.py")


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_no_identity_of_the_tree_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def identities() -> dict[str, str]:
        files, _ = available(ROOT)
        return {
            file.name: identity(kconf.load(root=ROOT, config_file=file).in_effect)
            for file in files
            if file.is_relative_to(ROOT)
        }

    there = identities()
    monkeypatch.delenv(plugin_folders.EXTERNAL)
    assert there == identities() and len(there) > 10


def test_a_folder_with_a_model_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "bare_net", "bare_net")
    write_model(tmp_path / "beside_net", "beside_net")
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(tmp_path / "bare_net"))
    assert find(load_own_tree(ROOT), "BARE_NET_WIDTH") is not None
    assert MODELS.home("bare_net") == tmp_path / "bare_net" and "beside_net" not in MODELS.names()
    assert MODELS.load("bare_net").TASK == "classify"


def test_tasks_and_data_sets_are_found_too(folder: Path) -> None:
    for kind, name in ((TASKS, "rank"), (DATASETS, "rows")):
        home = folder / kind.external / name
        home.mkdir(parents=True)
        (home / f"{kind.file}.py").write_text(
            "from lib.plugins import NoOptions as Options\nDATA = ()\nbuild = fault = open_set = None\n"
        )
        (home / "Kconfig").write_text(f'config {name.upper()}_SIZE\n\tint "Size"\n\tdefault 3\n')
        assert kind.home(name) == home and kind.load(name).__file__ == str(home / f"{kind.file}.py")
    tree = load_own_tree(ROOT)
    assert find(tree, "RANK_SIZE") is not None and find(tree, "ROWS_SIZE") is not None


def test_a_changed_file_is_parsed_again(folder: Path) -> None:
    def width() -> object:
        return kconf.load(root=ROOT, config_file=folder / "defconfigs" / "tiny_net").values["TINY_NET_WIDTH"]

    assert width() == 16
    kconfig(folder).write_text(kconfig(folder).read_text().replace("default 16", "default 24"))
    assert width() == 24


@pytest.mark.slow
def test_the_pages_and_the_lint_rules_are_of_the_tree_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kconfig(folder).write_text(kconfig(folder).read_text().replace("\trange 1 4096\n", ""))  # a breach
    assert command("kconfig-lint", capsys=capsys)[0] == 0


def test_a_new_configuration_belongs_to_the_folder(folder: Path) -> None:
    assert path_of(ROOT, "mine") == folder / "defconfigs" / "mine"
    assert path_of(ROOT, "lenet5") == ROOT / "defconfigs" / "lenet5"


def test_the_message_names_its_file(
    kconf_project: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "defconfigs" / "mine").write_text("CONFIG_DEBUG=y\n")
    assert main(("defconfig", "mine+long"), root=kconf_project) == 0
    assert f"written from {folder.name}/defconfigs/mine+long\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("called", ["explain", "searchconfig"])
def test_origins_are_told(
    folder: Path, called: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KCONFIG_CONFIG", str(folder / "none"))
    _, out, _ = command(called, "TINY_NET_WIDTH", capsys=capsys)
    assert f"{kconfig(folder)}:20" in " ".join(out.split())


def test_its_name_is_without_dots_unless_a_link_makes_them_lead_elsewhere(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(folder / "models" / ".."))
    assert plugin_folders.external() == folder
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "elsewhere" / "inner")
    for name in (folder / "link" / "..", folder / "link" / ".." / "inner"):  # in "elsewhere"
        monkeypatch.setenv(plugin_folders.EXTERNAL, str(name))
        assert plugin_folders.external() == name


# What it may not be.


def test_a_missing_folder_and_a_file_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(folder / "nope"))
    assert refusal().startswith(f"EXTERNAL={folder / 'nope'} is not there; give another EXTERNAL=DIR")
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(kconfig(folder)))
    assert "Kconfig is not a folder" in refusal()


@pytest.mark.parametrize("part", [".", "models", "models/lenet5", "train", "lib/data/datasets/digits"])
def test_the_tree_itself_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(ROOT / part))
    assert "is this tree itself, or a part of it" in refusal()


def test_a_folder_without_kconfig_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(tmp_path))
    assert "has no Kconfig: it needs one beside a model.py, or in models/NAME" in refusal()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda home: (home / "model.py").unlink(), "models/tiny_net has no model.py"),
        (lambda home: home.rename(home.with_name("Tiny-net")), "models/Tiny-net cannot be a model"),
        (lambda home: write_model(home.with_name("lenet5"), "other"), "both have a model 'lenet5'"),
        (lambda home: (home.with_name("more")).mkdir(), None),
    ],
)
def test_what_is_no_plug_in_is_told(folder: Path, spoil: Callable[[Path], object], told: str | None) -> None:
    spoil(kconfig(folder).parent)
    if told is None:
        load_own_tree(ROOT)
    else:
        assert told in refusal()


def test_both_files_of_a_configuration_of_one_name_are_told(folder: Path) -> None:
    (folder / "defconfigs" / "lenet5").write_text("CONFIG_SEED=2\n")
    with pytest.raises(
        ConfigError, match=r"defconfigs/lenet5 and /.*/defconfigs/lenet5 are both called lenet5"
    ):
        available(ROOT)


# What its Kconfig may not do.

# kconfiglib leaves files open where a macro function fails.
WITH_OPEN_FILES = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # kconfiglib leaves them
SHELL = "$(shell,touch {ran})"
WAYS_TO_RUN = {
    "at once": f"{SHELL}\n",
    "as a default": f'config TINY_NET_X\n\tstring\n\tdefault "{SHELL}"\n',
    "in a variable": f"x := {SHELL}\n",
    "by a variable's name": "s := she\nx := $($(s)ll,touch {ran})\n",
    "in a macro": "run = $(shell,touch $(1))\nx := $(run,{ran})\n",
    "in an argument": f"$(info,{SHELL})\n",
    "in a sourced file": 'rsource "more.inc"\n',
    "in one that may be missing": 'orsource "*.inc"\n',
    "by a variable in a name": 'd := {home}\nsource "$(d)/more.inc"\n',
}


@pytest.mark.slow
@WITH_OPEN_FILES
@pytest.mark.parametrize("way", WAYS_TO_RUN)
def test_no_program_is_run(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, home = folder / "ran", kconfig(folder).parent
    (home / "more.inc").write_text(
        f"{SHELL}\n".replace("{ran}", "../../ran").replace("../../ran", f"'{ran}'")
    )
    with kconfig(folder).open("a") as file:
        file.write(WAYS_TO_RUN[way].replace("{ran}", f"'{ran}'").replace("{home}", str(home)))
    text = refusal()
    assert "$(shell,touch" in text and "EXTERNAL_SHELL=1 if you trust it" in text
    assert text.startswith(str(home)) and not ran.exists()
    monkeypatch.setenv("EXTERNAL_SHELL", "1")
    load_own_tree(ROOT)
    assert ran.exists(), "it would have run"


@WITH_OPEN_FILES
def test_functions_of_a_module_are_refused_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "functions_of_kconfig.py").write_text(
        "def call(kconf, name):\n    raise AssertionError\n\nfunctions = {'call': (call, 0, 0)}\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("KCONFIG_FUNCTIONS", "functions_of_kconfig")
    with kconfig(folder).open("a") as file:
        file.write("x := $(call)\n")
    assert "$(call) runs a program" in refusal()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("added", "told"),
    [
        ('config SEED\n\tint "Mine"\n', "defines CONFIG_SEED, and so does train/Kconfig:"),
        ("config SEED\n\tint\n\trange 1 2\n", "defines CONFIG_SEED, and so does train/Kconfig:"),
        ("config SEED\n\tint\n\tdefault 7\n", "changes the default of CONFIG_SEED, which train/Kconfig:"),
        ("config SEED\n\tint\n\tdefault 7 if MODEL_LENET5\n", "changes the default of CONFIG_SEED"),
        ("config SEED\n\tint\n\tdefault 7 if MODEL_LENET5 || MODEL_TINY_NET\n", "changes the default"),
        (
            "choice DATASET_CHOICE\n\tdefault DATASET_MNIST\nendchoice\n",
            "changes the default of DATASET_CHOICE",
        ),
        ('choice DATASET_CHOICE\n\tprompt "Mine"\nendchoice\n', "defines DATASET_CHOICE, and so does lib/"),
        ('config MODEL_LENET5\n\tbool "Mine"\n', "defines CONFIG_MODEL_LENET5, and so does models/lenet5/"),
        (
            "config TINY_NET_X\n\tdef_bool y\n\tselect DETERMINISTIC\n",
            "sets CONFIG_DETERMINISTIC, which a user",
        ),
        ("config TINY_NET_X\n\tdef_bool y\n\timply EMA\n", "sets CONFIG_EMA, which a user"),
    ],
)
def test_it_changes_nothing_of_the_tree(folder: Path, added: str, told: str) -> None:
    with kconfig(folder).open("a") as file:
        file.write(added)
    text = refusal()
    assert told in text
    assert text.startswith(str(folder))


def test_a_top_file_that_sources_what_the_tree_sources_is_told(folder: Path) -> None:
    (folder / "Kconfig").write_text('rsource "models/*/Kconfig"\n')
    assert "models/tiny_net/Kconfig is sourced twice" in refusal()


# Where it is forgotten.


@pytest.mark.parametrize("other", [False, True])
def test_a_forgotten_folder_is_named(folder: Path, other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = kconf.load(root=ROOT, config_file=folder / "defconfigs" / "tiny_net")
    (folder / ".config").write_text(resolved.text)
    monkeypatch.delenv(plugin_folders.EXTERNAL)
    state = "EXTERNAL= is not given"
    if other:
        elsewhere = write_external(folder / "elsewhere", "other_net")
        monkeypatch.setenv(plugin_folders.EXTERNAL, str(elsewhere))
        state = f"EXTERNAL={elsewhere} is given"
    for file in (folder / ".config", folder / "defconfigs" / "tiny_net"):
        with pytest.raises(ConfigError) as caught:
            kconf.load(root=ROOT, config_file=file)
        assert str(caught.value) == (
            f"{file} was made with EXTERNAL={folder}, and {state}; give EXTERNAL={shlex.quote(str(folder))}"
        )
    with pytest.raises(ConfigError, match=f"was made with EXTERNAL={folder}, and"):
        kconf.load_written(resolved.text, root=ROOT)
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(folder / ".." / folder.name))  # the same folder
    (folder / "defconfigs" / "tiny_net").write_text("CONFIG_NOWHERE=y\n")
    with pytest.raises(ConfigError) as caught:
        kconf.load(root=ROOT, config_file=folder / "defconfigs" / "tiny_net")
    assert "NOWHERE is not a symbol" in caught.value.findings[0]


@pytest.mark.slow
def test_a_moved_folder_with_the_same_symbols_is_no_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = kconf.load(root=ROOT, config_file=folder / "defconfigs" / "tiny_net").text
    moved = folder.rename(folder.with_name("moved"))
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(moved))
    assert kconf.load_written(text, root=ROOT).values["MODEL"] == "tiny_net"


@pytest.mark.slow
@WITH_OPEN_FILES
def test_it_is_kept_only_if_it_is_sound(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KCONFIG_OUTPUT", str(folder / "out"))
    kept = folder / "out" / ".external"
    with kconfig(folder).open("a") as file:
        file.write("$(shell,true)\n")
    status, _, err = command("external", capsys=capsys)
    assert (status, err.count("\n"), kept.parent.exists()) == (2, 1, False)
    gc.collect()
    monkeypatch.setenv("EXTERNAL_SHELL", "1")
    assert command("external", capsys=capsys)[0] == 0 and kept.read_text() == f"{folder}\n"
    monkeypatch.setenv(plugin_folders.EXTERNAL, "")
    assert command("external", capsys=capsys)[0] == 0 and not kept.exists()

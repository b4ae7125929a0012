"""From .config and make's command line to typed values."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from lib.config import config_from_values
from lib.errors import ConfigError
from lib.kconf import from_environment, load, tree
from lib.kconf.external import FILES
from lib.kconf.reader import HEADER
from lib.kconf.tree import load_own_tree

ROOT = Path(__file__).resolve().parents[3]
TREE = ROOT / "tests" / "fixtures" / "kconf" / "tree"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A root with the test tree; the current directory."""
    shutil.copy(TREE / "Kconfig", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("KCONFIG_CONFIG", "KCONFIG_MAKE_VARIABLES", "KCONFIG_MAKE_KNOWN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def resolve(root: Path, text: str, **overrides: str):
    (root / ".config").write_text(text)
    return load(root=root, config_file=root / ".config", overrides=overrides)


def test_values_are_typed(project):
    values = resolve(project, 'CONFIG_LEARNING_RATE="1e-4"\nCONFIG_ADDRESS=0x42\nCONFIG_DEBUG=y\n').values
    assert values["LEARNING_RATE"] == 1e-4
    assert values["ADDRESS"] == 0x42
    assert values["DEBUG"] is True and values["EMA"] is False
    assert values["NUM_EPOCHS"] == 10 and type(values["NUM_EPOCHS"]) is int
    assert values["LR_STEP_PCT_LIST"] == (50, 75) and values["SCALE_LIST"] == (0.5, 1.0)
    assert values["MODEL"] == "lenet5" and values["NOTE"] == ""
    assert values["BATCH_SIZE"] is None and values["EMA_DECAY"] is None and values["TRACE"] is False
    assert not any(name in values for name in ("MODEL_LENET5", "HYPER_PARAM_AUTO", "GPT2_SIZE_SMALL"))


def test_values_cannot_be_changed(project):
    with pytest.raises(TypeError):
        resolve(project, "").values["SEED"] = 3  # type: ignore[index]


def test_origins(project):
    resolved = resolve(project, "# note\nCONFIG_MODEL_MLP=y\nCONFIG_DEBUG=y\n", CONFIG_NUM_EPOCHS="3")
    origins = resolved.origins
    assert origins["DEBUG"] == ".config:3"
    assert origins["MODEL"] == ".config:2"  # through the member of the choice
    assert origins["NUM_EPOCHS"] == "command line"
    assert origins["LEARNING_RATE"] == "default"
    assert origins["BATCH_SIZE"] == "default"
    assert origins.keys() == resolved.values.keys()


def test_defaults_in_a_full_file_are_defaults(project):
    full = resolve(project, "CONFIG_DEBUG=y\n").text
    assert full.startswith(HEADER + "\n")
    again = resolve(project, full)
    assert again.text == full and again.notices == ()
    assert again.minimal == "CONFIG_DEBUG=y\n"
    line = full.splitlines().index("CONFIG_DEBUG=y") + 1
    assert again.origins["DEBUG"] == f".config:{line}"
    assert again.origins["NUM_EPOCHS"] == "default"


def test_defaults_of_a_full_file_follow_the_command_line_and_say_so(project):
    full = resolve(project, "").text
    resolved = resolve(project, full, CONFIG_HYPER_PARAM_MANUAL="y")
    assert resolved.values["LEARNING_RATE"] == 0.1
    assert resolved.notices == ("command line: defaults that follow: CONFIG_LEARNING_RATE 0.001 -> 0.1",)
    assert "CONFIG_HYPER_PARAM_MANUAL=y" in resolved.minimal


def test_value_that_a_user_set_does_not_follow(project):
    full = resolve(project, 'CONFIG_LEARNING_RATE="0.5"\n').text
    resolved = resolve(project, full, CONFIG_HYPER_PARAM_MANUAL="y")
    assert resolved.values["LEARNING_RATE"] == 0.5 and resolved.notices == ()


def test_value_that_the_command_line_hides_is_a_notice(project):
    full = resolve(project, 'CONFIG_EMA=y\nCONFIG_EMA_DECAY="0.5"\n').text
    line = full.splitlines().index('CONFIG_EMA_DECAY="0.5"') + 1
    resolved = resolve(project, full, CONFIG_EMA="n")
    assert resolved.values["EMA_DECAY"] is None
    assert resolved.notices == (
        f'.config:{line}: CONFIG_EMA_DECAY="0.5" has no effect: it needs CONFIG_EMA=y (now n)',
    )


def test_command_line_is_not_written(project):
    resolve(project, "CONFIG_DEBUG=y\n", CONFIG_NUM_EPOCHS="3")
    assert (project / ".config").read_text() == "CONFIG_DEBUG=y\n"
    assert [path.name for path in sorted(project.iterdir())] == [".config", "Kconfig"]


@pytest.mark.slow
def test_file_from_an_older_tree_lists_what_is_new(project):
    full = resolve(project, "").text
    kconfig = project / "Kconfig"
    kconfig.write_text(kconfig.read_text() + '\nconfig NEW\n\tint "New"\n\tdefault 7\n')
    assert resolve(project, full).notices == (
        ".config: a new option takes its default: CONFIG_NEW=7 (make olddefconfig writes this down)",
    )
    assert resolve(project, "CONFIG_DEBUG=y\n").notices == ()  # by hand: not meant to name everything


def test_file_from_an_older_tree_is_refused_where_an_assignment_is_lost(project):
    full = resolve(project, 'CONFIG_EMA=y\nCONFIG_EMA_DECAY="0.5"\n').text
    kconfig = project / "Kconfig"
    kconfig.write_text(kconfig.read_text().replace("config EMA\n", "config EMAS\n"))
    with pytest.raises(ConfigError) as caught:
        resolve(project, full)
    line = full.splitlines().index("CONFIG_EMA=y") + 1
    assert caught.value.findings == (
        f".config:{line}: CONFIG_EMA is not a symbol; did you mean CONFIG_EMAS?",
        f'.config:{line + 1}: CONFIG_EMA_DECAY="0.5" has no effect: '
        "it needs CONFIG_EMA=y (which no Kconfig file defines)",
    )
    assert caught.value.exit_code == 2


def test_file_from_an_older_tree_may_turn_off_what_is_off_anyway(project):
    full = resolve(project, "CONFIG_DEBUG=y\n").text
    assert "# CONFIG_TRACE is not set" in full
    kconfig = project / "Kconfig"
    kconfig.write_text(kconfig.read_text().replace("depends on DEBUG && !EMA", "depends on EMA"))
    assert resolve(project, full).values["TRACE"] is False


def test_missing_file_names_the_ways_to_get_one(project):
    with pytest.raises(ConfigError) as caught:
        load(root=project, config_file=project / ".config")
    for way in (".config", "make defconfig-NAME", "make menuconfig", "make list-defconfigs"):
        assert way in str(caught.value)
    assert caught.value.exit_code == 2


def test_default_that_breaks_its_own_value_line(project):
    kconfig = project / "Kconfig"
    kconfig.write_text(kconfig.read_text().replace('default "0.99"', 'default "1"'))
    with pytest.raises(ConfigError, match=r'Kconfig:\d+: the default CONFIG_EMA_DECAY="1" is out of range'):
        resolve(project, "CONFIG_EMA=y\n")


def test_fault_of_the_tree_is_told(project):
    kconfig = project / "Kconfig"
    kconfig.write_text(kconfig.read_text().replace("default 10\n", "default ten\n", 1))
    with pytest.raises(ConfigError, match="Kconfig files have faults") as caught:
        resolve(project, "")
    assert "NUM_EPOCHS" in caught.value.findings[0]


def test_environment_that_kconfiglib_listens_to_is_ignored(project, monkeypatch):
    monkeypatch.setenv("srctree", "/nowhere")
    monkeypatch.setenv("CONFIG_", "OTHER_")
    monkeypatch.setenv("KCONFIG_CONFIG_HEADER", "# surprise\n")
    resolved = resolve(project, "CONFIG_DEBUG=y\n")
    assert resolved.values["DEBUG"] is True
    assert resolved.minimal == "CONFIG_DEBUG=y\n" and "surprise" not in resolved.text


def test_own_tree_gives_a_config(tmp_path):
    config_file = tmp_path / "config"
    for model in ("LENET5", "RESNET18", "RESNET50"):
        config_file.write_text(f"CONFIG_MODEL_{model}=y\nCONFIG_DATASET_CIFAR10=y\n")
        resolved = load(root=ROOT, config_file=config_file, overrides={"CONFIG_DATA_DIR": 'q"u\\ $HOME #x'})
        config = config_from_values(resolved.values)
        assert config.model == model.lower()
        assert config.data_dir == 'q"u\\ $HOME #x'


# Variables of make's command line


def given(monkeypatch, known: str = "O V", **variables: str) -> None:
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", " ".join(variables))
    monkeypatch.setenv("KCONFIG_MAKE_KNOWN", known)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_variables_override_the_file(project, monkeypatch):
    (project / "other").write_text("CONFIG_NUM_EPOCHS=3\n")
    given(monkeypatch, CONFIG_NUM_EPOCHS="4", CONFIG_NOTE='a "b" $c #d', O="build")
    monkeypatch.setenv("KCONFIG_CONFIG", "other")
    values = from_environment(project).values
    assert values["NUM_EPOCHS"] == 4 and values["NOTE"] == 'a "b" $c #d'


@pytest.mark.parametrize(
    ("name", "value", "finding"),
    [
        ("LR", "0.1", "LR=0.1 is not a variable of this Makefile; did you mean CONFIG_LEARNING_RATE?"),
        (
            "BATCH_SIZE",
            "64",
            "BATCH_SIZE=64 is not a variable of this Makefile; did you mean CONFIG_BATCH_SIZE?",
        ),
        (
            "batch_size",
            "64",
            "batch_size=64 is not a variable of this Makefile; did you mean CONFIG_BATCH_SIZE?",
        ),
        ("config_ema", "y", "config_ema=y is not a variable of this Makefile; did you mean CONFIG_EMA?"),
        ("EPOCHS", "3", "EPOCHS=3 is not a variable of this Makefile; did you mean CONFIG_NUM_EPOCHS?"),
        ("MODEL", "gpt2", "MODEL=gpt2 is not a variable of this Makefile; did you mean CONFIG_MODEL_GPT2=y?"),
        ("o", "x", "o=x is not a variable of this Makefile; did you mean O?"),
        ("PYTHN", "x", "PYTHN=x is not a variable of this Makefile; did you mean PYTHON?"),
        ("XYZZY", "1", "XYZZY=1 is not a variable of this Makefile"),
        ("CONFIG_BATCHSIZE", "1", "CONFIG_BATCHSIZE is not a symbol; did you mean CONFIG_BATCH_SIZE?"),
    ],
)
def test_variables_that_mean_nothing(project, monkeypatch, name, value, finding):
    (project / ".config").write_text("")
    given(monkeypatch, known="O V PYTHON", **{name: value})
    with pytest.raises(ConfigError) as caught:
        from_environment(project)
    assert caught.value.findings == (f"command line: {finding}",)


def test_stray_variable_is_named_and_not_used(project, monkeypatch, capsys):
    (project / ".config").write_text("CONFIG_DEBUG=y\n")
    monkeypatch.setenv("CONFIG_NUM_EPOCHS", "4")
    monkeypatch.setenv("CONFIG_EPOCHS", "4")
    monkeypatch.setenv("CONFIG_XYZZY", "1")
    monkeypatch.setenv("CONFIG_SITE", "/usr/share/site.conf")  # of other tools
    assert from_environment(project).values["NUM_EPOCHS"] == 10
    assert capsys.readouterr().err.splitlines() == [
        "note: CONFIG_EPOCHS in the environment is not used, and is not a symbol; "
        "did you mean CONFIG_NUM_EPOCHS?",
        "note: CONFIG_NUM_EPOCHS in the environment is not used; give it on make's command line",
        "note: CONFIG_XYZZY in the environment is not used, and is not a symbol",
    ]


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_a_file_that_assigns_nothing_says_so(project, text):
    assert resolve(project, text).notices == (".config assigns nothing: every option has its default",)


def test_what_an_older_tree_derived_is_refused_or_derived_anew_with_a_notice(project):
    text = resolve(project, "CONFIG_MODEL_MLP=y\n").text
    name, value = "MODEL", '"mlp"'
    assert f"CONFIG_{name}={value}" in text
    older = text.replace(f"CONFIG_{name}={value}", f'CONFIG_{name}="older"')
    with pytest.raises(ConfigError):
        resolve(project, older)
    resolved = load(root=project, config_file=project / ".config", refresh=True)
    assert resolved.values[name] == "mlp" and resolved.text == text
    assert any("older" in notice and "is now" in notice for notice in resolved.notices)


def test_a_tree_is_parsed_again_where_its_files_have_changed(project, monkeypatch):
    parsed = list[Path]()
    monkeypatch.setattr(tree, "load_own_tree", lambda root: parsed.append(root) or load_own_tree(root))
    assert resolve(project, "CONFIG_NUM_EPOCHS=7\n").values["NUM_EPOCHS"] == 7
    assert resolve(project, "").values["NUM_EPOCHS"] != 7, "no value is left over"
    assert len(parsed) == 1
    with (project / "Kconfig").open("a") as file:
        file.write('\nconfig FRESH\n\tbool "Fresh"\n\nrsource "models/*/Kconfig"\n')
    (project / "models/a").mkdir(parents=True)
    (project / "models/a/Kconfig").write_text('config A\n\tbool "A"\n')
    assert resolve(project, "").values.keys() >= {"FRESH", "A"}
    (project / "models/b").mkdir()
    resolve(project, "")
    assert len(parsed) == 2, "a folder alone is nothing"
    (project / "models/b/Kconfig").write_text('config B\n\tbool "B"\n')
    assert "B" in resolve(project, "").values
    shutil.rmtree(project / "models/a")
    assert "A" not in resolve(project, "").values and len(parsed) == 4
    with pytest.raises(ConfigError):
        resolve(project, "CONFIG_NUM_EPOCHS=x\n")
    assert resolve(project, "").values["NUM_EPOCHS"] != 7 and len(parsed) == 5, (
        "one that failed is not used again"
    )


def test_a_file_that_is_edited_while_it_is_parsed_is_not_believed(project, monkeypatch):
    def parse_slowly(root: Path) -> object:
        parsed = load_own_tree(root)
        with (root / "Kconfig").open("a") as file:
            file.write('\nconfig FRESH\n\tbool "Fresh"\n')
        return parsed

    with monkeypatch.context() as slow:
        slow.setattr(tree, "load_own_tree", parse_slowly)
        assert "FRESH" not in resolve(project, "").values
    assert "FRESH" in resolve(project, "").values


def test_every_file_of_the_tree_is_looked_at():
    own = load_own_tree(ROOT)
    assert {ROOT / name for name in own.kconfig_filenames} == set(tree._stamps(ROOT))


def test_every_pattern_of_the_tree_is_looked_for():
    included = re.findall(r'^o?r?source "(.*\*.*)"', (ROOT / "Kconfig").read_text(), re.MULTILINE)
    for folder in ("lib/data", "train"):
        lines = re.findall(r'^o?r?source "(.*\*.*)"', (ROOT / folder / "Kconfig").read_text(), re.MULTILINE)
        included += [pattern if pattern.startswith("$(") else f"{folder}/{pattern}" for pattern in lines]
    external = [pattern for pattern in included if pattern.startswith("$(")]
    assert sorted(set(included) - set(external)) == sorted(tree._PLUGINS)
    assert {pattern.removeprefix("$(ANNEAL_EXTERNAL)/") for pattern in external} == set(FILES[1:])

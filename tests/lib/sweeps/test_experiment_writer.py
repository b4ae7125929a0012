"""A configuration goes to an experiment file, and the one run of that is the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib import atomic, kconf
from lib.errors import ConfigError
from lib.kconf.extremes import make_extreme
from lib.kconf.tree import load_own_tree
from lib.kconf.write import full_text
from lib.runs.identity import identity
from lib.sweeps.experiment import read_experiment
from lib.sweeps.experiment_writer import as_yaml
from lib.sweeps.runner import Run, compose_text, resolved_runs
from scripts.sweep import write_yaml

ROOT = Path(__file__).resolve().parents[3]


def sources(spec: str, *files: str, **settings: str) -> kconf.Resolved:
    """The configuration `spec`, changed, whose header names these files."""
    header, _, rest = compose_text(ROOT, spec).partition("\n")
    text = f"{header}\n# Made from: {', '.join(files)}\n{rest}" if files else f"{header}\n{rest}"
    given = {f"CONFIG_{name}": value for name, value in settings.items()}
    return kconf.load_written(text, root=ROOT, overrides=given)


def round_trip(resolved: kconf.Resolved, folder: Path) -> tuple[list[str], Run]:
    """Lines of the file, and what it makes."""
    file = folder / "study.yaml"
    file.write_text(as_yaml(resolved, root=ROOT), encoding="utf-8")
    (run,) = resolved_runs(read_experiment(file), root=ROOT)
    return file.read_text(encoding="utf-8").splitlines(), run


def test_changes_are_set_on_top_of_the_shipped_files(tmp_path: Path) -> None:
    files = "defconfigs/resnet18", "defconfigs/fragments/fp32"
    requested = sources("resnet18+fp32", *files, NUM_EPOCHS="7", SEED="12", SCHEDULE_COSINE="y")
    lines, run = round_trip(requested, tmp_path)
    assert run.identity == identity(requested.in_effect) and run.resolved.values == requested.values
    assert lines[1:-1] == [
        "config: resnet18+fp32",
        "set:",
        "  NUM_EPOCHS: 7",
        "  SCHEDULE_COSINE: true",
        "seeds: [12]",
    ], "cosine is the default, which the configuration below does not have"


@pytest.mark.slow
@pytest.mark.parametrize("files", [("defconfigs/gone",), ("defconfigs/lenet5", "other/place")])
def test_without_the_shipped_files_it_is_on_top_of_all_defaults(
    files: tuple[str, ...], tmp_path: Path
) -> None:
    requested = sources("lenet5", *files, EMA="n", LEARNING_RATE="4e-4", GRAD_CLIP="1.0")
    lines, run = round_trip(requested, tmp_path)
    assert {"config: alldefconfig", '  LEARNING_RATE: "4e-4"', "  GRAD_CLIP: 1.0"} < set(lines)
    assert run.resolved.values == requested.values and "seeds: [1]" in lines


@pytest.mark.slow
@pytest.mark.parametrize("folder", ['a "b" \\c: #d {e} é', "007", "1.50", "y", "null"])
def test_any_text_is_a_value(folder: str, tmp_path: Path) -> None:
    requested = sources("lenet5", "defconfigs/lenet5", DATASET_MNIST="y", DATA_DIR=folder)
    assert round_trip(requested, tmp_path)[1].resolved.values["DATA_DIR"] == folder


def test_a_random_configuration_with_the_header_of_another(tmp_path: Path) -> None:
    tree = load_own_tree(ROOT)
    make_extreme(tree, "randconfig", {}, seed=1, percent=50)
    tree.syms["RESET_HEAD"].set_value(0)  # refused without initial weights
    text = full_text(tree, sources=("defconfigs/gpt2-shakespeare",))
    requested = kconf.load_written(text, root=ROOT)
    lines, run = round_trip(requested, tmp_path)
    assert lines[1] == "config: gpt2-shakespeare" and run.resolved.values == requested.values


@pytest.mark.slow
def test_the_command_writes_a_file_that_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / ".config", tmp_path / "mine.yaml"
    config.write_text(compose_text(ROOT, "lenet5"))
    monkeypatch.setenv("KCONFIG_CONFIG", str(config))
    assert write_yaml(None) == 0
    shown = capsys.readouterr().out
    for _ in range(2):  # what is the same is no loss
        assert write_yaml(out) == 0 and out.read_text() == shown
    assert capsys.readouterr().out.count(f"{out}: written; make sweep SWEEP={out} trains it") == 2
    written = list[str]()
    monkeypatch.setattr(atomic, "save", lambda path, text: written.extend((str(path), text)))
    assert write_yaml(Path("/dev/stdout")) == 0 and written == ["/dev/stdout", shown]
    monkeypatch.undo()
    monkeypatch.setenv("KCONFIG_CONFIG", str(config))
    out.write_text(shown + "axes: {EMA: [true, false]}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml exists"):
        write_yaml(out)
    with pytest.raises(ConfigError, match=r"OUT=.*mine does not end in \.yaml"):
        write_yaml(tmp_path / "mine")
    assert write_yaml(below := tmp_path / "new" / "mine.yaml") == 0 and below.read_text() == shown
    assert f"OUT={below}: there is no folder {below.parent}; it will be made" in capsys.readouterr().out


def test_the_notices_of_a_base_are_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "other").write_text("# CONFIG_QWERTZ is not set\n")
    monkeypatch.setenv("ANNEAL_CONFIG_PATH", str(tmp_path))
    compose_text(ROOT, "lenet5+other")
    assert "CONFIG_QWERTZ is not a symbol here, and off anyway" in capsys.readouterr().err

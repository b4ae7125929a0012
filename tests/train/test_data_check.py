"""What make data-check tells of a data set: its classes, duplicates, samples, and all faults at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lib import kconf
from lib.errors import ConfigError
from tests.e2e.runner import Runner
from tests.support.configs import ROOT
from train.data_check import _shown, data_check

pytestmark = pytest.mark.slow  # each resolves a configuration
SMALL = {"TARGET_EFFECTIVE_BATCH": "8"}
FOLDER = {"DATASET_IMAGE_FOLDER": "y", "IMAGE_SIZE": "16", "NORM_BATCH": "8", **SMALL}
JSONL = {"DATASET_JSONL": "y", "TOKENIZER_BYTE": "y", "BLOCK_SIZE": "16", **SMALL}


def check(root: Path, capsys: pytest.CaptureFixture[str], name: str, options: dict[str, str]) -> list[str]:
    """The lines that it prints."""
    values = {f"CONFIG_{symbol}": value for symbol, value in options.items()}
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides=values)
    assert data_check(resolved, root=root, out=root / "sheets" / "sheet.png") == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes of 2, 4 and 8 images for training, with one image of each for validation; all differ."""
    grey = 0
    for label, (name, size) in enumerate((("a", 2), ("b", 4), ("c", 8))):
        for part, count in (("train", size), ("val", 1)):
            for number in range(count):
                file = tmp_path / "photos" / part / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (20 + label, 30), (grey := grey + 5, 0, 0)).save(file)
    return tmp_path / "photos"


def test_classes_sizes_and_duplicates_of_images(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for one, other in (("train/a/0", "train/b/9"), ("train/c/1", "train/c/9"), ("train/b/0", "val/b/7")):
        (photos / f"{other}.png").write_bytes((photos / f"{one}.png").read_bytes())
    lines = check(photos.parent, capsys, "resnet18", FOLDER | {"DATA_DIR": str(photos)})
    table = [re.split(r" {2,}", line) for line in lines]
    assert ["a", "2", "12.5%", "1", "25.0%"] in table and ["c", "9", "56.2%", "1", "25.0%"] in table
    assert "Samples: 16 for training, 4 for evaluation" in lines
    assert "A sample: 3 x 16 x 16 float32 numbers" in lines
    assert any("20x30 to 22x30 pixels, median 22x30" in line for line in lines)
    start = lines.index("Exact duplicates within training: 2, 1 with another target")
    assert lines[start + 1 : -1] == [
        "  train/a/0.png = train/b/9.png",
        "Exact duplicates of training in evaluation: 1",
        "  train/b/0.png = val/b/7.png",
        "Exact duplicates within evaluation: 0",
    ]
    sheet = np.asarray(Image.open(photos.parent / "sheets" / "sheet.png"))
    within = sheet[60::114, 40::96]  # a pixel of each sample, or of white
    shown = [[int(red) for red, green, _ in row if not green] for row in within]
    assert [len(row) for row in shown] == [2, 5, 8] and shown[0] == [5, 10] and shown[2][0] == 45


def test_texts_are_shown_by_class_or_as_the_set_itself_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"text {row}", "label": ("good", "bad")[row % 2]} for row in range(60)]
    rows.append({"text": "longer than all the others", "label": "bad"})
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = JSONL | {"DATA_DIR": str(tmp_path)}
    lines = check(tmp_path, capsys, "gpt2-sst2", options)
    assert any(re.match(r"good +\d+ +\d+\.\d% +\d+ +\d+\.\d%", line) for line in lines)
    assert any("6 to 16 tokens, median 7; 1 fill CONFIG_BLOCK_SIZE=16 or are cut" in line for line in lines)
    shown = [line for line in lines if line.startswith("Sample of")]
    assert shown[0] == "Sample of bad: 'text 1'" and shown[1].startswith("Sample of good: 'text ")
    own = "lib.data.datasets.jsonl.data.show"
    monkeypatch.setattr(own, lambda _, __, places: [f"[{place}]" for place in places], raising=False)
    assert "Sample of bad: [1]" in check(tmp_path, capsys, "gpt2-sst2", options)


def test_a_fault_of_what_the_set_itself_shows_has_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data: dict[str, Any] = {}
    file = ROOT / "lib" / "data" / "datasets" / "friedman" / "data.py"
    exec(compile("def show(dataset, part, places):\n    raise ValueError('boom')", str(file), "exec"), data)
    monkeypatch.setattr("train.data_check._lines", data["show"])
    told = "^data set friedman: lib/data/datasets/friedman/data.py:2: ValueError: boom; correct it there$"
    with pytest.raises(ConfigError, match=told):
        check(tmp_path, capsys, "tabular-regression", {"DATASET_FRIEDMAN": "y"})


@pytest.mark.parametrize(
    ("show", "told"),
    [
        (
            "return None",
            "py: show returns NoneType, not a list with a text for each of 2 samples; correct that",
        ),
        ("yield 1 / 0", "py: show returns generator, not a list"),
        ("return 'ab'", "py: show returns 'ab', not a list"),
        ("return ['a']", "py: show returns list of str, not a list with a text for each of 2 samples"),
        ("return [1, 2]", "py: show returns list of int, not a list"),
        ("return [1 / 0]", r"py:2: ZeroDivisionError: .*; correct it there"),
    ],
)
def test_what_the_set_itself_shows_is_a_text_for_each_sample(
    show: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: dict[str, Any] = {}
    file = ROOT / "lib" / "data" / "datasets" / "friedman" / "data.py"
    exec(compile(f"def show(dataset, part, places):\n    {show}", str(file), "exec"), data)
    monkeypatch.setattr("lib.data.datasets.friedman.data.show", data["show"], raising=False)
    dataset: Any = None  # for `show` alone
    with pytest.raises(ConfigError, match=f"^data set friedman: lib/data/datasets/friedman/data.{told}"):
        _shown("friedman", dataset, dataset, np.arange(2))


def test_a_show_of_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset: Any = None
    monkeypatch.setattr("lib.data.datasets.friedman.data.show", lambda _: ["a"], raising=False)
    with pytest.raises(ConfigError, match=r"friedman/data\.py: TypeError: .* takes 1 positional argument"):
        _shown("friedman", dataset, dataset, np.arange(2))


def test_windows_of_a_text_and_rows_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text_files").mkdir()
    for number in range(12):
        (tmp_path / "text_files" / f"{number}.txt").write_text(f"{number} " * 200)
    options = {"DATASET_TEXT_FILES": "y", "DATA_DIR": str(tmp_path), "BLOCK_SIZE": "20"}
    lines = check(tmp_path, capsys, "gpt2-tiny", options)
    within = next(line for line in lines if line.startswith("Exact duplicates within training"))
    assert int(within.rpartition(" ")[2]) > 100 and sum(line.startswith("Sample: '") for line in lines) == 5
    rows = "\n".join(f"{row},{row % 2},{row % 3 // 2}" for row in range(40))
    (tmp_path / "table.csv").write_text(f"size,small,odd\n{rows}")
    table = {"DATASET_TABULAR": "y", "TABULAR_TARGETS": "small,odd", "TABULAR_TARGET_LABELS": "y", **SMALL}
    lines = check(tmp_path, capsys, "tabular-regression", table | {"DATA_DIR": str(tmp_path)})
    assert any(re.match(r"small +\d+ +\d+\.\d%", line) for line in lines)
    assert sum(line.startswith("Sample: size ") for line in lines) == 5


def test_all_faults_are_listed_and_nothing_is_drawn(photos: Path) -> None:
    runner = Runner(photos.parent)
    short = {"RESNET18_WIDTH": "8", "BUDGET_STEPS": "y", "MAX_STEPS": "2"}
    options = {f"CONFIG_{name}": value for name, value in (FOLDER | short).items()}
    runner.configure("resnet18", options | {"CONFIG_DATA_DIR": str(photos)})
    bad = [photos / "train" / "b" / "1.png", photos / "train" / "c" / "3.png"]
    for file in bad:
        file.write_bytes(b"no image")
    sheet = photos.parent / "sheet.png"
    output = runner.run("data-check", "--out", str(sheet), status=2)
    assert all(f"{file}: it is not an image of a known format" in output for file in bad)
    assert "error: 2 of 17 images cannot be decoded: " in output and "CONFIG_ON_BAD_SAMPLE_SKIP=y" in output
    assert not sheet.exists() and not runner.runs.exists()
    runner.configure("resnet18", options | {"CONFIG_DATA_DIR": str(photos), "CONFIG_ON_BAD_SAMPLE_SKIP": "y"})
    output = runner.run("data-check", "--out", str(sheet))
    assert output.count("Skipped: ") == 2 and "Samples: 12 for training" in output and sheet.exists()
    for number in range(30):
        (photos / "train" / "a" / f"bad{number}.png").write_bytes(b"no image")
    output = runner.run("data-check", "--out", str(sheet))
    assert output.count("Skipped: ") == 21 and "Skipped: ... and 12 more files" in output
    output = runner.run("train")
    assert output.count("Skipped: ") == 21 and "... and 12 more files, all of which data.json names" in output
    assert len(json.loads((runner.newest().path / "data.json").read_text())["skipped"]) == 32


def test_the_sheet_is_below_the_output_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5")
    for output, folder in (("", tmp_path / "build"), (str(tmp_path / "o"), tmp_path / "o")):
        monkeypatch.setenv("KCONFIG_OUTPUT", output or ".")
        assert data_check(resolved, root=tmp_path, out=None) == 0
        assert f"{folder}/data-check/digits.png" in capsys.readouterr().out
        assert (folder / "data-check" / "digits.png").is_file()


@pytest.mark.parametrize("out", ["sheet.jpg", "file.png/sheet.png"])
def test_a_sheet_that_cannot_be_written_is_told_first(out: str, tmp_path: Path) -> None:
    (tmp_path / "file.png").touch()
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5")
    with pytest.raises(ConfigError, match=f"OUT=.*{out}"):
        data_check(resolved, root=tmp_path, out=tmp_path / out)
    assert [file.name for file in tmp_path.iterdir()] == ["file.png"]


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("lenet5", {"TARGET_EFFECTIVE_BATCH": "70000"}, "an effective batch of 70000 cannot be planned"),
        (
            "vit-tiny-scenes",
            {"VIT_WIDTH": "30"},
            "VIT_WIDTH=30 is not a multiple of CONFIG_VIT_HEADS=4",
        ),
    ],
)
def test_what_a_run_would_refuse_is_refused_after_the_data_are_shown(
    name: str, changes: dict[str, str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=told):
        check(tmp_path, capsys, name, changes)
    assert "Samples: " in capsys.readouterr().out


def test_images_without_a_class_and_too_large_a_batch_are_reported_at_once(photos: Path) -> None:
    flat = photos.parent / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(photos.rglob("*.png"))):
        file.rename(flat / f"{number}.png")
    options = {"DATASET_IMAGE_FOLDER": "y", "IMAGE_SIZE": "16", "DATA_DIR": str(flat)}
    runner = Runner(photos.parent)
    runner.configure("resnet18", {f"CONFIG_{name}": value for name, value in options.items()})
    for command in ("data-check", "plan", "train"):
        output = runner.run(command, status=2)
        assert (
            f"error: {flat} has 17 images without a class: it has neither folders nor labels.csv, " in output
        )
        assert (
            f"write {flat}/labels.csv: name,label in its first line, then lines such as 0.png,LABEL" in output
        )
        size = int(re.findall(r"an effective batch of 512 .* only (\d+) training samples", output)[0])
    rows = [f"{number}.png,{'1b'[number % 2]}" for number in range(17)]
    (flat / "labels.csv").write_text("\n".join(["name,label", *rows]))
    assert f"only {size} training samples" in runner.run("data-check", status=2)
    small = FOLDER | {"DATA_DIR": str(flat)}
    runner.configure("resnet18", {f"CONFIG_{name}": value for name, value in small.items()})
    output = runner.run("data-check")
    assert f"Samples: {size} for training" in output
    assert "; NOTE: numbers (1) and texts (b) are classes side by side" in output

"""make predict: the answers of make eval, without the training data; and what it refuses."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lib.errors import ConfigError, DataError
from lib.runs import metrics
from tests.e2e.runner import TINY, Runner
from tests.support.configs import ROOT
from train import predict as command
from train.predict import predict
from train.stored_run import Restored, restore

pytestmark = pytest.mark.slow

STEPS = {name: value for name, value in TINY.items() if name != "CONFIG_DATA_LIMIT"}
CLASSES = ("apple", "pear tree")


def write_images(folder: Path, part: str, count: int) -> list[Path]:
    """Noise around a grey that differs by class, of odd sizes and in two formats."""
    random, files = np.random.default_rng(len(part)), []
    for label, name in enumerate(CLASSES):
        (folder / part / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.normal(110 + 25 * label, 45, (30 + number % 9, 40 + number % 7, 3)).clip(0, 255)
            file = folder / part / name / f"{number:03}.{'png' if number % 2 else 'jpg'}"
            Image.fromarray(pixels.astype(np.uint8)).save(file)
            files.append(file)
    return files


def write_table(file: Path, count: int) -> list[dict[str, str]]:
    random = np.random.default_rng(5)
    rows = []
    for number in range(count):
        area, city, built = random.uniform(20, 200), random.integers(3), 1900 + number % 100
        kind = ("flat", "house")[int(area + 30 * city > 120)]
        rows.append({"area": f"{area:.3f}", "city": "ABC"[city], "built": f"{built}", "kind": kind})
    file.write_text("".join(",".join(row) + "\n" for row in [[*rows[0]], *(r.values() for r in rows)]))
    return rows


def trained(folder: Path, defconfig: str, settings: dict[str, str]) -> Runner:
    runner = Runner(folder)
    runner.configure(defconfig, STEPS | settings)
    runner.run("train")
    return runner


def restored(runner: Runner) -> Restored:
    return restore("", root=ROOT, runs=runner.runs, best=False, needs_data=False)


def evaluation(runner: Runner) -> dict[str, Any]:
    return [row for row in metrics.read(runner.newest().metrics) if row["kind"] == "eval"][-1]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Path]:
    """A run on a folder of images, of which only those for evaluation are left, and these."""
    folder = tmp_path_factory.mktemp("images")
    data = folder / "data"
    write_images(data, "train", 64)
    write_images(data, "val", 50)
    settings = {"CONFIG_DATASET_IMAGE_FOLDER": "y", "CONFIG_IMAGE_SIZE": "32", "CONFIG_DATA_DIR": str(data)}
    narrow = {"CONFIG_RESNET18_WIDTH": "8", "CONFIG_NORM_BATCH": "16", "CONFIG_MAX_STEPS": "12"}
    runner = trained(folder, "resnet18", settings | narrow)
    shutil.rmtree(data / "train")
    return runner, data / "val"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Path]:
    """A run that learned classes from rows of a table that is gone, and the rows of its evaluation."""
    folder = tmp_path_factory.mktemp("table")
    write_table(folder / "table.csv", 400)
    write_table(folder / "other.csv", 150)
    settings = {
        "CONFIG_DATASET_TABULAR": "y",
        "CONFIG_DATA_DIR": str(folder),
        "CONFIG_TABULAR_TARGETS": "kind",
        "CONFIG_TABULAR_TARGET_CLASSES": "y",
        "CONFIG_TABULAR_VALIDATION_OTHER": "y",
        "CONFIG_TABULAR_VALIDATION_FILE": "other.csv",
    }
    runner = trained(folder, "tabular-regression", settings)
    (folder / "table.csv").unlink()
    (folder / "other.csv").rename(folder / "rows.csv")
    return runner, folder / "rows.csv"


def test_images_are_predicted_as_they_are_evaluated(images: tuple[Runner, Path], tmp_path: Path) -> None:
    runner, folder = images
    out = tmp_path / "out.csv"
    runner.run("predict", "--input", str(folder), "--out", str(out))
    rows = [*csv.DictReader(out.read_text().splitlines())]
    files = sorted(str(path) for path in folder.rglob("*.*"))
    assert [row["input"] for row in rows] == files and [*rows[0]] == [
        *("input", "prediction", "probability", "p_apple", "p_pear tree")
    ]
    right = sum(row["prediction"] == Path(row["input"]).parent.name for row in rows)
    assert right / len(rows) == evaluation(runner)["accuracy"] > 0.7
    for row in rows:
        assert float(row["p_apple"]) + float(row["p_pear tree"]) == pytest.approx(1, abs=1e-6)
        assert row["probability"] == row[f"p_{row['prediction']}"]


def test_rows_of_a_table_are_predicted_as_they_are_evaluated(table: tuple[Runner, Path]) -> None:
    runner, file = table
    found = predict(restored(runner), file)
    rows = [*csv.DictReader(file.read_text().splitlines())]
    right = sum(found.columns["prediction"] == [row["kind"] for row in rows])
    assert right / len(rows) == evaluation(runner)["accuracy"] > 0.7
    assert found.names[:2] == (f"{file} row 1", f"{file} row 2")
    with pytest.raises(DataError):  # the data themselves are not there
        restore("", root=ROOT, runs=runner.runs, best=False)


def test_numbers_come_in_units(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv", 300)
    settings = {"CONFIG_DATASET_TABULAR": "y", "CONFIG_DATA_DIR": str(tmp_path)}
    settings |= {"CONFIG_TABULAR_TARGETS": "built", "CONFIG_TABULAR_VALIDATION_OTHER": "y"}
    runner = trained(
        tmp_path, "tabular-regression", settings | {"CONFIG_TABULAR_VALIDATION_FILE": "table.csv"}
    )
    found = predict(restored(runner), tmp_path / "table.csv").columns["predicted_built"]
    true = np.array(
        [float(row["built"]) for row in csv.DictReader((tmp_path / "table.csv").read_text().splitlines())]
    )
    assert np.abs(found - true).mean() == pytest.approx(evaluation(runner)["mae"], rel=1e-5)


def test_texts_are_predicted_as_they_are_evaluated(tmp_path: Path) -> None:
    lines = [f"{('bad', 'good')[number % 2] * 4} {number}\t{number % 2}\n" for number in range(512)]
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2/train.tsv").write_text("".join(lines[:448]))
    (tmp_path / "sst2/dev.tsv").write_text("".join(lines[448:]))
    small = {"SIZE_CUSTOM": "y", "LAYERS": "2", "HEADS": "2", "WIDTH": "32", "DROPOUT": "0.0"}
    settings = {f"CONFIG_GPT2_{name}": value for name, value in small.items()}
    settings |= {"CONFIG_DATA_DIR": str(tmp_path), "CONFIG_TOKENIZER_CHAR": "y", "CONFIG_BLOCK_SIZE": "32"}
    runner = trained(tmp_path, "gpt2-sst2", settings | {"CONFIG_LEARNING_RATE": "0.01"})
    shutil.rmtree(tmp_path / "sst2")
    own, texts = restored(runner), [line.partition("\t")[0] for line in lines[448:]]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    found = predict(own, tmp_path / "texts.txt")
    right = sum(found.columns["prediction"] == [line[-2] for line in lines[448:]])
    assert right / len(texts) == evaluation(runner)["accuracy"] > 0.9
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert (predict(own, tmp_path / "texts.jsonl").columns["p_1"] == found.columns["p_1"]).all()
    (tmp_path / "texts.txt").write_text("good ☃\n")
    with pytest.raises(ConfigError, match=r"texts.txt: characters that the vocabulary lacks: '☃'"):
        predict(own, tmp_path / "texts.txt")
    (tmp_path / "texts.txt").write_text("good\n\n")
    with pytest.raises(ConfigError, match=r"texts.txt, row 2 has no text"):
        predict(own, tmp_path / "texts.txt")


def test_probabilities_do_not_depend_on_what_is_predicted_together(images: tuple[Runner, Path]) -> None:
    own, files = restored(images[0]), sorted(images[1].rglob("*.*"))
    assert len(files) > own.job.plan.micro_batch  # several batches
    together = predict(own, files).columns["p_apple"]
    seen: list[tuple[int, int]] = []
    for size in (1, 7):
        parts = [predict(own, files[at : at + size]).columns["p_apple"] for at in range(0, 35, size)]
        assert np.concatenate(parts) == pytest.approx(together[:35], abs=1e-6)
    backwards = predict(own, files[::-1], progress=lambda *done: seen.append(done))
    assert backwards.names == tuple(map(str, files[::-1]))
    assert backwards.columns["p_apple"][::-1] == pytest.approx(together, abs=1e-6)
    size = own.job.plan.micro_batch
    assert seen == [(done, len(files)) for done in range(size, len(files), size)]


def test_arrays_and_columns_are_predicted_like_files(
    images: tuple[Runner, Path], table: tuple[Runner, Path]
) -> None:
    own, file = restored(images[0]), sorted(images[1].rglob("*.png"))[0]
    from lib.data.datasets.image_folder.data import decode

    pixels = decode(file, 32)[None]
    assert predict(own, pixels).columns["p_apple"] == predict(own, file).columns["p_apple"]
    own = restored(table[0])
    rows = [*csv.DictReader(table[1].read_text().splitlines())]
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {
        "built": [int(row["built"]) for row in rows]
    }
    expected = predict(own, table[1]).columns["p_flat"]
    assert (predict(own, columns).columns["p_flat"] == expected).all()
    file = table[1].with_name("rows.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (predict(own, file).columns["p_flat"] == expected).all()


def test_the_top_classes_and_each_format(
    images: tuple[Runner, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = restored(images[0])
    monkeypatch.setattr(command, "restore", lambda *_, **__: own)
    found = {}
    for suffix in (".csv", ".json", ".jsonl"):
        out = tmp_path / f"new/out{suffix}"
        assert run(f"{images[1]}/apple/00*", out, top=2) == 0
        text = out.read_text()
        rows = {".csv": lambda text: [*csv.DictReader(io.StringIO(text))], ".json": json.loads}.get(
            suffix, lambda text: [json.loads(line) for line in text.splitlines()]
        )(text)
        found[suffix] = [{name: str(value) for name, value in row.items()} for row in rows]
    assert found[".csv"] == found[".json"] == found[".jsonl"]
    for row in found[".csv"]:
        assert [*row] == ["input", "prediction", "probability", "prediction_2", "probability_2"]
        assert {row["prediction"], row["prediction_2"]} == {*CLASSES}
        assert float(row["probability"]) >= 0.5 >= float(row["probability_2"])


def test_without_out_the_first_rows_are_shown(images: tuple[Runner, Path]) -> None:
    shown = images[0].run("predict", "--input", str(images[1]), "--top", "1")
    lines = [line for line in shown.splitlines() if ("/val/" in line)]
    assert len(lines) == 20 and "\n80 more rows: OUT=predictions.csv" in shown
    assert "100 predictions in fp32" in shown


def test_a_run_without_the_file_opens_its_data(images: tuple[Runner, Path], tmp_path: Path) -> None:
    shutil.copytree(images[0].folder, tmp_path / "old")
    old = Runner(tmp_path / "old")
    (old.newest().path / "preprocess.json").unlink()
    refused = old.run("predict", "--input", str(images[1]), status=2)
    assert "does not say how its data are read" in refused and "images of one class, val" in refused


def test_other_tasks_name_the_command_for_them(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(3000)))
    small = {"SIZE_CUSTOM": "y", "LAYERS": "1", "HEADS": "2", "WIDTH": "16"}
    settings = {f"CONFIG_GPT2_{name}": value for name, value in small.items()}
    settings |= {"CONFIG_DATASET_TEXT_FILES": "y", "CONFIG_DATA_DIR": str(text), "CONFIG_BLOCK_SIZE": "16"}
    runner = trained(tmp_path, "gpt2-tiny", settings | {"CONFIG_MAX_STEPS": "2"})
    refused = runner.run("predict", "--input", str(text), status=2)
    assert "error: a language model predicts no class; make sample PROMPT= continues a text" in refused
    text.unlink()
    run, answer = runner.run("sample", "--prompt", "12 is").splitlines()[:2]
    assert answer.startswith("12 is")
    assert run == f"{runner.newest().path}, step {runner.newest().status().step}:"


def run(given: str, out: Path | None, *, top: int = 0) -> int:
    return command.command("", root=ROOT, runs=Path("runs"), best=False, given=given, out=out, top=top)


IMAGE_FAULTS = {
    "nothing": ("", "out.csv", "there is nothing to predict"),
    "missing": ("{here}/nope.png", "out.csv", "INPUT={here}/nope.png is not there"),
    "missing of many": ("{here}/good.png {here}/nope.png", "out.csv", "nope.png is not there"),
    "pattern": ("{here}/*.webp", "out.csv", "*.webp is not there; name a file or a folder; INPUT=- reads"),
    "quote": ("'a", "out.csv", "INPUT='a cannot be split into names: No closing quotation"),
    "empty folder": ("{here}/empty", "out.csv", "INPUT={here}/empty has no files to predict: it reads"),
    "folder of others": ("{here}/others", "out.csv", ".webp; name a folder that has some"),
    "other file": ("{here}/others/a.doc", "out.csv", ".webp; save it as one of these"),
    "damaged": ("{here}/bad.png", "out.csv", "1 of 1 images cannot be used: {here}/bad.png: it is not an"),
    "truncated": ("{here}/good.png {here}/cut.png", "out.csv", "1 of 2 images cannot be used: {here}/cut"),
    "mode": ("{here}/float.tiff", "out.csv", "its pixels are 32-bit floats"),
    "shape": ("{here}/shape.npz", "out.csv", "is uint8 (2, 3, 8, 8): the run was trained on uint8 (N, 3, 32"),
    "type": ("{here}/type.npz", "out.csv", "is float64 (2, 3, 32, 32)"),
    "pickle": ("{here}/pickle.npz", "out.csv", "is no npz file of plain arrays"),
    "two arrays": ("{here}/two.npz", "out.csv", "has 2 arrays; call the one to predict inputs"),
    "OUT is an input": ("{here}/good.png", "good.png.csv", "OUT={here}/good.png.csv is an input"),
    "OUT without format": ("{here}/good.png", "out.txt", "does not end in .csv or .json or .jsonl: another"),
    "OUT is a folder": ("{here}/good.png", "folder.csv", "OUT={here}/folder.csv is a folder"),
    "OUT below a file": ("{here}/good.png", "good.png/out.csv", "is no folder that you can write to"),
}
TABLE_FAULTS = {
    "column": ("area,city\n1,A\n", "has no column 'built', an input of the run; there are area, city"),
    "heading": ("area,area,built\n1,A,2\n", "'area' is there twice"),
    "no rows": ("area,city,built\n", "has no rows"),
    "ragged": ("area,city,built\n1,A,2\n1,A\n", "row 2 has 2"),
    "category": (
        "area,city,built\n1,A,2\n1,D,2\n",
        "row 2: 'city' is 'D': the training data did not have it",
    ),
    "date": ("area,city,built\n1,2024-05-31,2\n", "did not have it; make numbers of the dates in the table"),
    "missing": ("area,city,built\n,A,2\n", "row 1: 'area' is missing: the run was trained without"),
    "text": ("area,city,built\n1,A,new\n", "column 'built' is no column of numbers: it has 'new' in row 1"),
    "infinite": ("area,city,built\ninf,A,2\n", "column 'area' is infinite in row 1"),
    "bytes": (b"area,city,built\n\xff,A,2\n", ".csv is not UTF-8: byte 16 is 0xff; convert it"),
    "json": ('{"area": 1}\n{"area"\n', "line 2 is no JSON"),
    "json list": ('{"area": 1}\n[1]\n', "line 2 is no JSON object"),
    "json nested": ('{"area": {}, "city": "A", "built": 2}\n', "line 1: area is dict"),
}


@pytest.mark.parametrize("fault", IMAGE_FAULTS)
def test_bad_images_are_refused_in_a_line_and_nothing_is_made(
    images: tuple[Runner, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_images: Restored,
    fault: str,
) -> None:
    given, out, told = IMAGE_FAULTS[fault]
    for folder in ("empty", "others", "folder.csv"):
        (tmp_path / folder).mkdir()
    (tmp_path / "others/a.doc").touch()
    good = sorted(images[1].rglob("*.png"))[0].read_bytes()
    (tmp_path / "good.png").write_bytes(good)
    (tmp_path / "cut.png").write_bytes(good[:2000])
    (tmp_path / "bad.png").write_text("no image")
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "float.tiff")
    blank = np.zeros((2, 3, 32, 32), np.uint8)
    np.savez(tmp_path / "shape.npz", blank[:, :, :8, :8])
    np.savez(tmp_path / "type.npz", blank.astype(float))
    np.savez(tmp_path / "two.npz", a=blank, b=blank)
    (tmp_path / "pickle.npz").write_bytes(b"not a zip file")
    given = "{here}/good.png.csv" if fault == "OUT is an input" else given
    if fault == "OUT is an input":
        (tmp_path / "good.png.csv").touch()
    monkeypatch.setattr(command, "restore", lambda *_, **__: own_images)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        run(given.replace("{here}", str(tmp_path)), tmp_path / out)
    assert told.replace("{here}", str(tmp_path)) in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_bad_tables_are_refused_in_a_line_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_table: Restored, fault: str
) -> None:
    content, told = TABLE_FAULTS[fault]
    file = tmp_path / ("rows.jsonl" if "json" in fault else "rows.csv")
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr(command, "restore", lambda *_, **__: own_table)
    with pytest.raises(ConfigError) as caught:
        run(str(file), tmp_path / "out.csv")
    assert told in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert str(file) in str(caught.value) or fault == "bytes"
    assert [*tmp_path.iterdir()] == [file]


@pytest.fixture(scope="module")
def own_images(images: tuple[Runner, Path]) -> Restored:
    return restored(images[0])


@pytest.fixture(scope="module")
def own_table(table: tuple[Runner, Path]) -> Restored:
    return restored(table[0])


def test_a_grey_run_takes_grey_images_of_any_mode(own_images: Restored, tmp_path: Path) -> None:
    spec = own_images.data.dataset.spec
    grey = dataclasses.replace(spec, channels=1, mean=(0.5,), std=(0.2,))  # type: ignore[type-var]
    dataset = dataclasses.replace(own_images.data.dataset, spec=grey)
    from lib.data.inputs import read_inputs

    pixels = np.random.default_rng(1).integers(0, 256, (32, 32), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    Image.fromarray(pixels).convert("RGB").save(tmp_path / "rgb.png")
    files = [tmp_path / "grey.png", tmp_path / "rgb.png"]
    count, chunks = read_inputs(files, dataset, rows=8, log=print)
    (rows,) = chunks
    assert count == 2 and (rows.inputs == pixels).all() and rows.inputs.shape == (2, 1, 32, 32)
    Image.fromarray(np.stack([pixels, pixels, 255 - pixels], axis=2)).save(tmp_path / "colour.png")
    with pytest.raises(ConfigError, match=r"colour.png: it has colours"):
        [*read_inputs(tmp_path / "colour.png", dataset, rows=8, log=print)[1]]


def test_names_and_tables_come_from_standard_input(
    images: tuple[Runner, Path], table: tuple[Runner, Path], own_table: Restored, own_images: Restored,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Given:
        buffer = io.BytesIO(table[1].read_bytes())

    monkeypatch.setattr("sys.stdin", Given)
    found = predict(own_table, "-")
    assert (found.columns["p_flat"] == predict(own_table, table[1]).columns["p_flat"]).all()
    assert found.names[0] == "standard input row 1"
    files = sorted(map(str, images[1].rglob("*.png")))[:3]
    Given.buffer = io.BytesIO("\n".join(files).encode())
    assert predict(own_images, "-").names == tuple(files)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is no folder that you can write to"):
        run("x.png", tmp_path / "out.csv")

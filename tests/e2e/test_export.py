"""make export FORMAT=pt2: preprocessing and answers in the graph, compared outside before it is done."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from lib.data.types import ImageSpec
from lib.errors import ConfigError, ToolkitError
from tests.e2e.runner import BRIEF, TINY, Runner
from tests.support.configs import ROOT
from train import export as module
from train.export import export
from train.predict import predict
from train.stored_run import Restored, restore

pytestmark = pytest.mark.slow

TABLE = "area,city,rooms,kind\n" + "".join(
    f"{20 + 3.7 * number % 90},{'ABC'[number % 3]},{number % 5},{('flat', 'house')[number % 7 > 3]}\n"
    for number in range(300)
)
# A residual network with all that may not export: ghost batches, an average of weights, recomputation.
RESNET = {
    "CONFIG_RESNET18_WIDTH": "8",
    "CONFIG_NORM_BATCH": "16",
    "CONFIG_EMA": "y",
    "CONFIG_EMA_DECAY": "0.5",
    "CONFIG_GRAD_CHECKPOINT_BLOCKS": "y",
    "CONFIG_CHANNELS_LAST": "y",
    "CONFIG_PRECISION_FP32": "n",
    "CONFIG_PRECISION_BF16": "y",
    "CONFIG_AUTO_METHOD_TABLE": "y",
    "CONFIG_MAX_STEPS": "3",
}
TABULAR = {
    "CONFIG_DATASET_TABULAR": "y",
    "CONFIG_TABULAR_MISSING_MEAN": "y",
    "CONFIG_MLP_DROPOUT": "0.1",
    "CONFIG_MAX_STEPS": "5",
}
CLASSES = {"CONFIG_TABULAR_TARGET_CLASSES": "y"}
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "images": ("resnet18", RESNET),
    "classes": ("tabular-regression", TABULAR | {"CONFIG_TABULAR_TARGETS": "kind", **CLASSES}),
    "numbers": ("tabular-regression", TABULAR | {"CONFIG_TABULAR_TARGETS": "area,rooms"}),
}
ANSWER = """
import numpy, sys
numpy.save(sys.argv[2], predict(numpy.load(sys.argv[1])))
"""


def trained(kind: str, folder: Path, *, best: bool = False) -> Restored:
    (folder / "table.csv").write_text(TABLE)
    defconfig, settings = RUNS[kind]
    if kind == "images":
        steps = BRIEF
    else:
        steps = {name: value for name, value in TINY.items() if name != "CONFIG_DATA_LIMIT"}
        settings = settings | {"CONFIG_DATA_DIR": str(folder)}
    runner = Runner(folder)
    runner.configure(defconfig, steps | settings)
    runner.run("train")
    return restore("", root=ROOT, runs=runner.runs, best=best, needs_data=False)


Exported = tuple[Restored, Path, float | None]


def export_of(kind: str, folder: Path) -> Exported:
    """A run, what was exported of it, and the difference that was told."""
    own, out = trained(kind, folder), folder / "deep" / "out"
    return own, out, export(own, directory=out, layout="pt2")


@dataclass(frozen=True)
class ByMake:
    """An export by the command into the folder of an earlier one, which has a file of the user's, too."""

    own: Restored
    out: Path
    printed: str


NOTES = "mine"  # the user's file


@pytest.fixture(scope="module")
def by_make(tmp_path_factory: pytest.TempPathFactory) -> ByMake:
    folder = tmp_path_factory.mktemp("classes")
    own, out = trained("classes", folder, best=True), folder / "deep" / "out"
    out.mkdir(parents=True)
    earlier = '{"format": "pt2", "files": ["LICENSE", "model.pt2"]}'
    old = {"LICENSE": "of another run", "model.json": earlier, "model.pt2": "old", "notes": NOTES}
    for name, text in old.items():
        (out / name).write_text(text)
    printed = Runner(folder).run("export", "--best", "--format", "pt2", "--directory", str(out))
    return ByMake(own, out, printed)


@pytest.fixture(scope="module")
def classes(by_make: ByMake) -> Exported:
    (difference,) = re.findall(r", at most (\S+) from the run's own outputs\n", by_make.printed)
    return by_make.own, by_make.out, float(difference)


@pytest.fixture(
    scope="module",
    params=["classes", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("images", "numbers"))],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    if request.param == "classes":
        found: Exported = request.getfixturevalue("classes")
        return found
    return export_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def own(classes: Exported) -> Restored:
    return classes[0]


def loaded(out: Path, inputs: np.ndarray[Any, Any], folder: Path) -> np.ndarray[Any, Any]:
    """What a process that has never heard of this project makes of the files, by the lines of their card."""
    lines = (out / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "torch.export.load" in lines
    np.save(folder / "inputs.npy", inputs)
    arguments = [str(folder / "inputs.npy"), str(folder / "outputs.npy")]
    subprocess.run([sys.executable, "-I", "-c", lines + ANSWER, *arguments], check=True, cwd=out)
    found: np.ndarray[Any, Any] = np.load(folder / "outputs.npy")
    return found


def run_lines(code: str, folder: Path) -> dict[str, Any]:
    """What the lines of a card define in the folder of the export."""
    found: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(code, found)
    return found


def test_what_is_exported_answers_like_the_run(exported: Exported, tmp_path: Path) -> None:
    own, out, difference = exported
    assert difference is not None and difference < 1e-5
    facts = json.loads((out / "model.json").read_text())
    assert facts["files"] == ["README.md", "check.npz", "model.json", "model.pt2"]
    assert sorted(path.name for path in out.iterdir() if path.name != "notes") == facts["files"]
    spec: Any = own.data.dataset.spec
    is_image = isinstance(spec, ImageSpec)
    assert ("## Read an image" in (out / "README.md").read_text()) == is_image == bool(facts["preprocessing"])
    numbers = map(str, range(getattr(spec, "classes", 0)))
    assert facts["labels"] == list(own.data.dataset.class_names or numbers)
    before = {name: weight.clone() for name, weight in own.job.model.state_dict().items()}
    if hasattr(spec, "columns"):  # numbers in units and categories by their place; one number is missing
        places: dict[str, Any] = {"area": [65.5, np.nan], "rooms": [3, 0], "city": [1, 2], "kind": [1, 0]}
        cells = places | {"area": [65.5, ""], "city": ["B", "C"], "kind": ["house", "flat"]}
        names = [column.name for column in spec.columns]
        given = np.array([places[name] for name in names], np.float64).T.copy()
        found = predict(own, {name: cells[name] for name in names})
        lines = (
            (out / "README.md").read_text().split("## Read a row")[1].split("```python\n")[1].split("```")[0]
        )
        rows = [{name: cells[name][row] for name in names} for row in range(2)]
        assert np.array_equal(run_lines(lines, out)["read"](rows), given, equal_nan=True)
    else:
        given = np.random.default_rng(3).integers(0, 256, (5, *spec.input_shape), np.uint8)
        found = predict(own, given)
    answers = loaded(out, given, tmp_path)
    columns = [values for name, values in found.columns.items() if name.startswith(("p_", "predicted_"))]
    is_half = own.job.plan.precision == "bf16"
    assert answers == pytest.approx(np.stack(columns, axis=1), abs=2e-2 if is_half else 1e-5, rel=1e-5)
    after = own.job.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_file_that_answers_otherwise_is_refused(
    own: Restored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, outside = module._own_outputs, dict[str, np.ndarray[Any, Any]]()

    def off(*arguments: Any) -> Any:
        outside["answers"] = exact(*arguments)
        return outside["answers"] * 1.01

    monkeypatch.setattr(module, "_own_outputs", off)
    # That a process without this project answers as the run does is another test's; it takes seconds.
    monkeypatch.setattr(module, "_loaded_outside", lambda *_: outside)
    with pytest.raises(ToolkitError, match=r"the exported pt2 differs from the run by .*, more than 0.0001"):
        export(own, directory=tmp_path / "out", layout="pt2")
    assert not [*tmp_path.iterdir()]


def test_the_card_tells_where_a_model_comes_from(exported: Exported) -> None:
    own, out, _ = exported
    text, spec = (out / "README.md").read_text(), own.data.dataset.spec
    assert text.startswith("---\nlicense: unknown\n---\n") and f"trained on {spec.name}" in text
    assert f"Exported from run `{own.run.name}`" in text and "none: trained from random weights" in text
    part = "held-out training samples" if isinstance(spec, ImageSpec) else "test part"
    assert f"({part} of {spec.name}{', synthetic' if spec.synthetic else ''}), step {own.step}" in text
    assert ("content hash unknown" in text) != (spec.name == "tabular")
    assert str(own.run.path.parents[1]) not in text + (out / "model.json").read_text()


def test_only_what_an_export_wrote_is_removed_by_the_next(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    out.symlink_to(elsewhere)
    files = ["LICENSE", "check.npz", "gone", "kept", "model.json", "../safe", {}]
    (out / "model.json").write_text(json.dumps({"format": "pt2", "files": files}))
    for name in ("LICENSE", "check.npz", "notes", "../safe"):
        (elsewhere / name).touch()
    (elsewhere / "kept").mkdir()
    with module._staged(out) as folder:
        assert folder.parent == elsewhere, "where the files will be, which may be another file system"
        (folder / "check.npz").write_text("new")
        (folder / "model.json").write_text("{}")
    assert sorted(each.name for each in elsewhere.iterdir()) == ["check.npz", "kept", "model.json", "notes"]
    assert (out / "check.npz").read_text() == "new" and (tmp_path / "safe").exists()
    with module._staged(out) as folder:
        (folder / "model.json").write_text("{}")
    assert (out / "check.npz").exists(), "that export kept no record"


def test_a_staging_folder_that_cannot_be_made_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", refused)  # type: ignore[attr-defined]
    told = r"^cannot write to .*/out: Permission denied$"
    with pytest.raises(ToolkitError, match=told), module._staged(tmp_path / "out"):
        pass


def test_a_format_that_is_not_possible_is_refused(own: Restored, tmp_path: Path) -> None:
    faults = {
        "FORMAT=onx is not a format; there are safetensors, pt2, onnx, huggingface": (
            "onx",
            tmp_path / "out",
        ),
        f"DIRECTORY={tmp_path}/file cannot be written in {tmp_path}/file": ("pt2", tmp_path / "file"),
        f"DIRECTORY={tmp_path}/file/out cannot be": ("pt2", tmp_path / "file/out"),
        f"DIRECTORY={tmp_path} is in use: it has file and 2 more; name a new folder": ("pt2", tmp_path),
        f"DIRECTORY={tmp_path}/onnx is in use: it has an export in FORMAT=onnx": ("pt2", tmp_path / "onnx"),
        f"DIRECTORY={tmp_path}/other is in use: it has model.json;": ("pt2", tmp_path / "other"),
    }
    (tmp_path / "file").touch()
    for name, content in {"onnx": '{"format": "onnx"}', "other": "[1]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.json").write_text(content)
    before = sorted(tmp_path.rglob("*"))
    for told, (layout, directory) in faults.items():
        with pytest.raises(ConfigError) as caught:
            export(own, directory=directory, layout=layout)
        assert told in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_cannot_be_traced_is_refused_in_a_line(
    own: Restored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Undecided(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs if inputs.sum() > 0 else -inputs

    class Own(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.ops.testing_export.twice(inputs)  # type: ignore[no-any-return]

    library = torch.library.Library("testing_export", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("testing_export::twice", torch.empty_like, lib=library)
    for model, told in ((Undecided(), "data-dependent"), (Own(), "it calls testing_export.twice.default")):
        monkeypatch.setattr(module, "Graph", lambda *_, model=model: model)
        with pytest.raises(ConfigError) as caught:
            export(own, directory=tmp_path / "out", layout="pt2")
        assert f"FORMAT=pt2 is not possible for {own.job.config.model}: " in str(caught.value)
        assert told in str(caught.value) and "\n" not in str(caught.value)
        assert "FORMAT=safetensors writes its weights" in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_what_is_written_to_a_file_by_make(by_make: ByMake, tmp_path: Path) -> None:
    """Of its folder the files of an earlier export are replaced or removed, no other ones."""
    own, out = by_make.own, by_make.out
    best = int((own.run.checkpoints / "best").read_text().strip().removeprefix("step-"))
    assert own.step == best and f"step {best}: written to" in by_make.printed
    assert "from the run's own outputs" in by_make.printed
    assert (out / "model.pt2").stat().st_size > 3 and (out / "notes").read_text() == NOTES
    refused = Runner(own.run.path.parents[2]).run("export", "--directory", str(tmp_path / "more"), status=2)
    assert "mlp have no layout in Hugging Face transformers; FORMAT=onnx, pt2 or safetensors" in refused
    assert not (tmp_path / "more").exists()

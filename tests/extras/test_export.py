"""make export to ONNX, safetensors and Hugging Face transformers: what others read answers like the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lib.errors import ConfigError, ToolkitError
from tests.e2e.runner import TINY, Runner
from tests.e2e.test_export import RESNET, TABLE, TABULAR
from tests.extras.foreign import HUGGING_FACE
from tests.support.configs import ROOT
from train import export as module
from train.export import SAMPLES, export
from train.predict import predict
from train.stored_run import Restored, restore

GPT2 = {"SIZE_CUSTOM": "y", "LAYERS": "2", "HEADS": "2", "WIDTH": "32", "PAD_VOCAB": "64", "DROPOUT": "0.1"}
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "resnet18": ("resnet18", RESNET),
    "table": (
        "tabular-regression",
        TABULAR | {"CONFIG_TABULAR_TARGETS": "kind", "CONFIG_TABULAR_TARGET_CLASSES": "y"},
    ),
    "numbers": ("tabular-regression", TABULAR | {"CONFIG_TABULAR_TARGETS": "area"}),
    "text": (
        "gpt2-tiny",
        {f"CONFIG_GPT2_{name}": value for name, value in GPT2.items()}
        | {"CONFIG_DATASET_TEXT_FILES": "y", "CONFIG_BLOCK_SIZE": "16", "CONFIG_MAX_STEPS": "5"},
    ),
    "resnet_bk": ("resnet_bk", {"CONFIG_MAX_STEPS": "2", "CONFIG_TARGET_EFFECTIVE_BATCH": "16"}),
}
_MADE: dict[str, Restored] = {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(kind: str) -> Restored:
        if kind not in _MADE:
            folder = tmp_path_factory.mktemp(kind)
            (folder / "table.csv").write_text(TABLE)
            (folder / "text.txt").write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(3000)))
            defconfig, settings = RUNS[kind]
            data = {"text": folder / "text.txt"}.get(kind, folder)
            if kind in ("text", "table", "numbers"):
                settings = settings | {"CONFIG_DATA_DIR": str(data), "CONFIG_DATA_LIMIT": "0"}
            runner = Runner(folder)
            runner.configure(defconfig, TINY | settings)
            runner.run("train")
            _MADE[kind] = restore("", root=ROOT, runs=runner.runs, best=False, needs_data=False)
        return _MADE[kind]

    return make


def in_onnxruntime(file: Path, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].name == "inputs" and isinstance(session.get_inputs()[0].shape[0], str)
    found: np.ndarray[Any, Any] = session.run(["outputs"], {"inputs": inputs})[0]
    return found


@pytest.mark.parametrize("kind", ["resnet18", "table", "numbers", "text"])
def test_onnx_answers_like_the_run(made: Any, tmp_path: Path, kind: str) -> None:
    own = made(kind)
    difference = export(own, directory=tmp_path / "out", layout="onnx")
    assert difference is not None and difference < 1e-5
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["README.md", "check.npz", "model.json", "model.onnx"]
    with np.load(tmp_path / "out/check.npz") as check:
        inputs, outputs = check["inputs"], check["outputs"]
    assert len(inputs) == SAMPLES
    for rows in (1, 5):  # numbers of rows that nothing was traced with
        found = in_onnxruntime(tmp_path / "out/model.onnx", inputs[:rows])
        assert found == pytest.approx(outputs[:rows], rel=1e-4, abs=1e-5)
    if kind == "table":
        given = {"area": [30.0, 80.0], "city": ["B", "A"], "rooms": [1, 4]}
        probabilities = in_onnxruntime(tmp_path / "out/model.onnx", np.array([[30.0, 1, 1], [80.0, 0, 4]]))
        assert probabilities[:, 1] == pytest.approx(predict(own, given).columns["p_house"], abs=1e-5)


def test_an_operator_of_our_own_is_refused(made: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"FORMAT=onnx is not possible for resnet_bk: it calls anneal\.contin"
    ):
        export(made("resnet_bk"), directory=tmp_path / "out", layout="onnx")
    assert not [*tmp_path.iterdir()]


def test_weights_alone_are_those_of_the_run(made: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for kind in ("resnet18", "resnet_bk"):
        own, out = made(kind), tmp_path / kind
        assert export(own, directory=out, layout="safetensors") is None
        found, weights = load_file(out / "model.safetensors"), own.job.model.state_dict()
        assert found.keys() == weights.keys()
        averaged = kind == "resnet18"  # the run averages its weights, and evaluates the average
        assert any(bool((found[name] != weights[name]).any()) for name in found) == averaged
        assert json.loads((out / "model.json").read_text())["spec"]["name"] == own.data.dataset.spec.name


def test_weights_that_differ_are_refused(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = module._write_weights

    def damaged(*given: Any) -> Any:
        weights = write(*given)
        next(iter(weights.values())).add_(1)
        return weights

    monkeypatch.setattr(module, "_write_weights", damaged)
    with pytest.raises(ToolkitError, match="the weights that were written differ"):
        export(made("table"), directory=tmp_path / "out", layout="safetensors")
    assert not [*tmp_path.iterdir()]


def test_transformers_answers_like_the_run(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = made("text")
    difference = export(own, directory=tmp_path / "out", layout="huggingface")
    assert difference is not None and difference < 1e-5
    assert (tmp_path / "out/config.json").exists() and "AutoModelForCausalLM" in (
        tmp_path / "out/README.md"
    ).read_text()
    said: list[str] = []
    found = module.importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    assert export(own, directory=tmp_path / "more", layout="huggingface", log=said.append) is None
    assert said == ["Not compared with the run: the package transformers is not installed"]


def test_a_missing_package_is_named(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = module.importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name)
    )
    with pytest.raises(
        ConfigError, match=r"onnxscript is not installed.*pip install onnx onnxscript onnxrun"
    ):
        export(made("table"), directory=tmp_path / "out", layout="onnx")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", ["hf-vit", "hf-resnet"])
@pytest.mark.parametrize("folder", [False, True], ids=["of one size", "of a folder"])
def test_transformers_classifies_images_like_the_run(kind: str, folder: bool, tmp_path: Path) -> None:
    import transformers

    values = HUGGING_FACE[kind] | {"id2label": {"0": "cat", "1": "dog"}}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(values))
    settings = {"MODEL_HUGGINGFACE": "y", "HUGGINGFACE_DIR": str(tmp_path / "model"), "NORM_BATCH": "8"}
    settings |= {"TARGET_EFFECTIVE_BATCH": "16", "BUDGET_STEPS": "y", "MAX_STEPS": "3", "PRECISION_FP32": "y"}
    settings |= {"DATASET_SCENES": "y"}
    if folder:
        write_folder(tmp_path / "photos")
        settings |= {"DATASET_SCENES": "n", "DATASET_IMAGE_FOLDER": "y", "IMAGE_SIZE": "32"}
        settings |= {"DATA_DIR": str(tmp_path / "photos")}
    runner = Runner(tmp_path)
    (tmp_path / "none").write_text("")
    runner.configure(str(tmp_path / "none"), {f"CONFIG_{name}": value for name, value in settings.items()})
    runner.run("train")
    own = restore("", root=ROOT, runs=runner.runs, best=False, needs_data=False)
    difference = export(own, directory=(out := tmp_path / "out"), layout="huggingface")
    assert difference is not None and difference < 1e-5
    names = list(own.data.dataset.class_names) or [str(n) for n in range(10)]
    assert json.loads((out / "config.json").read_text())["label2id"] == {n: k for k, n in enumerate(names)}
    has_processor = (out / "preprocessor_config.json").is_file()
    assert has_processor != folder, "files of a folder are cropped as none of its fields says"
    assert ("AutoImageProcessor" in (out / "README.md").read_text()) != folder
    images = np.load(out / "check.npz")["inputs"]
    found = predict(own, images).columns
    model = transformers.AutoModelForImageClassification.from_pretrained(out)
    assert type(model).__name__ == ("ViT" if kind == "hf-vit" else "ResNet") + "ForImageClassification"
    if not has_processor:
        return
    pipeline = transformers.pipeline("image-classification", model=str(out), top_k=len(names))
    pictures = [Image.fromarray(image.transpose(1, 2, 0)) for image in images]
    for row, scores in enumerate(pipeline(pictures)):
        for each in scores:
            assert each["score"] == pytest.approx(found[f"p_{each['label']}"][row], abs=1e-5)


def write_folder(place: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("dark", "light"):
        (place / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(0, 128, (40, 50, 3)) + 128 * (name == "light")
            Image.fromarray(pixels.astype(np.uint8)).save(place / name / f"{number}.png")

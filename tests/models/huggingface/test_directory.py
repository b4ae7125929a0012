"""Directories that are no model of transformers are refused in one line, before the package is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.nn.model_code import build_model
from lib.nn.packages import import_extra
from tests.contract.cases import spec_of

SPEC = spec_of({"channels": 3, "height": 32, "width": 32, "classes": 3})
BERT = '{"model_type": "bert"'
BAD: dict[str, tuple[dict[str, str], str]] = {
    "": ({}, "CONFIG_HUGGINGFACE_DIR is empty; set it to a local directory"),
    "org/model": ({}, "is no local directory: it does not exist, and models are not downloaded"),
    "file": ({}, "is no local directory: it is a file"),
    "empty": ({"notes.txt": ""}, "has no config.json"),
    "damaged": ({"config.json": "{"}, "config.json is not JSON: "),
    "list": ({"config.json": "[]"}, "config.json has no model_type"),
    "typeless": ({"config.json": "{}"}, "config.json has no model_type"),
    "code": ({"config.json": BERT + ', "auto_map": {"AutoModel": "m.M"}}'}, "asks for code: auto_map names"),
    "quantized": ({"config.json": BERT + ', "quantization_config": {}}'}, "is of quantized weights"),
    "pickle": ({"config.json": BERT + "}", "pytorch_model.bin": "x"}, "pytorch_model.bin is a pickle"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_model_is_refused(name: str, tmp_path: Path) -> None:
    files, told = BAD[name]
    for file, text in files.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).write_text(text)
    (tmp_path / "file").write_text("")
    given = str(tmp_path / name) if name else ""
    with pytest.raises(ConfigError, match=told) as caught:
        build_model("huggingface", {"dir": given, "input": "images"}, SPEC, seed=0)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(("model", "package"), [("timm", "timm"), ("huggingface", "transformers")])
def test_a_missing_package_is_named(
    model: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    (tmp_path / "config.json").write_text(BERT + "}")
    options = (
        {"dir": str(tmp_path), "input": "images"} if model == "huggingface" else {"name": "x", "options": ""}
    )
    with pytest.raises(ConfigError, match=f"the package {package} is needed here: .* install {package}"):
        build_model(model, options, SPEC, seed=0)
    with pytest.raises(ConfigError, match="nowhere is needed"):
        import_extra("nowhere")

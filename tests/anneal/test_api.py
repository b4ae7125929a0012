"""`import anneal`: what it has, and that it leaves alone what is the caller's."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import anneal
from tests.e2e.forked import Forked
from tests.support.external import write_external

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    'anneal.configure("lenet5+cpu+fp32", DATA_LIMIT=512, HOLDOUT=256, BUDGET_STEPS=True, MAX_STEPS={steps})'
)
PUBLIC = {
    "ConfigError": "(what: 'str', *, why: 'str' = '', todo: 'str' = '', "
    "findings: 'Sequence[str]' = ()) -> 'None'",
    "Configuration": "(values: 'Mapping[str, Any]', text: 'str') -> None",
    "Model": "(run: 'Run', module: 'nn.Module', spec: 'Any', step: 'int', _restored: 'Restored') -> None",
    "Plan": "(values: 'Mapping[str, Any]', text: 'str') -> None",
    "Run": "(path: 'Path') -> None",
    "ToolkitError": "(what: 'str', *, why: 'str' = '', todo: 'str' = '') -> 'None'",
    "configure": "(base: 'str | Path', **options: 'bool | int | float | str') -> 'Configuration'",
    "estimate": "(model: 'Model', inputs: 'Any', *, optimizer: 'MakeOptimizer' = "
    "<class 'torch.optim.adamw.AdamW'>, precision: 'AnyPrecision' = 'fp32', "
    "loss: 'Callable[[Any], Tensor] | None' = None, device: 'Kind' = 'cuda', "
    "expandable_segments: 'bool' = False, accumulation: 'int' = 1) -> 'Report'",
    "export": "(model: 'Model', directory: 'str | Path', *, layout: 'str') -> 'float | None'",
    "fit": "(configuration: 'Configuration', *, runs: 'str | Path' = 'runs') -> 'Run'",
    "fits": "(model: 'Model', inputs: 'Any', *, gpu: 'str', **options: 'Any') -> 'bool'",
    "largest_batch": "(model: 'Model', inputs: 'Any', *, gpu: 'str', limit: 'int' = 1048576, "
    "**options: 'Any') -> 'int'",
    "load": "(run: 'Run | str | Path', *, best: 'bool' = False, runs: 'str | Path' = 'runs') -> 'Model'",
    "plan": "(configuration: 'Configuration') -> 'Plan'",
    "predict": "(model: 'Model', inputs: 'Inputs', *, top: 'int' = 0) -> 'Predictions'",
}
RUN_METHODS = {"metrics": "(self, kind: 'str' = 'eval') -> 'list[dict[str, Any]]'"}


def script(folder: Path, text: str, *, forks: bool = True, **variables: str) -> str:
    """Run a program in `folder` that can import anneal and nothing else of the tree; returns its output.

    forks: it is forked off a process with torch, and so is what it starts. That is for what it does with
    the processes of the tree, not for how they begin.
    """
    (folder / "script.py").write_text(textwrap.dedent(text))
    link = folder / "site"
    link.mkdir(exist_ok=True)
    if not (link / "anneal").exists():
        # As the finder of an editable installation does: this package, and nothing beside it.
        (link / "sitecustomize.py").write_text(
            "import importlib.util, sys\n"
            f"spec = importlib.util.spec_from_file_location('anneal', '{ROOT}/anneal/__init__.py')\n"
            "class Finder:\n"
            "    @staticmethod\n"
            "    def find_spec(name, path=None, target=None):\n"
            "        return spec if name == 'anneal' else None\n"
            "sys.meta_path.insert(0, Finder)\n"
        )
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(link), **variables}
    if forks:
        program = Forked(str(folder / "script.py"), [], environment=environment, output=folder / "output.txt")
        output, _ = program.communicate()
        assert program.returncode == 0, output
        return output
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with packages called as those of the tree."""
    for name in ("lib", "models", "train", "scripts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"MINE = {name!r}\n")
        (tmp_path / name / "errors.py").write_text("raise AssertionError('this is not the tree')\n")
    return tmp_path


def test_what_is_public_is_fixed() -> None:
    assert sorted(anneal.__all__) == sorted({*PUBLIC, "Report"}) and dir(anneal) == sorted(anneal.__all__)
    assert {name: str(inspect.signature(getattr(anneal, name))) for name in PUBLIC} == PUBLIC
    methods = {name: getattr(anneal.Run, name) for name in vars(anneal.Run) if not name.startswith("_")}
    functions = {name: value for name, value in methods.items() if inspect.isfunction(value)}
    assert {name: str(inspect.signature(value)) for name, value in functions.items()} == RUN_METHODS
    assert methods.keys() - functions.keys() == {"path", "state"}
    assert all(getattr(anneal, name).__doc__ for name in anneal.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["anneal", pytest.param("mine", marks=pytest.mark.long)])
def test_a_folder_may_have_packages_of_the_same_names(folder: Path, first: str) -> None:
    mine, ours = "import lib, models, train, scripts", "import anneal"
    order = [ours, mine] if first == "anneal" else [mine, ours]
    tiny = TINY.replace("{steps}", "2")
    program = f"""
        import sys
        {order[0]}
        {"asked = " + tiny if first == "anneal" else "pass"}
        {order[1]}
        asked = {tiny}
        assert "torch" not in sys.modules
        run = anneal.fit(asked)
        assert run.state == "done" and run.metrics()[-1]["step"] == 2, run
        model = anneal.load(run)
        import torch
        with torch.no_grad():
            assert model.module(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
        assert model.step == 2 and model.spec.classes == 10
        import numpy
        found = anneal.predict(model, numpy.zeros((3, 1, 28, 28), numpy.uint8), top=2)
        assert len(found.names) == 3 and len(next(found.rows())) > 2, next(found.rows())
        if {first == "mine"}:  # it takes seconds
            difference = anneal.export(model, "out", layout="pt2")
            assert difference is not None and difference < 1e-4
        assert anneal.fits(torch.nn.Linear(3, 4), inputs=(5, 3), gpu="rtx3090")
        import models, lib
        assert (lib.MINE, models.MINE, train.MINE, scripts.MINE) == ("lib", "models", "train", "scripts")
        names = {{"lib", "models", "train", "scripts"}}
        assert names == {{name for name in sys.modules if name.partition(".")[0] in names}}
        assert not [path for path in sys.path if path == {str(ROOT)!r}]
    """
    script(folder, program, forks=False)
    assert {path.name for path in (folder / "runs").iterdir()} == {"lenet5"}


@pytest.mark.slow
def test_configure_is_strict_and_writes_nothing(tmp_path: Path) -> None:
    before = sorted(ROOT.glob("*")), sorted(tmp_path.rglob("*"))
    asked = anneal.configure("lenet5+bf16", NUM_EPOCHS=3, CONFIG_EMA=True, EMA_DECAY=0.5)
    assert (asked.values["NUM_EPOCHS"], asked.values["PRECISION"], asked.values["EMA_DECAY"]) == (
        3,
        "bf16",
        0.5,
    )
    assert "\nCONFIG_NUM_EPOCHS=3\n" in asked.text
    assert (sorted(ROOT.glob("*")), sorted(tmp_path.rglob("*"))) == before
    file = tmp_path / "config"
    file.write_text(asked.text)
    assert anneal.configure(file).text == anneal.configure(str(file)).text == asked.text
    for base, options, told in (
        ("lenet5", {"NUM_EPOHCS": 1}, "^NUM_EPOHCS is not a symbol; did you mean NUM_EPOCHS"),
        ("lenet5", {"MAX_STEPS": 3}, "^MAX_STEPS=3 has no effect: .*; add BUDGET_STEPS=True$"),
        ("lenet5", {"EMA": "on"}, "^EMA=on is not True or False; write EMA=True$"),
        ("lenet5", {"NUM_EPOCHS": "many"}, "is not a plain decimal number"),
        ("lenet", {}, "there is no configuration called 'lenet'; did you mean lenet5"),
        (tmp_path / "nope", {}, "there is no configuration at"),
    ):
        with pytest.raises(anneal.ConfigError, match=told.replace("(", r"\(")):
            anneal.configure(base, **options)
    for call in (anneal.plan, anneal.fit):
        with pytest.raises(anneal.ConfigError, match=r"str is no configuration; give anneal.configure\("):
            call("lenet5")  # type: ignore[operator]


def test_a_value_that_loses_its_effect_is_a_warning_and_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "mine").write_text(
        'CONFIG_MODEL_LENET5=y\nCONFIG_OPTIMIZER_SGD=y\nCONFIG_MOMENTUM="0.5"\n'
    )
    with pytest.warns(UserWarning) as caught:
        assert anneal.configure(file, OPTIMIZER_ADAMW=True).values["MOMENTUM"] is None
    lost, followed = (str(one.message) for one in caught)
    assert lost.startswith(f"{file}:3: MOMENTUM=0.5 has no effect") and "(now OPTIMIZER_ADAMW=True)" in lost
    assert followed.startswith(f"{file}: defaults that follow: LEARNING_RATE 0.1 -> 0.001, ")
    assert all(one.filename == __file__ for one in caught)
    with pytest.raises(anneal.ConfigError, match="SEED is given twice: also as CONFIG_SEED"):
        anneal.configure("lenet5", SEED=1, CONFIG_SEED=2)


@pytest.mark.slow
def test_a_loop_runs_and_signal_handlers_stay(tmp_path: Path) -> None:
    """As in a notebook; and the plan is the one of make plan."""
    tiny = TINY.replace("{steps}", "2")
    program = f"""
        import asyncio, signal, sys
        import anneal

        async def cell():
            asked = {tiny}
            found = anneal.plan(asked)
            assert found.values["plan"]["effective_batch"] == 512 and "micro batch" in found.text
            return anneal.fit(asked).state

        before = [signal.getsignal(number) for number in signal.Signals]
        assert asyncio.run(cell()) == "done"
        assert before == [signal.getsignal(number) for number in signal.Signals]
        assert not {{"lib", "models", "train", "scripts"}} & {{*sys.modules}}
    """
    script(tmp_path, program)


@pytest.mark.slow
def test_an_interrupt_stops_with_a_checkpoint_and_fit_resumes(tmp_path: Path) -> None:
    tiny = TINY.replace("{steps}", "60")
    program = f"""
        import builtins, os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        import anneal
        show, caller = builtins.print, os.getpid()

        def print_and_interrupt(*words, **options):
            show(*words, **options)
            if os.getpid() == caller and str(words[0]).startswith("First optimizer step"):
                os.kill(os.getpid(), signal.SIGINT)

        builtins.print = print_and_interrupt
        asked = {tiny}
        anneal._tree.module("train.api").print = print_and_interrupt
        run = anneal.fit(asked)
        assert run.state == "preempted", run.state
        step = anneal.load(run).step
        assert 0 < step < 60
        again = anneal.fit(asked)
        assert again.path == run.path and anneal.load(again).step > step
    """
    assert "Resuming" in script(tmp_path, program)


@pytest.mark.slow
def test_what_cannot_begin_is_an_error_with_its_reason(tmp_path: Path) -> None:
    program = """
        import anneal
        try:
            anneal.fit(anneal.configure("lenet5-mnist", DATA_DIR="nowhere", DATA_DOWNLOAD=False))
        except anneal.ToolkitError as error:
            print("told:", error)
    """
    told = script(tmp_path, program).splitlines()[-1]
    assert told.startswith("told: ") and "nowhere" in told


@pytest.mark.long
def test_plug_ins_of_external_are_used(folder: Path) -> None:
    """Also by several processes, and their own imports of the tree lead to the tree."""
    external = write_external(folder / "external")
    program = """
        import lib, models
        import anneal
        few = {"DATA_LIMIT": 256, "HOLDOUT": 256, "NUM_EPOCHS": 1}
        asked = anneal.configure("tiny_net", **few, DEVICE_CPU=True, NUM_DEVICES=2)
        run = anneal.fit(asked)
        model = anneal.load(run)
        assert type(model.module[1]).__name__ == "Sequential", model
        assert type(model.module[1][2]).__module__ == "anneal._tree.lib.nn.dropout"
    """
    script(folder, program, forks=False, ANNEAL_EXTERNAL="external")
    (plugins,) = folder.glob("runs/tiny_net/*/plugins.json")
    assert f'"folder": "{external}"' in plugins.read_text()


def test_what_predict_notes_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from train import api, predict

    monkeypatch.setattr(predict, "predict", lambda *_, log, **__: log("not used: a"))
    with pytest.warns(UserWarning, match="not used: a"):
        api.predict(mock.Mock(), [])


def test_errors_name_the_arguments_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lib.data.inputs import files_of
    from lib.errors import ConfigError
    from train import api, export, predict

    with pytest.raises(ConfigError, match=r"^run=nope: there is no run in ") as caught:
        api.load("nope", runs=tmp_path)
    assert "RUN=" not in caught.value.what
    with pytest.raises(ConfigError, match=r"^kind='evall' is no kind of rows; there are train, eval, speed$"):
        api.Run(tmp_path).metrics("evall")
    model: Any = api.Model(api.Run(tmp_path), None, None, 0, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^layout=onx is not a format; there are "):
        api.export(model, tmp_path / "out", layout="onx")
    monkeypatch.setattr(predict, "predict", lambda _, paths, **__: files_of(paths, frozenset({".txt"})))
    with pytest.raises(ConfigError, match=r"^inputs=nope is not there; name a file or a folder$"):
        api.predict(model, ["nope"])
    monkeypatch.setattr(predict, "predict", lambda *_, top, **__: error(f"TOP={top} is more than"))
    with pytest.raises(ConfigError, match=r"^top=9 is more than"):
        api.predict(model, "a.txt", top=9)
    monkeypatch.setattr(export, "export", lambda *_, **__: error("RUN=a", todo="BEST=1"))
    with pytest.raises(ConfigError, match=r"^run=a; best=True$"):
        api.export(model, tmp_path, layout="pt2")


def error(what: str, **options: str) -> None:
    from lib.errors import ConfigError

    raise ConfigError(what, **options)


def test_a_relative_path_to_the_folder_of_the_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts at the source tree, where another folder may have its name, or none."""
    for name in ("rows", "docs"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "docs", "../" + tmp_path.name):
        with pytest.raises(anneal.ConfigError) as caught:
            anneal.configure("tabular-regression", DATASET_TABULAR=True, DATA_DIR=name)
        whole = (tmp_path / name).resolve()
        assert str(caught.value) == (
            f"DATA_DIR={name!r} is in {tmp_path}: a relative path starts at the source tree, {ROOT}; "
            f"give a whole path, such as DATA_DIR={str(whole)!r}"
        )
        asked = anneal.configure("tabular-regression", DATASET_TABULAR=True, DATA_DIR=str(whole))
        assert asked.values["DATA_DIR"] == str(whole)
    anneal.configure("tabular-regression", DATASET_TABULAR=True, DATA_DIR="tests")
    monkeypatch.chdir(ROOT)
    anneal.configure("tabular-regression", DATASET_TABULAR=True, DATA_DIR="docs")


def test_what_a_notebook_prints_of_an_object_is_short() -> None:
    from train.api import Plan
    from train.predict import Predictions

    asked = anneal.configure("lenet5")
    assert repr(asked) == f"Configuration(model='lenet5', dataset='digits', {len(asked.values)} values)"
    values = {"plan": {"effective_batch": 512, "micro_batch": 64, "precision": "bf16", "device": "cpu"}}
    assert repr(Plan(values, "a long text")) == "Plan(effective_batch=512, micro_batch=64, precision='bf16')"
    columns: Any = {"prediction": ["a"] * 2, "probability": [1.0] * 2}
    found = Predictions(run=Path("r"), step=3, precision="bf16", names=("a", "b"), columns=columns)
    assert repr(found) == "<2 predictions of r, step 3: prediction, probability>"

"""make export: a run's model in files for programs without this project, compared with the run first."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import io
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lib.atomic import check_writable
from lib.config import Config
from lib.data.datasets.tabular.data import encoded
from lib.data.datasets.tabular.table_files import Table
from lib.data.types import Dataset, ImageSpec
from lib.devices.backend import configure_numerics
from lib.errors import ConfigError, ToolkitError, os_errors
from lib.nn.activation_checkpointing import configure_recomputation
from lib.nn.model_code import ModelCode, load_layout
from lib.rng import integers, key, noise_bytes, uniform
from train.export_card import (
    LOADS,
    answers_in_logits,
    card,
    check_replaceable,
    copy_beside,
    earlier_facts,
    exported_shape,
    facts_of,
    labels_of,
)
from train.export_graph import Graph, write_graph
from train.job import Job, evaluate, evaluated_weights
from train.predict import outputs_of
from train.record import format_evaluation, log
from train.stored_run import Restored, restore
from train.summary import eval_part
from train.tasks.answers import Answers, answers_of

FORMATS = {  # and the packages that each needs
    "safetensors": ("safetensors",),
    "pt2": (),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "huggingface": (),  # but what the layout of the model needs
    "adapter": ("safetensors",),
}
TOLERANCE = 1e-4  # of probabilities, or of numbers in standard deviations of the target
SAMPLES = 8
_GRAPHS = ("pt2", "onnx")
_REASON = 200  # characters of an exporter's, which may fill pages

# Run in the folder of the files, after LOADS.
_OUTPUTS = f"""
import numpy
inputs = numpy.load("check.npz")["inputs"]
numpy.savez("found.npz", *[predict(inputs[:rows]) for rows in ({SAMPLES}, 3, 1)])
"""
_WEIGHTS = """
import numpy
numpy.savez("found.npz", **{name: weight.float().numpy() for name, weight in weights.items()})
"""


def command(
    name: str, *, root: Path, runs: Path, best: bool, directory: Path, layout: str, merge: bool = False
) -> int:
    """Export run `name` to `directory`; print how much its answers differ from the run's."""
    _check_request(layout, directory, log)
    check = partial(_answers, layout, merge)
    restored = restore(name, root=root, runs=runs, best=best, needs_data=merge, check=check)
    difference = export(restored, directory=directory, layout=layout, merge=merge, log=log)
    compared = "" if difference is None else f", at most {difference:.1e} from the run's own outputs"
    log(f"{restored.run.path}, step {restored.step}: written to {directory}{compared}")
    return 0


def export(
    restored: Restored,
    *,
    directory: Path,
    layout: str = "huggingface",
    merge: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> float | None:
    """Write the model of a run to `directory` in the format `layout`, one of FORMATS.

    The files are loaded by another process, which knows nothing of this project, and compared with the run:
    the largest difference of outputs is returned, None where only weights were compared. merge: adapters are
    added to the weights first, and the result is evaluated. Nothing is left of files that differ by more than
    TOLERANCE. Raises ConfigError for a format that is not possible, ToolkitError where the files differ or
    cannot be loaded.
    """
    _check_request(layout, directory, lambda _: None)
    spec, answers = restored.data.dataset.spec, _answers(layout, merge, restored.job.config)
    dtype, merged = torch.float32, None
    restored.job.model.float()  # layers may be in half precision, for autocast alone
    if merge:
        restored, dtype, merged = _merged(restored, log)
    with _staged(directory) as folder, evaluated_weights(job := restored.job):
        model = copy.deepcopy(job.model).to("cpu").to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
        outputs, weights = None, dict[str, Tensor]()
        if answers is not None:
            given, stored = _samples(spec)
            outputs = _own_outputs(restored, answers, stored)
            np.savez(folder / "check.npz", inputs=given, outputs=outputs)
        impossible = partial(_impossible, job.config, layout)
        with ModelCode(job.config.model, impossible, torchs=True), _quiet():
            if layout in _GRAPHS:
                assert answers is not None
                configure_recomputation(model, "none")
                write_graph(Graph(model, spec, answers), given, folder / f"model.{layout}", impossible)
            else:
                weights = _write_weights(model.to(dtype), job, restored.data.dataset, layout, folder)
        licences = copy_beside(job.config, restored.data.dataset, folder, log)
        program = _program(layout, spec, folder)
        difference = _difference_outside(folder, layout, program, weights, outputs, spec, log)
        known: dict[str, Any] = {"dtype": dtype, "merged": merged, "licences": licences}
        facts = facts_of(restored, layout=layout, difference=difference, **known)
        facts["files"] = sorted({"README.md", "model.json", *(each.name for each in folder.iterdir())})
        (folder / "model.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", "utf-8")
        (folder / "README.md").write_text(card(facts, program), "utf-8")
    return difference


def _check_request(layout: str, directory: Path, log: Callable[[str], object]) -> None:
    if layout not in FORMATS:
        raise ConfigError(f"FORMAT={layout} is not a format", todo=f"there are {', '.join(FORMATS)}")
    for package in FORMATS[layout]:
        if importlib.util.find_spec(package) is None:
            why = f"it is an extra: FORMAT={layout} needs it"
            todo = f"install it, for example with .venv/bin/pip install {' '.join(FORMATS[layout])}"
            raise ConfigError(f"the package {package} is not installed", why=why, todo=todo)
    check_writable(directory, "DIRECTORY", log=log)
    check_replaceable(directory, layout)


def _impossible(config: Config, layout: str, why: str) -> ConfigError:
    what, reason = f"FORMAT={layout} is not possible for {config.model}", why.partition(". ")[0][:_REASON]
    return ConfigError(what, why=reason, todo="FORMAT=safetensors writes its weights")


def _merged(restored: Restored, log: Callable[[str], None]) -> tuple[Restored, torch.dtype, dict[str, float]]:
    """Return `restored` with adapters in the weights, the type to store, and figures; log those of both."""
    from lib.nn.lora import merge
    from train.adapters import base_dtype

    dtype = base_dtype(restored.job.config)
    job, part = restored.job, eval_part(restored.job.config, restored.data.dataset)
    with job.eval_loader:
        before = format_evaluation(evaluate(job))
        with evaluated_weights(job):
            model = copy.deepcopy(job.model)
        restored_layers = merge(model, dtype)
        own: dict[str, Any] = {"model": model, "wrapped": model, "forward": model, "ema": None}
        job = dataclasses.replace(job, **own, adapters=None)
        after = evaluate(job)
    log(f"With adapters: {before}; merged, in {str(dtype)[6:]}: {format_evaluation(after)} ({part})")
    if restored_layers:
        log(f"{restored_layers} layers were in 4 bits: their merged weights are not those of the base")
    return dataclasses.replace(restored, job=job), dtype, after


def _answers(layout: str, merge: bool, config: Config) -> Answers | None:
    """Return how the task answers, None where that is not needed and unknown. Raises ConfigError."""
    has_adapters = config.weights.adapt != "full"
    if not has_adapters and (merge or layout == "adapter"):
        what = f"{'MERGE=y' if merge else 'FORMAT=adapter'} is for a run with adapters, and all was trained"
        raise ConfigError(what, todo="leave it out")
    if has_adapters and merge == (layout == "adapter"):
        why = f"FORMAT={layout} has {'adapters alone' if merge else 'one weight for each layer'}"
        todo = "leave out one of them" if merge else "add MERGE=y, or write FORMAT=adapter"
        raise ConfigError(f"the run has adapters, and MERGE={'y' if merge else 'n'}", why=why, todo=todo)
    if layout == "huggingface":
        load_layout(config.model)
    try:
        return answers_of(config)
    except ConfigError:
        if layout in ("safetensors", "adapter"):  # of which weights alone are compared
            return None
        raise


@contextmanager
def _staged(directory: Path) -> Iterator[Path]:
    """Yield a folder, whose files replace those of an earlier export unless an exception is raised."""
    target = directory.resolve()
    # On the file system of the files, and where they may be written: the folder above may be neither.
    place = next(each for each in (target, *target.parents) if each.is_dir())
    with (
        os_errors(f"write to {directory}"),
        tempfile.TemporaryDirectory(prefix=".export-", dir=place) as folder,
    ):
        yield Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        written = {each.name: each for each in sorted(Path(folder).iterdir())}
        earlier = earlier_facts(target).get("files")
        names = earlier if isinstance(earlier, list) else []
        for file in target.iterdir():
            if file.name in names and file.name not in written and file.is_file():
                file.unlink()
        for name, file in written.items():
            file.replace(target / name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters, whose warnings are about their own code, and who print graphs that fail."""
    sink = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(sink), redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _samples(spec: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Generate samples: as they are given to an exported graph, and as in an ArrayPart."""
    seed, shape = key("export"), (SAMPLES, *exported_shape(spec))
    if isinstance(spec, ImageSpec):
        given: npt.NDArray[Any] = noise_bytes(seed, shape)
    elif hasattr(spec, "columns"):
        spread = uniform(seed, (len(spec.columns), SAMPLES), low=-2, high=2).astype(np.float64)
        pairs = [*zip(spec.columns, spread, strict=True)]
        # Numbers about the mean of each column; of its categories one after the other.
        cells = [np.arange(SAMPLES) % len(c.values) if c.values else c.mean + c.std * s for c, s in pairs]
        given = np.stack(cells, axis=1).astype(np.float64)
        texts = {
            column.name: [column.values[int(x)] if column.values else repr(float(x)) for x in own]
            for column, own in zip(spec.columns, given.T, strict=True)
        }
        return given, encoded(spec.columns, Table(Path("samples"), texts, ""), np.arange(SAMPLES))
    else:
        given = integers(seed, shape, below=spec.vocab_size - hasattr(spec, "pad"))
        if hasattr(spec, "pad"):
            given += given >= spec.pad
            given[1::2, -(shape[1] // 2) :] = spec.pad
    return given, given


@torch.no_grad()
def _own_outputs(restored: Restored, answers: Answers, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what the run answers in single precision, by the way that evaluation takes."""
    job, spec = restored.job, restored.data.dataset.spec
    configure_numerics("fp32", deterministic=job.config.deterministic)
    single = dataclasses.replace(job.plan, precision="fp32")
    job = dataclasses.replace(job, plan=single, forward=job.model)
    found: npt.NDArray[Any] = answers.postprocess(outputs_of(job, spec, stored), spec).cpu().numpy()
    return found


def _write_weights(
    model: nn.Module, job: Job, dataset: Dataset, layout: str, folder: Path
) -> dict[str, Tensor]:
    """Write the weights of `model`; return those to compare with what is read."""
    file = folder / "model.safetensors"
    if layout == "huggingface":
        from train.export_transformers import write_settings

        (own := load_layout(job.config.model)).save(model, str(file))
        settings, labels = own.configuration(model), labels_of(dataset)
        write_settings(folder, settings, labels=labels, config=job.config, dataset=dataset)
        return {}
    if layout == "adapter":
        from train import adapters

        return adapters.write(model, job.config, job.adapters or {}, folder)
    from safetensors.torch import save_file

    weights = {name: weight.clone() for name, weight in model.state_dict().items()}  # no two share memory
    save_file(weights, file, metadata={"format": "pt"})
    return weights


def _program(layout: str, spec: Any, folder: Path) -> str:
    """Return the lines that load the files in `folder`."""
    if layout != "huggingface":
        return LOADS[layout]
    from train.export_transformers import PROCESSOR, program_of

    return program_of(dataclasses.asdict(spec), has_processor=(folder / PROCESSOR).is_file())


def _difference_outside(
    folder: Path,
    layout: str,
    program: str,
    weights: dict[str, Tensor],
    outputs: npt.NDArray[Any] | None,
    spec: Any,
    log: Callable[[str], None],
) -> float | None:
    """Return the largest difference of what another process makes of the files; None for equal weights.

    Raises ToolkitError where it is too large, or they cannot be loaded.
    """
    if layout == "huggingface" and importlib.util.find_spec("transformers") is None:
        log("Not compared with the run: the package transformers is not installed")
        return None
    found = _loaded_outside(folder, program + (_WEIGHTS if weights else _OUTPUTS))
    if weights:
        own = {name: weight.float().numpy() for name, weight in weights.items()}
        if own.keys() != found.keys() or not all(np.array_equal(own[name], found[name]) for name in own):
            raise ToolkitError("the weights that were written differ from those of the run")
        return None
    assert outputs is not None
    # A model of language may have rows for more tokens than there are.
    pairs = [(each[..., : outputs.shape[-1]], outputs[: len(each)]) for each in found.values()]
    difference = max(float(np.abs(_comparable(a, spec) - _comparable(b, spec)).max()) for a, b in pairs)
    if not difference <= TOLERANCE:
        raise ToolkitError(
            f"the exported {layout} differs from the run by {difference:.1e}, more than {TOLERANCE:g}",
            why="it is not what was trained; nothing was kept",
        )
    return difference


def _comparable(answers: npt.NDArray[Any], spec: Any) -> npt.NDArray[np.float64]:
    """Return probabilities, or numbers in standard deviations."""
    if answers_in_logits(spec):
        return torch.from_numpy(answers).double().softmax(dim=-1).numpy()
    stds = [column.std for column in getattr(spec, "targets", ())]
    return answers.astype(np.float64) / (np.array(stds) if stds else 1.0)


def _loaded_outside(folder: Path, program: str) -> dict[str, npt.NDArray[Any]]:
    """Run `program` in an isolated process, which cannot import this project, and return its arrays."""
    command = [sys.executable, "-I", "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ToolkitError("the exported files cannot be loaded", why=lines[-1])
    file = folder / "found.npz"
    with np.load(file, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    file.unlink()
    return found

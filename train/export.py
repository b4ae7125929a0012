"""make export: a run's model in files for programs without this project, compared with the run first."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lib.config import Config
from lib.data.datasets.tabular.data import encoded
from lib.data.datasets.tabular.table_files import Table
from lib.data.loader import normalisation
from lib.data.types import Column, ImageSpec, TextSpec
from lib.devices.backend import configure_numerics
from lib.errors import ConfigError, ToolkitError, os_errors
from lib.nn.activation_checkpointing import configure_recomputation
from lib.nn.model_code import ModelCode, load_layout
from lib.rng import integers, key, noise_bytes, uniform
from train.export_card import LOADS, card, facts_of
from train.job import evaluated_weights
from train.predict import check_writable, outputs_of
from train.record import log
from train.stored_run import Restored, restore
from train.tasks.base import Answers, answers_of

FORMATS = {  # and the packages that each needs
    "safetensors": ("safetensors",),
    "pt2": (),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "huggingface": ("safetensors",),
}
TOLERANCE = 1e-4  # of probabilities, or of numbers in standard deviations of the target
SAMPLES = 8
_GRAPHS = ("pt2", "onnx")
_LARGEST_FILE = 1 << 30  # bytes of weights in an ONNX file; more are put beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written. difference: the largest from the run's own outputs; None: not compared."""

    directory: Path
    run: Path
    step: int
    difference: float | None


def export(
    name: str,
    *,
    root: Path,
    runs: Path,
    directory: Path,
    layout: str = "huggingface",
    best: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write the model of run `name` to `directory` in the format `layout`, one of FORMATS.

    The files are loaded by another process, which knows nothing of this project, and compared with the run;
    nothing is left of files that differ. Raises ConfigError for a format that is not possible, ToolkitError
    where the files differ from the run.
    """
    _check_request(layout, directory)
    check = partial(_check_run, layout)
    restored = restore(name, root=root, runs=runs, best=best, needs_data=False, check=check)
    return export_with(restored, directory=directory, layout=layout, log=log)


def export_with(
    restored: Restored, *, directory: Path, layout: str, log: Callable[[str], None] = lambda _: None
) -> Exported:
    """Write the model of a run that is restored already; see `export`."""
    _check_request(layout, directory)
    job, spec = restored.job, restored.data.dataset.spec
    answers = _check_run(layout, job.config)
    samples = None if answers is None else _samples(spec)
    with _staged(directory) as folder:
        with evaluated_weights(job):
            outputs = None if samples is None or answers is None else _own_outputs(restored, answers, samples)
            model = copy.deepcopy(job.model).to("cpu", memory_format=torch.contiguous_format).eval()
        with ModelCode(job.config.model, torchs=True), _quiet():
            if layout in _GRAPHS:
                assert samples is not None and answers is not None
                configure_recomputation(model, "none")
                _write_graph(Graph(model, spec, answers), samples, folder / f"model.{layout}")
            else:
                _write_weights(model, job.config, layout, folder)
        if samples is not None and outputs is not None:
            np.savez(folder / "check.npz", inputs=samples.given, outputs=outputs)
        difference = _difference_outside(folder, layout, model, outputs, spec, log)
        facts = facts_of(restored, layout=layout, difference=difference)
        (folder / "model.json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", "utf-8")
        (folder / "README.md").write_text(card(restored, facts), "utf-8")
    return Exported(directory=directory, run=restored.run.path, step=restored.step, difference=difference)


def command(name: str, *, root: Path, runs: Path, best: bool, directory: Path, layout: str) -> int:
    """Export a run and say what was compared."""
    done = export(name, root=root, runs=runs, best=best, directory=directory, layout=layout, log=log)
    compared = (
        "" if done.difference is None else f", at most {done.difference:.1e} from the run's own outputs"
    )
    log(f"{done.run}, step {done.step}: written to {directory}{compared}")
    return 0


def _check_request(layout: str, directory: Path) -> None:
    if layout not in FORMATS:
        raise ConfigError(f"FORMAT={layout} is not a format", todo=f"there are {', '.join(FORMATS)}")
    for package in FORMATS[layout]:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the package {package} is not installed",
                why=f"it is an extra: FORMAT={layout} needs it",
                todo=f"install it, for example with .venv/bin/pip install {' '.join(FORMATS[layout])}",
            )
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"DIRECTORY={directory} is a file", todo="name a folder")
    check_writable(directory / "model", "DIRECTORY")


def _check_run(layout: str, config: Config) -> Answers | None:
    """Return how the task answers, None where only weights are written of a task that does not."""
    if layout == "huggingface":
        load_layout(config.model)
    try:
        return answers_of(config)
    except ConfigError:
        if layout in _GRAPHS:
            raise
        return None


@contextmanager
def _staged(directory: Path) -> Iterator[Path]:
    """Yield a folder beside `directory`, whose files replace those there unless an exception is raised."""
    above = next(each for each in directory.absolute().parents if each.is_dir())
    temporary = tempfile.TemporaryDirectory(prefix=".export-", dir=above)
    with os_errors(f"write to {directory}"), temporary as folder:
        yield Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(folder).iterdir()):
            file.replace(directory / file.name)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about their own code
        yield


@dataclass(frozen=True, slots=True)
class Samples:
    """Generated samples. given: to the exported graph. stored: the same as in an ArrayPart."""

    given: npt.NDArray[Any]
    stored: npt.NDArray[Any]


def _samples(spec: Any) -> Samples:
    """Return SAMPLES samples of any content. Raises ConfigError for data that have no such graph."""
    seed, shape = key("export", spec.name), (SAMPLES, *spec.input_shape)
    if isinstance(spec, ImageSpec):
        pixels = noise_bytes(seed, shape)
        return Samples(pixels, pixels)
    if hasattr(spec, "columns"):
        return _table_samples(spec.columns, seed)
    if hasattr(spec, "vocab_size"):
        tokens = integers(seed, shape, below=spec.vocab_size - hasattr(spec, "pad"))
        if hasattr(spec, "pad"):
            tokens[1::2, -(shape[1] // 2) :] = spec.pad
        return Samples(tokens, tokens)
    raise ConfigError(f"samples of {spec.name} are not images, texts or rows of a table")


def _table_samples(columns: tuple[Column, ...], seed: int) -> Samples:
    """Numbers about the mean of each column, and its categories in turn."""
    spread = uniform(seed, (len(columns), SAMPLES), low=-2, high=2).astype(np.float64)
    given = np.stack(
        [
            np.arange(SAMPLES) % len(column.values) if column.values else column.mean + column.std * own
            for column, own in zip(columns, spread, strict=True)
        ],
        axis=1,
    ).astype(np.float64)
    texts = {
        column.name: [column.values[int(value)] if column.values else repr(float(value)) for value in own]
        for column, own in zip(columns, given.T, strict=True)
    }
    return Samples(given, encoded(columns, Table(Path("samples"), texts, ""), np.arange(SAMPLES)))


def _own_outputs(restored: Restored, answers: Answers, samples: Samples) -> npt.NDArray[Any]:
    """Return what the run answers in single precision, by the way that evaluation takes."""
    job, spec = restored.job, restored.data.dataset.spec
    configure_numerics("fp32", deterministic=job.config.deterministic)
    single = dataclasses.replace(job.plan, precision="fp32")
    job = dataclasses.replace(job, plan=single, forward=job.model)
    with torch.no_grad():
        found: npt.NDArray[Any] = (
            answers.postprocess(outputs_of(job, spec, samples.stored), spec).cpu().numpy()
        )
    return found


class Graph(nn.Module):
    """Preprocessing, model and answers in one: what pt2 and ONNX files have."""

    def __init__(self, model: nn.Module, spec: Any, answers: Answers) -> None:
        super().__init__()
        self.model, self._spec, self._postprocess = model, spec, answers.postprocess
        self.encoder: nn.Module = nn.Identity()
        if isinstance(spec, ImageSpec):
            self.encoder = _Pixels(spec)
        elif hasattr(spec, "columns"):
            self.encoder = _Row(spec.columns)

    def forward(self, inputs: Tensor) -> Tensor:
        """uint8 images (N, C, H, W), float64 rows (N, columns) or int64 tokens (N, T) -> answers (N, ...)."""
        return self._postprocess(self.model(self.encoder(inputs)), self._spec)


class _Pixels(nn.Module):
    def __init__(self, spec: ImageSpec) -> None:
        super().__init__()
        scale_C, offset_C = normalisation(spec)
        self.register_buffer("scale", scale_C[:, None, None])
        self.register_buffer("offset", offset_C[:, None, None])

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return images_NCHW.to(torch.float32) * self.scale + self.offset


class _Row(nn.Module):
    """Numbers in their units, nan for a missing one; categories by their number, any other for none."""

    def __init__(self, columns: tuple[Column, ...]) -> None:
        super().__init__()
        self._columns = columns

    def forward(self, rows_NF: Tensor) -> Tensor:
        parts = []
        for place, column in enumerate(self._columns):
            own_N1 = rows_NF[:, place : place + 1]
            if column.values:
                parts.append(own_N1 == torch.arange(len(column.values), dtype=rows_NF.dtype))
            else:
                scaled_N1 = (own_N1 - column.mean) / column.std
                parts.append(torch.where(scaled_N1.isnan(), 0.0, scaled_N1))
        return torch.cat([part.to(torch.float32) for part in parts], dim=1)


def _write_graph(graph: Graph, samples: Samples, file: Path) -> None:
    """Write the graph for any number of rows. Raises what torch raises where the model has none."""
    batch = {"inputs": {0: torch.export.Dim("batch")}}
    with torch.no_grad():
        program = torch.export.export(graph.eval(), (torch.from_numpy(samples.given),), dynamic_shapes=batch)
    if file.suffix == ".pt2":
        torch.export.save(program, file)
        return
    large = sum(weight.nbytes for weight in graph.state_dict().values()) > _LARGEST_FILE
    names = {"input_names": ["inputs"], "output_names": ["outputs"]}
    torch.onnx.export(program, (), file, dynamo=True, external_data=large, verbose=False, **names)


def _write_weights(model: nn.Module, config: Config, layout: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    if layout == "huggingface":
        own = load_layout(config.model)
        own.save(model, str(file))
        (folder / "config.json").write_text(json.dumps(own.configuration(model), indent=2) + "\n")
        return
    from safetensors.torch import save_file

    save_file(_weights(model), file, metadata={"format": "pt"})


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each weight and buffer, so that no two share memory."""
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def _difference_outside(
    folder: Path,
    layout: str,
    model: nn.Module,
    outputs: npt.NDArray[Any] | None,
    spec: Any,
    log: Callable[[str], None],
) -> float | None:
    """Return the largest difference of what another process makes of the files; 0 for equal weights.

    Raises ToolkitError where it is too large, or they cannot be loaded.
    """
    if layout == "safetensors":
        if _outside(folder, layout, _DIGEST).strip() != _digest(_weights(model)):
            raise ToolkitError("the weights that were written differ from those of the run")
        return None
    if layout == "huggingface" and importlib.util.find_spec("transformers") is None:
        log("Not compared with the run: the package transformers is not installed")
        return None
    assert outputs is not None
    _outside(folder, layout, _OUTPUTS)
    found = folder / "found.npz"
    with np.load(found) as arrays:
        pairs = [(arrays[name], outputs[: len(arrays[name])]) for name in arrays.files]
    found.unlink()
    difference = max(float(np.abs(_comparable(a, spec) - _comparable(b, spec)).max()) for a, b in pairs)
    if not difference <= TOLERANCE:
        raise ToolkitError(
            f"the exported {layout} differs from the run by {difference:.1e}, more than {TOLERANCE:g}",
            why="it is not what was trained; nothing was kept",
        )
    return difference


def _comparable(answers: npt.NDArray[Any], spec: Any) -> npt.NDArray[np.float64]:
    """Return probabilities, or numbers in standard deviations."""
    if isinstance(spec, TextSpec):  # logits
        return torch.from_numpy(answers).double().softmax(dim=-1).numpy()
    stds = [column.std for column in getattr(spec, "targets", ())]
    return answers.astype(np.float64) / (np.array(stds) if stds else 1.0)


# Run in the folder of the files, after LOADS.
_OUTPUTS = f"""
import numpy
inputs = numpy.load("check.npz")["inputs"]
numpy.savez("found.npz", *[predict(inputs[:rows]) for rows in ({SAMPLES}, 3, 1)])
"""
_DIGEST = """
import hashlib, torch
digest = hashlib.sha256()
for name in sorted(weights):
    digest.update(name.encode() + weights[name].reshape(-1).view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _outside(folder: Path, layout: str, then: str) -> str:
    """Run the commands of the model card, and `then`, in an isolated process; return what it prints."""
    command = [sys.executable, "-I", "-c", LOADS[layout] + then]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ToolkitError(f"the exported {layout} cannot be loaded", why=lines[-1])
    return done.stdout

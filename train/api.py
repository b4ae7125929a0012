"""The functions of `import anneal`.

Planning and training run in processes of their own: no signal handler, thread or device memory of theirs is
left in the caller's, which may be a notebook. What is imported here needs no torch until a model is loaded.
"""

from __future__ import annotations

import collections
import json
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib import kconf
from lib.config import config_from_values
from lib.errors import ConfigError, Suspended, ToolkitError, error_in
from lib.plugin_folders import ROOT, shortened
from lib.runs import metrics
from lib.runs.directory import RunDir

if TYPE_CHECKING:
    from torch import nn

    from lib.data.inputs import Inputs
    from train.predict import Predictions
    from train.stored_run import Restored

_LAST_LINES = 200  # that may have the error
_RUN = re.compile(r"(?:Run|Resuming) (/.*)\n")
_VARIABLE = re.compile(r"\b(RUN|INPUT|TOP|DIRECTORY|FORMAT|BEST)=")  # of make, for an argument here
_ARGUMENTS = {"INPUT": "inputs", "FORMAT": "layout"}  # that are not the same word in lower case
_STDIN = re.compile(r"; INPUT=- reads standard input.*")


@dataclass(frozen=True, slots=True, repr=False)
class Configuration:
    """A valid configuration: its values by symbol, and its text as in a .config."""

    values: Mapping[str, Any]
    text: str

    def __repr__(self) -> str:
        """Return model, data set and number of values, for a notebook shows what a cell ends in."""
        named = f"model={self.values['MODEL']!r}, dataset={self.values['DATASET']!r}"
        return f"Configuration({named}, {len(self.values)} values)"


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The decisions for this machine: values as make plan JSON=1 prints them, and a text with reasons."""

    values: Mapping[str, Any]
    text: str

    def __repr__(self) -> str:
        """Return what a step is; `text` has all."""
        shown = {name: self.values["plan"][name] for name in ("effective_batch", "micro_batch", "precision")}
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory."""

    path: Path

    @property
    def state(self) -> str:
        """The state of the run: done, preempted (stopped with a checkpoint), failed or running."""
        return str(RunDir.open(self.path).status().state)

    def metrics(self, kind: str = "eval") -> list[dict[str, Any]]:
        """Return the rows of its metrics of a kind: eval, train or speed. Raises ToolkitError without any."""
        if kind not in metrics.KINDS:
            known = ", ".join(metrics.KINDS)
            raise ConfigError(f"kind={kind!r} is no kind of rows", todo=f"there are {known}")
        return [row for row in metrics.read(RunDir.open(self.path).metrics) if row["kind"] == kind]


@dataclass(frozen=True, slots=True)
class Model:
    """A trained model, and the step of its checkpoint.

    module: in evaluation mode, with averaged weights where there are some; on the device of the run's plan.
    spec:   of its data: shapes, classes and normalisation.
    """

    run: Run
    module: nn.Module
    spec: Any
    step: int
    _restored: Restored = field(repr=False)


def configure(base: str | Path, **options: bool | int | float | str) -> Configuration:
    """Resolve `base` with `options` such as NUM_EPOCHS=3 on top; writes nothing.

    base: NAME or NAME+FRAGMENT as in make defconfig-NAME, or a file: a Path, or a text with a slash.
    What make notes, such as a value of `base` that has no effect any more, is a warning. Raises ConfigError
    for an option that does not exist, has no effect, or is given twice.
    """
    from lib.kconf.diagnostics import in_notation
    from lib.sweeps.runner import compose_text, placed

    if twice := [name for name in options if f"CONFIG_{name}" in options]:
        raise ConfigError(f"{twice[0]} is given twice", why=f"also as CONFIG_{twice[0]}")
    _check_places(options)
    words = {True: "y", False: "n"}
    given = {
        f"CONFIG_{name.removeprefix('CONFIG_')}": words[value] if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }
    try:
        if isinstance(base, Path) or "/" in base:
            resolved = kconf.load(root=ROOT, config_file=Path(base), overrides=given)
        else:
            resolved = kconf.load_written(compose_text(ROOT, base), root=ROOT, overrides=given)
        config_from_values(resolved.values)
    except ConfigError as error:  # a traceback shows no findings
        found = [one.removeprefix("command line: ") for one in error.findings or [str(error)]]
        lines = [in_notation(one, equals="=", yes="True", no="False") for one in found]
        raise ConfigError("; ".join(lines), findings=lines if error.findings else ()) from error
    for notice in resolved.notices:
        text = in_notation(placed(notice, str(base)), equals="=", yes="True", no="False")
        warnings.warn(text, stacklevel=2)
    return Configuration(resolved.values, resolved.text)


def _check_places(options: Mapping[str, object]) -> None:
    """Raise ConfigError for a relative path to what is in the program's folder: it starts at the tree."""
    for name, value in options.items():
        is_path = name.endswith("_DIR") or name.removeprefix("CONFIG_") == "INITIAL_WEIGHTS"
        if not is_path or not value or Path(str(value)).is_absolute():
            continue
        here, there = Path.cwd() / str(value), ROOT / str(value)
        if here.exists() and not (there.exists() and there.samefile(here)):
            what = f"{name}={str(value)!r} is in {Path.cwd()}"
            why = f"a relative path starts at the source tree, {ROOT}"
            todo = f"give a whole path, such as {name}={str(shortened(here))!r}"
            raise ConfigError(what, why=why, todo=todo)


@contextmanager
def _in_words_of_python() -> Iterator[None]:
    """Name arguments as they are called here, in errors that name variables of make."""

    def name(found: re.Match[str]) -> str:
        return f"{_ARGUMENTS.get(found[1], found[1].lower())}="

    try:
        yield
    except ToolkitError as error:
        texts = error.what, error.why, _STDIN.sub("", error.todo).replace("BEST=1", "BEST=True")
        error.what, error.why, error.todo = (_VARIABLE.sub(name, text) for text in texts)
        error.args = (error.one_line(),)
        raise


def plan(configuration: Configuration) -> Plan:
    """Decide batch, precision and parallelism for this machine, in another process. Raises ToolkitError."""
    from lib.plan import types
    from lib.plan.show import plain_text

    lines = list[str]()
    _run(configuration, "plan", "--json", on_line=lines.append)
    values = json.loads("".join(lines[lines.index("{\n") : lines.index("}\n") + 1]))
    return Plan(values, plain_text(types.Plan.from_json(values["plan"])))


def fit(configuration: Configuration, *, runs: str | Path = "runs") -> Run:
    """Train in another process, print what it prints, and return the run, which is below the folder `runs`.

    A stopped run of the same configuration is resumed. KeyboardInterrupt stops it with a checkpoint, a
    second one at once. Raises ConfigError if it cannot begin, ToolkitError if it fails.
    """
    paths = list[Path]()

    def on_line(line: str) -> None:
        print(line, end="", flush=True)
        if found := _RUN.fullmatch(line):
            paths.append(Path(found[1]))

    _run(configuration, "--runs", str(Path(runs).absolute()), "train", on_line=on_line)
    return Run(paths[0])


def load(run: Run | str | Path, *, best: bool = False, runs: str | Path = "runs") -> Model:
    """Load the latest or the best checkpoint of a run: its directory, or its name below the folder `runs`.

    Raises ToolkitError if there is none.
    """
    import copy

    from train.job import evaluated_weights
    from train.stored_run import restore

    name = str(run.path if isinstance(run, Run) else run)
    with _in_words_of_python():
        restored = restore(name, root=ROOT, runs=Path(runs), best=best, needs_data=False)
    with evaluated_weights(restored.job):
        weights = copy.deepcopy(restored.job.model).float().eval()
    return Model(Run(restored.run.path), weights, restored.data.dataset.spec, restored.step, restored)


def predict(model: Model, inputs: Inputs, *, top: int = 0) -> Predictions:
    """Predict files, folders, columns by name (a table, or texts), or an array of samples as they are stored.

    top: keep the probabilities of this many classes; 0: of each. What make predict notes is a warning here.
    Raises ConfigError for inputs that do not fit.
    """
    from train import predict

    with _in_words_of_python():
        return predict.predict(model._restored, inputs, top=top, log=warnings.warn)


def export(model: Model, directory: str | Path, *, layout: str) -> float | None:
    """Write the model to a folder as make export FORMAT=`layout` does, and compare what was written.

    Returns the largest difference of outputs, None where only weights were compared. Raises ConfigError for a
    layout that is not possible, ToolkitError where the files differ from the run.
    """
    from train import export

    with _in_words_of_python():
        return export.export(model._restored, directory=Path(directory), layout=layout)


def _run(configuration: Configuration, *arguments: str, on_line: Callable[[str], object]) -> None:
    """Run `python -m train` on a configuration, and pass on each line that it prints.

    It is in a session of its own, so that what interrupts the caller does not reach it twice. Returns if it
    succeeds, or stops with a checkpoint.
    """
    if not isinstance(configuration, Configuration):
        todo = f"give anneal.configure({configuration!r})"
        raise ConfigError(f"{type(configuration).__name__} is no configuration", todo=todo)
    last, interrupts = collections.deque[str](maxlen=_LAST_LINES), 0
    with tempfile.NamedTemporaryFile("w", prefix="anneal-", encoding="utf-8") as file:
        file.write(configuration.text)
        file.flush()
        command = ["env", "-u", "KCONFIG_MAKE_VARIABLES", "-u", "PYTHONSAFEPATH"]
        command += [
            f"ANNEAL_CALLER={Path.cwd()}",
            f"KCONFIG_CONFIG={file.name}",
            sys.executable,
            "-u",
            "-m",
            "train",
            *arguments,
        ]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            while process.returncode is None:
                try:
                    for line in process.stdout:
                        last.append(line)
                        on_line(line)
                    process.wait()
                except KeyboardInterrupt:
                    interrupts += 1
                    process.send_signal(signal.SIGINT)
                    if interrupts > 1:
                        raise
    if process.returncode in (0, Suspended.exit_code):
        return
    if interrupts:
        raise KeyboardInterrupt
    kind = ConfigError if process.returncode == ConfigError.exit_code else ToolkitError
    raise kind(error_in("".join(last)) or f"the process ended with status {process.returncode}")

"""Loading and building of models/, with one-line errors for faults in their code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lib import plugin_folders, plugins
from lib.devices.backend import is_out_of_memory
from lib.devices.probe import git_state
from lib.errors import ConfigError, ToolkitError
from lib.kconf.values import Value
from lib.runs.identity import code_digest, folders_of

_MISTAKES = AttributeError, NameError, SyntaxError, ImportError  # in code, whatever it is given
_META = re.compile(r"\bmeta\b")
MAX_CHARACTERS = 400  # of a model's exception in messages; those of compilers fill pages


class ModelModule(Protocol):
    """Required definitions of models/<name>/model.py."""

    # HEAD: str may name the module that CONFIG_RESET_HEAD replaces.
    # initialise_from_samples(model, first_samples) may return weights by name, computed from the first
    # training samples (N, ...) as the model gets them.
    TASK: str  # name of a folder of train/tasks
    Options: type[Any]  # a frozen dataclass; its fields are the model's own symbols
    build: Callable[[Any, Any], nn.Module]  # takes Options and the spec of the data


def code_facts(model: str, task: str, dataset: str) -> dict[str, dict[str, Any]]:
    """Return folder and hash of the code of a run's plug-ins and of EXTERNAL=, with the git state of that."""
    folders = folders_of(model, task, dataset)
    git: dict[str, Any] = {}
    if base := plugin_folders.external():
        folders["EXTERNAL"] = base
        git = dict(zip(("git_commit", "git_dirty"), git_state(base, anywhere=True), strict=True))
    facts: dict[str, dict[str, Any]] = {}
    for name, folder in folders.items():
        facts[name] = {"folder": plugin_folders.shown(folder), "sha256": code_digest(folder)}
    return facts | ({"EXTERNAL": facts["EXTERNAL"] | git} if git else {})


def load_model(name: str) -> ModelModule:
    """Import models/`name`/model.py. Raises ConfigError if it is missing or invalid."""
    with ModelCode(name):
        module = plugins.MODELS.load(name)
    plugins.check_task(name, module.TASK)
    if plugins.task_of(name) != module.TASK:
        what = f'{plugins.MODELS.place(name)}/model.py has no line TASK = "{module.TASK}"'
        raise ConfigError(what, why="it is read without importing the file")
    return cast(ModelModule, module)


@dataclass(frozen=True, slots=True)
class PluginCode(AbstractContextManager[None], ContextDecorator):
    """Context that turns exceptions from the code of plug-in `name` into one line with its file and line.

    loop_frees_memory: what calls it reports that memory ran out, or tries again with less.
    """

    kind: ClassVar[plugins.Kind]
    loop_frees_memory: ClassVar[bool] = True
    name: str

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, ToolkitError):
            return
        if self.loop_frees_memory and is_out_of_memory(error):
            return
        place = place_in_code(error, root=plugin_folders.ROOT)
        # The call itself fails where a function has other parameters.
        if not place and isinstance(error, TypeError) and trace is not None and trace.tb_next is None:
            place = f"{self.kind.place(self.name)}/{self.kind.file}.py"
        if (reported := self.reported(error, place)) is not None:
            raise reported from error

    def reported(self, error: Exception, place: str) -> ToolkitError | None:
        """Return what is raised for `error` of code at `place`, "" if unknown; None for no fault of it."""
        return ConfigError(with_place(error, place)) if place else None


@dataclass(frozen=True, slots=True)
class ModelCode(PluginCode):
    """Context for the code of models/`name`.

    error:  class of the resulting error, but for mistakes in the code itself.
    torchs: also convert RuntimeError and ValueError from elsewhere, such as from a backward pass, and all
            exceptions of packages.
    """

    kind = plugins.MODELS
    error: Callable[[str], ToolkitError] = ConfigError
    torchs: bool = False

    def reported(self, error: Exception, place: str) -> ToolkitError | None:
        """Return one of the class `error` for what may depend on the data, else a ConfigError."""
        theirs = isinstance(error, RuntimeError | ValueError) or _is_raised_outside(error)
        if not place and self.torchs and theirs:
            place = plugins.MODELS.place(self.name)
        if not place:
            return None
        return (ConfigError if isinstance(error, _MISTAKES) else self.error)(with_place(error, place))


@dataclass(frozen=True, slots=True)
class TaskCode(PluginCode):
    """Context for the code of train/tasks/`name`."""

    kind = plugins.TASKS


def fault_of_plugin(error: Exception) -> ToolkitError | None:
    """Return what is reported for an `error` that no context has met; None where it is no plug-in's.

    What code of the toolkit raises is a fault of the plug-in that called it only if that is of EXTERNAL=.
    Errors of the system are reported with their file wherever they come from.
    """
    if isinstance(error, ToolkitError | OSError) or is_out_of_memory(error):
        return None
    place, root = place_in_code(error, root=plugin_folders.ROOT), plugin_folders.ROOT
    names = [each.filename for each in traceback.extract_tb(error.__traceback__)]
    rooms = [root / room for room in ("lib", "models", "train", "scripts")]
    own = [name for name in names if any(map(Path(name).is_relative_to, rooms))]
    base = plugin_folders.external()
    is_external = base is not None and (root / place).is_relative_to(base)
    is_innermost = bool(own) and own[-1].removeprefix(f"{root}/") == place.rpartition(":")[0]
    return ToolkitError(with_place(error, place)) if place and (is_external or is_innermost) else None


def with_place(error: Exception, place: str) -> str:
    """Return `error`, of code at `place`, as one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    reason = " ".join(text.split())[:MAX_CHARACTERS]
    if isinstance(error, AttributeError) and is_dataclass(error.obj):  # of the data, or a batch
        reason += f"; it has {', '.join(field.name for field in fields(error.obj))}"
    if "device" in reason and _META.search(reason):  # by which training is traced
        reason = reason.rstrip(".!") + "; create tensors on the device of the input, by device=x.device"
    if type(error).__name__ == "DataDependentOutputException" or "Tensor.item()" in reason:
        reason += "; training is traced without values, so its code reads none (item, if, assert, print)"
    return f"{place}: {type(error).__name__}{reason and ': '}{reason}"


def _is_raised_outside(error: Exception) -> bool:
    """Return True if the code that raised is a package's."""
    frames, rooms = traceback.extract_tb(error.__traceback__), ("lib", "models", "train", "scripts")
    return bool(frames) and not any(
        Path(frames[-1].filename).is_relative_to(plugin_folders.ROOT / room) for room in rooms
    )


def place_in_code(error: Exception, *, root: Path) -> str:
    """Return file and line of `error` or of the call that led to it, in a plug-in; "" if there is none.

    Plug-ins are below `root` or in EXTERNAL=. Only for a mistake is it a task that calls a module: the module
    is the model, whose code may be a package's.
    """
    frames = [(each.filename, each.lineno, each.name) for each in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((error.filename or "", error.lineno, ""))
    tasks, folders = _folders(plugins.TASKS, root), [root / "models", *_folders(plugins.DATASETS, root)]
    folders += [base] if (base := plugin_folders.external()) else []
    in_module = False
    for filename, line, function in reversed(frames):
        in_module |= function == "_call_impl" and not isinstance(error, _MISTAKES)
        if any(map(Path(filename).is_relative_to, tasks)):
            is_found = not in_module
        else:
            is_found = any(map(Path(filename).is_relative_to, folders))
        if is_found:
            return f"{filename}:{line}".removeprefix(f"{root}/")
    return ""


def _folders(kind: plugins.Kind, root: Path) -> list[Path]:
    """Return the folders of the plug-ins of `kind`, without what they share."""
    homes = [root / kind.package.replace(".", "/")]
    homes += [base / kind.external] if (base := plugin_folders.external()) else []
    return [path for home in homes if home.is_dir() for path in home.iterdir() if path.is_dir()]


class Layout(Protocol):
    """Required definitions of models/<name>/huggingface.py."""

    require_package: Callable[[], Any]  # raises ConfigError if it is not installed
    save: Callable[[Any, str], None]  # of the model and the path of a safetensors file
    from_huggingface: Callable[[Any, Mapping[str, torch.Tensor]], None]
    configuration: Callable[[Any], dict[str, Any]]  # of the model: the contents of config.json


def load_layout(name: str) -> Layout:
    """Import models/`name`/huggingface.py. Raises ConfigError if there is none."""
    if not (plugins.MODELS.home(name) / "huggingface.py").is_file():
        what = f"the weights of {name} have no layout in Hugging Face transformers"
        raise ConfigError(what, todo="FORMAT=onnx, pt2 or safetensors exports them")
    with ModelCode(name):
        return cast(Layout, plugins.MODELS.module(name, "huggingface"))


def check_tokenizer(
    name: str, options: Mapping[str, Value], tokenizer: str | None, folder: str | None
) -> None:
    """Raise ConfigError where model `name` has weights for other tokens than texts will become.

    It tells by a function `check_tokenizer(options, tokenizer, folder)`, if it has one. tokenizer:
    CONFIG_TOKENIZER, None for images and tokens that are ready-made. folder: CONFIG_TOKENIZER_DIR.
    """
    check = getattr(load_model(name), "check_tokenizer", None)
    if check is not None:
        with ModelCode(name):
            check(plugins.MODELS.options(name, options), tokenizer, folder)


def build_model(name: str, options: Mapping[str, Value], spec: Any, *, seed: int) -> nn.Module:
    """Build model `name` with initial weights that are a function of `seed` alone.

    options: values of the model's own symbols without their prefix, lower case. Weights are drawn by the
    CPU's generator, whose state is restored, on torch's default device; build on the CPU and move the model,
    so that all devices start from equal weights. Raises ConfigError if `options` are not those that the
    model declares, or its code fails.
    """
    module = load_model(name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        with ModelCode(name):
            model = module.build(plugins.MODELS.options(name, options), spec)
    if not isinstance(model, nn.Module):
        returned = f"build returns {type(model).__name__}, which is not a torch.nn.Module"
        raise ConfigError(f"{plugins.MODELS.place(name)}/model.py: {returned}")
    lazy = next((key for key, weight in model.state_dict(keep_vars=True).items() if is_lazy(weight)), None)
    if lazy is not None:
        raise ConfigError(
            f"{plugins.MODELS.place(name)}/model.py: the shape of {lazy} is left open",
            todo="use no lazy modules of torch",
        )
    return model


def has_stock_layers(model: nn.Module) -> bool:
    """Return True if `model` has dropout of torch, or modules of a package beside torch."""
    kinds = {type(module) for module in model.modules()}
    return any(issubclass(kind, nn.modules.dropout._DropoutNd) for kind in kinds) or any(
        kind.__module__.partition(".")[0] not in ("torch", "lib", "models") for kind in kinds
    )

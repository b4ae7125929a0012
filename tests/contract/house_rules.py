"""The rules of the house as functions of one module's syntax tree; test_house.py applies and tries them.

A rule takes a `Module` and yields one line for each breach.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Packages in the order of their imports: each may import itself and those before it in this list, never a
# later one. The longest prefix decides. docs/architecture.md has the same table.
ROOMS = (
    ("lib.errors", "lib.atomic", "lib.units", "lib.plugin_folders", "lib.plugins"),
    ("lib.kconf",),
    ("lib.config",),
    ("lib.plan",),
    ("lib.rng", "lib.runs"),
    ("lib.reports",),
    ("lib.distributed",),
    ("lib.devices",),
    ("lib.memory", "lib.hyperparams", "lib.tiers"),
    ("lib.nn", "lib.optim"),
    ("lib.data",),
    ("lib.sweeps",),
    ("lib.scaling",),
    ("models",),
    ("train",),
    ("scripts",),
    ("anneal",),
)
LEVELS = {name: number for number, names in enumerate(ROOMS) for name in names}
HIGHEST_LIGHT = LEVELS["lib.plan"]
HEAVY = {"torch", "numpy", "matplotlib"}
BACKEND_SEAM = ("lib/devices/backend.py", "lib/devices/base.py", "lib/devices/xla.py", "lib/devices/tpu.py")
READS_ENVIRONMENT = (
    *(
        "anneal/_tree.py",
        "lib/__init__.py",
        "lib/plugin_folders.py",
        "lib/kconf/",
        "lib/devices/backend.py",
        "lib/devices/base.py",
        "lib/devices/host.py",
        "lib/distributed/launcher.py",
        "lib/devices/tpu.py",
    ),
)
RUN_DIRECTORY_NAMES = {
    "metrics.jsonl",
    "status.json",
    "plan.json",
    "hardware.json",
    "env.json",
    "log.txt",
}
BACKEND_ONLY_IMPORTS = {"torch_xla", "torch_tpu"}
CONFIG_NAMES = {"config", "cfg", "conf", "requested"}
OPTION_GROUPS = {
    "compilation",
    "optim",
    "lr_schedule",
    "checkpoints",
    "launch",
    "weights",
    "sinks",
    "evaluation",
    "augmentation",
}  # nested in Config
CLOSED_TO_MODELS = {
    "lib.config",
    "lib.kconf",
    "lib.plan",
    "lib.devices",
    "lib.devices.probe",
    "lib.runs.directory",
    "os",
    "pathlib",
    "sys",
}
# Names of files that say what they are only with the room.
_COMMON = {"__init__.py", "base.py", "types.py", "command.py", "remote.py", "opening.py"}
_PLUG_IN = re.compile(r"lib/data/datasets/\w+/|train/tasks/\w+/")
DEVICE_NAMES = re.compile(r"(cuda|cpu|mps|xla|tpu)(:\d+)?")
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(home|root|tmp|work|mnt|Users)/\w")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


@dataclass(frozen=True)
class Module:
    """One Python file: its path from the root of the tree, and its text."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of `tree`."""
        return tuple(ast.walk(self.tree))

    @property
    def name(self) -> str:
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_under(root: Path, *packages: str) -> list[Module]:
    files = (file for package in packages for file in sorted((root / package).rglob("*.py")))
    return [_module(root, file) for file in files]


@functools.cache
def _module(root: Path, file: Path) -> Module:
    """It is parsed once for the rules of all tests."""
    return Module(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))


def level(name: str) -> int | None:
    """The place of a module in the order of imports; None for one that is not ours."""
    while name:
        if name in LEVELS:
            return LEVELS[name]
        name = name.rpartition(".")[0]
    return None


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module imports, wherever it does so."""
    package = module.name if module.path.endswith("__init__.py") else module.name.rpartition(".")[0]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            # `from lib import kconf` imports a module, `from lib.kconf import load` a name: both fit.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def cycles(modules: Sequence[Module]) -> list[list[str]]:
    """Modules that import each other, at the top or in a function; each cycle in order of names."""
    names = {module.name for module in modules}
    wanted = {
        module.name: {
            name if name in names else name.rpartition(".")[0]
            for _, name in imports(module)
            if (name in names or name.rpartition(".")[0] in names)
        }
        - {module.name}
        for module in modules
    }
    reached = {name: _reached(name, wanted) for name in wanted}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in wanted
        if name in reached[name]
    }
    return sorted(map(list, found))


def _reached(name: str, wanted: Mapping[str, set[str]]) -> set[str]:
    """All that `name` imports, and what that imports."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for other in wanted.get(waiting.pop(), set()) - found:
            found.add(other)
            waiting.append(other)
    return found


def repeated_names(paths: Sequence[str]) -> list[str]:
    """Files of one package tree that have the same name, but for those that every room may have."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        if not _PLUG_IN.match(path):
            by_name.setdefault(PurePosixPath(path).name, []).append(path)
    return sorted(
        path for name, same in by_name.items() if len(same) > 1 and name not in _COMMON for path in same
    )


def layering(module: Module) -> Iterator[str]:
    own = level(module.name)
    for line, name in imports(module):
        other = level(name)
        if own is not None and other is not None and other > own:
            yield f"{module.path}:{line}: imports {name}, a later package (ROOMS)"


def light_imports(module: Module) -> Iterator[str]:
    own = level(module.name)
    if own is None or own > HIGHEST_LIGHT:
        return
    for line, name in imports(module):
        if name.split(".")[0] in HEAVY:
            yield f"{module.path}:{line}: a light module imports {name}"


def environment(module: Module) -> Iterator[str]:
    if module.path.startswith(READS_ENVIRONMENT):
        return
    wanted = {"environ", "environb", "getenv", "putenv"}
    for node in module.nodes:
        read = isinstance(node, ast.Attribute) and node.attr in wanted and dotted(node.value) == "os"
        taken = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in wanted for alias in node.names)
        )
        if read or taken:
            yield f"{module.path}:{node.lineno}: touches the environment"  # type: ignore[attr-defined]


def run_directory_names(module: Module) -> Iterator[str]:
    if module.path == "lib/runs/directory.py":
        return
    for line, text in string_constants(module):
        if PurePosixPath(text).name in RUN_DIRECTORY_NAMES and " " not in text:
            yield f"{module.path}:{line}: {text!r} is for lib/runs/directory.py to know"


def backend_seam(module: Module) -> Iterator[str]:
    if module.path in BACKEND_SEAM:
        return
    for line, name in imports(module):
        if name.split(".")[0] in BACKEND_ONLY_IMPORTS:
            yield f"{module.path}:{line}: imports {name}; only lib/devices/xla.py and lib/devices/tpu.py may"
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield f"{module.path}:{node.lineno}: calls .cuda(); only lib/devices may"
    for line, text in string_constants(module):
        if text == "nccl":
            yield f"{module.path}:{line}: names nccl; only lib/devices may"


def no_fallback_values(module: Module) -> Iterator[str]:
    if module.path == "lib/hyperparams.py":
        return
    for node in module.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
            continue
        guesses = (node.func.id == "getattr" and len(node.args) == 3) or node.func.id == "hasattr"
        if guesses and dotted(node.args[0]).rpartition(".")[2] in CONFIG_NAMES:
            yield f"{module.path}:{node.lineno}: asks a configuration for a field that may be absent"


def no_broad_except(module: Module) -> Iterator[str]:
    broad = {"Exception", "BaseException"}
    for node in module.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            passes_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if not passes_on and any(kind is None or dotted(kind) in broad for kind in caught):
                yield f"{module.path}:{node.lineno}: swallows every exception"
        elif isinstance(node, ast.Call):
            suppressed = node.args if dotted(node.func) in {"suppress", "contextlib.suppress"} else []
            if any(dotted(kind) in broad for kind in suppressed):
                yield f"{module.path}:{node.lineno}: swallows every exception"


def models_know_tensors_only(module: Module) -> Iterator[str]:
    if not module.path.startswith("models/"):
        return
    for line, name in imports(module):
        if any(name == closed or name.startswith(closed + ".") for closed in CLOSED_TO_MODELS):
            yield f"{module.path}:{line}: a model imports {name}"
    for node in module.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) in {"print", "open"}:
            yield f"{module.path}:{node.lineno}: a model calls {dotted(node.func)}()"
    for line, text in string_constants(module):
        if DEVICE_NAMES.fullmatch(text):
            yield f"{module.path}:{line}: a model names the device {text!r}"


def modules_by_their_own_name(module: Module) -> Iterator[str]:
    """`import anneal` loads the tree under other names, which a text does not follow."""
    if not module.path.startswith(("lib/", "models/", "train/")):
        return
    for node in module.nodes:
        texts: Sequence[ast.AST] = ()
        function = dotted(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and function.endswith(
            ("import_module", "__import__", "sys.modules.get")
        ):
            texts = node.args[:1]
        elif isinstance(node, ast.Subscript) and dotted(node.value) == "sys.modules":
            texts = [node.slice]
        for text in texts:
            first = text.values[0] if isinstance(text, ast.JoinedStr) and text.values else text
            name = first.value if isinstance(first, ast.Constant) else ""
            if str(name).partition(".")[0] in {"lib", "models", "scripts", "train"}:
                yield f"{module.path}:{node.lineno}: names a module of the tree by a text"  # type: ignore[attr-defined]


def nothing_of_a_machine(module: Module) -> Iterator[str]:
    for line, text in enumerate(module.text.splitlines(), start=1):
        if MACHINE_PATH.search(text):
            yield f"{module.path}:{line}: a path of one machine"


def nothing_unfinished(module: Module) -> Iterator[str]:
    for line, text in enumerate(module.text.splitlines(), start=1):
        if UNFINISHED.search(text):
            yield f"{module.path}:{line}: unfinished"


def function_sizes(module: Module) -> dict[str, int]:
    """Lines of each function of a module, by path::qualified name."""
    sizes: dict[str, int] = {}

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}" if outer else child.name
                if not isinstance(child, ast.ClassDef):
                    sizes[f"{module.path}::{name}"] = (child.end_lineno or child.lineno) - child.lineno + 1
            visit(child, name)

    visit(module.tree, "")
    return sizes


def config_reads(module: Module) -> set[str]:
    """Attributes that a module reads from an object that is named as a configuration is."""
    return {
        node.attr
        for node in module.nodes
        if isinstance(node, ast.Attribute)
        and dotted(node.value).rpartition(".")[2] in CONFIG_NAMES | OPTION_GROUPS
    }


def own_reads(module: Module) -> dict[str, set[str]]:
    """For each method of a class, the attributes of self that it reads."""
    found: dict[str, set[str]] = {}
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    attributes = (part for part in ast.walk(method) if isinstance(part, ast.Attribute))
                    found[method.name] = {part.attr for part in attributes if dotted(part.value) == "self"}
    return found


def fields_of(module: Module, *, class_name: str) -> set[str]:
    """Annotated names in the body of a class."""
    return {
        statement.target.id
        for node in module.nodes
        if isinstance(node, ast.ClassDef) and node.name == class_name
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def string_constants(module: Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is not a docstring or another bare expression."""
    bare = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value


def dotted(node: ast.AST | None) -> str:
    """The dotted name that an expression is, "" if it is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


MODULE_RULES = (
    layering,
    light_imports,
    environment,
    run_directory_names,
    backend_seam,
    no_fallback_values,
    no_broad_except,
    models_know_tensors_only,
    modules_by_their_own_name,
    nothing_of_a_machine,
    nothing_unfinished,
)

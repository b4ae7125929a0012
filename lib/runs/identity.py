"""Run identity: 8 hexadecimal digits in a run's name, a hash of what is trained; and hashes of its code.

It finds an interrupted run to resume, and the runs that a sweep has trained already. Until 0.1.0 it hashed
every symbol of the tree, those of other models too; runs with such names are still recognized by their
stored values.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib import plugin_folders, plugins
from lib.errors import ToolkitError, os_errors
from lib.kconf import Resolved, Value, values_from_json
from lib.plugin_folders import ROOT
from lib.runs.directory import RunDir

if TYPE_CHECKING:
    from lib.runs.weight_files import WeightFiles

# Symbols that change no number of a training run: its launch, data loading, logging and checkpoints.
_LAUNCH = ("NUM_DEVICES", "DIST_NNODES", "DIST_ENDPOINT", "DIST_MAX_RESTARTS")
_WEIGHTS = "INITIAL_WEIGHTS"
_EXCLUDED = {
    *_LAUNCH,
    *("DIST_STAGES", "DIST_NETWORK_GBIT"),
    *("TABLE_SCALE", "DATA_DOWNLOAD", "DATA_PLACEMENT", "NUM_WORKERS", "PREFETCH", "AUGMENT_AHEAD"),
    *("OOM_RETRY", "LOG_INTERVAL_STEPS", "LOG_SECONDS", "CHECKPOINT_INTERVAL_STEPS", "CHECKPOINT_SECONDS"),
    *("CHECKPOINT_ASYNC", "CHECKPOINT_ASYNC_MB", "CHECKPOINT_FORMAT", "CHECKPOINT_URL", "KEEP_LAST"),
    *("KEEP_BEST", "RESUME", "WEIGHTS_DIR"),
}
_GROUPS = ("SLURM_", "SINK_")
_RELATIVE = re.compile(rb"\bfrom\s+\.")
# What is hashed in place of the value: which strategy trains does not matter, as for AUTO.
_HASHED_AS: Mapping[str, Value] = {"DIST_STRATEGY": "auto"}
# Directories of which some files are hashed, and not where they are.
DIRECTORIES = {
    "HUGGINGFACE_DIR": ("config.json",),  # and weights
    "TOKENIZER_DIR": ("tokenizer*", "vocab*", "merges*", "*_tokens*.json", "chat_template*"),
}
SOURCE = "source.json"  # beside what make fetch has downloaded: repository, commit, license, sha256 by file
_SOURCE_KEYS = ("repository", "commit", "license")
EXPORTED = "model.json"  # of make export, which tells the same of the base
_EXPORTED_KEYS = ("base_model", "base_commit", "license")
_END_BYTES = 1 << 16  # at each end of a file of weights, which differ between two trainings
# Symbol prefixes that identities left out until 0.1.0, when they hashed every symbol of the tree.
_FORMERLY_EXCLUDED = (*_LAUNCH, "CHECKPOINT_URL", *_GROUPS)


def identity(in_effect: Mapping[str, Value]) -> str:
    """Return 8 hexadecimal digits that are equal for equal training, however it was configured.

    in_effect: of a `lib.kconf.Resolved`, so that symbols of other models or data sets, and new options at
    their neutral value, do not matter. What may change when a run resumes is left out. Initial weights count
    by their content, not their path; by the path where they cannot be read.
    """
    try:
        content = initial_digest(in_effect)
    except ToolkitError:  # training says so; here another machine's files may be meant
        content = None
    return _digest_with(hashed_values(in_effect), content)


def initial_digest(in_effect: Mapping[str, Value]) -> str | None:
    """Return the SHA-256 of the initial weights; None for random ones. Raises ToolkitError."""
    return None if (found := _initial(in_effect)) is None else found.digest(cache=ROOT / "data")


def _initial(in_effect: Mapping[str, Value]) -> WeightFiles | None:
    if not in_effect.get(_WEIGHTS):
        return None
    from lib.runs.weight_files import find_weights  # most runs do without it

    folders = [text for name in ("WEIGHTS_DIR", "DATA_DIR") if isinstance(text := in_effect.get(name), str)]
    return find_weights(str(in_effect[_WEIGHTS]), root=ROOT, folders=folders)


def weight_facts(in_effect: Mapping[str, Value]) -> dict[str, Any]:
    """Return what a run stores of its weights and tokenizer: their SHA-256, and where make fetch got them.

    What starts from a run has the source of its weights. Raises ToolkitError where weights cannot be read.
    """
    sources = dict[str, Any]()
    for name in DIRECTORIES:
        if value := in_effect.get(name):
            sources[name] = _source(ROOT / Path(str(value)).expanduser())
    digest = None
    if (found := _initial(in_effect)) is not None:
        digest = found.digest(cache=ROOT / "data")
        if found.checkpoint is None:
            sources[_WEIGHTS] = _source(found.path if found.path.is_dir() else found.path.parent)
        else:
            sources[_WEIGHTS] = source_of_base(RunDir(found.checkpoint[0].parent))
    facts = {"initial_weights": digest, "fetched": {name: each for name, each in sources.items() if each}}
    return {name: value for name, value in facts.items() if value}


def _source(folder: Path) -> dict[str, Any] | None:
    """Return what make fetch wrote beside the files in `folder`, or make export of their base; else None."""
    for name, keys in {SOURCE: _SOURCE_KEYS, EXPORTED: _EXPORTED_KEYS}.items():
        try:
            with os_errors("read"):
                found = json.loads((folder / name).read_bytes()) if (folder / name).is_file() else None
        except ValueError:
            continue  # others may call a file so, too
        if isinstance(found, dict) and all(isinstance(found.get(key), str) for key in keys):
            return found if name == SOURCE else dict(zip(_SOURCE_KEYS, map(found.get, keys), strict=True))
    return None


def source_of_base(run: RunDir) -> dict[str, Any] | None:
    """Return where make fetch got the weights that `run` started from; None if it did not."""
    values, fetched = _values(run) or {}, stored_weight_facts(run).get("fetched", {})
    found: dict[str, Any] | None = fetched.get(_WEIGHTS if values.get(_WEIGHTS) else "HUGGINGFACE_DIR")
    return found


def _digest_with(values: Mapping[str, Value], content: str | None) -> str:
    changed = _HASHED_AS if content is None else {**_HASHED_AS, _WEIGHTS: f"sha256:{content}"}
    return _digest({**values, **{name: value for name, value in changed.items() if name in values}})


def is_identity(
    known: str,
    resolved: Resolved,
    *,
    stored: Callable[[], Mapping[str, Value] | None],
    content: str | None = None,
) -> bool:
    """Return True if a run with the identity `known` trains the configuration `resolved`.

    content: SHA-256 of the initial weights that the run stored, if its path is that of `resolved`.

    stored: reads the values of every symbol as the run stored them, None if it has none. Called only if
    `known` may come from a tree that hashed all of them; they must then have that hash.
    """
    wanted = hashed_values(resolved.in_effect)
    # Initial weights were once hashed by their path, and the strategy, too.
    paths = _digest_with(wanted, None), _digest(wanted)
    if known in (identity(resolved.in_effect), _digest_with(wanted, content), *paths):
        return True
    values = stored()
    if values is None or known != former_identity(values):
        return False
    removed = [value for name, value in values.items() if name not in resolved.values]
    return not any(removed) and all(name in values and values[name] == wanted[name] for name in wanted)


def former_identity(values: Mapping[str, Value]) -> str:
    """Return the identity used up to 0.1.0, from the values of every symbol that the tree had."""
    kept = {name: value for name, value in values.items() if not name.startswith(_FORMERLY_EXCLUDED)}
    return _digest(kept)


def hashed_values(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return what an identity counts of `in_effect` values, directories by a hash of what is in them."""
    kept = (name for name in values if name not in _EXCLUDED and not name.startswith(_GROUPS))
    return {name: _content(name, values[name]) if name in DIRECTORIES else values[name] for name in kept}


def _content(name: str, value: Value) -> Value:
    """Return a hash of a directory: of small files, and of name, size and ends of each file of weights."""
    folder = ROOT / Path(str(value)).expanduser()
    digest, weights = hashlib.sha256(), "*.safetensors" * (name == "HUGGINGFACE_DIR")
    try:
        small = sorted({file for pattern in DIRECTORIES[name] for file in folder.glob(pattern)})
        if not value or not small:
            return value  # training it is refused
        for file in small:
            digest.update(file.read_bytes())
        for file in sorted(folder.glob(weights)) if weights else ():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_END_BYTES))
                stream.seek(max(0, size - _END_BYTES))
                digest.update(stream.read())
    except OSError:
        return value  # training it is refused
    return digest.hexdigest()


def _digest(values: Mapping[str, Value]) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def trains(run: RunDir, resolved: Resolved) -> bool:
    """Return True if `run` is a run of that configuration."""
    content = stored_digest(run) if resolved.in_effect.get(_WEIGHTS) else None
    if content and (_values(run) or {}).get(_WEIGHTS) != resolved.in_effect[_WEIGHTS]:
        content = None
    return bool(run.identity) and is_identity(
        run.identity, resolved, stored=lambda: _values(run), content=content
    )


def stored_digest(run: RunDir) -> str | None:
    """Return the SHA-256 of the initial weights of `run`, as it stored it; None where it did not."""
    stored = stored_weight_facts(run).get("initial_weights")
    return stored if isinstance(stored, str) else None


def stored_weight_facts(run: RunDir) -> dict[str, Any]:
    """Return the `weight_facts` of `run` as it stored them, those that it did."""
    try:
        stored = run.read_json("env")
    except ToolkitError:
        return {}
    return {name: stored[name] for name in ("initial_weights", "fetched") if name in stored}


def has_former_identity(run: RunDir) -> bool:
    """Return True if the name of `run` has an identity of 0.1.0 or older, by its stored values."""
    values = _values(run)
    return values is not None and run.identity == former_identity(values)


def _values(run: RunDir) -> dict[str, Value] | None:
    try:
        return values_from_json(run.read_json("values"))
    except ToolkitError:
        return None  # without them only a current identity can match


def sources_of(root: Path, *models: str) -> list[Path]:
    """Return the sorted sources of the tree at `root` that training `models` may run, without other models.

    Models that are imported by shared code or by one of `models` are included, and all of EXTERNAL=.
    """
    shared = [path for folder in ("lib", "train") for path in _sources(root / folder)]
    shared += [*root.glob("Kconfig"), *(root / "models").glob("*.py")]
    own = [path for model in models for path in _sources(root / "models" / model)]
    own += _sources(base) if (base := plugin_folders.external()) else []
    return sorted({*shared, *own, *_imported([*shared, *own], _homes(root))})


def _sources(folder: Path) -> list[Path]:
    return [path for kind in ("*.py", "Kconfig") for path in folder.rglob(kind)]


def _homes(root: Path) -> dict[str, list[Path]]:
    """Return where plug-ins share code, by package: models/ of the tree at `root`, folders of EXTERNAL=."""
    homes = {k.package: [file.parent.parent for file in k.of_external(f"{k.file}.py")] for k in plugins.KINDS}
    homes[plugins.MODELS.package].insert(0, root / "models")
    return homes


def _imported(files: Iterable[Path], homes: Mapping[str, list[Path]]) -> set[Path]:
    """Return the sources below `homes` that `files` import, directly or not: modules and whole folders."""
    found, pending = set[Path](), {file for file in files if file.suffix == ".py"}
    while pending:
        for dotted in _imports(pending.pop(), homes):
            for package in [each for each in homes if dotted.startswith(f"{each}.")]:
                name = dotted.removeprefix(f"{package}.").partition(".")[0]
                there = ({*_sources(home / name), *home.glob(f"{name}.py")} for home in homes[package])
                new = next(filter(None, there), set()) - found  # Python takes the first, too
                found |= new
                pending |= {file for file in new if file.suffix == ".py"}
    return found


def _imports(file: Path, homes: Mapping[str, list[Path]]) -> Iterator[str]:
    """Yield the dotted names that `file` imports; relative ones of the packages in `homes`."""
    content = file.read_bytes()
    named = any(known and package.encode() in content for package, known in homes.items())
    if not (named or _RELATIVE.search(content)):  # most files: parsing all takes half a second
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # its own import gives them
            nodes = [*ast.walk(ast.parse(content))]
    except (SyntaxError, ValueError):  # code that cannot run
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if node.level else None
            above = [package for package, known in homes.items() if folder in known] if folder else [""]
            for package in above:
                module = ".".join(filter(None, (package, node.module)))
                yield from (f"{module}.{alias.name}" for alias in node.names)


def digest_of(files: Iterable[Path], *roots: Path) -> str:
    """Return the SHA-256 in hexadecimal digits of `files`: their names below `roots`, and their contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(_name(file, roots).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _name(file: Path, roots: Sequence[Path]) -> str:
    """Return the name of `file` below the first of `roots` that has it."""
    return next((file.relative_to(root) for root in roots if file.is_relative_to(root)), file).as_posix()


def code_digest(folder: Path) -> str:
    """Return the SHA-256 in hexadecimal digits of the code of the plug-in in `folder`.

    It covers the Python and Kconfig files there, and what they import from models/ and from beside them in
    EXTERNAL=, directly or not. It does not cover lib/ and train/, whose version is the git commit of the run,
    packages, and modules whose names only the running code knows.
    """
    own, homes = sorted(_sources(folder)), _homes(ROOT)
    roots = [*itertools.chain(*homes.values())]
    others = sorted(_imported(own, homes).difference(own), key=lambda file: (_name(file, roots), file))
    return digest_of([*own, *others], folder, *roots)


def folders_of(model: str, task: str, dataset: str) -> dict[str, Path]:
    """Return the folders of a run's plug-ins, by their kind: model, task and data set."""
    chosen = ((plugins.MODELS, model), (plugins.TASKS, task), (plugins.DATASETS, dataset))
    return {kind.noun: kind.home(name) for kind, name in chosen}


@functools.cache
def plugin_digests(model: str, task: str, dataset: str) -> Mapping[str, str]:
    """Return the SHA-256 of the code of a run's plug-ins, by their kind, when first asked for."""
    return {kind: code_digest(folder) for kind, folder in folders_of(model, task, dataset).items()}


def stored_digests(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what `plugin_digests` was for a run with plugins.json `facts`; empty for an older run's.

    Of code that was other code for some of the steps, it is all the hashes, which no digest equals.
    """
    known = {kind.noun: facts.get(kind.noun, {}) for kind in plugins.KINDS}
    return {
        kind: "+".join([*each.get("former", ()), each["sha256"]])
        for kind, each in known.items()
        if "sha256" in each
    }


def with_former(facts: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return `facts` for plugins.json of a run that resumes, with the hashes of code it had before, "former".

    known: its plugins.json so far.
    """
    found = dict(facts)
    for kind in stored_digests(known):
        former = [*known[kind].get("former", ()), known[kind]["sha256"]]
        if former[-1] == facts[kind]["sha256"]:
            former.pop()
        if former:
            found[kind] = {**facts[kind], "former": former}
    return found


def changed(known: Mapping[str, str], digests: Mapping[str, str]) -> str:
    """Name the kinds of plug-ins whose code is not as `known`: "model and task"; "" if none or unknown."""
    return " and ".join(kind for kind, digest in known.items() if digests.get(kind, digest) != digest)

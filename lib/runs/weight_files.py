"""Files of initial weights: which they are, by their first bytes, and the hash by which a run knows them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib import atomic
from lib.errors import CheckpointError, ConfigError, meant, os_errors
from lib.kconf import Resolved, load
from lib.plugin_folders import shortened
from lib.runs.directory import CHECKPOINTS, RunDir, checkpoint_name, checkpoint_step, is_run_name

OPTION = "CONFIG_INITIAL_WEIGHTS"
SHIPPED = "defconfig:"  # before the name of a configuration, whose run has the weights
_ACCEPTED = "give a file of safetensors or of torch.save, a folder of Hugging Face, or a run of this toolkit"
_OTHERS = {  # first bytes of what nothing here reads
    b"version https://git-lfs": "a Git LFS pointer without the weights, which git lfs pull fetches",
    b"GGUF": "a GGUF file, whose weights are quantized",
    b"\x89HDF": "an HDF5 file",
}
_OF_TORCH_SAVE = {b"PK\x03\x04": "a zip archive", b"\x80\x02": "a pickle"}  # a pickle: before 2020
_MAX_HEADER_BYTES = 100_000_000  # of safetensors, by their definition
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")  # of a folder: the first that exists
_CACHED_BYTES = 2**24  # smaller files are hashed again each time


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Files of weights, or (checkpoint) the folder of a run's checkpoints and a step."""

    path: Path  # as requested, absolute
    files: tuple[Path, ...] = ()
    checkpoint: tuple[Path, int] | None = None

    def __str__(self) -> str:
        if self.checkpoint is None:
            return str(self.path)
        return str(self.checkpoint[0] / checkpoint_name(self.checkpoint[1]))

    def digest(self, *, cache: Path) -> str:
        """Return the hexadecimal SHA-256 of the weights. Those of large files are kept in `cache`.

        Raises ToolkitError where a file cannot be read, or the cache not be written.
        """
        if self.checkpoint is None:
            digests = [_digest(file, cache) for file in self.files]
        else:
            digests = _stored_digests(*self.checkpoint)
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def find_weights(requested: str, *, root: Path, folders: Sequence[str] = ()) -> WeightFiles:
    """Return the files of CONFIG_INITIAL_WEIGHTS=`requested`, a path that may be relative.

    folders: where it is looked for if it is not below `root`; URLs are left out. Raises ConfigError where
    there is nothing, or nothing that can be read.
    """
    if (kept := kept_run(requested, root=root)) is not None:
        if (found := _checkpoint(kept)) is None:
            raise ConfigError(f"{OPTION}={requested} is not trained yet", todo="make train trains it first")
        return WeightFiles(path=kept, checkpoint=found)
    name = Path(requested).expanduser()
    others = (root / Path(each).expanduser() for each in folders if each and "://" not in each)
    bases = [root, *map(shortened, others)]
    path = next((base / name for base in bases if (base / name).exists()), root / name).resolve()
    try:
        if (found := _checkpoint(path)) is not None:
            return WeightFiles(path=path, checkpoint=found)
        files = _files_in(path) if path.is_dir() else (path,)
        for file in files:
            kind_of(file)
    except OSError as error:
        looked = f", looked for in {', '.join(map(str, bases))}" if len(bases) > 1 else ""
        why = f"{error.strerror or error}{looked}"
        raise ConfigError(f"{OPTION}={path} cannot be read", why=why, todo=_ACCEPTED) from error
    return WeightFiles(path=path, files=files)


def shipped(requested: str, *, root: Path) -> Resolved | None:
    """Return the configuration in "defconfig:NAME"; None for other texts.

    Raises ConfigError where there is no such configuration, or one that starts from another one itself.
    """
    if not requested.startswith(SHIPPED):
        return None
    from lib.kconf.defconfig import available, path_of

    file = path_of(root, name := requested.removeprefix(SHIPPED))
    if not file.is_file():
        known = [path.name for path in available(root)[0]]
        raise ConfigError(f"{OPTION}={requested}: there is no such configuration", todo=meant(name, known))
    resolved = _loaded(root, file, file.stat().st_mtime_ns)
    if str(own := resolved.values.get("INITIAL_WEIGHTS")).startswith(SHIPPED):
        raise ConfigError(f"{OPTION}={requested} starts from {own} itself", todo="name a run of it")
    return resolved


@functools.lru_cache(maxsize=4)
def _loaded(root: Path, file: Path, _changed: int) -> Resolved:
    return load(root=root, config_file=file)


def kept_run(requested: str, *, root: Path) -> Path | None:
    """Return the folder for the run of the configuration in "defconfig:NAME"; None for other texts.

    It has a hash of the values of all symbols, so that a tree with other defaults trains its own.
    """
    if (resolved := shipped(requested, root=root)) is None:
        return None
    values = repr(sorted(resolved.in_effect.items()))
    digest = hashlib.sha256(values.encode()).hexdigest()[:8]
    return root / "data" / f"run-{requested.removeprefix(SHIPPED)}-{digest}"


def kind_of(file: Path) -> str:
    """Return "safetensors" or "torch" by the first bytes of `file`.

    Raises ConfigError for another format and for a file of torch.save with the name of the other, by which
    torch reads it; OSError.
    """
    with file.open("rb") as opened:
        start, size_bytes = opened.read(32), file.stat().st_size
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and length <= min(size_bytes - 8, _MAX_HEADER_BYTES):
        return "safetensors"
    if kind := of_torch_save(start):
        if file.suffix == ".safetensors":
            what = f"{OPTION}={file} is no safetensors file but {kind}, as torch.save writes it"
            raise ConfigError(what, todo=f"name it {file.stem}.pt")
        return "torch"
    if start[8:9] == b"{":
        why = f"its header would have {length:,} bytes, and the file has {size_bytes:,}"
        raise ConfigError(f"{OPTION}={file} is a damaged safetensors file", why=why, todo="copy it again")
    kind = other_format(start) or "empty, or of no known format"
    raise ConfigError(f"{OPTION}={file} is {kind}", todo=_ACCEPTED)


def of_torch_save(start: bytes) -> str:
    """Return what a file of torch.save is, by its first bytes; "" for other files."""
    return next((kind for magic, kind in _OF_TORCH_SAVE.items() if start.startswith(magic)), "")


def other_format(start: bytes) -> str:
    """Return the known format of a file that nothing here reads, by its first bytes; "" for others."""
    return next((kind for magic, kind in _OTHERS.items() if start.startswith(magic)), "")


def _checkpoint(path: Path) -> tuple[Path, int] | None:
    """Return folder and step of the checkpoint of a run that `path` names; None for other paths."""
    named, folder = path.name, path.parent
    if folder.name != CHECKPOINTS:
        run = _run_in(path)
        if run is None:
            return None
        named, folder = "latest", run.checkpoints
    from lib.runs import checkpoint

    steps = checkpoint.steps(folder)
    step = {"latest": max(steps, default=None), "best": checkpoint.best_step(folder)}.get(
        named, checkpoint_step(named)
    )
    if step is None or step not in steps:
        why = f"its steps are {', '.join(map(str, steps))}" if steps else "it has none"
        raise ConfigError(f"{OPTION}={path} is no checkpoint of the run", why=why, todo="name another one")
    return folder, step


def _run_in(path: Path) -> RunDir | None:
    """Return the run that `path` is, or the one done run in it; None where it is no folder of runs."""
    if RunDir(path).checkpoints.is_dir() and RunDir(path).config.is_file():
        return RunDir(path)
    entries = (each for pattern in ("*", "*/*") for each in path.glob(pattern) if is_run_name(each.name))
    runs = sorted(each for each in entries if RunDir(each).config.is_file())
    done = [run for run in runs if RunDir(run).status().state == "done"]
    if runs and len(done) != 1:
        why = f"{len(done)} of its {len(runs)} runs are done"
        todo = f"name one, such as {done[-1]}" if done else "train one to its end: make resume"
        raise ConfigError(f"{OPTION}={path} is a folder of runs", why=why, todo=todo)
    return RunDir(done[0]) if done else None


def _files_in(folder: Path) -> tuple[Path, ...]:
    """Return the files of weights in a folder of Hugging Face. Raises ConfigError."""
    for index in (folder / name for name in _INDEXES if (folder / name).is_file()):
        try:
            shards = sorted(
                {Path(name).name for name in json.loads(index.read_bytes())["weight_map"].values()}
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} names no shards", why=str(error), todo="copy it again") from error
        if missing := [name for name in shards if not (folder / name).is_file()]:
            why = f"{missing[0]} is missing, of {len(shards)} shards"
            raise ConfigError(f"{OPTION}={folder} is not complete", why=why, todo="copy it again")
        return tuple(folder / name for name in shards)
    found = next((files for pattern in _PATTERNS if (files := sorted(folder.glob(pattern)))), [])
    if len(found) != 1:
        why = f"{len(found)} files of weights and no index of shards" if found else "it has no weights"
        todo = f"name one of them, such as {found[0]}" if found else _ACCEPTED
        raise ConfigError(f"{OPTION}={folder} is a folder", why=why, todo=todo)
    return tuple(found)


def _stored_digests(folder: Path, step: int) -> list[str]:
    """Return the SHA-256 of each file of a checkpoint, by its manifest. Raises CheckpointError."""
    from lib.runs import checkpoint  # it imports torch

    manifest = folder / checkpoint_name(step) / checkpoint.MANIFEST
    try:
        files = checkpoint.decode_manifest(manifest.read_bytes(), step=step)["files"]
    except (OSError, checkpoint.DamagedError) as error:
        raise CheckpointError(f"cannot read {manifest}", why=str(error)) from error
    return [entry["sha256"] for _, entry in sorted(files.items())]


def _digest(file: Path, cache: Path) -> str:
    with os_errors("read initial weights"), file.open("rb") as opened:
        status = file.stat()
        key = f"{file} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        known = cache / "sha256" / hashlib.sha256(key.encode()).hexdigest()
        if known.is_file():
            return known.read_text(encoding="utf-8").strip()
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if status.st_size >= _CACHED_BYTES:
        with os_errors("write the data cache"):
            known.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(known, digest + "\n")
    return digest

"""Files of initial weights: which they are, by their first bytes, and the hash by which a run knows them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib import atomic
from lib.errors import CheckpointError, ConfigError, os_errors
from lib.runs.directory import CHECKPOINTS, RunDir, checkpoint_name, checkpoint_step, is_run_name

_ACCEPTED = "give a file of safetensors or of torch.save, a folder of Hugging Face, or a run of this toolkit"
_OTHERS = (  # first bytes of what is read by nothing here
    (b"version https://git-lfs", "a Git LFS pointer without the weights", "fetch them: git lfs pull"),
    (b"GGUF", "a GGUF file, whose weights are quantized", _ACCEPTED),
    (b"\x89HDF", "an HDF5 file", _ACCEPTED),
)
_MAX_HEADER_BYTES = 100_000_000  # of safetensors, by their definition
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth")  # of a folder: the first that exists
_CACHED_BYTES = 2**24  # smaller files are hashed again each time


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Where weights are.

    path: as requested, absolute. checkpoint: folder of a run's checkpoints, and the step; else None.
    """

    path: Path
    files: tuple[Path, ...]
    checkpoint: tuple[Path, int] | None = None

    def __str__(self) -> str:
        """The path, or that of the checkpoint of a run."""
        return str(
            self.path if self.checkpoint is None else self.checkpoint[0] / checkpoint_name(self.checkpoint[1])
        )

    def digest(self, *, cache: Path) -> str:
        """Return the hexadecimal SHA-256 of the weights. Those of large files are kept in `cache`.

        Raises ToolkitError where a file cannot be read, or the cache not be written.
        """
        if self.checkpoint is None:
            digests = [_digest(file, cache) for file in self.files]
        else:
            digests = _stored_digests(*self.checkpoint)
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def find_weights(requested: str, *, root: Path, folders: Sequence[str | None] = ()) -> WeightFiles:
    """Return the files of CONFIG_INITIAL_WEIGHTS=`requested`, a path that may be relative.

    folders: where it is looked for if it is not below `root`; URLs are left out. Raises ConfigError where
    there is nothing, or nothing that can be read.
    """
    name = Path(requested).expanduser()
    bases = [root, *(root / Path(each).expanduser() for each in folders if each and "://" not in each)]
    path = next((base / name for base in bases if (base / name).exists()), root / name).resolve()
    fault = f"CONFIG_INITIAL_WEIGHTS={path}"
    try:
        if (found := _checkpoint(path, fault)) is not None:
            return WeightFiles(path=path, files=(), checkpoint=found)
        files = _files_in(path, fault) if path.is_dir() else (path,)
        for file in files:
            kind_of(file, fault if file == path else f"CONFIG_INITIAL_WEIGHTS={file}")
    except OSError as error:
        looked = f", looked for in {', '.join(map(str, bases))}" if len(bases) > 1 else ""
        raise ConfigError(f"{fault} cannot be read", why=f"{error.strerror or error}{looked}") from error
    return WeightFiles(path=path, files=files)


def kind_of(file: Path, fault: str) -> str:
    """Return "safetensors" or "torch" by the first bytes of `file`. Raises ConfigError, OSError."""
    with file.open("rb") as opened:
        start, size_bytes = opened.read(32), file.stat().st_size
    length = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and length <= min(size_bytes - 8, _MAX_HEADER_BYTES):
        return "safetensors"
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):  # a zip archive, and the pickles of before 2020
        return "torch"
    for magic, kind, todo in _OTHERS:
        if start.startswith(magic):
            raise ConfigError(f"{fault} is {kind}", todo=todo)
    if not start:
        raise ConfigError(f"{fault} is empty", todo=_ACCEPTED)
    if start[8:9] == b"{":
        why = f"its header has {length:,} bytes, and the file {size_bytes:,}"
        raise ConfigError(f"{fault} is a damaged safetensors file", why=why, todo="copy it again")
    raise ConfigError(f"{fault} is of no known format, or damaged", todo=_ACCEPTED)


def _checkpoint(path: Path, fault: str) -> tuple[Path, int] | None:
    """Return folder and step of the checkpoint that `path` names; None for other paths."""
    named, folder = path.name, path.parent
    if folder.name != CHECKPOINTS:
        run = _run_in(path, fault)
        if run is None:
            return None
        named, folder = "latest", run / CHECKPOINTS
    from lib.runs import checkpoint

    steps = checkpoint.steps(folder)
    latest = steps[-1] if steps else None
    step = {"latest": latest, "best": checkpoint.best_step(folder)}.get(named, checkpoint_step(named))
    if step is None or step not in steps:
        why = f"there are steps {', '.join(map(str, steps))}" if steps else ""
        todo = "name another one" if steps else "name another run, or resume it: make resume"
        raise ConfigError(f"{fault} has no {'checkpoint' if not steps else 'such one'}", why=why, todo=todo)
    return folder, step


def _run_in(path: Path, fault: str) -> Path | None:
    """Return the run that `path` is, or the one done run in it; None where it is no folder of runs."""
    if path.name == CHECKPOINTS or (
        RunDir(path).config.is_file() and RunDir(path).status().state != "unknown"
    ):
        return path.parent if path.name == CHECKPOINTS else path
    found = (each for pattern in ("*", "*/*") for each in path.glob(pattern) if is_run_name(each.name))
    if not (runs := sorted(run for run in found if RunDir(run).config.is_file())):
        return None
    done = [run for run in runs if RunDir(run).status().state == "done"]
    if len(done) != 1:
        why = f"of its {len(runs)} runs {len(done) or 'none'} {'are' if len(done) > 1 else 'is'} done"
        todo = f"name one, such as {done[-1]}" if done else "train it to the end: make resume"
        raise ConfigError(f"{fault} is a folder of runs", why=why, todo=todo)
    return done[0]


def _files_in(folder: Path, fault: str) -> tuple[Path, ...]:
    """Return the files of weights in a folder of Hugging Face. Raises ConfigError."""
    for index in (folder / name for name in _INDEXES if (folder / name).is_file()):
        try:
            shards = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} names no shards", why=str(error), todo="copy it again") from error
        missing = [name for name in shards if Path(name).name != name or not (folder / name).is_file()]
        if missing or not shards:
            why = f"{len(missing)} of {len(shards)} shards are missing, such as {missing[:1]}"
            raise ConfigError(f"{fault} is not complete", why=why, todo="copy the folder again")
        return tuple(folder / name for name in shards)
    for pattern in _PATTERNS:
        if len(found := sorted(folder.glob(pattern))) == 1:
            return found[0],  # fmt: skip
        if found:
            why = f"it has {len(found)} files {pattern} and no index of shards"
            raise ConfigError(f"{fault} is a folder", why=why, todo=f"name one of them, such as {found[0]}")
    others = ", ".join(path.name for path in _first(folder)) or "nothing"
    raise ConfigError(f"{fault} is a folder without weights", why=f"it has {others}", todo=_ACCEPTED)


def _first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir())[:3]


def _stored_digests(folder: Path, step: int) -> list[str]:
    """Return the SHA-256 of the files of a checkpoint, as it says itself."""
    from lib.runs import checkpoint  # it imports torch

    manifest = folder / checkpoint_name(step) / checkpoint.MANIFEST
    try:
        files = checkpoint.decode_manifest(manifest.read_bytes(), step=step)["files"]
    except (OSError, checkpoint.DamagedError) as error:
        raise CheckpointError(f"cannot read {manifest}", why=str(error)) from error
    return [entry["sha256"] for _, entry in sorted(files.items())]


def _digest(file: Path, cache: Path) -> str:
    status = file.stat()
    key = f"{file} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
    known = cache / "sha256" / hashlib.sha256(key.encode()).hexdigest()
    if known.is_file():
        return known.read_text(encoding="utf-8").strip()
    with os_errors("read initial weights"), file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if status.st_size >= _CACHED_BYTES:
        with os_errors("write the data cache"):
            known.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(known, digest + "\n")
    return digest

import errno
import hashlib
import io
import os
import resource
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lib.errors import CheckpointError
from lib.runs import checkpoint


def state(step: int, *, version: int = 0, size: int = 256) -> dict[str, Any]:
    torch.manual_seed(step * 100 + version)
    return {
        "step": step,
        "version": version,
        "nested": {"weights": torch.randn(size), "list": [1, (2.5, None, "x")]},
    }


def save(directory: Path, step: int, *, version: int = 0, keep_last: int = 3, best: bool = False) -> Path:
    return checkpoint.save(
        directory, step=step, state=state(step, version=version), keep_last=keep_last, best=best
    )


def load(directory: Path, **options: Any) -> tuple[int, int, list[str]]:
    """Step, version and what was said; the content must be exactly what was saved."""
    said: list[str] = []
    found = checkpoint.load(directory, log=said.append, **options)
    assert found is not None
    step, loaded = found
    expected = state(step, version=loaded["version"], size=len(loaded["nested"]["weights"]))
    assert torch.equal(loaded["nested"].pop("weights"), expected["nested"].pop("weights"))
    assert loaded == expected
    return step, loaded["version"], said


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# What is kept


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        path = save(tmp_path, step, keep_last=2, best=step == 20)
        assert path.is_dir()
    assert visible(tmp_path) == ["best", "latest", "step-00000020", "step-00000040", "step-00000050"]
    assert checkpoint.steps(tmp_path) == [20, 40, 50]
    assert (tmp_path / "latest").read_text() == "step-00000050\n"
    assert load(tmp_path) == (50, 0, [])
    assert load(tmp_path, which="best") == (20, 0, [])
    assert load(tmp_path, which=40) == (40, 0, [])
    save(tmp_path, 60, keep_last=2, best=True)
    assert checkpoint.steps(tmp_path) == [50, 60]


def test_the_same_step_twice_is_the_second(tmp_path: Path) -> None:
    save(tmp_path, 7, keep_last=1)
    save(tmp_path, 7, version=1, keep_last=1)
    assert load(tmp_path) == (7, 1, [])
    assert visible(tmp_path) == ["latest", "step-00000007"]


def test_saving_an_earlier_step_drops_the_later_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, best=step == 3)
    save(tmp_path, 2, version=1)
    assert visible(tmp_path) == ["latest", "step-00000001", "step-00000002"]
    assert load(tmp_path) == (2, 1, [])
    assert checkpoint.load(tmp_path, which="best", log=print) is None


def test_steps_beyond_eight_digits_are_still_in_order(tmp_path: Path) -> None:
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    assert load(tmp_path)[0] == 100_000_000


def test_there_may_be_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, log=print) is None
    assert checkpoint.load(tmp_path / "nowhere", which="best", log=print) is None
    assert checkpoint.steps(tmp_path / "nowhere") == []
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step 5 .* available: 1"):
        checkpoint.load(tmp_path, which=5, log=print)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a PosixPath"):
        checkpoint.save(tmp_path, step=1, state={"a": [1, Path("x")]}, keep_last=1, best=False)
    assert visible(tmp_path) == []


def test_optimizer_and_generator_states_survive(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    checkpoint.save(tmp_path, step=1, state=saved, keep_last=1, best=False)
    found = checkpoint.load(tmp_path, log=print)
    assert found is not None
    other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters(), lr=1.0)
    other.load_state_dict(found[1]["optimizer"])
    assert other.param_groups[0]["lr"] == 1e-3
    assert torch.equal(found[1]["rng"], saved["rng"])


# Damage


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x07
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a byte of the state": lambda path: flip(path / "state.pt", -200),
    "the first byte": lambda path: flip(path / "state.pt", 0),
    "cut short": lambda path: os.truncate(path / "state.pt", 100),
    "empty": lambda path: (path / "state.pt").write_bytes(b""),
    "longer": lambda path: (path / "state.pt").write_bytes((path / "state.pt").read_bytes() + b"\0"),
    "no state": lambda path: (path / "state.pt").unlink(),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "empty manifest": lambda path: (path / "manifest.json").write_bytes(b""),
    "another manifest": lambda path: (path / "manifest.json").write_text('{"sha256": 3}'),
    "no object": lambda path: (path / "manifest.json").write_text("[]"),
    "a file for a directory": lambda path: (path.rename(path.with_name("x")), path.write_text("")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    DAMAGE[name](save(tmp_path, 2, best=True))
    step, _, said = load(tmp_path)
    assert step == 1
    assert len(said) == 1 and said[0].startswith("warning: checkpoint step-00000002 is damaged: ")
    with pytest.raises(CheckpointError, match="damaged: step-00000002"):
        checkpoint.load(tmp_path, which="best", log=print)
    save(tmp_path, 2, version=5)
    assert load(tmp_path) == (2, 5, [])


def test_a_wrong_size_is_told_in_bytes(tmp_path: Path) -> None:
    save(tmp_path, 1)
    size = (save(tmp_path, 2) / "state.pt").stat().st_size
    os.truncate(tmp_path / "step-00000002" / "state.pt", 100)
    assert load(tmp_path)[2] == [
        f"warning: checkpoint step-00000002 is damaged: state.pt has 100 bytes, not {size}"
    ]


@pytest.mark.slow
def test_every_byte_of_the_manifest_counts(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    sound = manifest.read_bytes()
    for position in range(len(sound)):
        flip(manifest, position)
        assert load(tmp_path)[0] == 1, position
        manifest.write_bytes(sound)
    assert load(tmp_path) == (2, 0, [])


def test_a_renamed_checkpoint_is_not_that_step(tmp_path: Path) -> None:
    save(tmp_path, 1).rename(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.load(tmp_path, log=print)


def test_a_state_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "attacked",)

    monkeypatch.setattr(checkpoint, "_LEAVES", (*checkpoint._LEAVES, Attack))
    checkpoint.save(tmp_path / "ckpt", step=1, state={"a": Attack()}, keep_last=1, best=False)
    said: list[str] = []
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.load(tmp_path / "ckpt", log=said.append)
    assert said == ["warning: checkpoint step-00000001 is damaged: it holds more than tensors and numbers"]
    assert not (tmp_path / "attacked").exists()


def rewrite(path: Path, **changes: Any) -> None:
    """Another manifest, whose own SHA-256 is right."""
    content = {**checkpoint.decode_manifest((path / "manifest.json").read_bytes(), step=2), **changes}
    (path / "manifest.json").write_bytes(checkpoint.encode_manifest(content))


@pytest.mark.parametrize(
    "changes",
    [{"files": {}}, {"files": None}, {"files": {"state.pt": {}}}, {"files": ["state.pt"]}, {"format": None}],
    ids=str,
)
def test_a_manifest_that_does_not_name_the_state_is_damage(changes: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, 1)
    rewrite(save(tmp_path, 2), **changes)
    step, _, said = load(tmp_path)
    assert (
        step == 1 and len(said) == 1 and said[0].startswith("warning: checkpoint step-00000002 is damaged: ")
    )
    assert checkpoint.latest_valid(tmp_path) == 1


def zip_of(text: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("x", text)
    return buffer.getvalue()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content", [b"", b"text", zip_of("x"), saved([1]), saved(torch.ones(2))], ids=range(5)
)
def test_a_state_that_is_no_dict_of_torch_is_damage(content: bytes, tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / "state.pt").write_bytes(content)
    file = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(path, files={"state.pt": file})
    step, _, said = load(tmp_path)
    assert step == 1 and said[0].startswith("warning: checkpoint step-00000002 is damaged: state.pt ")


def test_no_process_reads_an_archive_that_another_found_damaged(tmp_path: Path) -> None:
    """What torch and zipfile raise for damaged bytes is of any kind, and the others would wait for it."""
    state_file = save(tmp_path, 1) / "state.pt"
    state_file.write_bytes(state_file.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x03"))
    first = {1: state_file.parent}
    other = mock.Mock(rank=1, world=2, broadcast={None: first}.get, all_reduce_max=lambda _: (True,))
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.load(tmp_path, log=print, ranks=other)


def test_a_newer_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", 3)
        save(tmp_path, 1)
    said: list[str] = []
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.load(tmp_path, log=said.append)
    assert "format is 3, this version reads 1 and 2" in said[0]


def test_a_damaged_pointer_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1, best=True)
    (tmp_path / "best").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="does not name a checkpoint"):
        checkpoint.load(tmp_path, which="best", log=print)


# A disk that does not take it


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Make the kernel refuse to let files grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_refused_write_loses_nothing(tmp_path: Path, file_limit: Callable[[int], None]) -> None:
    save(tmp_path, 1)
    before = visible(tmp_path)
    for size in (0, 100, 20_000):
        file_limit(size)
        try:
            with pytest.raises(CheckpointError, match=r"cannot save .*state\.pt: File too large") as caught:
                checkpoint.save(tmp_path, step=2, state=state(2, size=100_000), keep_last=1, best=True)
        finally:
            file_limit(resource.RLIM_INFINITY)
        assert "\n" not in str(caught.value)
        assert visible(tmp_path) == before
        assert load(tmp_path) == (1, 0, [])


@pytest.mark.parametrize("good_syncs", range(3))
def test_a_disk_that_fills_up_at_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_syncs: int
) -> None:
    save(tmp_path, 1)
    fsync, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > good_syncs:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(tmp_path, 2, keep_last=1)
    assert visible(tmp_path) == ["latest", "step-00000001"]
    assert load(tmp_path) == (1, 0, [])


def test_a_full_file_system(tmp_path: Path) -> None:
    tmp_path.joinpath("disk").mkdir()
    disk = tmp_path / "disk"
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "anneal-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        save(disk, 1)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.save(disk, step=2, state=state(2, size=200_000), keep_last=1, best=True)
        assert visible(disk) == ["latest", "step-00000001"]
        assert load(disk) == (1, 0, [])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("")
    with pytest.raises(CheckpointError, match="ckpt: File exists"):
        save(tmp_path / "ckpt", 1)
    with pytest.raises(CheckpointError, match="Not a directory"):
        checkpoint.load(tmp_path / "ckpt", log=print)

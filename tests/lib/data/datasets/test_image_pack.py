"""Packing of a folder of images: a disk without space, and names of files that are not UTF-8."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lib.errors import ToolkitError
from tests.lib.data.datasets.test_image_folder import opened


def folder(root: Path, names: list[str]) -> Path:
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for number, file in enumerate(names):
            Image.new("L", (9, 9), 100 * label + number).save(os.path.join(root, name, file))  # noqa: PTH118
    return root


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="a system without posix_fallocate")
def test_a_disk_without_space_is_an_error_before_images_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, taken = folder(tmp_path / "set", [f"{number}.png" for number in range(20)]), list[int]()

    def full(file: int, offset: int, size: int) -> None:
        taken.append(os.fstat(file).st_size - offset - size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context:
        context.setattr(os, "posix_fallocate", full)
        with pytest.raises(ToolkitError, match=r"cannot write the data cache .*: No space left .*; free"):
            opened(root)
    assert taken == [0]  # all of the file
    assert np.unique(opened(root).train.take()[1]).tolist() == [0, 1]


def test_names_of_files_need_not_be_utf_8(tmp_path: Path) -> None:
    names = [os.fsdecode(b"\xff%d.png" % number) for number in range(20)]
    try:
        root = folder(tmp_path / "set", names)
    except OSError:
        pytest.skip("a file system that takes no such names")
    dataset = opened(root)
    assert dataset.train.size + dataset.test.size == 40

"""Images and texts of a user that cannot be used: one line with file and cure, status 2, and nothing made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lib.errors import ConfigError
from tests.support.datasets import IMAGE_FOLDER, opened

Fault = Callable[[Path], object]
SUFFIXES = ".bmp, .gif, .jpeg, .jpg, .pgm, .png, .ppm, .tif, .tiff, .webp"


def flat(root: Path) -> None:
    """Ten images of each of two classes."""
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (9, 9), 20 * number + label).save(root / name / f"{number}.png")


def parts(root: Path) -> None:
    for name in ("train", "val"):
        flat(root / name)


def listed(*rows: str, heading: str = "name,label") -> Fault:
    def write(root: Path) -> None:
        flat(root)
        whole = [f"{name}/{number}.png,{name}" for name in ("cat", "dog") for number in range(10)]
        (root / "labels.csv").write_text("\n".join([heading, *whole, *rows]), encoding="latin-1")

    return write


def images(write: Fault, *changes: Fault) -> Fault:
    def both(root: Path) -> None:
        write(root)
        for change in changes:
            change(root)

    return both


def loose(root: Path) -> None:
    root.mkdir()
    for number in range(3):
        Image.new("L", (9, 9)).save(root / f"{number}.png")


# What is written, options, and what is told; {} is the folder.
IMAGES: dict[str, tuple[Fault, dict[str, Any], str]] = {
    "no folder": (
        lambda _: None,
        {},
        "image_folder is not there: {} is no folder with images; point CONFIG_DA",
    ),
    "a file": (
        lambda root: root.touch(),
        {},
        "image_folder is not there: {} is a file, not a folder; point CONFIG_DATA_DIR to a folder with",
    ),
    "nothing": (
        lambda root: root.mkdir(),
        {},
        "{} is no folder with images; point CONFIG_DATA_DIR to a folder",
    ),
    "no classes": (
        loose,
        {},
        "{} has 3 images without a class: it has neither folders nor labels.csv; m",
    ),
    "an empty class": (
        images(flat, lambda root: (root / "bird").mkdir()),
        {},
        f"{{}} cannot be used: {{}}/bird has no images: looked for {SUFFIXES}; add images, or remove it",
    ),
    "two faults": (
        images(
            flat,
            lambda root: (root / "bird").mkdir(),
            lambda root: (root / "cat/a.png").symlink_to("nowhere"),
        ),
        {},
        f"{{}}/bird has no images: looked for {SUFFIXES}, and 1 more, which are listed above; add images",
    ),
    "one class": (
        images(flat, lambda root: (root / "dog").rename(root / "cat" / "dog")),
        {},
        "{} has images of one class, cat: there is nothing to tell apart; add images of a second one",
    ),
    "a class of one part": (
        images(parts, lambda root: (root / "val/dog").rename(root / "val/bird")),
        {},
        "{}: train/ and val/ have different classes: only one of them has bird, dog",
    ),
    "no class in a part": (
        images(parts, lambda root: [(root / "val" / name).rename(root / name) for name in ("cat", "dog")]),
        {},
        "{}/val has no images: it has neither folders nor labels.csv",
    ),
    "no image": (
        images(flat, lambda root: (root / "cat/3.png").write_bytes(b"x")),
        {},
        "1 of 20 images cannot be decoded: {}/cat/3.png: it is not an image of a known format; remove or rep",
    ),
    "truncated": (
        images(flat, lambda root: (root / "dog/3.png").write_bytes((root / "dog/2.png").read_bytes()[:45])),
        {},
        "1 of 20 images cannot be decoded: {}/dog/3.png: ",
    ),
    "no white": (
        images(flat, lambda root: Image.fromarray(np.zeros((9, 9), np.float32)).save(root / "dog/3.tiff")),
        {},
        "{}/dog/3.tiff: its pixels are 32-bit floats, without a known white: store 8 or 16 bits",
    ),
    "a class of bad images": (
        images(parts, lambda root: [file.write_bytes(b"x") for file in (root / "val/dog").iterdir()]),
        {"on_bad_sample": "skip"},
        "{} cannot be used: no image of class dog in val can be decoded; replace them, or remove the class",
    ),
    "a missing image": (
        listed("cat/99.png,cat"),
        {},
        "{} cannot be used: {}/labels.csv, row 21: there is no file {}/cat/99.png; mend it",
    ),
    "two missing images": (
        listed("cat/98.png,cat", "cat/99.png,cat"),
        {},
        "row 21: there is no file {}/cat/98.png, and 1 more, which are listed above; mend it",
    ),
    "twice": (
        listed("./cat/1.png,dog"),
        {},
        "labels.csv, row 21: cat/1.png is there twice, first in row 2; mend",
    ),
    "no label": (listed("cat/1.png,"), {}, "{}/labels.csv, row 21 has no label; mend it"),
    "no name": (listed(",cat"), {}, "{}/labels.csv, row 21 has no name; mend it"),
    "heading": (
        listed(heading="file,label"),
        {},
        "labels.csv has no column 'name': it has file, label; make its",
    ),
    "ragged": (listed("cat"), {}, "{}/labels.csv: 1 of 21 rows do not have the 2 fields of the heading"),
    "Latin-1": (listed("Größe.png,cat"), {}, "{}/labels.csv is not UTF-8: byte 293 is 0xf6; convert it"),
    "no pattern": (
        flat,
        {"group": "("},
        r"at position 0; write a backslash before a character that stands for itself: \(",
    ),
    "no match": (
        flat,
        {"group": "cat/."},
        "GROUP=cat/. matches nothing in 10 of 20 names in {}: the first is dog/0",
    ),
    "group and val": (
        parts,
        {"group": "."},
        "GROUP=. has no effect on {}: it has a folder val/; leave it",
    ),
    "nothing to train on": (
        flat,
        {"validation_pct": 90, "group": "^..."},
        "{} has classes without an image to train on: all images of class cat are for validation",
    ),
    "nothing to evaluate": (
        flat,
        {"group": "[ao]"},
        "{}: none of 20 images is left for validation; add images, or c",
    ),
}


def check(error: ConfigError, told: str, root: Path) -> None:
    line = str(error)
    assert told.replace("{}", str(root)) in line and "\n" not in line and error.exit_code == 2
    if error.findings:  # and the first of them is in the line
        assert len(error.findings) == 2 and error.findings[0] in line


@pytest.mark.slow
@pytest.mark.parametrize("fault", IMAGES)
def test_bad_images_are_refused_in_a_line(fault: str, tmp_path: Path) -> None:
    write, changes, told = IMAGES[fault]
    root, cache = tmp_path / "photos", tmp_path / "cache"
    write(root)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as caught:
        opened("image_folder", {**IMAGE_FOLDER, **changes}, data_dir=root, cache_dir=cache, image_size=8)
    check(caught.value, told, root)
    # What was decoded to find a bad image is kept, and not decoded again.
    is_decoded = "decoded" in told or "pixels" in told
    assert sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(cache)) == before
    assert cache.exists() == is_decoded


def test_an_image_without_permission_is_one_of_the_bad_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat(tmp_path / "photos")
    opens = Image.open

    def refuses(file: Path) -> Image.Image:
        if file.name == "3.png":
            raise PermissionError(13, "Permission denied", str(file))
        return opens(file)

    monkeypatch.setattr(Image, "open", refuses)
    where = {"data_dir": tmp_path / "photos", "cache_dir": tmp_path / "cache", "image_size": 8}
    with pytest.raises(ConfigError, match=r"^2 of 20 images .*Permission denied: .*/3\.png") as caught:
        opened("image_folder", IMAGE_FOLDER, **where)
    assert caught.value.exit_code == 2 and len(caught.value.findings) == 2


GOOD = [{"text": f"text {row}", "label": ("good", "bad")[row % 2]} for row in range(30)]


def lines(*more: object, given: list[Any] = GOOD) -> bytes:
    return b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in (*given, *more))


# The content of train.jsonl, that of validation.jsonl if there is one, and what is told.
TEXTS: dict[str, tuple[bytes | None, bytes | None, str]] = {
    "no file": (
        None,
        None,
        "{}/train.jsonl is not there: {} has no *.jsonl; put it there, or name another by "
        "CONFIG_DATA_DIR and CONFIG_JSONL_FILE",
    ),
    "no file of its own": (
        lines(),
        b"",
        "{}/validation.jsonl is not there: {} has train.jsonl; put it there, or name another by "
        "CONFIG_DATA_DIR and CONFIG_JSONL_VALIDATION_FILE",
    ),
    "nothing": (b"\n", None, "{}/train.jsonl: no text is left for training; add some"),
    "one text": (
        lines(given=GOOD[:1]),
        None,
        "; add others than these 1, or set CONFIG_JSONL_VALIDATION_OTHER=y",
    ),
    "no text": (
        lines({"label": "good"}),
        None,
        '{}/train.jsonl:31 has no "text": its keys are label; give it one',
    ),
    "blanks": (
        lines({"text": " ", "label": "bad"}),
        None,
        '{}/train.jsonl:31: "text" is no text; write {"te',
    ),
    "a number": (
        lines({"text": 3, "label": "good"}),
        None,
        '{}/train.jsonl:31: "text" is no text; write {"te',
    ),
    "no label": (
        lines({"text": "a"}),
        None,
        '{}/train.jsonl:31 has no "label": its keys are text; give it one',
    ),
    "null": (
        lines({"text": "a", "label": None}),
        None,
        '{}/train.jsonl:31: "label" is null; make it a name, a whole number',
    ),
    "a key like it": (
        lines({"text": "a", "Label": "good"}),
        None,
        '{}/train.jsonl:31 has no "label": its keys are text, Label; rename Label to label',
    ),
    "a list": (
        lines({"text": "a", "label": ["b"]}),
        None,
        '{}/train.jsonl:31: "label" is ["b"]; make it a name',
    ),
    "a fraction": (
        lines({"text": "a", "label": 0.5}),
        None,
        '{}/train.jsonl:31: "label" is 0.5; make it a name',
    ),
    "empty label": (
        lines({"text": "a", "label": ""}),
        None,
        '{}/train.jsonl:31: "label" is ""; make it a name',
    ),
    "no JSON": (
        lines(b"text,label"),
        None,
        '1 column 1 (char 0); write {"key": "value", ...} on a line of its own, or remove it',
    ),
    "Latin-1": (
        lines(*[b'{"text": "\xf6"}'] * 3),
        None,
        "{}/train.jsonl:31 is not UTF-8: byte 10 of the line is 0xf6; save the file as UTF-8",
    ),
    "gzip": (b"\x1f\x8b" + bytes(9), None, "{}/train.jsonl is a gzip archive, not JSON Lines; unpack it"),
    "half a character": (lines(rb'{"text": "\ud83d"}'), None, "not allowed; write the character whole"),
    "a key twice": (
        lines(b'{"text": "a", "label": "x", "text": "b"}'),
        None,
        "{}/train.jsonl:31 is no JSON object: it has a key twice; its keys are text, label, text; name ",
    ),
    "no object": (lines(["a", "good"]), None, "{}/train.jsonl:31 is no JSON object: it is list"),
    "two faults": (
        lines(3, 4),
        None,
        "2 of 32 lines cannot be used: {}/train.jsonl:31 is no JSON object: it is in",
    ),
    "one class": (
        lines(given=GOOD[::2]),
        None,
        "{}/train.jsonl: every label is 'good'; add texts with another",
    ),
    "another class": (
        lines(),
        lines({"text": "a", "label": "odd"}),
        "{}/validation.jsonl:31: no text for training has the label 'odd'; leave the text out, or add some",
    ),
}


@pytest.mark.parametrize("fault", TEXTS)
def test_bad_texts_are_refused_in_a_line(fault: str, tmp_path: Path) -> None:
    train, other, told = TEXTS[fault]
    for name, content in (("train", train), ("validation", other)):
        if content:
            (tmp_path / f"{name}.jsonl").write_bytes(content)
    own = {"validation": "split", "validation_pct": 20, "validation_file": None}
    if other is not None:
        own = {"validation": "other", "validation_pct": None, "validation_file": "validation.jsonl"}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError) as caught:
        opened(
            "jsonl",
            {"file": "train.jsonl", **own},
            data_dir=tmp_path,
            cache_dir=tmp_path / "cache",
            block_size=16,
            tokenizer="byte",
        )
    check(caught.value, told, tmp_path)
    assert sorted(tmp_path.iterdir()) == before

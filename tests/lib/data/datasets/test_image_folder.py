"""What a folder of images makes of modes of pixels, of EXIF data and of files that are no images."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lib.data import Dataset
from lib.data.datasets.image_folder.data import BadSampleError, decode
from lib.data.datasets.image_folder.image_files import find_images
from lib.data.sampler import held_out_by_hash
from lib.errors import DataError, ToolkitError
from tests.support import datasets
from tests.support.training import MemoryRecord, random_data, small_config, small_job, small_plan

SIZE, COLOUR = 8, (200, 30, 90)
BAD = b"\x89PNG\r\n\x1a\n and then nothing"


def pixel(image: Image.Image, file: Path, **options: Any) -> list[int]:
    """The colour that an image of one colour comes to when it is stored in `file`."""
    image.save(file, **options)
    pixels = decode(file, SIZE)
    assert pixels.shape == (3, SIZE, SIZE) and pixels.dtype == np.uint8
    assert (pixels == pixels[:, :1, :1]).all()
    found: list[int] = pixels[:, 0, 0].tolist()
    return found


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_of_grey_are_scaled_to_eight(suffix: str, tmp_path: Path) -> None:
    for value, expected in ((0, 0), (257 * 128, 128), (300, 1), (65535, 255)):
        image = Image.fromarray(np.full((12, 16), value, np.uint16))
        assert pixel(image, tmp_path / f"a.{suffix}") == [expected] * 3


@pytest.mark.parametrize("mode", ["I", "F"])
def test_what_has_no_known_white_is_refused(mode: str, tmp_path: Path) -> None:
    Image.new(mode, (9, 9), 1).save(tmp_path / "a.tif")
    with pytest.raises(BadSampleError, match=r"its pixels are 32-bit .* store 8 or 16 bits"):
        decode(tmp_path / "a.tif", SIZE)


@pytest.mark.parametrize(
    ("mode", "suffix", "expected"),
    [
        ("1", "png", [255] * 3),
        ("L", "png", [88] * 3),
        ("P", "png", [*COLOUR]),
        ("PA", "tif", [*COLOUR]),
        ("LA", "png", [88] * 3),
        ("RGBA", "png", [*COLOUR]),
        ("CMYK", "tif", [*COLOUR]),
        ("CMYK", "jpg", [*COLOUR]),
        ("LAB", "tif", [200, 27, 90]),
    ],
)
def test_every_mode_of_a_file_becomes_its_colour(
    mode: str, suffix: str, expected: list[int], tmp_path: Path
) -> None:
    colour = (255, 255, 255) if mode == "1" else COLOUR
    image = Image.new("RGB", (16, 12), colour)
    if mode.startswith("P"):  # converted at once it would be dithered
        image = image.quantize()
    found = pixel(image.convert(mode), tmp_path / f"a.{suffix}")
    assert found == pytest.approx(expected, abs=1)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(depth: int, colour_type: int, pixels: bytes, palette: bytes = b"") -> bytes:
    """A PNG of 8 x 8 times the same `pixels`, in whole bytes: Pillow reads more kinds than it writes."""
    bits = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour_type] * depth
    row = b"\0" + pixels * (bits // len(pixels))
    header = struct.pack(">IIBBBBB", 8, 8, depth, colour_type, 0, 0, 0)
    parts = chunk(b"IHDR", header) + palette + chunk(b"IDAT", zlib.compress(row * 8)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


PLTE = chunk(b"PLTE", b"\0\0\0\x10\x80\xf0")
ODD = {
    "grey1": (png(1, 0, b"\xff"), [255] * 3),
    "grey2": (png(2, 0, b"\xaa"), [170] * 3),
    "grey4": (png(4, 0, b"\x88"), [136] * 3),
    "grey16": (png(16, 0, b"\x80\x00"), [128] * 3),
    "colour16": (png(16, 2, b"\x10\0\x80\0\xf0\0"), [16, 128, 240]),
    "palette1": (png(1, 3, b"\xff", PLTE), [16, 128, 240]),
    "palette4": (png(4, 3, b"\x11", PLTE + chunk(b"tRNS", b"\xff\x80")), [135, 191, 247]),
    "grey16alpha": (png(16, 4, b"\x10\0\x80\0"), [135] * 3),
    "colour16alpha": (png(16, 6, b"\x10\0\x80\0\xf0\0\x80\0"), [135, 191, 247]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_depths_of_png_become_their_colour(name: str, tmp_path: Path) -> None:
    content, colour = ODD[name]
    (tmp_path / "a.png").write_bytes(content)
    pixels = decode(tmp_path / "a.png", SIZE)
    assert (pixels == pixels[:, :1, :1]).all() and pixels[:, 0, 0].tolist() == colour


def test_what_is_transparent_shows_white(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 12), COLOUR)
    palette, grey = image.convert("P"), image.convert("L")
    clear = image.copy()
    clear.putalpha(0)
    sixteen = Image.fromarray(np.full((12, 16), 5, np.uint16))
    file, white = tmp_path / "a.png", [255] * 3
    assert pixel(clear, file) == white
    assert pixel(clear.convert("LA"), file) == white
    assert pixel(palette, file, transparency=bytes(256)) == white
    assert pixel(grey, file, transparency=grey.getpixel((0, 0))) == white
    assert pixel(image, file, transparency=COLOUR) == white
    assert pixel(sixteen, file, transparency=5) == white
    half = image.copy()
    half.putalpha(128)
    assert pixel(half, file) == pytest.approx([227, 142, 172], abs=1)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_upright(suffix: str, tmp_path: Path) -> None:
    upper = np.zeros((32, 32, 3), np.uint8)
    upper[:16] = 255
    seen = {}
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = tmp_path / f"{orientation}.{suffix}"
        Image.fromarray(upper).save(file, exif=exif)
        grey = decode(file, SIZE)[0]
        ends = {"top": grey[0], "bottom": grey[-1], "left": grey[:, 0], "right": grey[:, -1]}
        seen[orientation] = max(ends, key=lambda end: ends[end].mean())
    assert [*seen.values()] == ["top", "top", "bottom", "bottom", "left", "right", "right", "left"]


def cache_of(root: Path) -> Path:
    """It is in no folder of images, where it would be a class."""
    return root.parent / f"cache of {root.name}"


def opened(
    root: Path,
    said: list[str] | None = None,
    *,
    on_bad: str = "error",
    percent: int = 20,
    group: str = "",
    **changes: Any,
) -> Dataset:
    log = [].append if said is None else said.append
    requested: dict[str, Any] = {"cache_dir": cache_of(root), "image_size": SIZE, "log": log, **changes}
    options = {**datasets.IMAGE_FOLDER, "on_bad_sample": on_bad, "validation_pct": percent, "group": group}
    return datasets.opened("image_folder", options, data_dir=root, **requested)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five + two images of each of two classes; the grey value tells which it is."""
    for part, count in (("train", 5), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                value = 100 * label + 10 * number
                Image.new("L", (9, 9), value).save(tmp_path / part / name / f"{number}.png")
    return tmp_path


def damage(root: Path) -> list[Path]:
    files = [root / name for name in ("train/cat/1.png", "train/dog/4.png", "val/cat/0.png")]
    for file in files:
        file.write_bytes(BAD)
    return files


def test_bad_files_are_told_all_at_once(root: Path) -> None:
    files = damage(root)
    for _ in range(2):
        said: list[str] = []
        with pytest.raises(DataError, match=r"^3 of 14 images cannot be decoded: .*BAD_SAMPLE_SKIP") as error:
            opened(root, said)
        assert [*error.value.findings] == [f"{file}: it is not an image of a known format" for file in files]
        assert not any("making it again" in line for line in said)


@pytest.mark.parametrize("labelled", [True, False], ids=["labels.csv", "folders"])
def test_bad_files_are_told_beside_other_faults(labelled: bool, root: Path) -> None:
    files = damage(root)
    empty = [root / part / "empty" for part in ("train", "val")]
    faults = [f"{folder} has no images: looked for " for folder in empty if folder.mkdir() is None]
    if labelled:
        (root / "labels.csv").write_text("name,label\nof train/cat/0.png,cat\ngone.png,dog\n1.png,\n")
        faults = [f"{root / 'labels.csv'}, row {row}" for row in ("2: there is no file", "3 has no label")]
        for part in ("train", "val"):
            (root / part).rename(root / f"of {part}")
        files = [root / f"of {file.relative_to(root)}" for file in files]
    said: list[str] = []
    with pytest.raises(DataError) as error:
        opened(root, said)
    assert said[-1] == f"{error.value.what}: looking for bad images, too"
    texts = [*faults, *(f"{file}: it is not an image of a known format" for file in files)]
    assert all(found.startswith(text) for found, text in zip(error.value.findings, texts, strict=True))
    with pytest.raises(DataError) as error:
        opened(root, on_bad="skip")
    assert "known format" not in str((error.value, error.value.findings))


def test_bad_files_are_skipped_counted_and_named(root: Path, tmp_path: Path) -> None:
    whole = opened(root)
    assert whole.class_names == ("cat", "dog")
    files = damage(root)
    for _ in range(2):
        dataset = opened(root, on_bad="skip")
        assert dataset.train.targets.tolist() == [0] * 4 + [1] * 4
        values = dataset.train.take()[0][:, 0, 0, 0].tolist()
        assert values == [0, 20, 30, 40, 100, 110, 120, 130] and dataset.test.size == 3
        assert "8 + 3 images" in dataset.source and "without 3 that cannot be decoded" in dataset.source
        assert [line.partition(": ")[0] for line in dataset.skipped] == [*map(str, files)]
    skipped = json.loads(
        (
            next((tmp_path.parent / f"cache of {tmp_path.name}").glob("image_folder-*")) / "skipped.json"
        ).read_text()
    )
    assert skipped == [[str(f.relative_to(root)), "it is not an image of a known format"] for f in files]
    # What is left is all that the normalisation follows from, as if the others had never been there.
    for file in files:
        file.unlink()
    alone = opened(root, cache_dir=tmp_path / "other")
    assert alone.spec == dataset.spec != whole.spec
    assert np.array_equal(alone.train.inputs, dataset.train.inputs)


def test_a_class_of_bad_files_alone_is_an_error(root: Path) -> None:
    for number in range(2):
        (root / f"val/dog/{number}.png").write_bytes(BAD)
    with pytest.raises(DataError, match="no image of class dog in val can be decoded"):
        opened(root, on_bad="skip")


def test_a_disk_that_fails_makes_no_bad_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Image, "open", fails)
    with pytest.raises(ToolkitError, match=r"cannot read .*\.png: Input/output error"):
        opened(root, on_bad="skip")


def names(root: Path, **options: Any) -> tuple[list[str], list[str]]:
    """The names of the images of both parts."""
    found = find_images(root, **{"percent": 20, **options})
    return [image.name for image in found.train], [image.name for image in found.test]


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Forty images of each of two classes, of ten patients; an image has the grey value of its number."""
    root = tmp_path / "flat"
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(40):
            Image.new("L", (9, 12), number).save(root / name / f"p{number % 10}_{number}.png")
    return root


def test_a_flat_folder_is_divided_by_names_and_no_added_file_moves_another(flat: Path) -> None:
    dataset, said = opened(flat), list[str]()
    assert dataset.class_names == ("cat", "dog") and dataset.train.size + dataset.test.size == 80
    train, test = names(flat)
    assert (dataset.train.size, dataset.test.size) == (len(train), len(test))
    assert dataset.test.take()[0][:, 0, 0, 0].tolist() == [int(n[:-4].split("_")[1]) for n in test]
    assert "9x12 to 9x12 pixels" in dataset.source and "20 % evaluated" in dataset.source
    for number in range(40):
        Image.new("L", (9, 9)).save(flat / "cat" / f"a{number}.png")
    later_train, later_test = names(flat)
    assert {*train} < {*later_train} and {*test} < {*later_test}
    moved = flat.rename(flat.with_name("elsewhere"))
    assert names(moved) == (later_train, later_test)
    assert 0 < len(names(moved, percent=5)[1]) < len(later_test) < len(names(moved, percent=60)[1])
    assert len(opened(moved, said).test.targets) == len(later_test)


def test_a_group_is_in_one_part(flat: Path) -> None:
    for group in ("p[0-9]+", "/(p.)_[0-9]+"):
        parts = [{name[4:6] for name in part} for part in names(flat, group=group)]
        assert parts[0] and parts[1] and not parts[0] & parts[1]
    with_groups, without = (opened(flat, group=group) for group in ("p[0-9]+", ""))
    assert with_groups.test.size != without.test.size and "the match of 'p[0-9]+'" in with_groups.source
    said = list[str]()
    assert opened(flat, said, group="p[0-9]+").test.size == with_groups.test.size
    assert opened(flat, said).train.size == without.train.size and said == [], "each has a pack of its own"


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_a_folder_of_its_own_is_evaluated(root: Path, name: str) -> None:
    (root / "val").rename(root / name)
    dataset = opened(root)
    assert (dataset.train.size, dataset.test.size) == (10, 4)
    assert f"evaluated on {name}/" in dataset.source


def test_a_training_folder_alone_is_divided(flat: Path, tmp_path: Path) -> None:
    whole = names(flat)
    flat.rename(tmp_path / "train")
    assert names(tmp_path) == whole


def test_labels_of_a_file_and_folders_in_folders(flat: Path, tmp_path: Path) -> None:
    by_folder = names(flat)
    deeper = flat / "dog" / "deep"
    deeper.mkdir()
    for file in (flat / "dog").glob("*.png"):
        file.rename(deeper / file.name)
    for folder in (flat / ".hidden", flat / "cat" / ".hidden"):
        folder.mkdir()
        Image.new("L", (9, 9)).save(folder / "thumbnail.png")
    (flat / "cat" / "._p0_1.png").write_bytes(b"of another system")
    assert len(names(flat)[0]) + len(names(flat)[1]) == 80
    listed = tmp_path / "listed"
    listed.mkdir()
    lines = ["label,name"]
    for name in sorted([*by_folder[0], *by_folder[1]]):
        file = listed / name.replace("/", "-")
        Image.new("L", (9, 9)).save(file)
        lines.append(f"{name[:3]},{file.name}")
    Image.new("L", (9, 9)).save(listed / "more.png")
    (listed / "labels.csv").write_text("\n".join(lines))
    said = list[str]()
    dataset = opened(listed, said)
    assert dataset.class_names == ("cat", "dog") and dataset.train.size + dataset.test.size == 80
    assert any("does not name 1 images in its folder" in line for line in said)


def test_odd_images_train_together(flat: Path) -> None:
    """Of all depths and sizes, with names that are not ASCII and suffixes that are not the format's."""
    for number, (name, (content, _)) in enumerate(ODD.items()):
        (flat / ("cat", "dog")[number % 2] / f"Größe {name}.PNG").write_bytes(content)
    Image.new("RGB", (1, 700)).save(flat / "cat" / "narrow.png")
    Image.new("CMYK", (700, 3)).save(flat / "dog" / "really a photo.png", format="jpeg")
    Image.new("RGBA", (33, 20)).save(
        flat / "dog" / "many.png", save_all=True, append_images=[Image.new("L", (9, 9))]
    )
    dataset = opened(flat)
    assert dataset.train.size + dataset.test.size == 80 + len(ODD) + 3 and not dataset.skipped
    assert "1x3 to 700x700 pixels, median 9x12" in dataset.source


def test_a_class_without_an_image_for_validation_is_told(flat: Path) -> None:
    (flat / "rare").mkdir()
    for number in range(1, 9):
        name = f"rare/{number}.png"
        if not held_out_by_hash([name], 20)[0]:
            Image.new("L", (9, 9)).save(flat / name)
    said = list[str]()
    assert opened(flat, said).class_names == ("cat", "dog", "rare")
    assert f"{flat}: no image for validation is of class rare" in said


def test_a_run_names_what_it_does_without() -> None:
    config, record = small_config(), MemoryRecord()
    data = random_data(config, shape=(1, 28, 28), train_size=8)
    dataset = dataclasses.replace(data.dataset, skipped=("a.png: bad", "b.png: worse"))
    data = dataclasses.replace(data, dataset=dataset)
    small_job(config, small_plan(4), data, record=record)
    assert [line for line in record.said if "Skipped" in line] == [
        "Skipped: a.png: bad",
        "Skipped: b.png: worse",
    ]
    assert data.to_json()["skipped"] == ["a.png: bad", "b.png: worse"]


@pytest.mark.slow
@pytest.mark.parametrize(("requested", "side", "pad"), [(0, 224, 28), (0, 32, 4), (0, 7, 1), (16, 224, 16)])
def test_the_largest_shift_is_an_eighth_of_the_side(
    requested: int, side: int, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[int]()

    class Seen(Exception):
        pass

    def loader(*_: Any, **options: Any) -> None:
        given.append(options["pad"])
        raise Seen

    monkeypatch.setattr("train.build.TrainLoader", loader)
    config = small_config("resnet18", augment="crop_flip", augment_pad=requested)
    data = random_data(config, shape=(3, side, side), train_size=4)
    with pytest.raises(Seen):
        small_job(config, small_plan(4), data)
    assert given == [pad]

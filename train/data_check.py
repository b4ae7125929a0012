"""`make data-check`: what the configured data set holds, before anything is trained on it.

Errors are those of training, with all faults of the files. A data set may define
`show(dataset, part, places) -> list[str]` in its data.py: a line for each of the samples `places` (as for
`Part.take`), such as the name of its file, or its text with marks, in the place of what `_lines` returns.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lib import atomic, kconf, units
from lib.atomic import check_writable
from lib.config import Config, config_from_values
from lib.data import ArrayPart, Dataset, ImageSpec, Part, TextClassSpec, restrict
from lib.data.datasets.files import DataCode, described, wrong_result
from lib.data.types import Indices, TableClassSpec, TableLabelsSpec, TableSpec, TokenTagSpec, row_text
from lib.errors import foremost
from lib.kconf.project import Project
from lib.nn.model_code import check_tokenizer
from lib.plugins import DATASETS
from lib.tiers import with_tier
from train.record import log
from train.training_data import check_sizes, check_start, make_training_data, open_configured

Show: TypeAlias = Callable[[Part, Indices], list[str]]

_CHUNK = 256  # samples read at a time
_SHOWN = 5  # pairs of duplicates, and samples of a set without classes
_SHOWN_LETTERS = 200  # of a text
_ROWS, _COLUMNS = 40, 8  # of the contact sheet: classes, and samples of each
_TILE, _LINE = 96, 18  # pixels of a sample, and of the name of its class above it


def data_check(requested: kconf.Resolved, *, root: Path, out: Path | None) -> int:
    """Print what the data set holds, and write a contact sheet of images to `out`, or below build/ or O=.

    All samples are read, whatever CONFIG_DATA_LIMIT and CONFIG_HOLDOUT are. Raises what training would.
    """
    config = config_from_values(with_tier(requested, root=root, log=log).values)
    note = log if out is not None else lambda _: None  # the folder by default is no user's
    made = Project.of_environment(root).output
    out = out or (made if made.parts else root / "build") / "data-check" / f"{config.dataset}.png"
    check_writable(out, "OUT", log=note, suffixes=[".png"])
    check_tokenizer(config.model, config.model_options, config.tokenizer, config.tokenizer_dir)
    dataset = open_configured(config, root=root, log=log)
    show: Show = partial(_shown, config.dataset, dataset)
    for line in [*_counts(dataset), *_duplicates(dataset, show)]:
        log(line)
    if isinstance(dataset.spec, ImageSpec):
        atomic.save(out, _contact_sheet(dataset, dataset.spec))
        log(f"Contact sheet, images as the model sees them before augmentation: {out}")
    else:
        for name, rows in _chosen(dataset, each=1).items():
            for line in show(dataset.train, rows * dataset.train.stride):
                log(f"Sample{f' of {name}' if name else ''}: {line}")
    _check_run(config, dataset, root)
    return 0


def _check_run(config: Config, dataset: Dataset, root: Path) -> None:
    """Raise ConfigError where a run would refuse the number of samples, or what they are for the model."""
    dataset = restrict(dataset, limit=config.data_limit, holdout=config.holdout)
    check_sizes(config, dataset.train.size)
    make_training_data(config, dataset)
    if not config.weights.initial_weights:
        check_start(config, dataset, root, log=log)


def _shown(name: str, dataset: Dataset, part: Part, places: Indices) -> list[str]:
    """Return what data set `name`, or else `_lines`, shows. Raises DataError for a fault of its code."""
    with DataCode(name):
        lines: Any = getattr(DATASETS.load(name), "show", _lines)(dataset, part, places)
    is_list = isinstance(lines, list) and len(lines) == len(places)
    if not is_list or not all(isinstance(line, str) for line in lines):
        wanted = f"not a list with a text for each of {units.counted(len(places), 'sample')}"
        raise wrong_result(name, "show", f"{described(lines)}, {wanted}")
    return [*lines]


def _lines(dataset: Dataset, part: Part, places: Indices) -> list[str]:
    """Return a line for each sample: its text, its row of a table, or its number."""
    spec: Any = dataset.spec
    inputs, _ = part.take(places)
    if isinstance(spec, TableSpec | TableClassSpec | TableLabelsSpec):
        return [row_text(spec.columns, row) for row in inputs]
    if dataset.tokenizer is None:
        return [f"number {place // part.stride + 1}" for place in places]
    rows = (row[row != spec.pad] for row in inputs) if hasattr(spec, "pad") else inputs
    return [f"{dataset.tokenizer.decode(row)!r:.{_SHOWN_LETTERS}}" for row in rows]


def _class_names(dataset: Dataset) -> Sequence[str]:
    return dataset.class_names or [*map(str, range(getattr(dataset.spec, "classes", 0)))]


def _counts(dataset: Dataset) -> Iterator[str]:
    """Yield the source, skipped files, the number and size of samples, and those of each class."""
    yield f"Data: {dataset.source}"
    yield from (f"Skipped: {line}" for line in foremost(dataset.skipped, "files"))
    parts = {"training": dataset.train, "evaluation": dataset.test}
    yield "Samples: " + ", ".join(f"{part.size} for {name}" for name, part in parts.items())
    yield f"A sample: {' x '.join(map(str, dataset.spec.input_shape))} {dataset.spec.input_dtype} numbers"
    if isinstance(spec := dataset.spec, TextClassSpec | TokenTagSpec):
        lengths, limit = (dataset.train.take()[0] != spec.pad).sum(axis=1), spec.block_size
        least, usual, most = (f"{length:.0f}" for length in np.quantile(lengths, (0, 0.5, 1)))
        full = f"{(lengths == limit).sum()} fill CONFIG_BLOCK_SIZE={limit} or are cut at it"
        yield f"Texts for training: {least} to {most} tokens, median {usual}; {full}"
    if not (names := _class_names(dataset)):
        return
    columns: list[Sequence[str]] = [("class", *names)]
    for name, part in parts.items():
        assert isinstance(part, ArrayPart)
        targets, whole = part.sample_targets, part.size
        if targets.dtype.kind == "f":  # several labels
            counts = targets.sum(axis=0).astype(int)
        else:
            counts = np.bincount(targets[targets >= 0], minlength=len(names))
            whole = int(counts.sum())
        columns += [(name, *map(str, counts)), ("", *(f"{count / whole:.1%}" for count in counts))]
    yield from units.aligned(columns)


def _duplicates(dataset: Dataset, show: Show) -> Iterator[str]:
    """Yield the numbers of samples with equal inputs, as they are stored, and the first of them."""
    parts, seen = (dataset.train, dataset.test), dict[bytes, tuple[int, int]]()
    found: dict[tuple[int, int], list[tuple[int, int]]] = {(0, 0): [], (0, 1): [], (1, 1): []}
    for number, part in enumerate(parts):
        for start in range(0, part.size, _CHUNK):
            places = np.arange(start, min(start + _CHUNK, part.size)) * part.stride
            for place, row in zip(places.tolist(), part.take(places)[0], strict=True):
                first = seen.setdefault(blake2b(row.tobytes(), digest_size=16).digest(), (number, place))
                if first != (number, place):
                    found[first[0], number].append((first[1], place))
    heads = "within training", "of training in evaluation", "within evaluation"
    for head, (numbers, pairs) in zip(heads, found.items(), strict=True):
        both = [parts[number] for number in numbers]
        others = [pair for pair in pairs if _targets_differ(both, pair)]
        yield f"Exact duplicates {head}: {len(pairs)}" + (
            f", {len(others)} with another target" * bool(others)
        )
        for pair in (others or pairs)[:_SHOWN]:
            names = (show(part, np.array([place]))[0] for part, place in zip(both, pair, strict=True))
            yield f"  {' = '.join(names)}"


def _targets_differ(parts: Sequence[Part], places: Sequence[int]) -> bool:
    if not all(isinstance(part, ArrayPart) for part in parts):  # the next tokens of a text
        return False
    one, other = (part.take(np.array([place]))[1] for part, place in zip(parts, places, strict=True))
    return not np.array_equal(one, other)


def _chosen(dataset: Dataset, *, each: int) -> dict[str, Indices]:
    """Return evenly spaced rows of the training part: `each` of a class, by its name, or _SHOWN in all."""
    train, names = dataset.train, _class_names(dataset)
    rows = {"": np.arange(train.size)}
    if names and isinstance(train, ArrayPart) and train.targets.ndim == 1:
        rows = {name: np.flatnonzero(train.sample_targets == label) for label, name in enumerate(names)}
    counts = {name: min(each if name else _SHOWN, len(own)) for name, own in rows.items()}
    return {name: own[np.linspace(0, len(own) - 1, counts[name]).astype(int)] for name, own in rows.items()}


def _contact_sheet(dataset: Dataset, spec: ImageSpec) -> bytes:
    """Return a PNG with a row of samples for each class."""
    import matplotlib  # whose font has more letters than Pillow's

    chosen = [*_chosen(dataset, each=_COLUMNS).items()][:_ROWS]
    sheet = Image.new("RGB", (_COLUMNS * _TILE, len(chosen) * (_TILE + _LINE)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", 13)
    scale = min((_TILE - 2) / spec.width, (_TILE - 2) / spec.height)
    size = max(1, round(spec.width * scale)), max(1, round(spec.height * scale))
    for row, (name, rows) in enumerate(chosen):
        top = row * (_TILE + _LINE)
        draw.text((2, top + 1), name, fill="black", font=font)
        for column, pixels in enumerate(dataset.train.take(rows)[0]):
            image = Image.fromarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels[0])
            sheet.paste(image.convert("RGB").resize(size), (column * _TILE, top + _LINE))
    content = io.BytesIO()
    sheet.save(content, format="PNG")
    return content.getvalue()

"""Experiment files: YAML 1.2, merging by defaults, and their points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.errors import ConfigError
from lib.sweeps.experiment import Experiment, merged, read_experiment
from lib.sweeps.yaml12 import read_yaml


def written(folder: Path, text: str, name: str = "study") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4e-4", 4e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("12:30:00", "12:30:00"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("", None),
        ("'4e-4'", "4e-4"),
        ("[1, 2.0, a]", [1, 2.0, "a"]),
        ("1_000", "1_000"),
    ],
)
def test_values_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: Any) -> None:
    found = read_yaml(written(tmp_path, f"a: {text}\n")).content["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "study.yaml:3: a is given twice"),
        ("a: [1\n", "study.yaml:2"),
        ("- a\n", "holds no mapping"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("a: 1\nb: \x01\n", "study.yaml:2: special characters are not allowed"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read_yaml(written(tmp_path, text))


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_bytes(b"\xef\xbb\xbfconfig: lenet5\nsed: 1\n")
    assert read_yaml(file).content == {"config": "lenet5", "sed": 1}
    with pytest.raises(ConfigError, match=r"study\.yaml:2: there is no key sed"):
        read_experiment(file)


def test_a_fault_has_the_line_where_it_is_written(tmp_path: Path) -> None:
    """In a file of its defaults, in a list over several lines, for the axis of a search."""
    base = written(
        tmp_path, "config: lenet5\nset:\n  MAX_STEPS:\n    1\naxes: {EMA: [true, false]}\n", "base"
    )
    experiment = read_experiment(written(tmp_path, "defaults: [base]\naxes:\n  EMA:\n  - true\n  - 7\n"))
    own = tmp_path / "study.yaml"
    assert experiment.place("MAX_STEPS", "1") == f"{base}:3"
    assert [experiment.place("EMA", value) for value in ("y", "7", "n")] == [f"{own}:{n}" for n in (4, 5, 3)]
    assert experiment.place("SEED", "1") == str(own), "nobody wrote it"
    for text, line in (("seeds: 0", 2), ("axes:\n  EMA: []", 3), ("sweep: all", 2), ("minimize: loss", 2)):
        with pytest.raises(ConfigError, match=rf"study\.yaml:{line}: "):
            read_experiment(written(tmp_path, f"config: lenet5\n{text}\n"))


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_bytes("about: café\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"study\.yaml is not in UTF-8"):
        read_yaml(file)


def test_defaults_are_merged_below_and_after_self_above(tmp_path: Path) -> None:
    written(tmp_path, "config: lenet5\nset: {MAX_SAMPLES: 1, MAX_STEPS: 5}\naxes: {EMA: [true]}\n", "base")
    written(tmp_path, "set: {MAX_SAMPLES: 7}\n", "last")
    own = "set: {MAX_SAMPLES: 2, GRAD_CLIP: 1.5, MAX_STEPS: null}\naxes: {EMA: [false, true]}\n"
    file = written(tmp_path, f"defaults: [base]\n{own}")
    assert merged(file).content == {
        "config": "lenet5",
        "set": {"MAX_SAMPLES": 2, "MAX_STEPS": None, "GRAD_CLIP": 1.5},
        "axes": {"EMA": [False, True]},
    }
    file = written(tmp_path, f"defaults: [base, _self_, last]\n{own}")
    assert merged(file).content["set"] == {"MAX_SAMPLES": 7, "MAX_STEPS": None, "GRAD_CLIP": 1.5}
    assert read_experiment(file).settings == {"MAX_SAMPLES": "7", "GRAD_CLIP": "1.5"}


def test_a_cycle_of_defaults_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "defaults: [two]\n", "one")
    file = written(tmp_path, "defaults: [one]\n", "two")
    with pytest.raises(
        ConfigError, match=r"the defaults of two\.yaml lead back to it: two\.yaml -> one\.yaml -> two\.yaml"
    ):
        merged(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed: 1", "no key sed; did you mean se"),
        ("seeds: none", "seeds is neither a number of seeds nor a list"),
        ("sweep: all", "no sweep all; one of grid, zip, random, optuna"),
        ("axes: {EMA: true}", "the axis EMA is empty or no list"),
        ("axes: {MAX_STEPS: [1], EMA: [true, false]}\nsweep: zip", r"one length, not \[1, 2\]"),
        ("axes: {EMA: [true]}\nsweep: random", "needs samples"),
        ("axes: {EMA: [true]}\nsweep: random\nsamples: -1", "needs samples"),
        ("axes: {EMA: [true]}\nsweep: random\nsamples: true", "needs samples"),
        ("axes: {EMA: [true]}\nsamples: 3", "samples is for sweep: random"),
        ("sweep: zip\ndraw_seed: 3", "draw_seed is for sweep: random"),
        ("seeds: [true]", "seeds is neither a number of seeds nor a list"),
        ("seeds: [2, 3, 2]", "a seed is given twice"),
        ("set: {SEED: 7}", "SEED comes from seeds"),
        ("axes: {SEED: [7, 8]}", "SEED comes from seeds"),
        ("defaults: [nowhere]", r"there is no nowhere\.yaml beside it"),
        ("set: {CONFIG_SEED: 1}", "written without CONFIG_"),
        ("set: {EMA: {a: 1}}", r"study\.yaml:2: EMA is a mapping, and an option takes one value"),
        ("axes: {EMA: [true, null]}", r"study\.yaml:2: EMA is null"),
        ("set: {SINK_PROJECT: [[a], b]}", r"study\.yaml:2: SINK_PROJECT is a list in a list"),
        ("defaults: base", "defaults is not a list"),
    ],
)
def test_malformed_experiments_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_experiment(written(tmp_path, f"config: lenet5\n{text}\n"))
    with pytest.raises(ConfigError, match="names no configuration"):
        read_experiment(written(tmp_path, "seeds: 1\n"))


def study(tmp_path: Path, text: str) -> Experiment:
    return read_experiment(written(tmp_path, f"config: lenet5\nset: {{BUDGET_STEPS: true}}\n{text}\n"))


AXES = "axes: {MAX_STEPS: [1, 2], LEARNING_RATE: [1e-3, 0.5]}\n"


def test_grid_zip_and_random(tmp_path: Path) -> None:
    def points(text: str) -> list[tuple[str, ...]]:
        return [tuple(point.values()) for point in study(tmp_path, AXES + text).points]

    every = [("1", "0.001"), ("1", "0.5"), ("2", "0.001"), ("2", "0.5")]
    assert points("sweep: grid") == every
    assert points("sweep: zip") == [("1", "0.001"), ("2", "0.5")]
    drawn = points("sweep: random\nsamples: 3")
    assert len(set(drawn)) == 3 and set(drawn) < set(every)
    assert drawn == points("sweep: random\nsamples: 3")
    assert sorted(points("sweep: random\nsamples: 99")) == every
    assert study(tmp_path, "").points == ({},) and study(tmp_path, "").seeds == (1, 2, 3)


def test_a_few_points_are_drawn_of_more_than_memory_could_hold(tmp_path: Path) -> None:
    axes = ", ".join(f"AXIS_{number}: [{', '.join(map(str, range(100)))}]" for number in range(9))
    drawn = study(tmp_path, f"axes: {{{axes}}}\nsweep: random\nsamples: 50").points
    assert len(drawn) == 50 and list(drawn[0]) == [f"AXIS_{number}" for number in range(9)]
    for name in drawn[0]:
        assert len({point[name] for point in drawn}) > 30, "each axis is drawn from as a whole"

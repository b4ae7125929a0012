"""Files for clusters: they fit the published schemas, and start what the configuration says."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lib import kconf
from lib.config import config_from_values
from lib.distributed.job_specs import CLUSTERS, RUNS
from lib.errors import ConfigError, PlanError
from lib.kconf.project import given_overrides
from lib.runs.identity import identity
from scripts import cluster
from tests.support.configs import ROOT, make_config
from tests.support.external import write_external

SCHEMAS = ROOT / "tests/fixtures/schemas"
CONFIGURATION = """\
CONFIG_MODEL_LENET5=y
CONFIG_DEVICE_CPU=y
CONFIG_NUM_DEVICES=2
CONFIG_DIST_MAX_RESTARTS=5
CONFIG_DIST_NNODES="2"
CONFIG_SLURM_PARTITION="a$$b$(HOME) 'c'"
"""
OF_PODS = {"image": "here/anneal:1", "storage": "runs-of-all", "accelerator": "nvidia.com/gpu"}
GIVEN = {"kubernetes": OF_PODS, "ray": OF_PODS, "skypilot": OF_PODS | {"accelerator": "H100"}}
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def breaches(value: Any, schema: dict[str, Any], at: str = "file") -> Iterator[str]:
    """What a schema forbids: fields, types, words and lengths; fields that it does not name, too."""
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at} is {value!r}"
    if "type" in schema and type(value) is not TYPES[schema["type"]]:
        yield f"{at} is no {schema['type']}"
        return
    if isinstance(value, str):
        if not re.fullmatch(schema.get("pattern", r"[\s\S]*"), value) or len(value) > schema.get(
            "maxLength", 10**6
        ):
            yield f"{at} is {value!r}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from breaches(item, schema["items"], f"{at}[{index}]")
    elif isinstance(value, dict):
        yield from (f"{at} has no {name}" for name in schema.get("required", []) if name not in value)
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("values"))
            yield from [f"{at} has {name}"] if inner is None else breaches(item, inner, f"{at}.{name}")


@cache
def schema_of(to: str) -> dict[str, Any]:
    schema: dict[str, Any] = yaml.safe_load((SCHEMAS / f"{to}.yaml").read_text())
    return schema


@cache
def _resolved(text: str, overrides: tuple[tuple[str, str], ...]) -> kconf.Resolved:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / ".config"
        file.write_text(text)
        return kconf.load(root=ROOT, config_file=file, overrides=dict(overrides))


def resolved(text: str, overrides: dict[str, str]) -> kconf.Resolved:
    return _resolved(text, tuple(overrides.items()))


def file_for(
    to: str, *, name: str = "lenet5-0a1b2c3d", given: dict[str, str] | None = None, **changes: Any
) -> str:
    config = replace(
        make_config("lenet5", device="cuda", num_devices=4, dist_nnodes="2", target_effective_batch=64),
        **changes,
    )
    return cluster.file_of(
        config, to=to, name=name, configuration=CONFIGURATION, given=GIVEN[to] | (given or {})
    )


def variants(to: str) -> Iterator[dict[str, Any]]:
    yield yaml.safe_load(file_for(to))
    yield yaml.safe_load(file_for(to, dist_nnodes="1", device="cpu", given={"accelerator": ""}))
    if to == "skypilot":
        yield yaml.safe_load(file_for(to, dist_nnodes="1", given={"storage": "s3://bucket/runs"}))


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(inner)


@pytest.mark.parametrize("to", CLUSTERS)
def test_a_file_fits_its_schema_and_a_misspelled_field_does_not(to: str) -> None:
    for document in variants(to):
        assert list(breaches(document, schema_of(to))) == []
        for place in range(len(list(mappings(document)))):
            wrong = copy.deepcopy(document)
            fields = list(mappings(wrong))[place]
            if not fields or {"/runs", "nvidia.com/gpu", "num-cpus"} & fields.keys():
                continue  # names that are the user's to choose
            name = next(iter(fields))
            fields[f"x{name}"] = fields.pop(name)
            assert list(breaches(wrong, schema_of(to))), fields


def test_a_schema_catches_wrong_values() -> None:
    document = yaml.safe_load(file_for("kubernetes"))
    for path, value in (
        (("kind",), "PyTorchJob"),
        (("metadata", "name"), "Anneal_1"),
        (("spec", "trainer", "numNodes"), "2"),
        (("spec", "runtimeRef"), {}),
    ):
        wrong = copy.deepcopy(document)
        inner = wrong
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        assert list(breaches(wrong, schema_of("kubernetes"))), path


@pytest.mark.parametrize("to", CLUSTERS)
def test_the_first_line_says_that_it_was_not_run(to: str) -> None:
    assert file_for(to).startswith("# Not run on ")


def test_what_is_asked_for_is_machines_and_gpus() -> None:
    job = yaml.safe_load(file_for("kubernetes"))["spec"]["trainer"]
    assert (job["numNodes"], job["resourcesPerNode"]) == (2, {"limits": {"nvidia.com/gpu": 4}})
    task = yaml.safe_load(file_for("skypilot"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:4")
    ray = yaml.safe_load(file_for("ray"))["spec"]
    assert ray["entrypoint"] == "python -m scripts.ray_machines --machines=2 --gpus=4"
    workers = ray["rayClusterSpec"]["workerGroupSpecs"][0]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2


def script_in(text: str, *, to: str) -> str:
    """The shell script of a file as the cluster hands it to a machine."""
    document = yaml.safe_load(text)
    if to == "skypilot":
        return str(document["run"])
    if to == "kubernetes":
        script = document["spec"]["trainer"]["command"][2]
    else:
        workers = document["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
        script = workers["template"]["spec"]["containers"][0]["env"][0]["value"]
    return str(re.sub(r"\$\$|\$\(\w+\)", lambda found: "$" if found[0] == "$$" else "", script))


def told_by(to: str, *, number: int) -> dict[str, str]:
    """What the environment of machine `number` of "there" and "elsewhere" holds."""
    if to == "skypilot":
        return {"SKYPILOT_NODE_IPS": "there\nelsewhere", "SKYPILOT_NODE_RANK": str(number)}
    own = ("there", "elsewhere")[number]
    if to == "kubernetes":
        return {"PET_MASTER_ADDR": "there", "PET_NODE_RANK": str(number), "THIS_MACHINE": own}
    return {"FIRST_MACHINE": "there", "THIS_MACHINE": own, "MACHINE_NUMBER": str(number)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "endpoint", "meets"),
    [(0, "", "there:29500"), (1, "", "there:29500"), (1, "own:1", "own:1")],
)
@pytest.mark.parametrize("to", CLUSTERS)
def test_it_starts_what_launch_print_shows(
    to: str, number: int, endpoint: str, meets: str, tmp_path: Path
) -> None:
    """The script runs with a stand-in for python, and what that is told is resolved again."""
    requested = resolved(CONFIGURATION + (f'CONFIG_DIST_ENDPOINT="{endpoint}"\n' if endpoint else ""), {})
    name = f"lenet5-{identity(requested.in_effect)}"
    text = cluster.file_of(
        config_from_values(requested.values),
        to=to,
        name=name,
        configuration=requested.minimal,
        given=GIVEN[to] | {"accelerator": ""},
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*"; cp "$KCONFIG_CONFIG" {tmp_path}/seen; env\n')
    python.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        **told_by(to, number=number),
    }
    done = subprocess.run(
        ["sh", "-c", script_in(text, to=to)], env=environment, capture_output=True, text=True, check=True
    )
    command, *lines = done.stdout.splitlines()
    assert command == f"-m train --runs {RUNS} train"
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    own = None if endpoint else ("there", "elsewhere")[number]
    assert variables.get("PET_LOCAL_ADDR") == own
    told = given_overrides(variables)
    there = resolved((tmp_path / "seen").read_text(), told)
    assert there.values["DIST_ENDPOINT"] == meets
    assert {**there.values, "DIST_ENDPOINT": ""} == {**requested.values, "DIST_ENDPOINT": ""}
    shown = cluster.command_line(config_from_values(there.values), name=name, runs=Path(RUNS))
    assert "--nnodes=2 --nproc-per-node=2 --max-restarts=5" in shown
    assert f"On each node it runs: {shown.replace(meets, endpoint or 'FIRST:29500')}\n" in text


@pytest.mark.parametrize(
    ("to", "given", "changes", "message"),
    [
        ("slurm", {}, {}, "TO=slurm is not a supported cluster"),
        ("", {}, {}, r"make emit needs TO= \(the cluster: kubernetes, skypilot, ray\): only you can know"),
        (
            "",
            {"image": "", "storage": "", "accelerator": ""},
            {"num_devices": 0},
            "TO= .*; IMAGE= .*; STORAGE= .*; ACCELERATOR= .*; CONFIG_NUM_DEVICES= .*: only you can know",
        ),
        ("ray", {"image": "", "storage": ""}, {}, "TO=ray needs IMAGE= .*; STORAGE= .*: only you can know"),
        ("skypilot", {"accelerator": ""}, {}, "needs ACCELERATOR= "),
        ("kubernetes", {"accelerator": "H100"}, {}, "ACCELERATOR=H100 is not the cluster's name of a GPU"),
        ("kubernetes", {"storage": "s3://bucket"}, {}, "STORAGE=s3://bucket is not the name of a Persistent"),
        ("skypilot", {"storage": "s3://bucket"}, {}, "is not for 2 nodes"),
        ("ray", {"image": "two words"}, {}, "IMAGE=two words is not a container image"),
        ("ray", {"image": "two words", "storage": "A"}, {}, "IMAGE=two words .*; STORAGE=A is not"),
        ("ray", {}, {"device": "cpu"}, "ACCELERATOR=nvidia.com/gpu is not used by CONFIG_DEVICE_CPU=y"),
        ("ray", {}, {"device": "mps"}, "CONFIG_DEVICE_MPS=y is not for make emit"),
        ("ray", {}, {"num_devices": 0}, "TO=ray needs CONFIG_NUM_DEVICES= "),
        ("ray", {"storage": "CLAIM"}, {}, "STORAGE=CLAIM .* in lower case, such as anneal-runs$"),
        ("skypilot", {"storage": "VOLUME"}, {}, "STORAGE=VOLUME .* in lower case, such as anneal-runs, or"),
        ("ray", {}, {"dist_nnodes": "2:4"}, "CONFIG_DIST_NNODES=2:4 is not for make emit"),
    ],
)
def test_what_is_missing_or_cannot_be_is_told(
    to: str, given: dict[str, str], changes: dict[str, Any], message: str
) -> None:
    config = make_config(device="cuda", num_devices=4, dist_nnodes="2", target_effective_batch=64)
    with pytest.raises(ConfigError, match=message) as told:
        cluster.file_of(
            config.replace(**changes),
            to=to,
            name="lenet5-0a1b2c3d",
            configuration=CONFIGURATION,
            given=GIVEN.get(to, OF_PODS) | given,
        )
    assert told.value.exit_code == 2 and "\n" not in str(told.value)


def test_a_plug_in_that_nodes_do_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANNEAL_EXTERNAL", str(folder := write_external(tmp_path / "mine")))
    assert file_for("ray"), "its own plug-ins are in the tree"
    message = f"the model tiny_net of EXTERNAL={folder}: .*; move {folder}/models/tiny_net to models"
    with pytest.raises(ConfigError, match=message):
        file_for("ray", model="tiny_net")


def tpu_file(to: str, accelerator: str, **changes: Any) -> dict[str, Any]:
    wanted = {"device": "xla", "num_devices": 0, "dist_nnodes": "1", **changes}
    document: dict[str, Any] = yaml.safe_load(file_for(to, given={"accelerator": accelerator}, **wanted))
    assert list(breaches(document, schema_of(to))) == []
    return document


def test_skypilot_is_asked_for_one_tpu_slice_by_its_name() -> None:
    assert tpu_file("skypilot", "tpu-v4-8")["resources"]["accelerators"] == "tpu-v4-8:1"
    document = tpu_file("skypilot", "TPU-v5e-8", device="tpu", num_devices=8)
    assert document["resources"]["accelerators"] == "tpu-v5litepod-8:1"
    assert "PJRT_DEVICE" not in document["run"], "torch_tpu does not read it"
    assert "\nexport PJRT_DEVICE=TPU\nexec python -m train" in tpu_file("skypilot", "tpu-v4-8")["run"]


def test_kubernetes_is_asked_for_tpus_on_nodes_of_that_slice() -> None:
    document = tpu_file("kubernetes", "tpu-v5p-8")
    assert document["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"google.com/tpu": 4}}
    (selector,) = (found["nodeSelector"] for found in mappings(document) if "nodeSelector" in found)
    labels = {"accelerator": "tpu-v5p-slice", "topology": "2x2x1"}
    assert selector == {f"cloud.google.com/gke-tpu-{name}": value for name, value in labels.items()}
    assert "nodeSelector" not in file_for("kubernetes")


@pytest.mark.parametrize(
    ("to", "accelerator", "changes", "message"),
    [
        ("skypilot", "H100", {}, "'h100' is no TPU slice of one host; name tpu-v4-8, "),
        ("skypilot", "tpu-v4-16", {}, "a host at most 4"),
        ("ray", "tpu-v4-8", {}, "TO=ray is not possible for 4 TPUs"),
        ("kubernetes", "tpu-v4-8", {"num_devices": 2}, "CONFIG_NUM_DEVICES=4"),
        ("kubernetes", "tpu-v4-8", {"dist_nnodes": "2"}, "CONFIG_DIST_NNODES=1"),
        ("skypilot", "", {}, "needs ACCELERATOR= .*a slice, such as tpu-v4-8"),
        ("skypilot", "tpu-v4-8", {"device": "auto", "num_devices": 4}, "would not be used: only CONFIG_DEV"),
        ("kubernetes", "tpu-v4-8", {"device": "auto"}, "needs CONFIG_DEVICE_TPU=y or CONFIG_DEVICE_XLA=y"),
        ("kubernetes", "google.com/tpu", {"device": "cuda", "num_devices": 4}, "would not be used"),
    ],
)
def test_what_tpus_cannot_be_asked_for(
    to: str, accelerator: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tpu_file(to, accelerator, **changes)


def test_a_batch_that_the_machines_cannot_share_is_told_before_they_are_asked_for() -> None:
    with pytest.raises(PlanError, match="64 cannot be split over 17 x 4"):
        file_for("ray", dist_nnodes="17")


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(path.parent.name for path in ROOT.glob("models/*/model.py")))
def test_every_model_makes_a_name(model: str) -> None:
    for to in CLUSTERS:
        document = yaml.safe_load(file_for(to, name=f"{model}-0a1b2c3d"))
        assert list(breaches(document, schema_of(to))) == []

"""Files for clusters pass the checks of the clusters' own packages, where those are installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.lib.distributed.test_job_specs import mappings, variants

pytestmark = pytest.mark.long


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What of a file Kubernetes itself checks; in a patch, the image and command are the runtime's."""
    specs = [fields["spec"] for fields in mappings(document) if "containers" in fields.get("spec", {})]
    assert specs, document
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec} for spec in specs]


def test_skypilot_accepts_its_file_and_no_other_field() -> None:
    sky = pytest.importorskip("sky", reason="needs the package skypilot")
    for document in variants("skypilot"):
        task = sky.Task.from_yaml_config(copy.deepcopy(document))
        assert task.num_nodes == document["num_nodes"]
        for wrong in ({"xworkdir": "."}, {"num_nodes": "two"}, {"resources": {"gpus": 1}}):
            with pytest.raises(sky.exceptions.InvalidSkyPilotConfigError):
                sky.Task.from_yaml_config(copy.deepcopy(document) | wrong)


def test_kubernetes_accepts_the_pods_and_no_other_field() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    version = validator.latest_version()
    for pod in (
        pod for to in ("kubernetes", "ray") for document in variants(to) for pod in pod_templates(document)
    ):
        validator.validate(pod, version, strict=True)
        container = pod["spec"]["containers"][0]
        name, value = container.popitem()
        container[f"x{name}"] = value
        with pytest.raises(validator.ValidationError):
            validator.validate(pod, version, strict=True)


def test_kubeflow_knows_every_field_of_its_file() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    for document in variants("kubernetes"):
        assert models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(document)).to_dict() == document
        for place, fields in enumerate(mappings(document)):
            name = next(iter(fields), "")
            if not name or "nvidia.com/gpu" in fields:
                continue
            wrong = copy.deepcopy(document)
            renamed = list(mappings(wrong))[place]
            renamed[f"x{name}"] = renamed.pop(name)
            with pytest.raises((ValueError, AssertionError)):
                assert models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(wrong)).to_dict() == wrong

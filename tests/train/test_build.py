"""From a configuration to a job: every choice arrives where it is used."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lib.config import Config
from lib.data import DataLocation, Dataset, ImageSpec, LoaderConfig, Part, TextClassSpec, TrainLoader
from lib.data.datasets.files import describe_images
from lib.devices.base import Backend
from lib.errors import ConfigError, DataError
from lib.nn.batch_norm import GhostBatchNorm2d
from lib.plan.types import Branch, Hardware
from lib.runs.weight_files import WeightFiles, find_weights
from models.gpt2 import huggingface
from tests.support.configs import make_config
from tests.support.fake_backend import FakeBackend
from tests.support.tokens import small_lm_config, text_data, text_spec
from tests.support.training import (
    CPU,
    MemoryRecord,
    largest_difference,
    random_data,
    small_config,
    small_plan,
)
from train.build import make_job
from train.job import Budget, Job
from train.summary import eval_part
from train.tasks.base import make_task
from train.tasks.classify.task import Classify
from train.tasks.lm.task import LanguageModel
from train.training_data import TrainingData, open_to_train, open_training_data


def make_job_of_text(
    config: Config, *, weights: WeightFiles | None = None, record: MemoryRecord | None = None
) -> Job:
    return make_job(
        config,
        small_plan(2),
        text_data(config),
        hardware=CPU,
        backend=Backend("cpu"),
        record=record or MemoryRecord(),
        weights=weights,
    )


class Wrapping(Backend):
    """Remembers how it was asked to wrap the model."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.share_buffers: list[bool] = []

    def wrap(self, model: nn.Module, *, share_buffers: bool) -> nn.Module:
        self.share_buffers.append(share_buffers)
        return nn.Sequential(model)


def job_of(
    model: str = "resnet18",
    *,
    norm_batch: int = 4,
    data: TrainingData | None = None,
    backend: Backend | None = None,
    plan: dict[str, Any] | None = None,
    hardware: Hardware = CPU,
    **changes: Any,
) -> Job:
    config = small_config(model, norm_batch=norm_batch or None, **changes)
    shape = (3, 8, 8) if model == "resnet18" else (1, 28, 28)
    return make_job(
        config,
        small_plan(8, 8, norm_batch=norm_batch, **(plan or {})),
        data or random_data(config, shape=shape, train_size=40, test_size=10),
        hardware=hardware,
        backend=backend or Backend("cpu"),
        record=MemoryRecord(),
    )


# The subject


def fake_data(
    monkeypatch: pytest.MonkeyPatch, *, synthetic: bool = True
) -> tuple[Dataset, list[dict[str, Any]]]:
    data = random_data(small_config(), shape=(1, 28, 28), train_size=40, test_size=10)
    spec = dataclasses.replace(data.dataset.spec, synthetic=synthetic)
    dataset = dataclasses.replace(data.dataset, spec=spec)
    requested: list[dict[str, Any]] = []

    def open_dataset(place: DataLocation, options: Mapping[str, Any]) -> Dataset:
        requested.append({"place": place, "options": options})
        return dataset

    monkeypatch.setattr("train.training_data.open_dataset", open_dataset)
    return dataset, requested


def test_data_are_opened_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, requested = fake_data(monkeypatch)
    config = small_config(dataset="mnist", data_dir="elsewhere", data_download=False)
    data = open_training_data(config, root=tmp_path, log=print)
    place: DataLocation = requested[0]["place"]
    assert (place.name, place.download, place.image_size, place.block_size) == ("mnist", False, None, None)
    assert (place.data_dir, place.cache_dir) == (tmp_path / "elsewhere", tmp_path / "data")
    assert data.dataset == dataset
    open_training_data(small_config(dataset="image_folder", image_size=96), root=tmp_path, log=print)
    assert requested[1]["place"].image_size == 96
    assert (data.facts.train_size, data.facts.has_batchnorm) == (40, False)
    assert data.to_json()["train_size"] == 40 and data.to_json()["evaluation_size"] == 10
    assert data.to_json()["flop_per_sample"] == data.facts.flop_per_sample
    frozen = Branch(flop_per_sample=1e9, parameters=1)
    facts = dataclasses.replace(data.facts, branches=(frozen, frozen), flop_per_sample=5.0)
    assert dataclasses.replace(data, facts=facts).flop_per_sample == 2e9 + 5


def test_training_refuses_data_that_are_not_as_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is at a URL only the usual is known before it is fetched."""
    fake_data(monkeypatch)
    known = describe_images(ImageSpec.square("random", 28, 10, mean=(0.5,), std=(0.5,)), (400, 10), "")
    monkeypatch.setattr("train.training_data.describe_dataset", lambda *_: known)
    config = small_config(dataset="mnist", data_dir="elsewhere", target_effective_batch=8)
    with pytest.raises(DataError, match=r"mnist/data.py: describe returns train.size 400, and open_set 40"):
        open_to_train(config, root=tmp_path, log=print)
    monkeypatch.setattr("train.training_data._data_dir", lambda *_, **__: None)
    assert open_to_train(config, root=tmp_path, log=print).dataset.train.size == 40


def test_texts_are_opened_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, requested = fake_data(monkeypatch)
    own = {"vocab_size": 300}
    config = small_config(dataset="token_bins", data_dir=None, block_size=64, data_options=own)
    open_training_data(config, root=tmp_path, log=print)
    place: DataLocation = requested[0]["place"]
    assert place.data_dir is None and (place.tokenizer, place.block_size) == (None, 64)
    assert requested[0]["options"] == own


def test_without_a_holdout_the_test_part_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, _ = fake_data(monkeypatch, synthetic=False)
    config = small_config(data_limit=30)
    data = open_training_data(config, root=tmp_path, log=print)
    assert data.dataset.test is dataset.test and data.dataset.train.size == 30
    assert eval_part(config, data.dataset) == "test part of random"


def test_a_holdout_is_evaluated_and_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_data(monkeypatch)
    config = small_config(holdout=8)
    dataset = open_training_data(config, root=tmp_path, log=print).dataset
    assert (dataset.train.size, dataset.test.size) == (32, 8)
    trained, evaluated = (part.rows for part in (dataset.train, dataset.test))
    assert trained is not None and evaluated is not None
    assert not np.intersect1d(trained, evaluated).size
    assert eval_part(config, dataset) == "held-out training samples of random, synthetic"


# The task


def test_the_model_names_its_task() -> None:
    images = random_data(small_config(), shape=(1, 28, 28), train_size=4).dataset.spec
    task = make_task(small_config(label_smoothing=0.25), images)
    assert isinstance(task, Classify) and task.label_smoothing == 0.25
    labelled = TextClassSpec(name="t", vocab_size=9, block_size=4, classes=2, pad=8)
    assert isinstance(make_task(make_config("gpt2"), text_spec()), LanguageModel)
    with pytest.raises(ConfigError, match=r"CONFIG_LABEL_SMOOTHING=0\.1 is for labels"):
        make_task(make_config("gpt2", label_smoothing=0.1), text_spec())
    assert isinstance(make_task(make_config("gpt2"), labelled), Classify)


# The job


@pytest.mark.slow
def test_training_starts_from_the_weights_that_are_given(tmp_path: Path) -> None:
    config = small_lm_config(ema=True, ema_decay=0.5)
    other = make_job_of_text(config.replace(seed=7)).model
    file = tmp_path / "weights"
    torch.save(huggingface.to_huggingface(other), file)  # type: ignore[arg-type]
    record = MemoryRecord()
    job = make_job_of_text(config, weights=find_weights(str(file), root=tmp_path), record=record)
    assert largest_difference(job.model.state_dict(), other.state_dict()) == 0
    assert job.ema is not None
    assert largest_difference(job.ema.state_dict(), other.state_dict()) == 0
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    said = [line for line in record.said if line.startswith(f"Weights: {file}, SHA-256 {digest[:16]}: ")]
    assert said[0].endswith("28 tensors in the layout of Hugging Face transformers")


@pytest.mark.slow
def test_weights_are_a_function_of_the_seed() -> None:
    weights = [job_of(seed=seed).model.state_dict() for seed in (1, 1, 2)]
    assert largest_difference(weights[0], weights[1]) == 0 < largest_difference(weights[0], weights[2])


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
def test_layout_is_that_of_the_plan(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.build.check_channels_last", lambda _: None)  # nothing is computed in it here
    job = job_of(plan={"channels_last": channels_last})
    kernel = next(parameter for parameter in job.model.parameters() if parameter.dim() == 4)
    (batch,) = job.eval_loader.batches(rank=0, world=1, batch_size=10)
    for tensor in (kernel, batch.inputs):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert tensor.is_contiguous() != channels_last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "norm_batch", "shared"),
    [("resnet18", 4, False), ("resnet18", 0, True), ("lenet5", 0, False)],
)
def test_buffers_are_shared_only_where_each_rank_has_its_own_statistics(
    model: str, norm_batch: int, shared: bool
) -> None:
    backend = Wrapping()
    job = job_of(model, norm_batch=norm_batch, backend=backend)
    assert backend.share_buffers == [shared]
    layers = [module for module in job.model.modules() if isinstance(module, GhostBatchNorm2d)]
    assert {layer.norm_batch for layer in layers} == ({norm_batch} if norm_batch else set())
    assert job.forward is job.wrapped is not job.model


@pytest.mark.slow
def test_a_planned_compilation_is_of_the_wrapped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def fake(module: Any) -> nn.Module:
        compiled.append(module)
        return nn.Identity()

    monkeypatch.setattr("lib.nn.compile.compiled", fake)
    job = job_of(plan={"compile": True}, backend=Wrapping())
    assert compiled == [job.wrapped] and job.wrapped is not job.model and isinstance(job.forward, nn.Identity)


def test_the_optimizer_and_the_average_are_as_configured() -> None:
    job = job_of("lenet5", norm_batch=0, learning_rate=0.25, momentum=0.5, nesterov=True, weight_decay=0.125)
    first, second = job.optimizer.param_groups
    assert isinstance(job.optimizer, torch.optim.SGD) and job.ema is None
    assert [first[name] for name in ("lr", "momentum", "nesterov")] == [0.25, 0.5, True]
    assert (first["weight_decay"], second["weight_decay"]) == (0.125, 0.0)
    adam: dict[str, Any] = {"adam_beta1": 0.7, "adam_beta2": 0.8, "adam_eps": 1e-3, "momentum": None}
    job = job_of("lenet5", norm_batch=0, optimizer="adamw", ema=True, ema_decay=0.5, **adam)
    assert isinstance(job.optimizer, torch.optim.AdamW) and job.ema is not None
    assert job.optimizer.param_groups[0]["betas"] == (0.7, 0.8)
    assert job.optimizer.param_groups[0]["eps"] == 1e-3


def test_epochs_count_what_is_trained_on() -> None:
    job = job_of("lenet5", norm_batch=0, budget="epochs", num_epochs=2)
    assert job.budget == Budget(total_steps=5, total_seconds=None)


@pytest.mark.slow
@pytest.mark.parametrize("requested", ["resident", "stream", "auto"])
def test_where_the_data_are_kept_is_told_and_changes_no_bit(requested: str) -> None:
    job = job_of("lenet5", norm_batch=0, data_placement=requested, num_workers=2, prefetch=2)
    reference = job_of("lenet5", norm_batch=0, data_placement="resident")
    assert isinstance(job.record, MemoryRecord)
    placement = "stream" if requested == "stream" else "resident"
    assert any(text.startswith(f"Data: random; {placement}: ") for text in job.record.said)
    options: dict[str, Any] = {"step": 1, "target": 16, "sizes": (8, 8)}
    with job.train_loader, job.eval_loader:
        found = list(job.train_loader.micro_batches(**options))
    for batch, expected in zip(found, reference.train_loader.micro_batches(**options), strict=True):
        assert torch.equal(batch.inputs, expected.inputs) and torch.equal(batch.targets, expected.targets)


def test_delivery_and_augmentation_are_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[tuple[LoaderConfig, dict[str, Any]]] = []

    def loader(part: Part, spec: ImageSpec, loader_config: LoaderConfig, **options: Any) -> TrainLoader:
        requested.append((loader_config, options))
        return TrainLoader(part, spec, loader_config, **options)

    monkeypatch.setattr("train.build.TrainLoader", loader)
    config = {"data_placement": "stream", "num_workers": 3, "prefetch": 5, "augment": "shift", "seed": 7}
    job = job_of("lenet5", norm_batch=0, augment_pad=2, **config)
    with job.train_loader, job.eval_loader:
        ((loader_config, options),) = requested
    assert (loader_config.placement, loader_config.num_workers, loader_config.prefetch) == ("stream", 3, 5)
    further = {"fixed": 0, "epochs_ahead": 0, "operations": []}
    assert options == {"seed": 7, "augment": "shift", "pad": 2, **further}


def test_processes_on_one_processor_share_its_memory() -> None:
    hardware = dataclasses.replace(CPU, devices=(dataclasses.replace(CPU.devices[0], free_bytes=200_000),))
    for world, placement in ((1, "resident"), (2, "stream")):  # 39 200 bytes of images
        job = job_of(
            "lenet5",
            norm_batch=0,
            backend=FakeBackend(rank=0, world=world),
            plan={"world": world, "effective_batch": 16 * world},
            hardware=hardware,
        )
        assert isinstance(job.record, MemoryRecord)
        assert any(text.startswith(f"Data: random; {placement}: ") for text in job.record.said)
        job.train_loader.close()
        job.eval_loader.close()


@pytest.mark.slow
def test_the_libraries_are_set_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    for name in ("configure_numerics", "configure_threads"):
        monkeypatch.setattr(f"train.build.{name}", lambda kind, **options: calls.append((kind, options)))
    job_of(deterministic=True, plan={"precision": "bf16"}, hardware=dataclasses.replace(CPU, cpu_count=6))
    assert calls == [("bf16", {"deterministic": True}), ("cpu", {"cpu_count": 6, "world": 1})]


def test_one_seed_is_one_order_of_the_data() -> None:
    def labels(seed: int) -> list[int]:
        loader = job_of("lenet5", norm_batch=0, seed=seed).train_loader
        (batch,) = loader.micro_batches(step=0, target=16, sizes=(16,))
        return batch.targets.tolist()

    assert labels(1) == labels(1) != labels(2)

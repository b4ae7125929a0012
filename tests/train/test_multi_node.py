"""What machines that met make sure of before they train."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lib import kconf
from lib.devices.base import Backend
from lib.distributed.rendezvous import Rendezvous
from lib.errors import ConfigError, PlanError, ToolkitError
from lib.plan.gpus import parse_gpu
from lib.plan.placement import of_all_nodes
from lib.runs.directory import RunDir
from tests.support.configs import ROOT, make_config
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import CPU, random_data, small_config, small_plan
from train import base_run, commands, multi_node, training_data
from train.multi_node import check_shared_directory, refusal_on_nodes
from train.planning import run_plan
from train.planning.run_plan import RunRequest


class Ranks:
    """What two processes tell each other, of which each is a thread."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.told: list[Any] = [None, None]

    def exchanged(self, rank: int, value: Any) -> list[Any]:
        self.told[rank] = value
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.is_main = ranks, rank, rank == 0

    def broadcast(self, value: Any) -> Any:
        return self.ranks.exchanged(self.rank, value)[0]

    def all_reduce_max(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(map(max, zip(*self.ranks.exchanged(self.rank, values), strict=True)))


def refusals(*directories: Path) -> list[str]:
    """What is said on each of two ranks that have these directories of runs; "" for nothing."""
    ranks = Ranks()

    def told(rank: int) -> str:
        try:
            check_shared_directory(cast(Backend, Rank(ranks, rank)), directories[rank])
        except ToolkitError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as both:
        return list(both.map(told, (0, 1)))


def test_machines_see_one_directory_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    (tmp_path / "link").symlink_to(shared)
    assert refusals(shared, tmp_path / "link") == ["", ""]
    monkeypatch.chdir(tmp_path)
    assert refusals(Path("shared"), shared) == ["", ""]
    for told in refusals(tmp_path / "one", tmp_path / "two"):
        assert told.startswith("the nodes do not share one directory of runs: "), told
    assert not list(tmp_path.glob("*/*")), "nothing is left"


def test_one_directory_by_two_paths_is_refused(tmp_path: Path) -> None:
    """What rank 0 calls a checkpoint is what the others open."""

    class Other:
        is_main = False
        broadcast = staticmethod(lambda _: "/only/there/.rendezvous-name")
        all_reduce_max = staticmethod(tuple)

    (tmp_path / ".rendezvous-name").touch()
    with pytest.raises(ToolkitError, match="the same path"):
        check_shared_directory(cast(Backend, Other()), tmp_path)


def test_a_directory_of_runs_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    class Main:
        is_main = True

    with pytest.raises(ToolkitError, match=r"cannot write to .*: "):
        check_shared_directory(cast(Backend, Main()), tmp_path / "file" / "runs")


def met(least: int, most: int) -> Rendezvous:
    return Rendezvous(min_nodes=least, max_nodes=most, endpoint="here:29500")


def refusal(monkeypatch: pytest.MonkeyPatch, machine: str, nodes: tuple[int, int], **changes: Any) -> str:
    """What is said of a language model of two blocks before anything is made; "" for nothing."""
    monkeypatch.setattr(multi_node, "probe", lambda _: parse_gpu(machine))
    several = {"dist_nnodes": "{}:{}".format(*nodes), "resume": "auto", "target_effective_batch": 24}
    config = small_lm_config().replace(**several | changes)
    refuse = refusal_on_nodes(config, met(*nodes))
    refuse(config, None)
    try:
        refuse(config, text_data(config))
    except PlanError as error:
        return f"{error.what}: {error.why}"
    return ""


@pytest.mark.slow
def test_what_no_number_of_processes_could_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes may differ in size: what some number of processes can run is planned after the rendezvous."""
    split = refusal(monkeypatch, "a100-40gx2", (2, 2), dist_strategy="split")
    assert split.startswith("CONFIG_DIST_STRATEGY_SPLIT=y is not possible: ")
    fp16 = refusal(monkeypatch, "a100-40gx2", (2, 3), dist_strategy="fsdp", precision="fp16")
    assert fp16 == "CONFIG_DIST_STRATEGY_FSDP=y is not possible: no loss scaling for sharded gradients"
    assert not refusal(monkeypatch, "a100-40gx2", (2, 2), dist_strategy="fsdp", precision="bf16")
    pipeline: dict[str, Any] = {"dist_strategy": "pipeline", "precision": "bf16"}
    assert not refusal(monkeypatch, "a100-40gx1", (2, 2), **pipeline)
    assert not refusal(monkeypatch, "a100-40gx1", (2, 2), **pipeline, dist_stages=2)
    # No number of processes gives three stages of two blocks.
    stages = refusal(monkeypatch, "a100-40gx1", (2, 2), **pipeline, dist_stages=3)
    assert stages.endswith("is not possible: 2 devices are no pipelines of 3 stages each")
    # Three nodes of one are no pipelines of two stages; of one, one and two they are.
    assert not refusal(monkeypatch, "a100-40gx1", (3, 3), **pipeline, dist_stages=2)


def test_nodes_like_this_one_have_its_memory() -> None:
    machine = of_all_nodes(parse_gpu("a100-40gx4"), processes=4, world=12)
    assert len(machine.devices) == 12 and machine.per_node == 4 and machine.of_all_nodes


def test_a_measurement_is_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_node, "probe", lambda _: CPU)
    config = small_config("lenet5", dist_nnodes="2", resume="auto", auto_method="probe")
    with pytest.raises(
        ConfigError, match=r"^CONFIG_AUTO_METHOD_PROBE=y is not for several nodes: .*PREDICT=y"
    ):
        refusal_on_nodes(config, met(2, 2))


def test_a_batch_that_grows_with_the_devices_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_node, "probe", lambda _: parse_gpu("a100-40gx8"))
    several: dict[str, Any] = {"dist_nnodes": "2", "resume": "auto", "target_effective_batch": 8}
    config = make_config("lenet5", **several)
    with pytest.raises(PlanError, match="an effective batch of 8 cannot be split over 2 x 8 processes"):
        multi_node.check_node(config, met(2, 2))
    by_hand = config.replace(hyper_param="manual", batch_size=4, gradient_accumulation=1)
    assert multi_node.check_node(by_hand, met(2, 2))[1] == 8


def test_gpus_beyond_the_requested_number_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONFIG_NUM_DEVICES=2 of 4, of which the others are busy, and of another kind."""
    four = parse_gpu("a100-40gx4")
    busy = dataclasses.replace(four.devices[0], name="other", free_bytes=1)
    machine = dataclasses.replace(four, devices=(*four.devices[:2], busy, busy), cpu_count=8)
    sums: list[float] = []
    both = SimpleNamespace(world=4, local_world=2, broadcast=lambda value: value, all_reduce_max=list)
    both.all_reduce_sum = lambda tensor: sums.append(tensor.item()) or tensor.mul_(4)
    made: list[Any] = []  # on the device of the process: NCCL has no other
    both.device, tensor_of = torch.device("cuda", 0), torch.tensor

    def tensor(value: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        made.append(device)
        return tensor_of(value, dtype=dtype)

    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(multi_node, "probe", lambda _: machine)
    monkeypatch.setattr(multi_node, "open_backend", lambda *_, **__: both)
    _, joined = multi_node.join_rendezvous(make_config("lenet5", num_devices=2), known=None)
    assert joined.devices == four.devices[:1] * 4 and joined.per_node == 2
    assert made == [both.device] and sums == [4.0]
    assert joined.cpu_count == 16, "those of both nodes, as devices are"
    assert of_all_nodes(machine, processes=2, world=4).cpu_count == 16


def test_a_run_that_is_named_is_resumed_and_none_is_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes resume whenever one joins or leaves: each time the run of RUN=, wherever it is."""
    config = small_config("lenet5", dist_nnodes="2", resume="auto", target_effective_batch=24)
    monkeypatch.setattr(multi_node, "probe", lambda _: CPU)
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(multi_node, "launch", lambda payload, **_: launched.append(payload))
    monkeypatch.setattr(multi_node, "route_to", lambda _: None)
    run = RunDir.create(tmp_path / "elsewhere", model="lenet5", identity="0123abcd", files={"config": ""})
    run.release()
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5", overrides={})
    for given in (run, None):
        multi_node.launch_multi_node(config, resolved, met(2, 2), run=given)
    assert [payload["run"] for payload in launched] == [str(run.path), None]

    monkeypatch.setattr(multi_node, "join_rendezvous", lambda *_, **__: (Backend("cpu"), CPU))
    monkeypatch.setattr(commands, "plan_for", lambda *_: small_plan(24))
    data = random_data(config, shape=(1, 28, 28), train_size=48)
    request = RunRequest(resolved=resolved, config=config, root=ROOT, runs=tmp_path / "runs", started=0.0)
    _, _, resumed = commands._plan_after_rendezvous(request, data, launched[0] | {"hardware": None})
    assert resumed is not None and resumed.path == run.path
    _, _, resumed = commands._plan_after_rendezvous(request, data, launched[1] | {"hardware": None})
    assert resumed is None

    with pytest.raises(ConfigError, match=r"^make rerun is not for several nodes: they resume"):
        refusal_on_nodes(config, met(2, 2), again=True)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_weights_to_start_from_are_not_trained_for_what_is_refused(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are there, so that nothing else would ask the plan before."""
    several: dict[str, Any] = {"dist_nnodes": str(nodes), "resume": "auto", "target_effective_batch": 24}
    config = small_lm_config().replace(**several, dist_strategy="split", initial_weights="defconfig:base")
    for module in (multi_node, run_plan):
        monkeypatch.setattr(module, "probe", lambda _: parse_gpu("a100-40gx2"))
    trained: list[object] = []
    monkeypatch.setattr(base_run, "base_of", lambda *_: "base")
    monkeypatch.setattr(base_run, "train_base", lambda base, *_, **__: trained.append(base))
    monkeypatch.setattr(training_data, "_metadata", lambda *_, **__: None)
    monkeypatch.setattr(training_data, "open_training_data", lambda *_, **__: text_data(config))
    refuse = refusal_on_nodes(config, met(2, 2)) if nodes > 1 else run_plan.refuse
    with pytest.raises(PlanError, match="CONFIG_DIST_STRATEGY_SPLIT=y is not possible"):
        training_data.open_to_train(config, root=tmp_path, log=lambda _: None, refuse=refuse)
    assert not trained

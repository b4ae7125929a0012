"""`make elastic-check` and `make elastic-demo`."""

from __future__ import annotations

import pytest

from lib.errors import ConfigError, PlanError, ToolkitError
from lib.plan import plan
from lib.plan.gpus import parse_gpu
from lib.plan.latentwire import document_facts
from lib.units import counted
from scripts import elastic
from tests.support.configs import make_config


def test_what_is_shown_is_what_a_run_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert elastic.show("a100-40gx5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NVIDIA A100-SXM4-40GB, 42.3 GB; 5 of them"
    assert lines[2].startswith(
        "  1  none: LatentWire's rule: 75 % of 42.3 GB less 4 GB and 27.00 GB of frozen"
    )
    shown = {int(line[:3]): lines[at : at + 2] for at, line in enumerate(lines) if line[:3].strip().isdigit()}
    assert {*shown} == {1, 2, 3, 4, 5, 8, 16}
    # The plan of a run with the policy, of the two models of the document.
    config = make_config(
        "lenet5", elastic_policy="latentwire", elastic_base_batch=64, elastic_target_util=75,
        target_effective_batch=0,
    )  # fmt: skip
    for count, (first, second) in [*shown.items()][1:]:
        found = plan(config, parse_gpu(f"a100-40gx{count}"), document_facts())
        name = found.reasons["strategy"].split()[-1]
        where = f"{found.strategy} in {counted(found.world, 'process')}: "
        assert first.startswith(f"{count:>3}  {name:<12} {where}")
        assert found.strategy == "ddp" or first.endswith(found.reasons["branch_devices"])
        assert f"{found.effective_batch} samples a step: {found.reasons['accumulation']}" in second
    assert "hybrid_3gpu" in shown[3][0] and "hybrid_4gpu" in shown[4][0] and "ddp_5gpu" in shown[5][0]
    with pytest.raises(PlanError, match="no batch here"):
        plan(config, parse_gpu("a100-40g"), document_facts())


@pytest.mark.parametrize(("name", "counts"), [("tpu-v4-8", [4]), ("tpu-v5e-4", [1, 4, 8])])
def test_of_tpus_only_slices_that_there_are_are_shown(
    name: str, counts: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert elastic.show(name) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [int(line[:3]) for line in lines if line[:3].strip()] == counts


def test_without_a_gpu_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "probe", lambda _: elastic.parse_gpu("cpu-24g"))
    with pytest.raises(ConfigError, match="name one: GPU=a100-40g"):
        elastic.show("")


@pytest.mark.parametrize(
    ("two", "alike"),
    [
        ((64, [0.7] * 10 + [0.8]), True),
        ((64, [0.71] * 11), False),
        ((64, [0.7] * 10), False),
        ((128, [0.7] * 11), False),
    ],
)
def test_the_demonstration_fails_where_two_do_not_train_as_one(
    two: tuple[int, list[float]], alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_trained", {1: (64, [0.7] * 11), 2: two}.__getitem__)
    if alike:
        assert elastic.demonstrate() == 0
        return
    with pytest.raises(ToolkitError, match="did not train alike"):
        elastic.demonstrate()


@pytest.mark.long
def test_one_process_and_two_train_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert elastic.demonstrate() == 0
    assert "The same training on both" in capsys.readouterr().out

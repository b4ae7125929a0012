"""`make fits TARGET=`: the micro-batches of a step, with a stand-in for timm."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
from torch import nn

from lib.errors import ConfigError
from lib.memory import largest_batch
from lib.plan.fitting import Split
from lib.plan.gpus import find_gpu, parse_gpu
from scripts import fits
from tests.scripts.test_fits import with_free

pytestmark = pytest.mark.slow
SHAPE = (3, 16, 16)


class Wide(nn.Sequential):
    """Gradients are 0.4 GB, and a sample takes about 0.3 MB."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(768, 40_000), nn.ReLU(), nn.Linear(40_000, 1_700))


class Pooled(nn.Sequential):
    def __init__(self) -> None:
        pool = nn.AdaptiveAvgPool2d(1)
        super().__init__(nn.Conv2d(3, 8, 3), pool, nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"wide": Wide, "pooled": Pooled}
    timm = SimpleNamespace(
        is_model=lambda _: True,
        create_model=lambda name: models[name](),
        get_pretrained_cfg=lambda _: SimpleNamespace(input_size=SHAPE),
    )
    monkeypatch.setitem(sys.modules, "timm", timm)  # type: ignore[arg-type]


def row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **options: str) -> list[str]:
    """Cells of a table of one row."""
    words = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["fits", *words, "--precision=fp32"])
    fits.main()
    return [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("  ") if cell]


def request(model: str) -> fits.Request:
    return fits.Request(model=f"timm:{model}", precision="fp32", seq=0, lora=0, checkpoint=False)


def test_steps_of_several_micro_batches_keep_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, gpu = {"limit": 30_000, "expandable_segments": True}, "rtx3090:6G"
    once, repeated = (
        largest_batch(Wide, (1, *SHAPE), gpu=gpu, **options, accumulation=count) for count in (1, 2)
    )
    assert once > repeated > once // 2
    for target in (once, once + 1):
        cells = row(monkeypatch, capsys, model="timm:wide", gpu=gpu, target=str(target))
        at_once = target == once
        assert cells[1] == str(once if at_once else repeated), "the most that fits in such a step"
        assert cells[2].startswith("1 x " if at_once else "2 x ") or " + " in cells[2]
    assert request("wide").to_reach(0, "cuda", 10**9) == request("wide"), "without TARGET= there is one"


def test_time_is_that_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    found, gpu = {}, find_gpu(parse_gpu("rtx3090").devices[0].name)
    monkeypatch.setattr(fits, "estimate_step_time", lambda work, *_, **__: work)
    assert gpu is not None
    for repeated in (False, True):
        own = dataclasses.replace(request("wide"), accumulates=repeated)
        for last in (1000, 4000):
            split = Split(micro_batch=4000, accumulation=3, last_micro_batch=last)
            found[last, repeated] = fits.step_time(fits.traced(own, "cuda")(4000), own, gpu, split)
    for last in (1000, 4000):
        assert found[last, True].flop == pytest.approx(found[last, False].flop), "of a micro-batch"
        assert found[last, True].launches < found[last, False].launches, "one update for two micro-batches"
    assert found[1000, False].flop / found[4000, False].flop == pytest.approx(9 / 12)
    assert found[1000, False].activation_bytes / found[4000, False].activation_bytes == pytest.approx(9 / 12)
    assert found[1000, False].launches == found[4000, False].launches


def test_a_model_that_cannot_be_trained_on_one_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert row(monkeypatch, capsys, model="timm:pooled", gpu="rtx3090", target="64")[1] == "64"
    assert row(monkeypatch, capsys, model="timm:pooled", gpu="rtx3090:1Gi", target="64")[1] == "0"
    # One micro-batch less than 65: 64 + 1 cannot be trained.
    own = dataclasses.replace(request("pooled"), accumulates=True)
    free = fits.traced(own, "cuda")(64).need_bytes
    monkeypatch.setattr(fits, "parse_gpu", lambda name: with_free(parse_gpu(name), free))
    monkeypatch.setattr(fits.Request, "to_reach", lambda *_: own)
    cells = row(monkeypatch, capsys, model="timm:pooled", gpu="rtx3090", target="65")
    assert cells[2] == "1 x 33 + 32" and int(cells[1]) == 64
    free = fits.traced(own, "cuda")(2).need_bytes
    with pytest.raises(ConfigError, match=r"TARGET=3 cannot be split: .* and no more than 2 fit"):
        row(monkeypatch, capsys, model="timm:pooled", gpu="rtx3090", target="3")
    with pytest.raises(ConfigError, match="TARGET=1: timm:pooled trains on 2 samples or more"):
        row(monkeypatch, capsys, model="timm:pooled", gpu="rtx3090", target="1")

"""`make fits`, with stand-ins for timm and transformers; tests/extras runs it on the real ones."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.errors import ConfigError
from lib.memory import largest_batch
from lib.plan.gpus import parse_gpu
from lib.plan.types import Hardware
from lib.units import bytes_text
from scripts import fits
from train.planning.changes import _OTHER

pytestmark = pytest.mark.slow


class Tiny(nn.Module):
    """A language model of four wide layers, as transformers has them."""

    main_input_name = "input_ids"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.recomputed = config, False
        self.embed = nn.Embedding(64, 512)
        nn.Linear(config.layers, 1)  # a negative size is a RuntimeError
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))

    def activation_checkpointing_enable(self, options: dict[str, bool]) -> None:
        assert options == {"use_reentrant": False} and not self.config.use_cache
        self.recomputed = True

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None and labels.shape == input_ids.shape
        x_BTC = self.embed(input_ids)
        for layer in self.layers:
            x_BTC = checkpoint(layer, x_BTC, use_reentrant=False) if self.recomputed else layer(x_BTC)
        return SimpleNamespace(loss=x_BTC.float().mean())


class CheckOfType(Exception):
    """StrictDataclassError of huggingface_hub, which is neither a ValueError nor a TypeError."""


class TinyForCausalLM(Tiny):
    pass


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timm = SimpleNamespace(
        is_model=lambda name: name == "images",
        create_model=lambda _: Images(),
        list_models=lambda: ["images"],
        get_pretrained_cfg=lambda _: SimpleNamespace(input_size=(3, 32, 32)),
    )

    def read(path: str, local_files_only: bool, trust_remote_code: bool) -> Any:
        assert local_files_only and not trust_remote_code
        if path in ("damaged.json", "type.json", "value.json"):
            raise {"damaged": ValueError, "type": AttributeError, "value": CheckOfType}[Path(path).stem](
                "no model_type\nand more"
            )
        if "class" in path:
            return SimpleNamespace(architectures=["Nobody"])
        return SimpleNamespace(
            layers=-1 if "layers" in path else 4,
            architectures=["TinyForCausalLM"],
            max_position_embeddings=256,
            use_cache=True,
        )

    transformers = SimpleNamespace(
        AutoConfig=SimpleNamespace(from_pretrained=read), TinyForCausalLM=TinyForCausalLM, __version__="5"
    )
    hub = SimpleNamespace(StrictDataclassError=CheckOfType)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", hub)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "timm", timm)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "transformers", transformers)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "peft", None)  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "damaged.json", "type.json", "value.json", "layers.json", "class.json"):
        (tmp_path / name).touch()


@pytest.fixture
def _own_traces() -> Iterator[None]:
    """For a test that changes what is traced; the others share what is traced of the stand-ins."""
    fits.traced.cache_clear()
    yield
    fits.traced.cache_clear()


def run(monkeypatch: pytest.MonkeyPatch, **options: str) -> int:
    words = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["fits", *words])
    return fits.main()


def test_a_table_for_one_gpu_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "memory.png"
    gpu = "rtx3090:3G"
    options = {"model": "timm:images", "gpu": gpu, "target": "10000", "out": str(picture)}
    assert run(monkeypatch, **options, precision="fp32", price="3.6") == 0
    title, head, row, foot, origin = capsys.readouterr().out.splitlines()
    inputs: Any = (1, 3, 32, 32)
    largest = largest_batch(Images, inputs, gpu=gpu, limit=10_000, expandable_segments=True)
    assert 1000 < largest < 10_000 and row.split()[:2] == [gpu, str(largest)]
    assert (
        title
        == "timm:images, fp32, AdamW, all weights trained, samples of 3 x 32 x 32: predicted, not measured"
    )
    assert head.split()[:5] == ["GPU", "batch", "steps", "of", "need"] and "what would fit" not in head
    words = row.split()
    accumulation, micro_batch = int(words[2]), int(words[4])
    assert accumulation * micro_batch + (int(words[6]) if words[5] == "+" else 0) == 10_000
    assert micro_batch <= largest and "activations" in row and "context, margin" in row
    seconds = [float(word) for word in row.split()[-6:] if word[0].isdigit()]
    assert seconds[2:] == pytest.approx(seconds[:2], rel=0.01), "1000 steps at 3.6 an hour"
    assert foot.startswith("Allocator: PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert origin.startswith("Model and loss are those of timm. ") and "CONFIG_MODEL_TIMM=y" in origin
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_names_the_phases_of_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lib.scaling import pictures

    axes = mock.Mock()
    monkeypatch.setattr(pictures, "draw_page", lambda draws, **_: (draws[0](axes), b"")[1])
    assert run(monkeypatch, model="timm:images", gpu="rtx3090", target="8", out=str(tmp_path / "a.png")) == 0
    middles, names = axes.set_xticks.call_args.args
    begin, end = (call.args[0] for call in axes.axvline.call_args_list)
    assert names == ("forward pass", "backward pass", "optimizer step")
    assert (
        0 < middles[0] < begin < middles[1] < end < middles[2]
        and "phase" in axes.set.call_args.kwargs["xlabel"]
    )


def test_a_language_model_of_a_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, model="hf:config.json", gpu="rtx3090:2G") == 0
    all_of_it, short = capsys.readouterr().out.splitlines(), {"seq": "128", "checkpoint": "y"}
    assert "AdamW, all weights trained, samples of 256 tokens: predicted" in all_of_it[0]
    assert run(monkeypatch, model="hf:config.json", gpu="rtx3090:2G", **short) == 0
    recomputed = capsys.readouterr().out.splitlines()
    assert "all weights trained, CHECKPOINT=y, samples of 128 tokens" in recomputed[0]
    assert "2.00 GB" in recomputed[2].split("  ")[3:5], "free memory, after the need"
    assert int(recomputed[2].split()[1]) > 2 * int(all_of_it[2].split()[1])


@pytest.mark.usefixtures("_own_traces")
@pytest.mark.parametrize(
    ("tokens", "less", "nearest"),
    [
        (65536, 2**27, "CHECKPOINT=y"),  # of activations, which are 0.9 GB
        (8, 2**31, "nothing that is known here"),
    ],
)
def test_the_nearest_change_that_would_fit(
    tokens: int, less: int, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fits, "Adam8bit", torch.optim.AdamW)  # not this one
    own = fits.Request(model="hf:config.json", precision="fp32", seq=tokens, lora=0, checkpoint=False)
    free = fits.traced(own, "cuda")(1).need_bytes - less
    monkeypatch.setattr(fits, "parse_gpu", lambda name: with_free(parse_gpu(name), free))
    assert run(monkeypatch, model="hf:config.json", gpu="rtx3090", seq=str(tokens), precision="fp32") == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:2] == ["rtx3090", "0"] and f"  {nearest}" in lines[2]
    listed = [line for line in lines[3:] if line.startswith(nearest)]
    if nearest == "CHECKPOINT=y":
        need = bytes_text(fits.traced(dataclasses.replace(own, checkpoint=True), "cuda")(1).need_bytes)
        name, seconds = lines[2].split(f"  {nearest}: {need}, ")
        assert name and seconds.endswith(" s") and f"{need}  {seconds.removesuffix(' s')}" in listed[0]
    else:
        assert not listed


def test_changes_go_together_with_shorter_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in make plan, each length only where twice as much is too much; also of the model's own length."""
    own = fits.Request(
        model="hf:config.json", precision="fp32", seq=0, lora=0, checkpoint=False
    ).with_length()
    assert own.seq == 256

    def need(seq: int, **values: Any) -> int:
        changed = dataclasses.replace(own, seq=seq, checkpoint=True, lora=16, **values)
        return fits.traced(changed, "cuda")(1).need_bytes

    free = need(128, four_bit=True)
    assert f"LORA=16 CHECKPOINT=y SEQ=128, 4-bit weights{_OTHER}" in dict(fits.changes(own, "cuda", free))
    free, longer = need(4096, four_bit=True), dataclasses.replace(own, seq=65536)
    found = dict(fits.changes(longer, "cuda", free))
    *fitting, left = found
    assert left.startswith("not enough: CHECKPOINT=y needs ") and found[left] is None
    assert all((report := found[name]) is not None and report.on(free).fits for name in fitting)
    for more, four_bit in (("", False), (", 4-bit weights", True)):
        (size,) = (
            size for size in (4096, 2048, 1024) if f"LORA=16 CHECKPOINT=y SEQ={size}{more}{_OTHER}" in fitting
        )
        assert need(size, four_bit=four_bit) <= free < need(2 * size, four_bit=four_bit)
    monkeypatch.setattr(fits, "parse_gpu", lambda name: with_free(parse_gpu(name), free))
    assert run(monkeypatch, model="hf:config.json", gpu="rtx3090", seq="65536", precision="fp32") == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6] == left and sum(line.startswith(tuple(fitting)) for line in lines) == len(fitting)


def with_free(machine: Hardware, free_bytes: int) -> Hardware:
    device = dataclasses.replace(machine.devices[0], free_bytes=free_bytes)
    return dataclasses.replace(machine, devices=(device,))


def test_state_in_8_bits_and_weights_in_4() -> None:
    own = fits.Request(model="hf:config.json", precision="fp32", seq=8, lora=0, checkpoint=False)
    small = fits.traced(dataclasses.replace(own, eight_bit=True), "cuda")(1)
    whole = fits.traced(own, "cuda")(1)
    assert small.parts["optimizer"] == pytest.approx(whole.parts["optimizer"] * 2.03125 / 8, rel=0.01)
    factors = fits.sharded(own, 4)
    assert factors["optimizer"] == pytest.approx(1 / 4, rel=0.01) and factors["parameters"] > 1 / 4, (
        "gathered ones"
    )
    # At the peak, in the update, are those of a GPU's part (tests/lib/plan/test_fake_group.py sees them).
    update = whole.trace.at_peak(factors)["temporaries"] / whole.parts["temporaries"]
    assert update == pytest.approx(1 / 4, rel=0.05) and whole.phases["update"][0] == whole.peak_bytes
    assert next(fits.changes(own, "cuda", small.need_bytes))[0] in (
        "CHECKPOINT=y",
        f"8-bit optimizer state{_OTHER}",
    )
    # Three of 4 layers of 512 x 512, for the last is the head, with 4.127 bits a weight in place of 32. The
    # allocator rounds scales of scales and tables of values up to 512 bytes.
    adapters = dataclasses.replace(own, lora=4)
    dense, packed = (
        fits.traced(dataclasses.replace(adapters, four_bit=four), "cuda")(1).parts["parameters"]
        for four in (False, True)
    )
    assert dense - packed == 3 * (512 * 512 * (4 - 0.5 - 1 / 64) - 3 * 512 - 1024)


def test_all_gpus_are_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fits, "machine_names", lambda _: ("rtx3090", "h100-80g", "tpu-v4-8", "mi300x"))
    assert run(monkeypatch, model="timm:images", gpu="all", target="64") == 0
    rows = capsys.readouterr().out.splitlines()[2:5]
    assert [row.split()[:2] for row in rows] == [[name, "64"] for name in ("rtx3090", "h100-80g", "mi300x")]


def test_notes_below_the_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fits, "machine_names", lambda _: ("rtx3090", "t4", "v100-16g"))

    def noted(**options: str) -> list[str]:
        assert run(monkeypatch, model="hf:config.json", gpu="all", lora="4", **options) == 0
        title, *lines = capsys.readouterr().out.splitlines()
        assert ", LORA=4, samples of 256 tokens: " in title
        return [line for line in lines if line.startswith("NOTE: ")]

    different, old = (
        "NOTE: 1000 steps of different batches",
        "NOTE: t4, v100-16g cannot compute in bf16: ",
    )
    first, second = noted(seq="256")
    assert first.startswith(old) and second.startswith(different)
    assert [line[:24] for line in noted(target="8")] == [old[:24]]
    assert [line[:24] for line in noted(precision="fp16")] == [different[:24]]


def test_changes_of_a_request_leave_its_own_model_as_it_is() -> None:
    """Rows of GPU=all after one where nothing fits were of another model."""
    own = fits.Request(model="hf:config.json", precision="fp32", seq=8, lora=0, checkpoint=False)
    first: Any = own.build()
    dataclasses.replace(own, checkpoint=True).build()
    second: Any = own.build()
    assert first.config.use_cache and second.config.use_cache
    assert first.config is not second.config


def test_a_shorter_sample_that_needs_hardly_less_says_where_the_peak_is() -> None:
    own = fits.Request(model="hf:config.json", precision="fp32", seq=256, lora=0, checkpoint=True)
    free = fits.traced(dataclasses.replace(own, seq=128), "cuda")(1).need_bytes - 1
    *_, left = fits.changes(own, "cuda", free)
    assert re.search(
        r"SEQ=128 .*? needs 1\.\d+ GB \(hardly less: its peak is in the optimizer step\)", left[0]
    )
    longer = dataclasses.replace(own, seq=65536)
    *_, left = fits.changes(longer, "cuda", fits.traced(longer, "cuda")(1).need_bytes // 3)
    assert (
        "; SEQ=32768" in left[0] and "; SEQ=32768 (not the same mathematics) needs 1.90 GB (h" not in left[0]
    )


def test_settings_of_configurations_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fits, "parse_gpu", lambda name: with_free(parse_gpu(name), 2**30))
    assert run(monkeypatch, model="hf:config.json", gpu="rtx3090", seq="65536", precision="fp32") == 2
    text = capsys.readouterr().out
    assert "\n8-bit optimizer state: CONFIG_ADAM_8BIT=y in a configuration; " in text
    assert "\n4-bit weights: CONFIG_ADAPT_QLORA=y in a configuration; " in text
    assert "\nSeconds with FSDP are without communication between the GPUs; " in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpu": "rtx3090"}, "there is no MODEL=; write MODEL=timm:NAME"),
        ({"model": "timm:images"}, "there is no GPU=; write .* GPU=rtx3090 or GPU=all"),
        ({"model": "images", "gpu": "rtx3090"}, "MODEL=images is of neither timm nor hf; write"),
        ({"model": "timm:none", "gpu": "rtx3090", "out": "README.md"}, r"does not end in \.png"),
        (
            {"model": "timm:images", "gpu": "rtx3090", "seq": "128"},
            "SEQ=128: timm:images takes no tokens; leave SEQ= out",
        ),
        (
            {"model": "timm:image", "gpu": "rtx3090"},
            "MODEL=timm:image is no model of the installed timm; did you mean images",
        ),
        ({"model": "hf:none", "gpu": "rtx3090"}, "MODEL=hf:none is no folder and no file"),
        *(
            (
                {"model": f"hf:{name}.json", "gpu": "rtx3090"},
                rf"^{name}.json is not understood by transformers 5: no model_type and more; mend or copy",
            )
            for name in ("damaged", "type", "value")
        ),
        (
            {"model": "hf:layers.json", "gpu": "rtx3090"},
            r"^layers.json makes no model: .*negative dimension.*; mend or copy",
        ),
        (
            {"model": "hf:class.json", "gpu": "rtx3090"},
            r'MODEL=hf:class.json names no model: .*Nobody.*; write "architectures"',
        ),
        ({"model": "timm:none", "gpu": "rtx3090x2"}, "GPU=rtx3090x2 is not one GPU"),
        ({"model": "timm:images", "gpu": "tpu-v4-8"}, "GPU=tpu-v4-8 is not one GPU"),
        ({"model": "timm:images", "gpu": "rtx3090", "checkpoint": "q"}, "CHECKPOINT=q is neither y nor n"),
        (
            {"model": "timm:images", "gpu": "rtx3090", "checkpoint": "y"},
            "cannot be traced so: .*checkpointing",
        ),
        (
            {"model": "timm:images", "gpu": "rtx3090", "precision": "bf61"},
            "PRECISION=bf61 is not predicted for; did you mean bf16",
        ),
        (
            {"model": "timm:images", "gpu": "rtx3090", "lora": "4"},
            "Images has no linear layer for an adapter beside its head 3; set CONFIG_ADAPT_FULL=y",
        ),
        ({"model": "timm:images", "gpu": "rtx3090", "lora": "x"}, "LORA=x is not a whole number"),
        ({"model": "timm:images", "gpu": "rtx3090", "price": "q"}, "PRICE='q' is no price"),
    ],
)
def test_what_is_not_possible_is_one_line(
    options: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        run(monkeypatch, **options)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=r"the package timm is needed here: .*; install it .* install timm",
    ):
        run(monkeypatch, model="timm:images", gpu="rtx3090")


@pytest.mark.usefixtures("_own_traces")
def test_inputs_that_are_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyForCausalLM, "main_input_name", "input_features")
    with pytest.raises(
        ConfigError, match=r"no inputs for TinyForCausalLM, which takes input_features; lib.memory"
    ):
        run(monkeypatch, model="hf:config.json", gpu="rtx3090")
    assert torch.is_grad_enabled()

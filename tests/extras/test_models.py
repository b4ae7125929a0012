"""Models of timm and of transformers keep to what our own models keep to, with their stock layers."""

from __future__ import annotations

import copy
import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lib.config import Config
from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.kconf.defconfig import available
from lib.memory.facts import saved_bytes
from lib.nn.batch_norm import configure_norm
from lib.nn.dropout import dropouts, key_samples
from lib.nn.model_code import build_model
from lib.plan.fitting import step_settings
from lib.plan.gpus import parse_gpu
from tests.contract import cases, effects, options, small_data, test_models, test_parameter_counts
from tests.contract.effects import DataLocation
from tests.contract.test_every_option_counts import SMALL, Base, Examination
from tests.extras import foreign, ranks_worker
from tests.extras.foreign import NAMES, WITH_NORMS, config_of, data_of
from tests.support.training import CPU, largest_difference, small_job, small_plan, trained
from train import loop, stock_layers, training_data
from train.job import Progress
from train.planning.memory_estimate import MemoryTraces
from train.planning.run_plan import predicted_plan
from train.preflight import checks
from train.training_data import built

ROOT = Path(__file__).resolve().parents[2]
CHECKS = (
    test_models.test_loss_is_finite_and_gradient_reaches_every_parameter,
    test_models.test_one_step_of_sgd_lowers_the_loss,
    test_models.test_training_does_not_depend_on_the_micro_batch,
    test_models.test_weights_are_a_function_of_the_seed_alone,
    test_models.test_state_dict_round_trip,
    test_models.test_task_can_be_read_without_importing_the_model,
)


def plain_case(name: str, place: Path) -> tuple[str, dict[str, Any]]:
    """A golden case of the contract tests, which set no keys: without dropout."""
    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    zero |= dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout"), 0.0)
    config = config_of(name, place)
    options = dict(config.model_options)
    if name in foreign.TIMM:
        options["options"] = " ".join(w for w in str(options["options"]).split() if "drop" not in w)
    else:
        file = Path(str(options["dir"])) / "config.json"
        file.write_text(json.dumps(foreign.HUGGING_FACE[name] | zero))
    case = {"options": options, "parameters": 0, "classes": 3}
    if name in foreign.CAUSAL:
        sizes = {"vocab_size": 257, "block_size": 12}
        return config.model, {"options": options, "parameters": 0, **sizes}
    if foreign.is_text(name):
        return config.model, case | {"vocab_size": 257, "block_size": 12}
    pixels = foreign.PIXELS.get(name, 32)
    return config.model, case | {"channels": 3, "height": pixels, "width": pixels}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.parametrize("name", NAMES)
def test_what_our_own_models_keep_to(
    name: str, check: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in foreign.SINGLE and "micro_batch" in check.__name__:
        pytest.skip("asks for 1e-12: test_training_does_not_depend_on_the_split has a bound for these")
    model, case = plain_case(name, tmp_path)
    monkeypatch.setattr(cases, "golden", lambda _: [case])
    by_layout = {"layout": torch.channels_last} if "gradient_reaches" in check.__name__ else {}
    check(name=model, **by_layout)


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_converted_and_nothing_stays_inexact(name: str, tmp_path: Path) -> None:
    data = data_of(name, config_of(name, tmp_path))
    assert data.facts.inexact == ()
    assert ("batch normalisations in groups" in data.facts.layers) == (name in WITH_NORMS)
    without = ("resnet", "hf-resnet", "lm-llama", "lm-gemma3")  # of torch's layers
    assert ("dropout by sample" in data.facts.layers) == (name not in without)
    assert ("the directory has no weights" in data.facts.layers) == name.startswith(("hf", "lm"))


@pytest.mark.parametrize("name", NAMES)
def test_training_does_not_depend_on_the_split(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    data, norm_batch = data_of(name, config), 2 * (name in WITH_NORMS)
    whole, *others = (
        trained(small_job(config, small_plan(*sizes, norm_batch=norm_batch), data))
        for sizes in ((8,), (4, 4), (2, 2, 2, 2), (6, 2))
    )
    bound = 1e-7 if name in foreign.SINGLE else 1e-10
    assert max(largest_difference(whole, other) for other in others) <= bound


@pytest.mark.parametrize("name", ["vit", "hf-bert"])
def test_without_the_conversion_it_does_and_the_layers_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (training_data, stock_layers):
        monkeypatch.setattr(module, "key_stock_dropouts", lambda _: (0, []))
    config = config_of(name, tmp_path)
    data = data_of(name, config)
    assert any("Drop" in layer for layer in data.facts.inexact), data.facts.inexact
    whole, halves, again = (
        trained(small_job(config, small_plan(*sizes), data)) for sizes in ((8,), (4, 4), (8,))
    )
    assert largest_difference(whole, halves) > 1e-6
    assert largest_difference(whole, again) == 0, "torch's generator is seeded by the sample"
    plan, _ = predicted_plan(config, data, CPU)
    options = {"hardware": CPU, "plan": small_plan(8), "root": tmp_path, "runs": tmp_path}
    passed, finding = checks.accumulation(checks.Candidate(config=config, data=data, **options))
    assert not passed and data.facts.inexact[0] in finding
    assert "NOTE: no trial showed these to be independent of the micro-batch: " in plan.reasons["norm_batch"]


@pytest.mark.parametrize("name", NAMES)
def test_preflights_checks_of_splits_shards_and_resuming(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    data = data_of(name, config)
    plan = small_plan(8, norm_batch=2 * (name in WITH_NORMS))
    candidate = checks.Candidate(
        config=config, data=data, hardware=CPU, plan=plan, root=tmp_path, runs=tmp_path
    )
    for check in (checks.accumulation, checks.shards, checks.round_trip):
        passed, finding = check(candidate)
        assert passed, f"{check.__name__}: {finding}"


def test_a_resumed_run_of_an_inexact_model_is_the_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (training_data, stock_layers):
        monkeypatch.setattr(module, "key_stock_dropouts", lambda _: (0, []))
    config = config_of("vit", tmp_path)
    data = data_of("vit", config)
    whole = trained(small_job(config, small_plan(8), data))
    first, second = (small_job(config, small_plan(8), data) for _ in range(2))
    loop.optimizer_step(first, Progress())
    state = copy.deepcopy(loop.state_dict(first, Progress(step=1)))
    torch.manual_seed(99)
    loop.load_state_dict(second, state)
    loop.train(second, Progress(step=1))
    assert largest_difference(whole, second.model.state_dict()) == 0


@pytest.mark.parametrize("name", NAMES)
def test_recomputing_blocks_saves_memory_and_changes_no_gradient(name: str, tmp_path: Path) -> None:
    plain = config_of(name, tmp_path)
    again = plain.replace(grad_checkpoint="blocks")
    data = data_of(name, again)  # which tries it
    plan = small_plan(4, 4, norm_batch=2 * (name in WITH_NORMS))
    states = [trained(small_job(config, plan, data)) for config in (plain, again)]
    assert largest_difference(*states) <= 1e-12
    kept = [saved_bytes(keyed(config, data), torch.empty(0)) for config in (plain, again)]
    assert kept[1] < kept[0]


def keyed(config: Config, data: Any) -> nn.Module:
    """On a batch of its own, whatever it is called with."""
    model, inputs = built(config, data.dataset.spec), stock_layers._inputs(data.dataset.spec, 4).float()
    inputs = inputs.long() if data.dataset.spec.input_dtype == "int64" else inputs
    configure_norm(model, norm_batch=0, momentum=None)
    key_samples(dropouts(model), seed=0, first=0, count=4, device=torch.device("cpu"))
    model.register_forward_pre_hook(lambda *_: (inputs,))
    return model


@pytest.mark.parametrize("name", ["vit", "hf-bert"])
def test_groups_of_blocks_are_for_chains(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"GRAD_CHECKPOINT_ALL=y is not possible: .*GRAD_CHECKPOINT_BLOCKS=y"
    ):
        data_of(name, config_of(name, tmp_path, grad_checkpoint="all"))


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_predicted_without_the_device(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path, precision="bf16")
    data = data_of(name, config)
    for hardware in (CPU, parse_gpu("rtx3090")):
        plan, _ = predicted_plan(config.replace(precision="auto"), data, hardware)
        found = MemoryTraces(config, data).of(step_settings(plan), hardware)
        assert data.facts.parameters is not None
        assert found.trace.at_peak()["parameters"] >= 4 * data.facts.parameters


def test_weights_of_a_directory_are_loaded_and_must_fit(tmp_path: Path) -> None:
    import transformers

    config = config_of("hf-bert", tmp_path)
    folder = Path(str(config.model_options["dir"]))
    data = data_of("hf-bert", config)
    known = transformers.AutoConfig.from_pretrained(folder, vocab_size=257, pad_token_id=256, num_labels=7)
    theirs = transformers.BertForSequenceClassification(known)
    theirs.save_pretrained(folder)
    model = built(config, data.dataset.spec)  # with a new head: 3 classes
    assert torch.equal(
        model.bert.encoder.layer[1].output.dense.weight, theirs.bert.encoder.layer[1].output.dense.weight
    )  # type: ignore[index,union-attr,operator]
    assert model.classifier.out_features == 3  # type: ignore[union-attr]
    told = "weights of model.safetensors; new: classifier.bias, classifier.weight"
    assert told in data_of("hf-bert", config).facts.layers
    values = json.loads((folder / "config.json").read_text())
    for change, told in (
        ({"num_hidden_layers": 3}, r"16 missing \(bert.encoder.layer.2.* and 15 more\)"),
        ({"num_hidden_layers": 1}, r"16 unexpected \(bert.encoder.layer.1"),
        ({"intermediate_size": 48}, r"6 mismatched \(bert.encoder.layer.0.intermediate.dense.bias"),
    ):
        (folder / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(ConfigError, match=f"do not fit: .*{told}"):
            data_of("hf-bert", config)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged or not complete"):
        data_of("hf-bert", config)


def test_attention_drops_by_sample(tmp_path: Path) -> None:
    config = config_of("hf-bert", tmp_path)
    spec = data_of("hf-bert", config).dataset.spec
    model, tokens = built(config, spec), stock_layers._inputs(spec, 2)
    layers = [layer for name, layer in model.named_modules() if name.endswith("keyed_dropout")]
    assert len(layers) == 2 and all(layer.rate == 0.2 for layer in layers)  # type: ignore[union-attr]
    for each in dropouts(model):
        each.train(each in layers)
    found = []
    for first in (0, 0, 8):
        key_samples(dropouts(model), seed=0, first=first, count=2, device=torch.device("cpu"))
        found.append(model(tokens))
    assert torch.equal(found[0], found[1]) and not torch.allclose(found[0], found[2])


def test_padding_is_masked(tmp_path: Path) -> None:
    config = config_of("hf-bert", tmp_path)
    data = data_of("hf-bert", config)
    model = built(config, data.dataset.spec).eval()
    tokens = stock_layers._inputs(data.dataset.spec, 2)
    short = tokens[:1, : 12 - 3]
    assert (tokens[0, 9:] == foreign.PAD).all()
    torch.testing.assert_close(model(tokens[:1]), model(short))


BAD_TIMM = {
    ("vit_tiny_patch16_244", ""): "is no model of timm .*did you mean vit_tiny_patch16_224",
    ("hf-hub:someone/model", ""): "is refused: a name with a colon .*and name a local file .*INITIAL_WEIGHTS",
    ("local-dir:/somewhere", ""): "is refused: a name with a colon",
    ("vit_tiny_patch16_224.augreg_in21k", ""): 'has a tag: .*set CONFIG_TIMM_NAME="vit_tiny_patch16_224"',
    ("", ""): "is no model of timm",
    ("resnet18", "pretrained=True"): "pretrained=True is refused: it loads files, .*CONFIG_INITIAL_WEIGHTS",
    (
        "resnet18",
        "checkpoint_path=/x",
    ): "is refused: it loads files, or downloads them; leave it out, and name",
    ("resnet18", "pretrained_cfg=x.json"): "is refused: it loads files",
    ("vit_tiny_patch16_224", "dept=3"): "is no option of the model; did you mean depth",
    ("vit_tiny_patch16_224", "depth"): "depth is not name=value",
    ("vit_tiny_patch16_224", "depth=two"): "depth=two has the wrong type: its default is 12",
    ("vit_tiny_patch16_224", "depth=2.5"): "has the wrong type",
    ("vit_tiny_patch16_224", "qkv_bias=1"): "has the wrong type: its default is True",
    ("vit_tiny_patch16_224", "depth=2 depth=3"): "sets depth a second time",
    ("vit_tiny_patch16_224", "num_classes=7"): "is decided by the data set",
    ("vit_tiny_patch16_224", "embed_dim=30 num_heads=4"): "models/timm/model.py:.*divisible",
    ("vit_tiny_patch16_224", "norm_layer=exit"): "models/timm/model.py:.*KeyError: 'exit'",
    ("inception_v3", ""): "models/timm",  # images are too small
}


@pytest.mark.parametrize(("given", "told"), BAD_TIMM.items(), ids=lambda value: str(value)[:40])
def test_bad_options_of_timm_are_one_line(given: Any, told: str, tmp_path: Path) -> None:
    config = config_of("vit", tmp_path, model_options=dict(zip(("name", "options"), given, strict=True)))
    with pytest.raises(ConfigError, match=told) as caught:
        data_of("vit", config)
    assert "\n" not in str(caught.value)


BAD_CONFIGS: dict[str, tuple[str, dict[str, Any] | str, str]] = {
    "no model of transformers": ("hf-vit", {"model_type": "nothing"}, "is not understood by transformers"),
    "wrong type": ("hf-vit", {"hidden_size": "wide"}, "config.json is not understood by .*hidden_size"),
    "generates only": ("hf-vit", {"model_type": "llama"}, "no class of image classification for llama"),
    "of images": ("hf-bert", {"model_type": "vit"}, "no class of sequence classification for vit"),
    "too long": (
        "hf-bert",
        {"max_position_embeddings": 8},
        "BLOCK_SIZE=12 is too long for .*set CONFIG_BLOCK",
    ),
    "encoder-decoder": ("hf-bert", {"model_type": "bart"}, "bart is an encoder-decoder: .*choose a model"),
    "patches": ("hf-vit", {"patch_size": 64}, "models/huggingface"),
}


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_bad_configurations_of_transformers_are_one_line(fault: str, tmp_path: Path) -> None:
    name, change, told = BAD_CONFIGS[fault]
    config = config_of(name, tmp_path)
    assert isinstance(change, dict)
    values = {**foreign.HUGGING_FACE[name], **change}
    (Path(str(config.model_options["dir"])) / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=told) as caught:
        data_of(name, config)
    assert "\n" not in str(caught.value)


def test_a_bad_name_ends_the_command_with_2_and_makes_nothing(tmp_path: Path) -> None:
    file, runs = tmp_path / ".config", tmp_path / "runs"
    file.write_text('CONFIG_MODEL_TIMM=y\nCONFIG_TIMM_NAME="hf-hub:a/b"\n')
    command = ["env", f"KCONFIG_CONFIG={file}", sys.executable, "-m", "train", "--runs", str(runs), "train"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not runs.exists()
    assert [line for line in done.stderr.splitlines() if "error" in line] == done.stderr.splitlines()[-1:]


@pytest.mark.parametrize("path", [path for path in available(ROOT)[0] if cases.needs_extra(path)], ids=str)
def test_shipped_configurations_tell_their_size_and_the_package(path: Path) -> None:
    test_parameter_counts.test_the_first_line_tells_the_number_of_parameters(path=path)
    assert "needs that package" in path.read_text()


def test_torchvision_is_not_left_behind() -> None:
    """transformers would use it."""
    program = "import sys; from lib.nn.packages import import_extra; t = import_extra('timm'); "
    program += "assert not [m for m in sys.modules if m.startswith('torchvision')], 'left'; "
    program += "from transformers.utils import is_torchvision_available as there; assert not there(); "
    program += "assert t.create_model('resnet10t') is not None"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_options_of_a_model_by_class(tmp_path: Path) -> None:
    options = {"name": "vit_tiny_patch16_224", "options": "depth=3 class_token=False global_pool=avg"}
    spec = data_of("vit", config_of("vit", tmp_path)).dataset.spec
    model = build_model(
        "timm", options, dataclasses.replace(spec, channels=1, mean=(0.5,), std=(0.5,)), seed=0
    )  # type: ignore[arg-type]
    assert len(model.blocks) == 3 and model.cls_token is None  # type: ignore[arg-type]
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    names = ["vit", "resnet", "hf-bert", "lm-gemma3"]
    command = [sys.executable, "-m", "tests.extras.ranks_worker", str(tmp_path), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in names:
        alone = ranks_worker.gradients(name, tmp_path, Backend("cpu"), "single")
        for strategy in ranks_worker.STRATEGIES:
            found = torch.load(tmp_path / f"{name}-{strategy}.pt", weights_only=True)
            assert largest_difference(found, alone) <= 1e-10, f"{name}, {strategy}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataLocation]:
    root = tmp_path_factory.mktemp("options")
    with small_data.few_generated(), pytest.MonkeyPatch.context() as patch:
        for kind in ("one", "other"):
            (root / kind).mkdir()
            sizes = foreign.HUGGING_FACE["hf-vit"] | {"hidden_size": 16 if kind == "one" else 32}
            (root / kind / "config.json").write_text(json.dumps(sizes))
        patch.setitem(options.TEXTS, "HUGGINGFACE_DIR", (str(root / "other"),))
        patch.setitem(options.TEXTS, "TIMM_NAME", ("deit3_small_patch16_224",))
        patch.setitem(options.TEXTS, "TIMM_OPTIONS", (foreign._VIT.replace("depth=2", "depth=1"),))
        yield DataLocation(root)


@pytest.mark.parametrize("model", ["TIMM", "HUGGINGFACE"])
def test_options_count(model: str, place: DataLocation) -> None:
    own = f'TIMM_NAME=vit_tiny_patch16_224 TIMM_OPTIONS="{foreign._VIT}"'
    own = own if model == "TIMM" else f"HUGGINGFACE_DIR={place.root / 'one'}"
    pairs = [word.partition("=") for word in shlex.split(f"MODEL_{model} DATASET_SCENES {own}")]
    wanted = {**SMALL, **{name: value or "y" for name, _, value in pairs}}
    pins = options.settle(wanted)
    examination = Examination(place, witnesses=(effects.model, effects.plans, effects.training))
    names = {name for name in options.shown({**wanted, **pins}) if name.startswith(model)}
    names |= {name for name in pins if name.startswith(model)} | {"GRAD_CHECKPOINT_BLOCKS", "NORM_BATCH"}
    base = Base(place, options.resolved({**wanted, **pins}))
    assert base.outcome(effects.training) != repr("refused")
    dead = {name for name in names if not examination._counts(name, {**wanted, **pins}, base)}
    # The chosen member of a choice is what the other differs from; a ViT has no batch normalisation.
    assert dead <= {"NORM_BATCH", "MODEL_HUGGINGFACE", "MODEL_TIMM", "HUGGINGFACE_INPUT_IMAGES"}, dead

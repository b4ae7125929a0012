"""Every option that can be set changes a plan, what training does, what a run leaves, or is refused.

Options are found in the Kconfig tree. Each is set to other values, with all others pinned, in a configuration
that shows it, until a witness (tests/contract/effects.py) tells the difference; that it is read, or stored,
is none. For a new option there is mostly nothing to do. Where the test names it:

- test_every_option_is_shown: add one to SHOWN that shows it;
- "changes nothing": first suspect the option. If it does count, then for values that are not tried
  (options.TEXTS has those of texts and paths), with another base (SMALL), or where no witness looks
  (effects.WITNESSES, to which a function from a place and a Config to anything with a repr is added);
- "changes nothing" in one of MIXED: what overrules it there must hide it (`depends on`, or `if` at its
  prompt, which keeps the value), or refuse it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lib.config import Config
from lib.errors import ToolkitError
from lib.kconf import Resolved
from lib.plan.sizing import Candidate, SizingContext
from lib.plan.strategies import choose_strategy
from tests.contract import effects, options, small_data
from tests.contract.effects import REFUSED, WITNESSES, DataLocation, Witness, outcome
from tests.support.examples import merged, told_of

LIKELY = Path(__file__).resolve().parents[1] / "golden" / "option_witnesses.json"

# Runs of five steps of eight samples, with as much going on as there can be.
SMALL = {
    "TARGET_EFFECTIVE_BATCH": "8",
    "BATCH_SIZE": "4",
    "NORM_BATCH": "2",
    "BUDGET_STEPS": "y",
    "MAX_STEPS": "5",
    "NUM_EPOCHS": "2",
    "MAX_SECONDS": "30",
    "WARMUP_PCT": "40",
    "WARMUP_STEPS": "1",
    "WARMUP_SAMPLES": "24",
    "LOG_INTERVAL_STEPS": "1",
    "CHECKPOINT_INTERVAL_STEPS": "2",
    "CHECKPOINT_SECONDS": "4",
    "KEEP_LAST": "1",
    "NUM_WORKERS": "1",
    "LR_BASE_BATCH": "16",
    "EMA_BASE_BATCH": "16",
    "EMA_DECAY": "0.5",
    "ELASTIC_BASE_BATCH": "8",
    "BLOCK_SIZE": "16",
    "VOCAB_SIZE": "97",
    "IMAGE_SIZE": "32",
    "GPT2_SIZE_CUSTOM": "y",
    "GPT2_LAYERS": "2",
    "GPT2_HEADS": "2",
    "GPT2_WIDTH": "8",
    "RESNET18_WIDTH": "8",
    "RESNET50_WIDTH": "8",
    "AIRBENCH_WIDTH": "4",
    "RESNET_BK_LAYERS": "1",
    "RESNET_BK_WIDTH": "8",
    "MLP_WIDTH": "8",
    "VIT_WIDTH": "8",
    "VIT_LAYERS": "1",
    "TABULAR_MISSING_MEAN": "y",
} | merged("SMALL")

# Model and options; together they show every option, each in the first that shows it.
SHOWN = (
    "LENET5 METRICS=roc_auc BEST_METRIC=loss EVAL_INTERVAL_STEPS=2 EARLY_STOP_EVALS=2 EARLY_STOP_DELTA=0.5",
    "LENET5 HYPER_PARAM_MANUAL COMPILE_MANUAL LR_SCALING_SQRT OPTIMIZER_SGD SCHEDULE_STEP WARMUP_UNIT_STEPS",
    "LENET5 AUTO_METHOD_TABLE EMA EMA_SCALING WARMUP_UNIT_SAMPLES DATASET_MNIST SINK_WANDB",
    "LENET5 ELASTIC_POLICY_LATENTWIRE BUDGET_EPOCHS",
    "LENET5 BUDGET_SECONDS",
    "LENET5 ADAPT_LORA",
    "LENET5 DIST_NNODES=2 DIST_ENDPOINT=here:29500",
    "RESNET18",
    "RESNET18 AUGMENT_RESIZED_CROP",
    "RESNET18 DATASET_IMAGE_FOLDER",
    "RESNET50",
    "AIRBENCH OPTIMIZER_MUON AUGMENT_CROP_ALTERNATE",
    "GPT2 OPTIMIZER_MUON",
    "GPT2 DIST_STRATEGY_PIPELINE",
    "GPT2 DATASET_TOKEN_BINS",
    "RESNET_BK RESNET_BK_FORM_UPSTREAM RESNET_BK_ALLOW_LEAK",
    "RESNET_BK",
    "VIT",
    "MLP",
    "MLP DATASET_TABULAR",
    "MLP DATASET_TABULAR TABULAR_VALIDATION_OTHER TABULAR_VALIDATION_FILE=other.csv",
    "MLP REGRESS_LOSS_HUBER",
    "MLP DATASET_TABULAR TABULAR_TARGET_LABELS TABULAR_TARGETS=small,odd",
    "GPT2 DATASET_TAGGED",
    "GPT2 DATASET_TAGGED JSONL_VALIDATION_OTHER",
    "GPT2 DATASET_CHAT CHAT_TOO_LONG_CUT BLOCK_SIZE=23",
    "GPT2 DATASET_CHAT CHAT_SOURCE_KEY_VALUES BLOCK_SIZE=36",
    "GPT2 DATASET_CHAT CHAT_VALIDATION_OTHER CHAT_VALIDATION_FILE=other-chat.jsonl BLOCK_SIZE=32",
    *(shown for example in told_of("SHOWN") for shown in example),
)

# Models before it have no equal blocks.
COUNTS_IN = {"COMPILE_BLOCKS": "RESNET18"}

# What could overrule other options, some of it at a time. What is in OF_ALL is changed in each.
MIXED = (
    "LENET5 ELASTIC_POLICY_LATENTWIRE OPTIMIZER_SGD SCHEDULE_STEP DEVICE_CUDA EMA",
    "LENET5 ELASTIC_POLICY_LATENTWIRE ELASTIC_SCALE_BATCH ELASTIC_BASE_BATCH=4 LR_SCALING_SQRT EMA",
    "LENET5 HYPER_PARAM_MANUAL OPTIMIZER_ADAM SCHEDULE_CONSTANT DEVICE_CPU NUM_DEVICES=2",
    "LENET5 AUTO_METHOD_TABLE OPTIMIZER_ADAM_ATAN2 SCHEDULE_ONE_CYCLE DIST_STRATEGY_DDP",
    "LENET5 AUTO_METHOD_PROBE PRECISION_BF16 BUDGET_EPOCHS CHECKPOINT_ASYNC DEVICE_XLA",
    "GPT2 DATASET_SST2 DIST_STRATEGY_FSDP WARMUP_UNIT_SAMPLES GRAD_CHECKPOINT_ALL",
    "GPT2 DATASET_TOKEN_BINS OPTIMIZER_MUON DETERMINISTIC",
    "RESNET_BK DATASET_SST2 RESNET_BK_FORM_UPSTREAM DATA_PLACEMENT_RESIDENT",
    *(mixed for example in told_of("MIXED") for mixed in example),
)
# AUTO, table and one device may well decide what another value asks for: such pairs are not in it.
OF_ALL = {
    *("TARGET_EFFECTIVE_BATCH", "BATCH_SIZE", "DIST_STRATEGY_FSDP", "DIST_MAX_RESTARTS", "NUM_DEVICES"),
    *("ELASTIC_BASE_BATCH", "CHANNELS_LAST", "NORM_BATCH", "COMPILE_MODEL"),
    *("CHUNKED_CROSS_ENTROPY", "LEARNING_RATE", "WEIGHT_DECAY", "GRAD_CLIP", "MOMENTUM", "ADAM_BETA2"),
    *("LABEL_SMOOTHING", "LR_MIN_RATIO", "WARMUP_PCT", "LR_BASE_BATCH", "EMA_DECAY", "MAX_SECONDS"),
    *("NUM_EPOCHS", "DATA_LIMIT", "HOLDOUT", "NUM_WORKERS", "PREFETCH", "AUGMENT_NONE", "SEED", "OOM_RETRY"),
    *("DETERMINISTIC", "CHECKPOINT_INTERVAL_STEPS", "RESNET_BK_DROPOUT", "RESNET_BK_ALLOW_LEAK"),
    *("GPT2_PAD_VOCAB", "GPT2_DROPOUT"),
    *(name for of_all in told_of("OF_ALL") for name in of_all),
}


@dataclass
class Examination:
    """Options that were found to count, and by which witness: the next time that one is asked first.

    So is the one that LIKELY names, which saves the time of the others and decides nothing.
    """

    place: DataLocation
    witnesses: tuple[Witness, ...] = WITNESSES
    witnessed: dict[str, str] = field(default_factory=lambda: json.loads(LIKELY.read_text()))
    refused: set[str] = field(default_factory=set)

    def dead(self, shown: str, only: Collection[str]) -> Iterator[str]:
        """Those of `only` that `shown` shows, and that change nothing there."""
        wanted = assignments(shown)
        pins = {**wanted, **options.settle(wanted)}  # what is small stays so where another choice shows it
        base = Base(self.place, options.resolved(pins))
        assert base.outcome(effects.training) != repr(REFUSED), f"{shown} is not a configuration that trains"
        for name in sorted(set(options.shown(pins)) & set(only)):
            if not self._counts(name, pins, base):
                yield f"CONFIG_{name} changes nothing in {shown}"

    def _counts(self, name: str, pins: options.Pins, base: Base) -> bool:
        """What trains is looked for first: that a value is refused says little of the others."""
        is_refused = False
        order = sorted(self.witnesses, key=lambda witness: witness.__name__ != self.witnessed.get(name))
        for other in options.changed(pins, name):
            try:
                changed = options.resolved(other)
            except ToolkitError:
                is_refused = True
                continue
            for witness in order:
                found = outcome(witness, self.place, changed)
                if repr(found) == base.outcome(witness):
                    continue
                if found == REFUSED:
                    is_refused = True
                    break
                self.witnessed[name] = witness.__name__
                return True
        if is_refused:
            self.refused.add(name)
        return is_refused


@dataclass
class Base:
    """What the witnesses say of a configuration before anything is changed."""

    place: DataLocation
    resolved: Resolved
    known: dict[Witness, str] = field(default_factory=dict)

    def outcome(self, witness: Witness) -> str:
        if witness not in self.known:
            self.known[witness] = repr(outcome(witness, self.place, self.resolved))
        return self.known[witness]


def assignments(shown: str) -> Mapping[str, str]:
    """SMALL, and on top of it MODEL NAME NAME=value ..."""
    model, *words = shown.split()
    pairs = (word.partition("=") for word in (f"MODEL_{model}", *words))
    wanted = {name: value or "y" for name, _, value in pairs}
    chosen = {id(options.tree().syms[name].choice) for name in wanted}
    chosen.discard(id(None))
    return {
        name: value for name, value in SMALL.items() if id(options.tree().syms[name].choice) not in chosen
    } | wanted


def _chosen_alone(context: SizingContext) -> tuple[Candidate, tuple[Candidate, ...]]:
    """`choose_strategy` without the requested one."""
    assert isinstance(context.config, Config)
    return choose_strategy(dataclasses.replace(context, config=context.config.replace(dist_strategy="auto")))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataLocation]:
    root = tmp_path_factory.mktemp("options")
    small_data.write_files(root / "data")
    with small_data.few_generated(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(options.TEXTS, "CHECKPOINT_URL", (f"file://{root / 'storage'}",))
        yield DataLocation(root)


@pytest.fixture(scope="module")
def examination(place: DataLocation) -> Examination:
    return Examination(place)


def shares() -> Iterator[tuple[str, set[str]]]:
    """Each of SHOWN with the options that it is the first to show; "" with those that none shows."""
    left = {symbol.name for symbol in options.prompted() if options.can_be_set(symbol)}
    for shown in SHOWN:
        pins = options.settle(assignments(shown))
        # The members that are chosen are what the others differ from.
        found = {*options.shown(pins), *pins} - {name for name, of in COUNTS_IN.items() if of != shown}
        yield shown, left & found
        left -= found
    yield "", left


def test_every_option_is_shown() -> None:
    assert dict(shares())[""] == set()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("shown", SHOWN)
def test_every_option_counts(shown: str, examination: Examination) -> None:
    assert list(examination.dead(shown, dict(shares())[shown])) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("shown", MIXED)
def test_no_option_overrules_another(shown: str, examination: Examination) -> None:
    assert list(examination.dead(shown, OF_ALL)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken", "by"),
    [
        ("GRAD_CLIP", "train.loop.clip_gradients", lambda *_: None),
        ("EMA_DECAY", "lib.optim.ema.decay_for", lambda *_, **__: 0.5),
        ("DIST_STRATEGY_DDP", "lib.plan.strategies.choose_strategy", _chosen_alone),
        ("DIST_STRATEGY_ZERO1", "lib.plan.strategies.choose_strategy", _chosen_alone),
    ],
)
def test_an_option_that_is_ignored_is_found(
    name: str, broken: str, by: object, place: DataLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    examination = Examination(place, witnesses=(effects.plans, effects.training))
    assert list(examination.dead("LENET5 EMA", {name})) == []
    monkeypatch.setattr(broken, by)
    assert list(examination.dead("LENET5 EMA", {name})) == [f"CONFIG_{name} changes nothing in LENET5 EMA"]

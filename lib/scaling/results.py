"""One model of a sweep: what is asked, what came out, and the file that keeps it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import ConfigError, os_error

ARCHITECTURES = ("resnet_bk", "resnet_bk_features", "gpt")
_MODELS = ("gpt2", "resnet_bk")  # that they are trained with
CORPORA = ("synthetic", "pysource", "wikitext2")  # besides file:PATH
# Below what any model of text has reached, in nats per byte: a smaller loss is a leak.
LOWEST_LOSS_OF_TEXT = 0.5
_HEAD_WIDTH = 16  # of attention, for a width that it divides

BLOCK = 128  # tokens that a model sees at once, where nothing else is asked for

# Of a run, but no result of it.
TIMINGS = ("training_time", "seconds_cpu", "peak_memory_mb", "host", "torch")
# What a sound result is judged by.
_POSITIVE = (
    *("d_model", "n_layers", "num_params", "num_params_nonembedding", "tokens"),
    *("val_nats", "final_perplexity", "training_time"),
)


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """One model to be trained. Raises ConfigError for what no model has.

    tokens: to train on; 0 means `epochs` passes over the corpus. data_sha256: of what the run will see.
    compile: with torch.compile, which takes seconds that only a run of some hundred steps earns back.
    """

    d_model: int
    n_layers: int
    n_seq: int = BLOCK
    batch_size: int = 32
    epochs: int = 5
    device: str = "auto"
    lr: float = 0.008
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 1
    arch: str = "resnet_bk"
    tokens: int = 0
    corpus: str = "synthetic"
    data_sha256: str = ""
    compile: bool = True

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise ConfigError(
                f"there is no architecture {self.arch!r}", todo=f"one of {', '.join(ARCHITECTURES)}"
            )
        for name in ("d_model", "n_layers", "n_seq", "batch_size", "epochs", "tokens"):
            value, least = getattr(self, name), int(name != "tokens")
            if not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{name}={value!r} is not possible", todo=f"it takes a whole number from {least} on"
                )

    @property
    def steps(self) -> int:
        """Optimizer steps of a run over `tokens`."""
        return max(1, round(self.tokens / (self.batch_size * self.n_seq)))

    @property
    def trained_tokens(self) -> int:
        """Of those steps, which are whole: `tokens` but for half a step."""
        return self.steps * self.batch_size * self.n_seq

    def model(self) -> tuple[str, dict[str, Any]]:
        """The model of this tree, and its options."""
        if self.arch == "gpt":
            heads = self.d_model // _HEAD_WIDTH if self.d_model % _HEAD_WIDTH == 0 else 1
            options = {"size": "custom", "layers": self.n_layers, "heads": heads, "width": self.d_model}
            return "gpt2", options | {"bias": True, "dropout": 0.0, "pad_vocab": 1}
        form = "features" if self.arch == "resnet_bk_features" else "value"
        options = {"form": form, "layers": self.n_layers, "width": self.d_model, "ffn_ratio": 4}
        return "resnet_bk", options | {"dropout": 0.0, "allow_leak": False}

    def assignments(self) -> str:
        """The configuration of the run, as a defconfig."""
        name, options = self.model()
        lines = [f"MODEL_{name.upper()}=y", *_of_model(name, options), *_of_corpus(self.corpus)]
        lines += [f"BLOCK_SIZE={self.n_seq}", f"TARGET_EFFECTIVE_BATCH={self.batch_size}"]
        lines += [f'LEARNING_RATE="{self.lr}"', f'WEIGHT_DECAY="{self.weight_decay}"']
        lines += [f'GRAD_CLIP="{self.grad_clip}"', 'ADAM_BETA2="0.95"', f"SEED={self.seed}"]
        lines += [
            "PRECISION_FP32=y",
            f"DEVICE_{self.device.upper()}=y",
            "KEEP_LAST=1",
            "KEEP_BEST=n",
            "AUTO_METHOD_TABLE=y",
        ]
        lines += ["CHECKPOINT_SECONDS=20", 'LR_MIN_RATIO="0.1"']
        lines += ["COMPILE_MANUAL=y", f"COMPILE_MODEL={'y' if self.compile else 'n'}"]
        lines += (
            ["BUDGET_STEPS=y", f"MAX_STEPS={self.steps}"] if self.tokens else [f"NUM_EPOCHS={self.epochs}"]
        )
        return "".join(f"CONFIG_{line}\n" for line in lines)

    def identity(self, code: str) -> str:
        """Of all that the result follows from: this, what a run is told, and the code, by its hash."""
        content = json.dumps([dataclasses.asdict(self), self.assignments(), code], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ScalingResults:
    """One trained model. Perplexities are of the validation part, exp of the loss per `perplexity_unit`.

    status: "done", "failed", or "suspect_leak" for a loss that no model of such a text has.
    """

    d_model: int
    n_layers: int
    num_params: int
    final_perplexity: float | None
    best_perplexity: float | None
    training_time: float
    total_training_flops: int
    peak_memory_mb: float
    epoch_perplexities: list[float]
    num_params_nonembedding: int = 0
    num_params_active: int = 0
    final_loss: float = 0.0
    val_nats: float = 0.0
    bits_per_byte: float | None = None
    perplexity_unit: str = "byte"
    tokens: int = 0
    seed: int = 1
    arch: str = "resnet_bk"
    status: str = "done"
    reason: str = ""
    config_hash: str = ""
    torch: str = ""
    host: str = ""
    seconds_cpu: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


def write(path: Path, text: str) -> None:
    """Replace a file of the sweep, whole or not at all. Raises ToolkitError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, text)
    except OSError as error:
        raise os_error("write", error) from error


def read(path: Path) -> ScalingResults | None:
    """The result in a file; None where there is none, one of another version, or one that is damaged."""
    try:
        result = ScalingResults(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error("read", error) from error
    except (ValueError, TypeError):
        return None
    return result if _is_whole(result) else None


def _is_whole(result: ScalingResults) -> bool:
    """Whether it says what it was asked for, and is a number wherever it is fitted or drawn."""
    if not isinstance(result.config, dict) or not {"corpus", "data_sha256"} <= result.config.keys():
        return False
    numbers = [getattr(result, name) for name in _POSITIVE]
    return result.status != "done" or all(
        isinstance(number, int | float) and 0 < number < math.inf for number in numbers
    )


def corpus_path(corpus: str) -> Path | None:
    """Where a text in files is; None for a corpus of its own name. Raises ConfigError for what is neither."""
    if corpus in CORPORA:
        return None
    path = corpus.removeprefix("file:")
    if path in ("", corpus):
        known = ", ".join(CORPORA)
        raise ConfigError(f"CORPUS={corpus} is no corpus", todo=f"one of {known} or file:PATH of texts")
    return Path(path)


def code_hash(root: Path) -> str:
    """Of everything that the runs follow from; not of other models, nor of what only reads their results."""
    from lib.nn.model_code import sources_of  # which imports torch

    digest = hashlib.sha256()
    own = root / "lib" / "scaling"
    for path in sources_of(root, *_MODELS):
        if not path.is_relative_to(own):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _of_model(name: str, options: dict[str, Any]) -> list[str]:
    """Symbols that can be set: what a choice names is set through its member."""
    prefix, lines = name.upper(), []
    for option, value in options.items():
        if option in ("form", "size"):
            lines.append(f"{prefix}_{option.upper()}_{value.upper()}=y")
        elif option in ("layers", "heads", "width"):
            lines.append(f"{prefix}_{option.upper()}={value}")
    return lines


def _of_corpus(corpus: str) -> list[str]:
    path = corpus_path(corpus)
    if path is not None:
        # Absolute, for a run is in the source tree, wherever the path was given.
        escaped = str(path.absolute()).replace("\\", r"\\").replace('"', r"\"")
        return ["DATASET_TEXT_FILES=y", f'DATA_DIR="{escaped}"']
    return [f"DATASET_{'MARKOV' if corpus == 'synthetic' else corpus.upper()}=y"]

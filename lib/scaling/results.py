"""Configuration and result of one run of a sweep, and their files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, os_error
from lib.runs.identity import digest_of, sources_of
from lib.scaling.laws import Point

ARCHITECTURES = ("resnet_bk", "resnet_bk_features", "gpt")
_MODELS = ("gpt2", "resnet_bk")  # models behind the architectures
CORPORA = ("synthetic", "pysource", "wikitext2")  # besides file:PATH
MIN_TEXT_LOSS = 0.5  # nats per byte; no model of text has reached it, so a smaller loss is a leak
_HEAD_WIDTH = 16  # of attention, if it divides the width

BLOCK = 128  # default context length in tokens

# Fields that differ between repetitions of a run.
TIMINGS = ("training_time", "seconds_cpu", "peak_memory_mb", "host", "torch")
# Fields that are positive in a valid result.
_POSITIVE = (
    *("d_model", "n_layers", "num_params", "num_params_nonembedding", "tokens"),
    *("val_nats", "final_perplexity", "training_time"),
)


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Configuration of one run. Raises ConfigError for impossible values.

    tokens: to train on; 0 means `epochs` passes over the corpus. data_sha256: hash of the corpus.
    compile: use torch.compile, which pays off after some hundred steps.
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
            value, minimum = getattr(self, name), int(name != "tokens")
            if not isinstance(value, int) or value < minimum:
                raise ConfigError(
                    f"{name}={value!r} is not possible", todo=f"it takes a whole number from {minimum} on"
                )

    @property
    def steps(self) -> int:
        """Number of optimizer steps for `tokens`, rounded."""
        return max(1, round(self.tokens / (self.batch_size * self.n_seq)))

    @property
    def trained_tokens(self) -> int:
        """Number of tokens in those steps."""
        return self.steps * self.batch_size * self.n_seq

    def model(self) -> tuple[str, dict[str, Any]]:
        """Return the name in models/ and its options."""
        if self.arch == "gpt":
            heads = self.d_model // _HEAD_WIDTH if self.d_model % _HEAD_WIDTH == 0 else 1
            options = {"size": "custom", "layers": self.n_layers, "heads": heads, "width": self.d_model}
            return "gpt2", options | {"bias": True, "dropout": 0.0, "pad_vocab": 1, "init_std": 0.02}
        form = "features" if self.arch == "resnet_bk_features" else "value"
        options = {"form": form, "layers": self.n_layers, "width": self.d_model, "ffn_ratio": 4}
        return "resnet_bk", options | {"dropout": 0.0, "allow_leak": False}

    def assignments(self) -> str:
        """Return the configuration of the run as a defconfig."""
        name, options = self.model()
        model = name.upper()
        lines = [f"MODEL_{model}=y"]
        for key in options.keys() & {"form", "size"}:  # a choice, of which each model has one
            lines.append(f"{model}_{key.upper()}_{options[key].upper()}=y")
        for key in ("layers", "heads", "width"):
            lines += [f"{model}_{key.upper()}={options[key]}"] if key in options else []
        lines += _corpus_symbols(self.corpus)
        lines += [f"BLOCK_SIZE={self.n_seq}", f"TARGET_EFFECTIVE_BATCH={self.batch_size}"]
        lines += [f'LEARNING_RATE="{self.lr}"', f'WEIGHT_DECAY="{self.weight_decay}"']
        lines += [f'GRAD_CLIP="{self.grad_clip}"', 'ADAM_BETA2="0.95"', f"SEED={self.seed}"]
        lines += ["PRECISION_FP32=y", f"DEVICE_{self.device.upper()}=y", "KEEP_LAST=1", "KEEP_BEST=n"]
        lines += ["AUTO_METHOD_TABLE=y", "CHECKPOINT_SECONDS=20", 'LR_MIN_RATIO="0.1"']
        lines += ["COMPILE_MANUAL=y", f"COMPILE_MODEL={'y' if self.compile else 'n'}"]
        steps = ["BUDGET_STEPS=y", f"MAX_STEPS={self.steps}"]
        lines += steps if self.tokens else [f"NUM_EPOCHS={self.epochs}"]
        return "".join(f"CONFIG_{line}\n" for line in lines)

    def identity(self, code: str) -> str:
        """Return a hash of everything that determines the result; `code` is a hash of the source code."""
        content = json.dumps([dataclasses.asdict(self), self.assignments(), code], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ScalingResults:
    """Result of one run. Perplexities are of the validation part, exp of the loss per `perplexity_unit`.

    status: "done", "failed", or "suspect_leak" for an impossibly low loss.
    """

    d_model: int
    n_layers: int
    num_params: int
    final_perplexity: float | None = None
    best_perplexity: float | None = None
    training_time: float = 0.0
    total_training_flops: int = 0
    peak_memory_mb: float = 0.0
    epoch_perplexities: list[float] = field(default_factory=list)
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
        """Return the content of the result's file."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


def by_architecture(results: Sequence[ScalingResults]) -> dict[str, list[ScalingResults]]:
    """Group the valid results by architecture, in the order of the sweep."""
    groups: dict[str, list[ScalingResults]] = {}
    for result in results:
        if result.status == "done":
            groups.setdefault(result.arch, []).append(result)
    return groups


def points_of(results: Sequence[ScalingResults]) -> list[Point]:
    """Return the points to fit."""
    return [
        Point(parameters=each.num_params_nonembedding, tokens=each.tokens, loss=each.val_nats, seed=each.seed)
        for each in results
    ]


def read(path: Path) -> ScalingResults | None:
    """Read a result; None if the file is missing, damaged or of another version.

    A valid result has its configuration, and positive numbers where fits and plots need them.
    """
    try:
        result = ScalingResults(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise os_error("read", error) from error
    except (ValueError, TypeError):
        return None
    if not isinstance(result.config, dict) or not {"corpus", "data_sha256"} <= result.config.keys():
        return None
    numbers = [getattr(result, name) for name in _POSITIVE] if result.status == "done" else []
    valid = all(isinstance(number, int | float) and 0 < number < math.inf for number in numbers)
    return result if valid else None


def corpus_path(corpus: str) -> Path | None:
    """Return the path of a corpus file:PATH, None for a named one. Raises ConfigError for an unknown name."""
    if corpus in CORPORA:
        return None
    path = corpus.removeprefix("file:")
    if path in ("", corpus):
        known = ", ".join(CORPORA)
        raise ConfigError(f"CORPUS={corpus} is not a corpus", todo=f"one of {known} or file:PATH of texts")
    return Path(path)


def code_hash(root: Path) -> str:
    """Return a hash of the code that runs depend on: without other models and without lib/scaling."""
    own = root / "lib" / "scaling"
    files = [path for path in sources_of(root, *_MODELS) if not path.is_relative_to(own)]
    return digest_of(files, root)[:16]


def _corpus_symbols(corpus: str) -> list[str]:
    path = corpus_path(corpus)
    if path is not None:
        # Absolute, because runs have the source tree as working directory.
        escaped = str(path.absolute()).replace("\\", r"\\").replace('"', r"\"")
        return ["DATASET_TEXT_FILES=y", f'DATA_DIR="{escaped}"']
    return [f"DATASET_{'MARKOV' if corpus == 'synthetic' else corpus.upper()}=y"]

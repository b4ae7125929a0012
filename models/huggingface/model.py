"""Models of Hugging Face transformers from a local directory: classifiers here, of language in causal.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lib.data.types import ImageSpec, TextClassSpec, TextSpec
from lib.errors import ConfigError
from lib.memory.simulation import replaced, simulated
from lib.memory.twin import RealConstants
from lib.nn.dropout import Dropout
from lib.nn.model_directory import open_directory
from lib.nn.packages import import_extra

TASK = "lm"  # of labels it is the one that TASK names
TAKES_TARGETS = True  # a language model
EXTRA = "transformers"  # the package that it needs

_ATTENTION = "keyed_by_sample"
_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/huggingface/Kconfig."""

    dir: str
    input: str


def build(options: Options, spec: ImageSpec | TextClassSpec | TextSpec) -> nn.Module:
    """Build a model from (N, C, H, W) images or (N, T) tokens to (N, classes) logits, or a language model.

    Weights in the directory are loaded, but not on the meta device and in simulations. Raises ConfigError
    without transformers, for an unusable directory, and for weights that do not fit.
    """
    directory, _, files = open_directory(options.dir, symbol="CONFIG_HUGGINGFACE_DIR")
    folder = str(directory)
    transformers = import_extra(EXTRA)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = configuration(transformers, folder)
    if not isinstance(spec, ImageSpec | TextClassSpec):
        from models.huggingface.causal import build_causal

        return build_causal(transformers, theirs, directory, files, spec)
    images = isinstance(spec, ImageSpec)
    task = "image classification" if images else "sequence classification"
    classes = (
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        if images
        else transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    )
    if type(theirs) not in classes:
        raise ConfigError(
            f"{folder}: transformers has no class of {task} for {theirs.model_type}",
            todo="choose another directory, or another CONFIG_HUGGINGFACE_INPUT",
        )
    _set_sizes(theirs, spec, folder)
    chosen = classes[type(theirs)]
    kind = chosen[0] if isinstance(chosen, Sequence) else chosen
    with RealConstants() if simulated() else contextlib.nullcontext():
        return _with_logits(transformers, _made(transformers, kind, theirs, folder, files), spec)


def configuration(transformers: Any, folder: str) -> Any:
    """Return the configuration in `folder`. Raises ConfigError where transformers does not understand it."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        what = f"{folder}/config.json is not understood by transformers {transformers.__version__}"
        raise ConfigError(what, why=" ".join(str(error).split())[:200]) from error


def _set_sizes(theirs: Any, spec: ImageSpec | TextClassSpec, folder: str) -> None:
    """Set what follows from the data: classes, image size and channels, or vocabulary and padding."""
    theirs.num_labels = spec.classes
    theirs.use_cache = False
    if isinstance(spec, ImageSpec):
        inner = getattr(theirs, "vision_config", theirs)
        size = spec.height if spec.height == spec.width else (spec.height, spec.width)
        for name, value in (("image_size", size), ("num_channels", spec.channels)):
            if hasattr(inner, name):
                setattr(inner, name, value)
        return
    check_length(theirs, spec.block_size, folder)
    theirs.vocab_size, theirs.pad_token_id = spec.vocab_size, spec.pad


def check_length(theirs: Any, block_size: int, folder: str) -> None:
    """Raise ConfigError where texts are longer than the model has positions."""
    longest = getattr(theirs, "max_position_embeddings", None) or block_size
    if block_size > longest:
        raise ConfigError(
            f"CONFIG_BLOCK_SIZE={block_size} is too long for {folder}",
            why=f"it has max_position_embeddings={longest}",
            todo=f"set CONFIG_BLOCK_SIZE={longest}",
        )


def _made(transformers: Any, kind: Any, theirs: Any, folder: str, files: Sequence[str]) -> nn.Module:
    """Return the model, with the weights in `folder` where there are any and contents are wanted."""
    rate = attention_dropout(theirs)
    transformers.AttentionInterface.register(_ATTENTION, attention)
    transformers.AttentionMaskInterface.register(_ATTENTION, transformers.masking_utils.eager_mask)
    contents = files and not simulated() and torch.empty(0).device.type != "meta"
    errors = []
    for name in (_ATTENTION,) * bool(rate) + ("sdpa", "eager"):
        try:
            if contents:
                model = loaded(kind, theirs, folder, name, counts=_of_base)
            else:
                model = kind._from_config(theirs, dtype=torch.float32, attn_implementation=name)
        except (ValueError, ImportError) as error:  # most often: no such attention
            errors.append(error)
            continue
        if name == _ATTENTION:
            key_attention(model, rate)
        note = f"weights of {', '.join(files)}" if files else "random weights: the directory has none"
        vars(model)["build_note"] = note
        return model
    raise ConfigError(
        f"{folder}: {kind.__name__} cannot be built", why=" ".join(str(errors[-1]).split())[:300]
    )


def attention_dropout(theirs: Any) -> float:
    """Return the share of attention weights that is zeroed in training."""
    return max((getattr(theirs, name, 0) or 0 for name in _ATTENTION_DROPOUT), default=0)


def loaded(
    kind: Any,
    theirs: Any,
    folder: str,
    attention: str,
    *,
    dtype: torch.dtype = torch.float32,
    counts: Callable[[Any, str], bool] = lambda *_: True,
) -> Any:
    """Return a model of class `kind` with the weights in `folder`.

    counts: of the model and a name: whether that weight must be there. Raises ConfigError for weights that
    cannot be read, are missing, left over or of another shape.
    """
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    options |= {
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        "attn_implementation": attention,
    }
    try:
        with torch.device("cpu"):
            model, info = kind.from_pretrained(folder, config=theirs, dtype=dtype, **options)
    except (OSError, RuntimeError, KeyError, import_extra("safetensors").SafetensorError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"the weights in {folder} cannot be read", why=why) from error
    faults = []
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(each if isinstance(each, str) else each[0] for each in info.get(what, ()))
        wrong = [key for key in found if counts(model, key)]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            faults.append(f"{len(wrong)} {what.partition('_')[0]} ({wrong[0]}{more})")
    if faults:
        todo = "give the weights of this config.json, and data of the model's own image size or vocabulary"
        raise ConfigError(f"the weights in {folder} do not fit", why=", ".join(faults), todo=todo)
    return model


def _of_base(model: Any, key: str) -> bool:
    """Return whether a weight is that of the model without its head."""
    inside = key.startswith(f"{model.base_model_prefix}.") or key in model.base_model.state_dict()
    return inside and "pooler." not in key


def _with_logits(transformers: Any, model: nn.Module, spec: ImageSpec | TextClassSpec) -> nn.Module:
    """Let `model` take inputs and return logits, in place: the names of its weights stay transformers'."""
    kind = type(model)
    # It would look for a mask of ones, so that the kernel and its rounding depended on what is in a batch.
    explicit = {"is_tracing": lambda *_: True}

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if isinstance(spec, ImageSpec):
            return kind.forward(self, pixel_values=inputs).logits  # type: ignore[no-any-return]
        compiling = torch.compiler.is_compiling()
        with contextlib.nullcontext() if compiling else replaced(transformers.masking_utils, **explicit):
            mask = (inputs != spec.pad).long()
            return kind.forward(self, input_ids=inputs, attention_mask=mask).logits  # type: ignore[no-any-return]

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def key_attention(model: nn.Module, rate: float) -> None:
    """Give the modules that compute attention a dropout by sample."""
    named = [one for one in model.modules() if "Attention" in type(one).__name__]
    inner = [one for one in named if not any("Attention" in type(child).__name__ for child in one.children())]
    for site, module in enumerate(inner):
        module.add_module("keyed_dropout", Dropout(rate, site=site))


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention (N, heads, T, D) whose dropout is a function of the sample, as transformers calls it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scale
    for bias in (position_bias, attention_mask):
        scores = scores if bias is None else scores + bias[..., : key.shape[-2]]
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = module.keyed_dropout(torch.softmax(scores, dim=-1, dtype=dtype).to(query.dtype))
    return (weights @ value).transpose(1, 2).contiguous(), weights

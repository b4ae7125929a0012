"""Models of Hugging Face transformers from a local directory: classifiers here, of language in causal.py."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lib.data.types import ImageSpec, TextClassSpec, TokenTagSpec
from lib.errors import ConfigError
from lib.memory.simulation import replaced, simulated
from lib.memory.twin import RealConstants
from lib.nn.model_directory import open_directory, read_configuration, values_of
from lib.nn.packages import import_extra
from lib.nn.weights import head_of
from models.huggingface import library
from models.huggingface.causal import LanguageSpec, build_causal
from models.huggingface.library import EXTRA

TASK = "lm"  # of labels it is the one that TASK names
TAKES_TARGETS = True  # a language model

Classes: TypeAlias = ImageSpec | TextClassSpec | TokenTagSpec
_ATTENTION = "keyed_by_sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/huggingface/Kconfig."""

    dir: str
    input: str


def check_tokenizer(options: Options, name: str | None, folder: str | None) -> None:
    """Raise ConfigError where the tokenizer `name`, which may be in `folder`, is not for the weights."""
    library.check_tokenizer(options.dir, options.input, name, folder)


def build(options: Options, spec: Classes | LanguageSpec) -> nn.Module:
    """Build a model from (N, C, H, W) images or (N, T) tokens to logits of classes, or a language model.

    Weights in the directory are loaded, but not on the meta device and in simulations. Raises ConfigError
    without transformers, for an unusable directory, and for weights that do not fit.
    """
    directory, _, files = open_directory(options.dir, symbol=library.SYMBOL)
    folder = str(directory)
    transformers = import_extra(EXTRA)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    theirs = read_configuration(folder)
    if not isinstance(spec, Classes):
        return build_causal(transformers, theirs, folder, files, spec)
    if isinstance(spec, ImageSpec):
        task, classes = "image classification", transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    elif isinstance(spec, TextClassSpec):
        task, classes = "sequence classification", transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    else:
        task, classes = "token classification", transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if type(theirs) not in classes:
        raise ConfigError(
            f"{folder}: transformers has no class of {task} for {theirs.model_type}",
            todo="choose another directory, or another CONFIG_HUGGINGFACE_INPUT",
        )
    if getattr(theirs, "is_encoder_decoder", False):
        why = "where its class looks for the end of a text cannot be traced"
        what = f"{folder}: {theirs.model_type} is an encoder-decoder"
        raise ConfigError(what, why=why, todo="choose a model that is an encoder or a decoder")
    _set_sizes(theirs, spec, folder, files)
    chosen = classes[type(theirs)]
    kind = chosen[0] if isinstance(chosen, Sequence) else chosen
    with RealConstants() if simulated() else contextlib.nullcontext(), values_of(directory / "config.json"):
        return _with_logits(transformers, _made(transformers, kind, theirs, folder, files), spec)


def _set_sizes(theirs: Any, spec: Classes, folder: str, files: Sequence[str]) -> None:
    """Set what follows from the data: classes, image size and channels, or padding.

    The vocabulary is that of the data where their tokenizer is none of Hugging Face.
    """
    theirs.num_labels = len(spec.tags) if isinstance(spec, TokenTagSpec) else spec.classes
    theirs.use_cache = False
    if isinstance(spec, ImageSpec):
        inner = getattr(theirs, "vision_config", theirs)
        size = spec.height if spec.height == spec.width else (spec.height, spec.width)
        for name, value in (("image_size", size), ("num_channels", spec.channels)):
            if hasattr(inner, name):
                setattr(inner, name, value)
        return
    library.check_length(theirs, spec.block_size, folder)
    if spec.published:
        library.check_vocabulary(theirs, spec, folder, files)
        if getattr(theirs, "pad_token_id", None) not in (None, spec.pad):
            what = f"{folder}/config.json has pad_token_id={theirs.pad_token_id}, its tokenizer {spec.pad}"
            raise ConfigError(what, todo=f"write pad_token_id={spec.pad}, or name its pad_token there")
    else:
        theirs.vocab_size = spec.vocab_size
    theirs.pad_token_id = spec.pad


def _made(transformers: Any, kind: Any, theirs: Any, folder: str, files: Sequence[str]) -> nn.Module:
    """Return the model, with the weights in `folder` where there are any and contents are wanted."""
    rate = library.attention_dropout(theirs)
    transformers.AttentionInterface.register(_ATTENTION, library.attention)
    transformers.AttentionMaskInterface.register(_ATTENTION, transformers.masking_utils.eager_mask)
    contents = files and not simulated() and torch.empty(0).device.type != "meta"
    errors = []
    model: nn.Module
    for name in (_ATTENTION,) * bool(rate) + ("sdpa", "eager"):
        try:
            if contents:
                model = library.loaded(kind, theirs, folder, name, counts=_of_base)
            else:
                model = kind._from_config(theirs, dtype=torch.float32, attn_implementation=name)
        except (ValueError, ImportError) as error:  # most often: no such attention
            errors.append(error)
            continue
        if name == _ATTENTION:
            library.key_attention(model, rate)
        vars(model)["build_note"] = library.note(files, getattr(model, "differing", ""))
        if files and (head := head_of(model, None)):
            vars(model)["head_fault"] = library.head_fault(model, head, folder, files)
            vars(model)["head_classes"] = library.class_names(theirs)
        return model
    raise ConfigError(
        f"{folder}: {kind.__name__} cannot be built", why=" ".join(str(errors[-1]).split())[:300]
    )


def _of_base(model: Any, key: str) -> bool:
    """Return whether a weight is that of the model without its head."""
    inside = key.startswith(f"{model.base_model_prefix}.") or key in model.base_model.state_dict()
    return inside and "pooler." not in key


def _with_logits(transformers: Any, model: nn.Module, spec: Classes) -> nn.Module:
    """Let `model` take inputs and return logits, in place: the names of its weights stay transformers'."""
    kind, head = type(model), head_of(model, None)
    # It would look for a mask of ones, so that the kernel and its rounding depended on what is in a batch.
    explicit = {"is_tracing": lambda *_: True}

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if isinstance(spec, ImageSpec):
            return kind.forward(self, pixel_values=inputs).logits  # type: ignore[no-any-return]
        compiling = torch.compiler.is_compiling()
        with contextlib.nullcontext() if compiling else replaced(transformers.masking_utils, **explicit):
            mask = (inputs != spec.pad).long()
            return kind.forward(self, input_ids=inputs, attention_mask=mask).logits  # type: ignore[no-any-return]

    def reset_head(self: Any) -> str:
        """Give the head the weights that a new one has, and return its name."""
        module = self.get_submodule(head)
        for weight in module.parameters():
            vars(weight).pop("_is_hf_initialized", None)  # transformers keeps what it has read
        self._init_weights(module)
        return head

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "reset_head": reset_head})
    return model

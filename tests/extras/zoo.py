"""Models of timm and transformers, without weights to download: how each is made, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lib.nn.packages import import_extra

Build = Callable[[], nn.Module]

# By family; two or more of each of the large ones.
TIMM = [
    "resnet50", "resnext50_32x4d", "seresnet50", "skresnet18", "resnetv2_50", "regnety_008",
    "nf_regnet_b1", "nfnet_l0", "efficientnet_b0", "tf_efficientnetv2_b0", "mobilenetv3_large_100",
    "mobilenetv4_conv_small", "ghostnet_100", "rexnet_100", "convnext_tiny", "convnextv2_atto",
    "densenet121", "inception_v3", "inception_next_tiny", "vgg11_bn", "dpn68", "dla34",
    "hrnet_w18_small", "cspresnet50", "convmixer_768_32", "repvit_m1", "fastvit_t8", "mambaout_femto",
    "vit_small_patch16_224", "vit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224",
    "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224", "xcit_nano_12_p8_224", "cait_xxs24_224", "pit_ti_224", "pvt_v2_b0",
    "twins_pcpvt_small", "coat_tiny", "levit_128", "efficientformer_l1", "edgenext_small",
    "poolformer_s12", "coatnet_0_rw_224", "maxvit_rmlp_pico_rw_256", "mobilevit_s", "volo_d1_224",
    "crossvit_tiny_240", "sequencer2d_s", "tnt_s_patch16_224", "mixer_s16_224", "gmlp_s16_224",
    "resmlp_12_224", "focalnet_tiny_srf", "davit_tiny", "tiny_vit_5m_224", "hiera_tiny_224",
    "nest_tiny",
]  # fmt: skip
TIMM_TRANSFORMERS = [
    "vit_small_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224",
    "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256",
    "cait_xxs24_224", "pvt_v2_b0", "mixer_s16_224", "convnext_tiny",
    "hiera_tiny_224",
]  # fmt: skip
# Names of linear layers that LoRA adapts, as regular expressions over timm's.
TIMM_LORA = r".*\.(qkv|q|k|v|kv|proj|fc1|fc2|q_proj|k_proj|v_proj|to_qkv)"


def timm_build(name: str, **options: Any) -> Build:
    return lambda: import_extra("timm").create_model(name, **options)


def timm_inputs(name: str, *, batch: int) -> tuple[int, ...]:
    size = import_extra("timm").get_pretrained_cfg(name).input_size
    return (batch, *size)


_TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": 320,
}  # fmt: skip
_DECODER = _TEXT | {"num_key_value_heads": 2, "pad_token_id": 0}
_IMAGE = {"image_size": 32, "patch_size": 8, **{key: _TEXT[key] for key in _TEXT if key != "vocab_size"}}
# Configuration, model class, options of the configuration.
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER),
    "mistral": ("MistralConfig", "MistralForCausalLM", _DECODER),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _DECODER | {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _DECODER | {"head_dim": 16}),
    "phi": ("PhiConfig", "PhiForCausalLM", _DECODER),
    "bert": ("BertConfig", "BertForMaskedLM", _TEXT),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320}),
    "t5": ("T5Config", "T5ForConditionalGeneration",
           {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 320,
            "decoder_start_token_id": 0}),
    "vit": ("ViTConfig", "ViTForImageClassification", _IMAGE),
    "clip": ("CLIPConfig", "CLIPModel",
             {"text_config": _TEXT | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
              "vision_config": _IMAGE, "projection_dim": 32}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration",
                {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                 "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
                 "vocab_size": 320,
                 "max_source_positions": 50, "max_target_positions": 64, "pad_token_id": 0,
                 "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}),
    "mamba": ("MambaConfig", "MambaForCausalLM",
              {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 320}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _DECODER | {"num_local_experts": 4}),
    "swin": ("SwinConfig", "SwinForImageClassification",
             {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
              "window_size": 4}),
}  # fmt: skip
WITHOUT_SDPA = ("mamba", "gemma2")  # transformers has none for these


PRECISIONS = ("fp32", "bf16", "bf16-true")


def lora_target(name: str) -> Any:
    return ["in_proj", "x_proj"] if name == "mamba" else "all-linear"  # PEFT refuses the others


def attentions(name: str) -> tuple[str, ...]:
    return ("eager",) if name in WITHOUT_SDPA else ("eager", "sdpa")


def hugging_face_build(name: str, *, attention: str = "sdpa", **changed: Any) -> Build:
    import transformers

    configuration, model, options = HUGGING_FACE[name]
    config = getattr(transformers, configuration)(**options | changed)
    config._attn_implementation = attention
    return lambda: getattr(transformers, model)(config)


def hugging_face_inputs(name: str, *, batch: int = 2, tokens: int = 16) -> dict[str, Any]:
    text = (batch, tokens)
    match name:
        case "vit" | "swin":
            return {"pixel_values": (batch, 3, 32, 32), "labels": ((batch,), torch.int64)}
        case "clip":
            return {"input_ids": text, "pixel_values": (batch, 3, 32, 32), "return_loss": True}
        case "whisper":
            return {"input_features": (batch, 80, 100), "labels": text}
    return {"input_ids": text, "labels": text}


def with_lora(build: Build, target: Any = "all-linear") -> Build:
    import peft

    config = peft.LoraConfig(r=4, target_modules=target)
    return lambda: peft.get_peft_model(build(), config)

"""Print published memory of fine-tuning beside the prediction, without a GPU and without weights.

    pip install transformers==5.23.0 peft==0.21.2
    PYTHONPATH=. python docs/benchmarks/comparison/published_memory.py [WORDS OF NAMES]

Runs are described in published_memory.toml. Seconds are CPU time of one process, imports left out.
"""

import functools
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from unittest import mock

import peft
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.integrations import sdpa_attention

from lib.memory import estimate
from lib.memory.allocator import replay
from lib.memory.twin import RealConstants  # noqa: F401  (its import is not part of the time)

MIB = 2**20
UNITS = {"MiB": MIB, "GB": 10**9, "GiB": 2**30}
TRUE = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}
BLOCK, GROUP = 64, 256  # weights that share a scale in NF4, and scales that share one of theirs


class Dense(torch.autograd.Function):
    """x @ weight' with a dense weight that is made for each pass and not kept."""

    @staticmethod
    def forward(ctx, x, packed, shape):
        ctx.shape, ctx.dtype = shape, x.dtype
        return nn.functional.linear(x, packed.new_empty(shape, dtype=x.dtype))

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.empty(ctx.shape, dtype=ctx.dtype), None, None


class FourBit(nn.Linear):
    """A frozen layer in NF4 with double quantisation, as bitsandbytes stores it; it computes in `dtype`."""

    def __init__(self, layer, dtype):
        nn.Module.__init__(self)
        self.dtype = dtype
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        count = layer.weight.numel()
        self.register_buffer("weight", torch.empty(count // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(count // BLOCK, dtype=torch.uint8))
        self.register_buffer("groups", torch.empty(count // BLOCK // GROUP, dtype=torch.float32))

    def forward(self, x):
        y = Dense.apply(x.to(self.dtype), self.weight, (self.out_features, self.in_features)).to(x.dtype)
        return y if self.bias is None else y + self.bias


class ChunkedLoss(torch.autograd.Function):
    """Cross-entropy of hidden states, 1024 rows at a time; the gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        rows, trained = hidden.flatten(0, 1), weight.requires_grad
        of_hidden, of_weight = torch.empty_like(rows), torch.zeros_like(weight) if trained else None
        total = torch.zeros(())
        for start in range(0, len(rows), 1024):
            with torch.enable_grad():
                part = rows[start : start + 1024].detach().requires_grad_()
                used = weight.detach().requires_grad_(trained)
                loss = nn.functional.cross_entropy((part @ used.t()).float(), labels[start : start + 1024])
            gradients = torch.autograd.grad(loss, [part, used] if trained else [part])
            of_hidden[start : start + 1024] = gradients[0]
            if trained:
                of_weight += gradients[1]
            total += loss.detach()
            del loss, gradients, part, used
        ctx.save_for_backward(of_hidden.view_as(hidden), *([of_weight] if trained else []))
        return total

    @staticmethod
    def backward(ctx, _):
        of_hidden, *of_weight = ctx.saved_tensors
        return of_hidden, *(of_weight or [None]), None


class WithChunkedLoss(nn.Module):
    """A language model whose logits are never all there."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, labels):
        inner = self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model
        hidden = inner.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return {"loss": ChunkedLoss.apply(hidden, inner.lm_head.weight, labels.flatten())}


def build(run, models):
    """Make the model of a run, as its library would."""
    options = dict(models[run["model"]])
    family = options.pop("class")
    kind = "ForSequenceClassification" if family == "Bert" else "ForCausalLM"
    if family != "Bert":
        options |= {"use_cache": False, "max_position_embeddings": 8192}
    config = getattr(transformers, f"{family}Config")(**options)
    config._attn_implementation = run["attention"]
    model = getattr(transformers, f"{family}{kind}")(config)
    dtype = TRUE.get(run["precision"])
    # peft's prepare_model_for_kbit_training leaves in fp32 what is not in four bits.
    if dtype and not run.get("prepared"):
        model.to(dtype)
    if run.get("four_bit"):
        for name, layer in [*model.named_modules()]:
            if isinstance(layer, nn.Linear) and name != "lm_head":
                parent = model.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], FourBit(layer, dtype))
    if run.get("recomputed"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if run.get("selective"):
        for layer in model.model.layers:
            layer.forward = functools.partial(selectively, layer.forward)
    if "rank" in run:
        if run.get("recomputed"):
            model.enable_input_require_grads()
        lora = peft.LoraConfig(r=run["rank"], target_modules=run["targets"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
        for weight in model.parameters():
            if weight.requires_grad and run.get("half_adapters"):
                weight.data = weight.data.to(dtype)
    return WithChunkedLoss(model) if run.get("chunked") else model


def selectively(forward, *args, **options):
    """Recompute all but attention and every second matrix product, as torchtitan does."""
    products = Counter()

    def keep(ctx, operator, *_, **__):
        if operator == torch.ops.aten._scaled_dot_product_flash_attention.default:
            return CheckpointPolicy.MUST_SAVE
        products[ctx.is_recompute] += operator == torch.ops.aten.mm.default
        if operator == torch.ops.aten.mm.default and products[ctx.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, keep)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=context, **options)


class KeptGradients(torch.optim.AdamW):
    """AdamW of transformers in 2022, one weight at a time, and a zero_grad() that fills with zeros."""

    def __init__(self, weights):
        super().__init__(weights, foreach=False)

    def zero_grad(self, set_to_none=False):  # noqa: ARG002
        super().zero_grad(set_to_none=False)


def predicted(run, models):
    """Return bytes as the publication counts them."""
    shape = run["batch"], run["tokens"]
    labels = ((run["batch"],), torch.int64) if run["model"] == "bert-large" else shape
    repeated = mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *_: run.get("shared_heads", True))
    weights, held = {}, {}

    def loss(output):
        held["output"] = output if run.get("held") else None  # until the next one
        return output["loss"]

    def make():
        model = build(run, models)
        weights["all"] = sum(each.numel() for each in model.parameters())
        weights["layer"] = max(
            (sum(w.numel() for w in each.parameters()) for each in layers(model)), default=0
        )
        weights["layers"] = len(layers(model))
        return model

    optimizer = functools.partial(torch.optim.AdamW, fused=run.get("fused", False))
    if run.get("kept_gradients"):
        optimizer = KeptGradients
    precision = "fp32" if run["precision"].endswith("-true") else run["precision"]
    with repeated:
        inputs = {"input_ids": shape, "labels": labels}
        report = estimate(make, inputs, optimizer=optimizer, precision=precision, loss=loss)
    world, gathered, shares = run.get("world", 1), 0, {}
    if world > 1:  # FSDP: a rank holds its part of weights, gradients and state in fp32, traced here in bf16
        shares = dict.fromkeys(("parameters", "gradients", "optimizer"), 2 / world)
        root = weights["all"] - weights["layers"] * weights["layer"]
        gathered = 2 * (root + 2 * weights["layer"])  # in bf16: what is in no layer, one layer, and the next
    if run["measures"] == "allocated":
        return sum(report.trace.at_peak(shares).values()) + gathered
    reserved = replay(report.trace.history(shares)).peak_reserved_bytes + gathered
    if world > 1:  # the cache of another stream is not used: what all-gathers write, and reduced gradients
        reserved += gathered + 4 * weights["all"] // world
    return reserved + run.get("context_mib", 0) * MIB


def layers(model):
    return getattr(getattr(model, "model", model), "layers", [])


def main():
    file = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    words = [word.lower() for word in sys.argv[1:]]
    print("| run | published | counts | predicted | difference | CPU | why |\n|---|---|---|---|---|---|---|")
    for run in file["runs"]:
        if not all(word in run["name"].lower() for word in words):
            continue
        start, unit = time.process_time(), UNITS[run["unit"]]
        ours = predicted(run, file["models"]) / unit
        seconds, digits = time.process_time() - start, 0 if run["unit"] == "MiB" else 1
        figure = run.get("figure")
        difference = f"{ours / figure - 1:+.1%}" if figure else ""
        said = f"{figure} {run['unit']}" if figure else "none found"
        print(f"| {run['name']} | {said} | {run['measures']} | {ours:.{digits}f} | {difference} "
              f"| {seconds:.1f} s | {run.get('reason', '')} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

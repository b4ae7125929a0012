"""Behaviour of Hugging Face Trainer, for docs/comparison.md: in an environment with transformers."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

SMALL = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
OUT = tempfile.mkdtemp()


class Ragged(Dataset):
    """Token rows whose targets end at different places."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(index))
        targets = tokens.clone()
        targets[index % 13 + 2 :] = -100
        return {"input_ids": tokens, "labels": targets}


class Counted(Trainer):
    """Keeps the sizes of the micro-batches; more than `limit` samples do not fit."""

    limit = 1000

    def training_step(self, model, inputs, *more, **named):
        rows = len(inputs["input_ids"])
        if rows > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        self.sizes = [*getattr(self, "sizes", []), rows]
        return super().training_step(model, inputs, *more, **named)


def train(rows, accumulation, *, resume=None, out=OUT, size=64, limit=1000, **given):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, **SMALL)
    )
    first = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    options = {"max_steps": 1, "save_strategy": "no"} | given
    arguments = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = Counted(model=model, args=arguments, train_dataset=Ragged(size))
    trainer.limit = limit
    trainer.train(resume_from_checkpoint=resume)
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]), first, trainer


def refusal(call):
    try:
        return f"accepted: {call()}"
    except (TypeError, ValueError, SystemExit) as error:
        return f"refused: {type(error).__name__}: {error}"


def parsed(*words):
    return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", OUT, *words])[0]


print("misspelt in Python", refusal(lambda: TrainingArguments(output_dir=OUT, learning_rat=0.1)))
print("a prefix on the command line", refusal(lambda: parsed("--learning_rat", "0.25").learning_rate))
print("misspelt on the command line", refusal(lambda: parsed("--lerning_rate", "0.25").learning_rate))
print("out of range", refusal(lambda: parsed("--learning_rate", "-5").learning_rate))
print("a batch of 0", refusal(lambda: parsed("--per_device_train_batch_size", "0").train_batch_size))
whole, first, _ = train(8, 1)
for rows in (4, 2):
    print(f"{rows}x{8 // rows}: differs by {(train(rows, 8 // rows)[0] - whole).abs().max():.1e}")
print(f"the update itself: {(whole - first).abs().max():.1e}")
train(8, 1, max_steps=4, save_strategy="steps", save_steps=4)
checkpoint = f"{OUT}/checkpoint-4"
whole = train(8, 1, max_steps=8)[0]
resumed = train(4, 2, max_steps=8, resume=checkpoint)[0]
print(f"resumed as 4x2: differs by {(resumed - whole).abs().max():.1e}")
print("resumed with half the batch: steps", train(4, 1, max_steps=8, resume=checkpoint)[2].state.global_step)
found = train(16, 1, max_steps=2, limit=4, auto_find_batch_size=True)[2]
print("out of memory: 16 became", found._train_batch_size, "x", found.args.gradient_accumulation_steps)
print("70 samples by 4x4:", train(4, 4, size=70, max_steps=-1, num_train_epochs=1)[2].sizes)

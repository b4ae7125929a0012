"""One case of make bench PEERS=1: the toolkit beside what a user would write with other programs.

    python -m docs.benchmarks.comparison.peers --case lenet5 bf16      in an environment with their packages

Every program trains the same network with the same optimizer on the same embedded data. The toolkit has
schedule, metrics, progress and checks on. A bare loop trains the toolkit's model, so that only the loops
differ. The others have their users' code: the network of `peer_models` in torch's default layout, loggers
and checkpoints off, and torch's DataLoader, which makes one sample at a time, an image by Pillow as
torchvision does. nanoGPT's loop has its own batches.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from docs.benchmarks.comparison.peer_models import GPT, peer_model
from lib import kconf
from lib.config import config_from_values
from lib.data import ArrayPart, ImageSpec, TextSpec
from lib.errors import run_main
from lib.memory.peak import resident_bytes
from scripts.bench.interleaved_timing import Clock, Run, interleaved
from scripts.bench.throughput import ROOT, bare_loop, in_bf16, plain_case, quiet, toolkit_loop
from train.build import optimizer_of
from train.commands import PlannedRun

ROWS = {"lenet5": 64, "resnet18": 32, "gpt2-shakespeare": 12}  # of a step


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A data set as its user writes it: one row of a part, an image as torchvision's transforms make it."""

    def __init__(self, planned: PlannedRun) -> None:
        self.spec = planned.data.dataset.spec
        inputs, labels = planned.data.dataset.train.take()
        self.labels = torch.from_numpy(labels)
        if not isinstance(self.spec, ImageSpec):
            self.inputs = torch.from_numpy(inputs)
            return
        images_NHWC = inputs.transpose(0, 2, 3, 1)
        self.images = images_NHWC[..., 0] if self.spec.channels == 1 else images_NHWC
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (self.spec.mean, self.spec.std))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        is_image = isinstance(self.spec, ImageSpec)
        return {"inputs": self.image(index) if is_image else self.inputs[index], "labels": self.labels[index]}

    def image(self, index: int) -> Tensor:
        """Return the picture as float32 (C, H, W): a Pillow image, its bytes, in [0, 1], normalised."""
        from PIL import Image

        pixels = np.array(Image.fromarray(self.images[index]), copy=True)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        return (
            torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div(255) - self.mean
        ) / self.std


class WithLoss(nn.Module):
    """The network with its loss, as Hugging Face's Trainer takes it."""

    def __init__(self, planned: PlannedRun) -> None:
        super().__init__()
        self.model = peer_model(planned.request.config.model, planned.data.dataset.spec)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss by its name."""
        logits = self.model(inputs)
        return {"loss": F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))}


def lightning(planned: PlannedRun, *, clock: Clock) -> Run:
    """Return Lightning's loop."""
    import lightning.pytorch as pl

    times: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.whole = WithLoss(planned)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.whole(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(planned.request.config, planned.plan, self.whole)

    class Clock(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            times.append(clock())

    module, loader = Module(), loader_of(planned)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    precision = "bf16-mixed" if planned.plan.precision == "bf16" else "32-true"

    def run(steps: int) -> float:
        times.clear()
        known: dict[str, Any] = {"accelerator": "cpu", "precision": precision, "callbacks": [Clock()]}
        pl.Trainer(max_steps=steps + 1, **known, **dict.fromkeys(off, False)).fit(module, loader)
        return times[-1] - times[0]

    return run


def trainer(planned: PlannedRun, *, clock: Clock) -> Run:
    """Return the loop of Hugging Face's Trainer."""
    import transformers

    model, samples, times = WithLoss(planned), Samples(planned), list[float]()
    optimizer = optimizer_of(planned.request.config, planned.plan, model)

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(clock())

    def run(steps: int) -> float:
        times.clear()
        arguments = transformers.TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=planned.plan.micro_batch,
            max_steps=steps + 1,
            bf16=planned.plan.precision == "bf16",
            max_grad_norm=planned.request.config.optim.grad_clip,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        known: dict[str, Any] = {"optimizers": (optimizer, None), "callbacks": [Clock()]}
        transformers.Trainer(model, arguments, train_dataset=samples, **known).train()
        return times[-1] - times[0]

    return run


def accelerate(planned: PlannedRun, *, clock: Clock) -> Run:
    """Return a loop by hand with accelerate."""
    import accelerate as package

    precision = "bf16" if planned.plan.precision == "bf16" else "no"
    accelerator = package.Accelerator(mixed_precision=precision, cpu=True)
    model = WithLoss(planned)
    optimizer = optimizer_of(planned.request.config, planned.plan, model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(planned))
    batches = endless(loader)

    def run(steps: int) -> float:
        started = clock()
        for _ in range(steps):
            loss = model(**next(batches))["loss"]
            optimizer.zero_grad()
            accelerator.backward(loss)
            if planned.request.config.optim.grad_clip:
                accelerator.clip_grad_norm_(model.parameters(), planned.request.config.optim.grad_clip)
            optimizer.step()
        return clock() - started

    return run


def nanogpt(planned: PlannedRun, *, clock: Clock) -> Run:
    """Return the loop of nanoGPT, by hand: slices of a memory map, autocast, clipping."""
    part, spec, rows = planned.data.dataset.train, planned.data.dataset.spec, planned.plan.micro_batch
    assert isinstance(spec, TextSpec) and not isinstance(part, ArrayPart), "nanoGPT trains on texts"
    tokens, block = part.tokens, part.block_size
    model = GPT(spec, gelu="none")
    optimizer = optimizer_of(planned.request.config, planned.plan, model)

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - block, (rows,)).tolist()
        both = [
            torch.stack([torch.from_numpy(tokens[i + k : i + k + block].astype(np.int64)) for i in starts])
            for k in (0, 1)
        ]
        return both[0], both[1]

    def run(steps: int) -> float:
        started = clock()
        x_BT, y_BT = batch()
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=planned.plan.precision == "bf16"):
                logits = model(x_BT)
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y_BT.view(-1))
            x_BT, y_BT = batch()
            loss.backward()
            if planned.request.config.optim.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), planned.request.config.optim.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return clock() - started

    return run


PROGRAMS: dict[str, Callable[..., Run]] = {
    "the toolkit": toolkit_loop,
    "a bare loop": bare_loop,
    "accelerate": accelerate,
    "Lightning": lightning,
    "Trainer": trainer,
    "nanoGPT's loop": nanogpt,
}


def programs_of(case: str) -> dict[str, Callable[..., Run]]:
    """Return the programs that can train the defconfig `case`."""
    return {name: make for name, make in PROGRAMS.items() if make is not nanogpt or case.startswith("gpt2")}


def loader_of(planned: PlannedRun) -> DataLoader[dict[str, Tensor]]:
    """Return torch's loader of shuffled samples, in this process."""
    return DataLoader(Samples(planned), planned.plan.micro_batch, shuffle=True, drop_last=True)


def endless(loader: DataLoader[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def case_of(name: str, precision: str, folder: Path) -> PlannedRun:
    """Return the defconfig `name` in steps of one micro-batch, on data that need no files."""
    rows = str(ROWS[name])
    given = {"HYPER_PARAM_MANUAL": "y", "BATCH_SIZE": rows, "TARGET_EFFECTIVE_BATCH": rows, "DEVICE_CPU": "y"}
    given |= {"DATASET_MARKOV": "y", "OPTIMIZER_ADAMW": "y"} if name.startswith("gpt2") else {}
    overrides = {f"CONFIG_{symbol}": value for symbol, value in given.items()}
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides=overrides)
    planned = plain_case(folder, resolved, config_from_values(resolved.values))
    return planned if precision == "fp32" else in_bf16(planned)


def measure(case: tuple[str, str], only: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a step of every program, or of the first step and the peak memory of one."""
    with quiet(), contextlib.redirect_stderr(sys.stdout), tempfile.TemporaryDirectory() as folder:
        planned = case_of(*case, folder=Path(folder))
        if only:
            PROGRAMS[only](planned, clock=time.perf_counter)(1)
            found = {"first_step_at": time.time(), "peak_bytes": resident_bytes("VmHWM")}
            return found | {"lines": lines_of(case[0], PROGRAMS[only])}
        clock = time.process_time if options.cpu_time else time.perf_counter
        runs = {name: make(planned, clock=clock) for name, make in programs_of(case[0]).items()}
        if options.cpu_time:  # the toolkit sets them, too
            torch.set_num_threads(1)
        known = {"rounds": options.rounds, "round_seconds": options.seconds, "warm_up": 5}
        steps, seconds = interleaved(runs, **known)
    threads = torch.get_num_threads()
    unit = f"{threads} threads" if threads > 1 else "CPU time" if options.cpu_time else "1 thread"
    return {"steps": steps, "unit": unit, "seconds": seconds}


def lines_of(name: str, make: Callable[..., Run]) -> int:
    """Return the lines that a user writes beside the model: of a defconfig, or of the function here."""
    if make is toolkit_loop:
        return len((ROOT / "defconfigs" / name).read_text().splitlines())
    texts = [make, Samples] if make in (lightning, trainer, accelerate) else [make]
    return sum(bool(line.strip()) for text in texts for line in inspect.getsource(text).splitlines())


def main() -> int:
    """Measure one case and print the figures as JSON, for `compare_all`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--case", nargs=2, required=True, metavar=("DEFCONFIG", "PRECISION"))
    parser.add_argument("--only", default="", help="of one program: its first step and its memory")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round of one loop, about")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    print(json.dumps(measure(tuple(options.case), options.only, options)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))

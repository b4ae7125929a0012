"""The configuration under test, scaled down to a few samples, and its checks in a single process.

Each check returns whether it passed, and its finding.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from lib.config import Config
from lib.data.loader import TrainLoader
from lib.data.sampler import HasLengths
from lib.devices.base import Backend
from lib.errors import ConfigError, ToolkitError
from lib.nn.graph_lint import IteratesToConvergence, lint
from lib.plan.types import Hardware, Plan, rank_shares
from lib.plugins import TASKS
from lib.runs import checkpoint
from train import loop
from train.build import make_job
from train.job import Budget, Job, Progress, budget_of, evaluation_sums, judge, warm_up_of
from train.record import Record
from train.tasks.base import Totals, report_of
from train.tasks.naive_loss import borrows_naive_loss, naive_loss_of
from train.training_data import TrainingData
from train.upload import check_storage

FALL, FALL_STEPS, FALL_RATE = 0.3, 30, 3e-3
CLOSE = 1e-5  # relative difference of gradients
EXPECTED_LOSS = 0.35  # tolerance of the first loss around that of a uniform guess
EVALUATED_AT_ONCE = 509
STEPS_OF_SECONDS = 1000  # assumed for a budget in seconds
ROWS = 10  # samples per batch: the fewest with three splits; 16 if they are normalised together
NO_WARM_UP: dict[str, Any] = {"warmup_unit": "percent", "warmup_pct": 0}
GROUP = 2  # of batch normalisation, in place of a NORM_BATCH that is larger than these batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The configuration, data, hardware and plan to be checked."""

    config: Config
    data: TrainingData
    hardware: Hardware
    plan: Plan
    root: Path
    runs: Path

    def splits(self) -> tuple[tuple[int, ...], ...]:
        """Splits of one batch into micro-batches."""
        if self.plan.norm_batch:
            return (16,), (8, 8), (4, 4, 4, 4)
        return (ROWS,), (5, 5), (4, 4, 2), (3, 3, 3, 1), (2, 2, 2, 2, 2)

    def job(
        self, *micro_batches: int, device: bool = False, world: int = 1, backend: Any = None, **changes: Any
    ) -> Job:
        """Build a job with these micro-batches: in float64 on the CPU, or with `device` as configured."""
        plain = {"data_placement": "stream", "num_workers": 1, "prefetch": 1, "grad_clip": 0.0}
        config = self.config.replace(**plain | changes)
        plan = small_plan(self.plan, micro_batches, world=world, device=device)
        return make_job(
            config,
            plan,
            self.data,
            hardware=self.hardware,
            backend=backend or Backend(plan.device),
            record=Record(),
            dtype=torch.float32 if device else torch.float64,
        )


def small_plan(plan: Plan, micro_batches: Sequence[int], *, world: int, device: bool) -> Plan:
    """Shrink `plan` to these micro-batches on each of `world` ranks; on the CPU unless `device`."""
    effective = sum(micro_batches) * world
    own: dict[str, Any] = {} if device else {"device": "cpu", "precision": "fp32", "channels_last": False}
    return dataclasses.replace(
        plan,
        world=world,
        strategy="ddp" if world > 1 else "single",
        shard=1,
        branch_devices=(),
        micro_batch=micro_batches[0],
        accumulation=len(micro_batches),
        last_micro_batch=micro_batches[-1],
        effective_batch=effective,
        target=effective,
        norm_batch=GROUP if plan.norm_batch else 0,
        compile=False,
        compile_parts=(),
        cuda_graphs=False,
        memory=None,
        **own,
    )


def first_loss(candidate: Candidate) -> tuple[bool, str]:
    """Check that the loss of random weights is about that of a uniform guess.

    Where the task's loss is not that of its `naive_loss`, the guess is a model's whose outputs are zero.
    """
    config = candidate.config
    job = candidate.job(*candidate.splits()[0], device=True)
    (found,) = _losses(job, 1)
    guess, expected = "a uniform guess has", naive_loss_of(config, candidate.data.dataset.spec)
    is_borrowed = borrows_naive_loss(config)
    if is_borrowed or config.class_weights:
        guess, expected = "outputs of zero have", _loss_of_zeros(candidate)
    if expected is None:
        return math.isfinite(found), f"{found:.4f}; the task cannot predict it"
    finding = f"{found:.4f}, {guess} {expected:.4f}"
    if abs(found - expected) < EXPECTED_LOSS * expected:
        return True, finding
    cure = "start with smaller weights of the last layer"
    if is_borrowed:
        place = f"{TASKS.place(config.task)}/task.py"
        cure += f", or define naive_loss(spec) in {place}: the loss to expect, or None if it is not known"
    return False, f"{finding}; {cure}"


def _loss_of_zeros(candidate: Candidate) -> float | None:
    """Return the first loss of a model with outputs of zero; None if they are no tensor, or it is not > 0."""
    job, outputs = candidate.job(*candidate.splits()[0], device=True), list[Any]()
    forward = job.forward

    def zeros(*inputs: Any, **options: Any) -> Any:
        outputs.append(forward(*inputs, **options))
        return outputs[-1] * 0 if isinstance(outputs[-1], Tensor) else outputs[-1]

    job.forward = zeros
    (found,) = _losses(job, 1)
    are_plain = all(isinstance(each, Tensor) and each.dim() for each in outputs)
    return found if are_plain and found > 0 else None


def loss_falls(candidate: Candidate) -> tuple[bool, str]:
    """Check that Adam lowers the loss on one fixed batch."""
    adam = {"optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}
    rule = NO_WARM_UP | adam | {"weight_decay": 0.0, "learning_rate": FALL_RATE, "schedule": "constant"}
    job = candidate.job(*candidate.splits()[0], device=True, **rule)
    (batch,) = job.train_loader.micro_batches(
        step=0, target=job.plan.effective_batch, sizes=job.plan.micro_batches
    )
    always = SimpleNamespace(micro_batches=lambda **_: [batch], by_length=False)
    job.train_loader = cast("TrainLoader", always)
    found = list[float]()
    for loss in _losses(job, FALL_STEPS):
        found.append(loss)
        if loss < (1 - FALL) * found[0]:
            break
    finding = f"{found[0]:.4f} to {found[-1]:.4f} in {len(found)} steps on one batch"
    return found[-1] < (1 - FALL) * found[0], finding


def _losses(job: Job, steps: int) -> Iterator[float]:
    """Yield the mean loss of each of the first steps."""
    for step in range(steps):
        totals = Totals()
        for sums in loop.optimizer_step(job, Progress(step=step)):
            totals.add(sums)
        yield totals.means(job.backend)["loss"]


def shards(candidate: Candidate) -> tuple[bool, str]:
    """Check that ranks see the shards of one process's batch, and evaluation counts every sample once."""
    job, target = candidate.job(*candidate.splits()[0]), 8
    whole = _inputs(job, target=target, world=1)
    same = all(_are_equal(_inputs(job, target=target, world=world), whole) for world in (2, 3, 8))
    sizes = [_evaluated(job, world=world) for world in (1, 2, 3)]
    finding = f"1 to 8 ranks train on the same stream; {sizes[0]:.0f} samples are evaluated by 1, 2 and 3"
    if same and set(sizes) == {float(job.eval_loader.size)}:
        return True, finding
    return False, f"the streams of several ranks {'agree' if same else 'differ'}; evaluated are {sizes}"


def _inputs(job: Job, *, target: int, world: int) -> list[Tensor]:
    """Return the inputs of each sample of a step."""
    loaded = partial(job.train_loader.micro_batches, step=3, target=target)
    sizes = rank_shares(target, world=world)
    batches = (next(loaded(firsts=[sum(sizes[:rank])], sizes=sizes[rank:][:1])) for rank in range(world))
    return [row for batch in batches for row in batch.inputs]


def _are_equal(rows: list[Tensor], others: list[Tensor]) -> bool:
    """Compare samples; those of tokens may be cut to the longest one of each rank."""
    pairs = [
        (one, other, min(one.shape[-1], other.shape[-1])) for one, other in zip(rows, others, strict=True)
    ]
    return all(torch.equal(one[..., :end], other[..., :end]) for one, other, end in pairs)


def _evaluated(job: Job, *, world: int) -> float:
    """Count the evaluated samples. Raises ToolkitError if ranks have different numbers of batches."""
    loaded = partial(job.eval_loader.batches, world=world, batch_size=EVALUATED_AT_ONCE)
    batches = [[batch.weights for batch in loaded(rank=rank)] for rank in range(world)]
    lengths = [len(one) for one in batches]
    if len(set(lengths)) > 1:
        raise ToolkitError(f"{world} ranks evaluate {lengths} batches and would wait for each other")
    return float(sum(float(weights.sum()) for one in batches for weights in one if weights is not None))


def evaluation(candidate: Candidate) -> tuple[bool, str]:
    """Check that a batch is evaluated to figures and a score, which otherwise fail after many steps."""
    job, totals = candidate.job(*candidate.splits()[0], device=True), Totals()
    for sums in evaluation_sums(job):
        totals.add(sums)
        break
    figures = report_of(job.task, totals, job.backend, job.config)
    judge(job, Progress(), figures)
    loss, names = figures.get("loss", 0.0), ", ".join(figures)  # others may be of the whole part
    return math.isfinite(loss), f"loss {loss:.4f} of one batch; it reports {names}"


def accumulation(candidate: Candidate) -> tuple[bool, str]:
    """Check that the gradients of the second step do not depend on the split into micro-batches."""
    splits = candidate.splits()
    gradients = [_gradients(candidate.job(*split), steps=2) for split in splits]
    differences = torch.tensor([relative_difference(one, gradients[0]) for one in gradients[1:]])
    worst = float(differences.max())  # NaN if one of them is, unlike Python's max
    pieces = ", ".join(str(len(split)) for split in splits)
    inexact = ", ".join(candidate.data.facts.inexact)
    layers = f"; not shown to be independent of them: {inexact}" if inexact else ""
    return worst < CLOSE, f"{worst:.1e} at most between {pieces} micro-batches{layers}"


def _gradients(job: Job, *, steps: int) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(*_: object) -> None:
        found[:] = [p.grad.clone() for p in job.model.parameters() if p.grad is not None]

    job.optimizer.register_step_pre_hook(keep)
    for step in range(steps):
        loop.optimizer_step(job, Progress(step=step))
    return found


def relative_difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return |one - other| / |other| over all tensors together."""
    difference = torch.stack([(a - b).norm() for a, b in zip(one, other, strict=True)]).norm()
    return float(difference / torch.stack([b.norm() for b in other]).norm())


def round_trip(candidate: Candidate) -> tuple[bool, str]:
    """Check that a job resumed from a checkpoint makes the same step, bit for bit."""
    split = candidate.splits()[0]
    job, other = candidate.job(*split, device=True), candidate.job(*split, device=True)
    for step in range(2):
        loop.optimizer_step(job, Progress(step=step))
    with tempfile.TemporaryDirectory() as folder:
        state = loop.state_dict(job, Progress(step=2))
        checkpoint.save(Path(folder), step=2, state=state, keep_last=1, best=False)
        damage: list[str] = []
        found = checkpoint.load(Path(folder), log=damage.append)
        if found is None:
            return False, "; ".join(damage) or "the saved checkpoint is missing"
        loop.load_state_dict(other, copy.deepcopy(found[1]))
    losses = [
        float(sum(part.loss.detach() for part in loop.optimizer_step(each, Progress(step=2))))
        for each in (job, other)
    ]
    pairs = list(zip(job.model.state_dict().values(), other.model.state_dict().values(), strict=True))
    same = losses[0] == losses[1] and all(torch.equal(one, two) for one, two in pairs)
    finding = f"losses of the next step {losses[0]:.9g} and {losses[1]:.9g}"
    return same, f"{finding}, weights {'the same' if same else 'not the same'}"


def static_graph(candidate: Candidate) -> tuple[bool, str]:
    """Check that steps after the first are one graph without host synchronization.

    Rows of tokens that are cut have a graph for each length: the one of whole rows is looked at.
    """
    spec = candidate.data.dataset.spec
    if isinstance(spec, HasLengths) and spec.bucketed:
        whole: Any = dataclasses.replace(cast("Any", spec), bucketed=False)
        dataset = dataclasses.replace(candidate.data.dataset, spec=whole)
        candidate = dataclasses.replace(candidate, data=dataclasses.replace(candidate.data, dataset=dataset))
    job = candidate.job(*candidate.splits()[0], device=True)
    if isinstance(job.model, IteratesToConvergence):
        return True, "not checked: states are iterated until they converge, with synchronization"
    report = lint(lambda step: loop.optimizer_step(job, Progress(step=step)))
    unchecked = ["CUDA graphs are not checked"] * candidate.plan.cuda_graphs
    return report.is_static, "; ".join([*report.lines(), *unchecked])


def learning_rates(candidate: Candidate) -> tuple[bool, str]:
    """Check that learning rates are positive, never above the peak, and lowest at the end."""
    config, rows = candidate.config, candidate.plan.effective_batch
    job = candidate.job(*candidate.splits()[0])
    # Those of the run, because the batch here is another one.
    requested = budget_of(config, train_size=candidate.data.dataset.train.size, effective_batch=rows)
    job.warmup_fraction = warm_up_of(config, requested, effective_batch=rows)
    total = requested.total_steps or STEPS_OF_SECONDS
    job.budget = Budget(total_steps=total, total_seconds=None)
    warm = min(total - 1, round(total * job.warmup_fraction))
    steps = sorted({0, min(1, total - 1), warm, total // 4, total // 2, 3 * total // 4, total - 1})
    factors = {step: loop.rate_factor(job, Progress(step=step)) for step in steps}
    peak = job.optimizer.param_groups[0]["peak_lr"]
    after = [factor for step, factor in factors.items() if step >= warm]
    finding = ", ".join(f"{step + 1}: {factor * peak:.3g}" for step, factor in factors.items())
    passed = min(factors.values()) > 0 and max(factors.values()) <= 1 and after[-1] == min(after)
    return passed, f"by step {finding}"


def storage(runs: Path, config: Config) -> tuple[bool, str]:
    """Check that the directory of runs and the remote storage can be written, read and cleaned up."""
    content = b"preflight" * 1000
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=runs, prefix=".preflight-") as file:
            file.write(content)
            file.flush()
            same = Path(file.name).read_bytes() == content
    except OSError as error:
        return False, f"{runs}: {error.strerror or error}"
    try:
        check_storage(config)
    except ConfigError as error:
        return False, str(error)
    places = " and ".join(filter(None, (str(runs), config.checkpoints.checkpoint_url)))
    return same, f"{places} can be written, read and deleted"


def memory(plan: Plan) -> tuple[bool, str]:
    """Check that the memory that the plan needs is free."""
    if plan.memory is None:
        return True, "not predicted: CONFIG_AUTO_METHOD_TABLE is set"
    need, usable = plan.memory.need_bytes, plan.memory.usable_bytes
    return need <= usable, f"{need / 1e9:.2f} GB of the {usable / 1e9:.2f} GB that may be used"

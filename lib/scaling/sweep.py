"""Training the models of a sweep: a process for each, what it cost, and nothing done twice."""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lib.data.types import TextSpec
from lib.nn.model_code import build_model
from lib.runs import metrics
from lib.runs.directory import RunDir
from lib.scaling.counts import count, training_flops
from lib.scaling.results import ScalingConfig, ScalingResults, read, write
from lib.sweeps.subprocess_run import Children


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Where a sweep works, and on what.

    floor: of the loss per token, below which a model must have seen what it predicts.
    """

    root: Path  # the source tree
    out: Path
    spec: TextSpec
    floor: float
    code: str
    workers: int
    say: Callable[[str], None]

    def run(self, configs: Sequence[ScalingConfig], names: Sequence[str]) -> list[ScalingResults]:
        """The results of all, in their order; what is there already, from the same code, is kept.

        Raises Suspended where a signal stopped it.
        """
        with Children() as children:

            def result(named: tuple[ScalingConfig, str]) -> ScalingResults | None:
                return self.result(*named, children)

            found = children.each(result, list(zip(configs, names, strict=True)), workers=self.workers)
        children.check(todo="the same command goes on from there")
        return [each for each in found if each is not None]

    def result(self, config: ScalingConfig, name: str, children: Children) -> ScalingResults | None:
        """That of one model: from its file, or by training it; None where it was stopped."""
        path = self.out / f"{name}_results.json"
        known = read(path)
        if known is not None and known.config_hash == config.identity(self.code) and known.status != "failed":
            self.say(f"{name}: already there")
            return known
        result = self._train(config, name, children)
        if result is None:
            return None
        write(path, result.to_json())
        told = f"{result.val_nats:.4f} nats" if result.status != "failed" else result.reason
        self.say(f"{name}: {result.status}, {told}, {result.seconds_cpu:.0f} s of processor")
        return result

    def _train(self, config: ScalingConfig, name: str, children: Children) -> ScalingResults | None:
        """A run of its own directory; one that was interrupted goes on from its last checkpoint."""
        identity = config.identity(self.code)
        place = self.out / "runs" / f"{name}-{identity}"
        child = children.train(place, config.assignments(), root=self.root)
        if child.stopped:
            return None
        empty = dataclasses.replace(
            self._empty(config, identity),
            seconds_cpu=child.seconds_cpu,
            peak_memory_mb=child.peak_memory_mb,
        )
        if child.run is None:
            return dataclasses.replace(empty, status="failed", reason=child.reason)
        return self._read(empty, child.run, config)

    def _empty(self, config: ScalingConfig, identity: str) -> ScalingResults:
        build = self.builder(config)
        counts = count(build)
        return ScalingResults(
            d_model=config.d_model,
            n_layers=config.n_layers,
            num_params=counts.total,
            num_params_nonembedding=counts.nonembedding,
            num_params_active=counts.active,
            final_perplexity=None,
            best_perplexity=None,
            training_time=0.0,
            total_training_flops=0,
            peak_memory_mb=0.0,
            epoch_perplexities=[],
            perplexity_unit=self.spec.unit,
            seed=config.seed,
            arch=config.arch,
            config_hash=identity,
            torch=_torch_version(),
            host=socket.gethostname(),
            config=dataclasses.asdict(config),
        )

    def _read(self, empty: ScalingResults, run: RunDir, config: ScalingConfig) -> ScalingResults:
        status, rows = run.status(), metrics.read(run.metrics)
        losses = [row["loss"] for row in rows if row["kind"] == "eval"]
        if None in losses:
            return dataclasses.replace(empty, status="failed", reason="the validation loss is not finite")
        tokens = status.step * config.batch_size * config.n_seq
        suspect = losses[-1] < self.floor
        flops = tokens * training_flops(self.builder(config), block_size=config.n_seq)
        return dataclasses.replace(
            empty,
            final_loss=next(row["loss"] for row in reversed(rows) if row["kind"] == "train"),
            val_nats=losses[-1],
            bits_per_byte=status.facts.get("bits_per_byte"),
            final_perplexity=math.exp(losses[-1]),
            best_perplexity=math.exp(min(losses)),
            epoch_perplexities=[math.exp(loss) for loss in losses],
            training_time=status.facts["seconds"],
            total_training_flops=flops,
            tokens=tokens,
            status="suspect_leak" if suspect else "done",
            reason=f"below {self.floor:.4f} nats, which no model reaches" if suspect else "",
        )

    def builder(self, config: ScalingConfig) -> Callable[[], Any]:
        """What makes the model of a run."""
        name, options = config.model()
        spec = dataclasses.replace(self.spec, block_size=config.n_seq)
        return partial(build_model, name, options, spec, seed=config.seed)


def failures(results: Iterable[ScalingResults]) -> list[str]:
    """A line for each result that is none."""
    return [
        f"{result.arch} d{result.d_model} l{result.n_layers}, {result.config.get('tokens', 0)} tokens, "
        f"seed {result.seed}: {result.status}: {result.reason}"
        for result in results
        if result.status != "done"
    ]


def _torch_version() -> str:
    import torch

    return str(torch.__version__)

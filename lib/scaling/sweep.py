"""Training of the models of a sweep: one process per run, resumable, with cached results."""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import atomic
from lib.data.types import TextSpec
from lib.runs import metrics
from lib.runs.directory import RunDir
from lib.scaling.costs import builder, count, training_flops
from lib.scaling.results import ScalingConfig, ScalingResults, read
from lib.sweeps.subprocess_run import Children


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Settings that all runs of a sweep share.

    root: of the source tree. floor: a loss per token below it means that the model saw its targets.
    """

    root: Path
    out: Path
    spec: TextSpec
    floor: float
    code: str
    workers: int
    log: Callable[[str], None]

    def run(self, configs: Sequence[ScalingConfig], names: Sequence[str]) -> list[ScalingResults]:
        """Return all results in order; those present from the same code are reused.

        Raises Suspended if a signal stopped the sweep.
        """
        with Children() as children:

            def result(named: tuple[ScalingConfig, str]) -> ScalingResults | None:
                return self.result(*named, children)

            found = children.map(result, list(zip(configs, names, strict=True)), workers=self.workers)
        children.check(todo="the same command resumes the sweep")
        return [each for each in found if each is not None]

    def result(self, config: ScalingConfig, name: str, children: Children) -> ScalingResults | None:
        """Return the result of one model from its file or by training; None if it was stopped."""
        path = self.out / f"{name}_results.json"
        known = read(path)
        if known is not None and known.config_hash == config.identity(self.code) and known.status != "failed":
            self.log(f"{name}: already there")
            return known
        result = self._train(config, name, children)
        if result is None:
            return None
        atomic.save(path, result.to_json())
        outcome = f"{result.val_nats:.4f} nats" if result.status != "failed" else result.reason
        self.log(f"{name}: {result.status}, {outcome}, {result.seconds_cpu:.0f} CPU seconds")
        return result

    def _train(self, config: ScalingConfig, name: str, children: Children) -> ScalingResults | None:
        """Train in the run's own directory; an interrupted run resumes from its last checkpoint."""
        identity = config.identity(self.code)
        child = children.train(self.out / "runs" / f"{name}-{identity}", config.assignments(), root=self.root)
        if child.stopped:
            return None
        used: dict[str, Any] = {"seconds_cpu": child.seconds_cpu, "peak_memory_mb": child.peak_memory_mb}
        empty = dataclasses.replace(self._empty(config, identity), **used)
        if child.run is None:
            return dataclasses.replace(empty, status="failed", reason=child.reason)
        return self._read(empty, child.run, config)

    def _empty(self, config: ScalingConfig, identity: str) -> ScalingResults:
        import torch

        counts = count(builder(config, self.spec))
        return ScalingResults(
            d_model=config.d_model,
            n_layers=config.n_layers,
            num_params=counts.total,
            num_params_nonembedding=counts.nonembedding,
            num_params_active=counts.active,
            perplexity_unit=self.spec.unit,
            seed=config.seed,
            arch=config.arch,
            config_hash=identity,
            torch=str(torch.__version__),
            host=socket.gethostname(),
            config=dataclasses.asdict(config),
        )

    def _read(self, empty: ScalingResults, run: RunDir, config: ScalingConfig) -> ScalingResults:
        status, rows = run.status(), metrics.read(run.metrics)
        losses = [row["loss"] for row in rows if row["kind"] == "eval"]
        if None in losses:
            return dataclasses.replace(empty, status="failed", reason="the validation loss is not finite")
        tokens = status.step * config.batch_size * config.n_seq
        leak = losses[-1] < self.floor
        return dataclasses.replace(
            empty,
            final_loss=next(row["loss"] for row in reversed(rows) if row["kind"] == "train"),
            val_nats=losses[-1],
            bits_per_byte=status.facts.get("bits_per_byte"),
            final_perplexity=math.exp(losses[-1]),
            best_perplexity=math.exp(min(losses)),
            epoch_perplexities=[math.exp(loss) for loss in losses],
            training_time=status.facts["seconds"],
            total_training_flops=tokens * training_flops(builder(config, self.spec), block_size=config.n_seq),
            tokens=tokens,
            status="suspect_leak" if leak else "done",
            reason=f"below {self.floor:.4f} nats, which no model reaches" if leak else "",
        )


def failures(results: Iterable[ScalingResults]) -> list[str]:
    """Return a line for each run that failed or is suspected of a leak."""
    return [
        f"{result.arch} d{result.d_model} l{result.n_layers}, {result.config.get('tokens', 0)} tokens, "
        f"seed {result.seed}: {result.status}: {result.reason}"
        for result in results
        if result.status != "done"
    ]

"""Scaling experiments from plan to verdict: what `make scaling` does, as a Python interface."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lib import atomic
from lib.data import DataLocation, open_dataset
from lib.data.cache import fingerprint
from lib.data.datasets.texts.markov import entropy_bits
from lib.data.ngram_baseline import ngram_baseline
from lib.data.types import Dataset, TextSpec
from lib.errors import ConfigError, DataError, ToolkitError
from lib.nn.model_code import build_model
from lib.reports.page import Section, as_text, write_page
from lib.scaling import PLAN, gate
from lib.scaling.judge import Verdict, judge
from lib.scaling.laws import Point
from lib.scaling.planning import FULL, LAYERS, WIDTHS, PlannedRun, configs_of, names_of, wall_seconds
from lib.scaling.results import (
    BLOCK,
    MIN_TEXT_LOSS,
    ScalingConfig,
    ScalingResults,
    by_architecture,
    code_hash,
    corpus_path,
    points_of,
    read,
)
from lib.scaling.sweep import Sweep, failures
from lib.scaling.sweep_report import KNOWN, sections

ROOT = Path(__file__).resolve().parents[2]
ALL_RESULTS, LAW = "all_scaling_results.json", "scaling_law.json"
REPORT, PAGE = "report.txt", "report.html"
_CHANCE_NATS = 0.01  # a loss may be this far below a known entropy rate by chance: four deviations


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text of a sweep. entropy_rate: in nats per token, if it is known."""

    dataset: Dataset
    spec: TextSpec
    sha256: str
    train_tokens: int
    ngram_nats: tuple[float, ...]  # cross-entropy per token of n-gram models
    entropy_rate: float | None

    @property
    def lowest(self) -> float:
        """Loss below which a model must have seen its targets."""
        return MIN_TEXT_LOSS if self.entropy_rate is None else self.entropy_rate - _CHANCE_NATS


class ScalingExperiments:
    """Train models of several sizes, one process each, and fit scaling laws to their losses.

    output_dir: for results, laws and plots; an interrupted sweep resumes there. Raises ConfigError for an
    unknown corpus or missing files.
    """

    def __init__(
        self,
        output_dir: str | Path = "benchmark_results/scaling",
        *,
        corpus: str = "synthetic",
        workers: int | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.out, self.corpus_name, self.log = Path(output_dir).resolve(), corpus, log
        path = corpus_path(corpus)
        if path is not None and not path.exists():
            raise ConfigError(f"CORPUS={corpus} is not there", todo="file: takes a file or a folder of texts")
        self.workers = workers or len(os.sched_getaffinity(0))

    @cached_property
    def corpus(self) -> Corpus:
        """The corpus, generated if necessary. Raises ConfigError if it cannot be used."""
        cache, path = ROOT / "data", corpus_path(self.corpus_name)
        name = "text_files" if path else {"synthetic": "markov"}.get(self.corpus_name, self.corpus_name)
        place = DataLocation(
            name=name,
            root=ROOT,
            data_dir=path or cache,
            cache_dir=cache,
            download=False,
            log=self.log,
            block_size=BLOCK,
            tokenizer="char" if name == "markov" else "byte",
        )
        try:
            dataset = open_dataset(place, {})
        except DataError as error:
            why = str(error).replace("a language model on CONFIG_DATASET_PYSOURCE=y", "CORPUS=pysource")
            raise ConfigError(f"CORPUS={self.corpus_name} cannot be used", why=why) from error
        assert isinstance(dataset.spec, TextSpec)
        baseline = ngram_baseline(dataset, cache_dir=cache, log=self.log)
        return Corpus(
            dataset=dataset,
            spec=dataset.spec,
            sha256=fingerprint(dataset.source),
            train_tokens=dataset.train.size * dataset.spec.block_size,
            ngram_nats=tuple(bits * math.log(2) for bits in baseline.bits),
            entropy_rate=entropy_bits() * math.log(2) if name == "markov" else None,
        )

    def run_all_experiments(
        self,
        d_model_values: Sequence[int] = WIDTHS,
        n_layers_values: Sequence[int] = LAYERS,
        epochs: int = 5,
        batch_size: int = 32,
        device: str = "auto",
    ) -> list[ScalingResults]:
        """Train every width with every number of layers. Raises ToolkitError if a run failed."""
        shapes = tuple((width, layers) for width in d_model_values for layers in n_layers_values)
        grid = dataclasses.replace(FULL, shapes=shapes, tokens=(), seeds=(1,))
        base = ScalingConfig(
            *shapes[0], batch_size=batch_size, epochs=epochs, device=device, corpus=self.corpus_name
        )
        results = self.run(configs_of(grid, architectures=(base.arch,), base=base))
        raise_failures(results)
        return results

    def check_gate(self, configs: Iterable[ScalingConfig]) -> None:
        """Check every architecture and context length for leaks of future tokens.

        Raises ToolkitError if a model leaks, or if the checks miss the block that is known to leak.
        """
        kinds = {(config.arch, config.n_seq): config for config in configs}
        for (arch, length), config in kinds.items():
            name, options = dataclasses.replace(config, d_model=16, n_layers=2).model()
            found = gate.find_faults(partial(build_model, name, options, seed=1), length=length)
            if found:
                raise ToolkitError(f"{arch} does not pass the leak checks", why="; ".join(found))
            self.log(f"Leak checks: {arch} is causal over {length} tokens and learns the next token")
        canary: dict[str, Any] = {"form": "upstream", "layers": 2, "width": 16, "ffn_ratio": 2}
        canary |= {"dropout": 0.0, "allow_leak": True}
        for spec in (gate.cycle_spec(length) for length in dict.fromkeys(length for _, length in kinds)):
            model = build_model("resnet_bk", canary, spec, seed=1)
            if not list(gate.leaks(model, spec)):
                why = "it does not detect the leak of the original, bidirectional block"
                raise ToolkitError("the leak checks are broken", why=why)
        self.log("Leak checks: the leak of the original, bidirectional block is detected")

    def run(self, configs: Sequence[ScalingConfig]) -> list[ScalingResults]:
        """Train all configurations without a result, and write all results, failed ones included.

        Raises ConfigError if a configuration is of another corpus, or two would have the same name.
        """
        self._check_corpora((config.corpus for config in configs), "a configuration")
        names = names_of(configs)
        configs = [dataclasses.replace(config, data_sha256=self.corpus.sha256) for config in configs]
        sweep = Sweep(
            root=ROOT,
            out=self.out,
            spec=self.corpus.spec,
            floor=self.corpus.lowest,
            code=code_hash(ROOT),
            workers=self.workers,
            log=self.log,
        )
        hashes = [config.identity(sweep.code) for config in configs]
        atomic.save(self.out / PLAN, json.dumps(dict(zip(names, hashes, strict=True)), indent=1) + "\n")
        results = sweep.run(configs, names)
        content = "[\n" + ",\n".join(result.to_json().rstrip("\n") for result in results) + "\n]\n"
        atomic.save(self.out / ALL_RESULTS, content)
        return results

    def results(self) -> list[ScalingResults]:
        """Return the results of the last sweep; those of earlier sweeps have other hashes.

        Raises ConfigError if there is no sweep or it is of another corpus, ToolkitError if a run is missing.
        """
        present = self._stored()
        self._check_corpora((result.config["corpus"] for result in present), f"the sweep in {self.out}")
        return present

    @classmethod
    def of_sweep(cls, out: Path) -> ScalingExperiments:
        """Return the sweep in `out`, on its own corpus. Raises errors of `results`."""
        found = cls(out)
        found.corpus_name = found._stored()[0].config["corpus"]
        return found

    def _stored(self) -> list[ScalingResults]:
        none = ConfigError(f"there is no sweep in {self.out}", todo="make scaling makes one")
        try:
            hashes = json.loads((self.out / PLAN).read_text())
        except (OSError, ValueError) as error:
            raise none from error
        if not isinstance(hashes, dict) or not hashes:
            raise none
        found = {name: read(self.out / f"{name}_results.json") for name in hashes}
        present = [result for name, result in found.items() if result and result.config_hash == hashes[name]]
        if missing := [name for name, result in found.items() if result not in present]:
            raise ToolkitError(
                f"{len(missing)} of {len(hashes)} runs are missing: {missing[0]} ...",
                todo="make scaling resumes the sweep",
            )
        return present

    def _check_corpora(self, names: Iterable[str], what: str) -> None:
        """Raise ConfigError for another corpus, whose losses have other baselines and another vocabulary."""
        if others := set(names) - {self.corpus_name}:
            raise ConfigError(
                f"{what} is of CORPUS={min(others)}, not of CORPUS={self.corpus_name}",
                todo="give the same to both",
            )

    def verdicts(self) -> dict[str, Verdict]:
        """Return the verdict on each architecture from its valid results.

        Raises ConfigError if the corpus has changed since the models were trained.
        """
        results = self.results()
        if any(result.config["data_sha256"] != self.corpus.sha256 for result in results):
            raise ConfigError(
                f"CORPUS={self.corpus_name} has changed since the sweep in {self.out}",
                todo="make scaling trains on the new text",
            )
        groups = by_architecture(results)
        return {arch: _judged(tuple(points_of(group))) for arch, group in groups.items()}

    def analyze_scaling_laws(self) -> dict[str, Any]:
        """Fit the laws, write scaling_law.json and return its content.

        Raises ToolkitError without results.
        """
        results, verdicts = self.results(), self.verdicts()
        parts = {arch: law_of(group, verdicts[arch]) for arch, group in by_architecture(results).items()}
        if not parts:
            raise ToolkitError("there is no valid result to fit", why="; ".join(failures(results)))
        first = next(iter(parts))
        content = {
            **parts[first],
            "architectures": parts,
            "corpus": self.corpus_name,
            "synthetic": self.corpus.spec.synthetic,
            "unit": self.corpus.spec.unit,
            "entropy_rate_nats": self.corpus.entropy_rate,
            "counting_nats": list(self.corpus.ngram_nats),
            "excluded": failures(results),
        }
        atomic.save(self.out / LAW, json.dumps(content, indent=1, sort_keys=True) + "\n")
        return content

    def plot_scaling_laws(self) -> list[Path]:
        """Write scaling_laws.png and scaling_laws_2.png, and return their paths."""
        from lib.scaling.pictures import write_pictures  # matplotlib takes half a second to import

        return write_pictures(by_architecture(self.results()), self.verdicts(), self.corpus_lines(), self.out)

    def report(self) -> str:
        """Write report.txt and report.html, and return the content of the first."""
        text = as_text(self.sections())
        atomic.save(self.out / REPORT, text)
        self.write_page(self.out / PAGE)
        return text

    def write_page(self, path: Path) -> None:
        """Write the report as HTML. Raises ToolkitError."""
        title, summary = f"Scaling sweep on {self.corpus_name}", str(self.out)
        write_page(path, title=title, summary=summary, sections=self.sections())

    def sections(self) -> list[Section]:
        """Return the sections of the report."""
        return sections(self.results(), self.verdicts(), self.corpus.dataset.source, self.corpus_lines())

    def corpus_lines(self) -> dict[str, float]:
        """Return baseline losses in nats: of n-gram models, and the entropy rate if it is known."""
        lines = {f"counting {n}-grams": nats for n, nats in enumerate(self.corpus.ngram_nats, start=1)}
        if self.corpus.entropy_rate is not None:
            lines[KNOWN] = self.corpus.entropy_rate
        return lines


@cache
def _judged(points: tuple[Point, ...]) -> Verdict:
    """Judge the points once; fit, plots and report of one command need the verdict."""
    return judge(points)


def raise_failures(results: Sequence[ScalingResults]) -> None:
    """Raise ToolkitError if a run failed or is suspected of a leak."""
    if failed := failures(results):
        raise ToolkitError(
            f"{len(failed)} of {len(results)} runs have no valid result", why="; ".join(failed)
        )


def law_of(results: Sequence[ScalingResults], verdict: Verdict) -> dict[str, Any]:
    """Return the content of scaling_law.json for one architecture.

    The law of the design, perplexity = a N^b with all parameters, is fitted in logarithms at the most data.
    """
    most = max(result.tokens for result in results)
    pairs = [(result.num_params, math.exp(result.val_nats)) for result in results if result.tokens == most]
    logs = np.log(np.asarray(pairs))
    content: dict[str, Any] = {"formula": "perplexity = a * (num_params)^b", "num_data_points": len(pairs)}
    if len({size for size, _ in pairs}) > 1:
        b, log_a = np.polyfit(logs[:, 0], logs[:, 1], 1)
        rest = logs[:, 1] - log_a - b * logs[:, 0]
        whole = logs[:, 1] - logs[:, 1].mean()
        content |= {"a": float(np.exp(log_a)), "b": float(b)}
        content["r_squared"] = float(1 - rest @ rest / (whole @ whole)) if whole.any() else None
    content["fits"] = {name: fitted.to_json() for name, fitted in verdict.fits.items()}
    content["isoflop"] = dataclasses.asdict(verdict.growth)
    content["verdict"], content["seed_spread_nats"] = verdict.sentence(), verdict.spread
    content["warnings"] = list(verdict.warnings)
    return content


def format_cost(plan: Sequence[PlannedRun], *, workers: int) -> str:
    """Return the cost of a whole plan as a sentence."""
    seconds = sum(each.seconds for each in plan)
    return (
        f"{len(plan)} runs, about {seconds / 60:.1f} minutes of CPU time, "
        f"{wall_seconds(plan, workers=workers) / 60:.1f} minutes with {workers} workers"
    )
